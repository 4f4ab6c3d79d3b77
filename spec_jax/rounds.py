"""Speculative rounds: draft, verify, accept, commit, until the sequence is done.

Functions here know a target and a drafter by what they do, and no more: neither pages
nor Qwen3. For a sequence with committed tokens `x[0, n)`:

    tokens        [0, n)       committed; x[n-1] is pending: it has no K/V yet
    target K/V    [0, n-1)
    draft memory  what the drafter keeps of [0, n-1)

    1 draft     d_1 .. d_g,  g = min(gamma, tokens still wanted - 1)
    2 verify    rows (x[n-1], n-1), (d_1, n), .., (d_g, n+g-1)     one target forward
    3 accept    t_i = the target's own choice by logits[i]: their argmax or, where
                `settings` say so, what it draws with the noise of position n+i;
                a = length of the leading run with d_i == t_(i-1)
    4 commit    d_1 .. d_a and t_a, cut after the first stop token
    5 truncate  target to n'-1; the drafter forgets what was not committed

`gamma` is data: the same executable with gamma 0 is plain decoding. The noise is keyed
by seed and position, so what is drawn is what plain decoding draws with that seed, bit
for bit. Two other rules of acceptance keep the distribution alone, see `Rule`.
"""

import enum
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import acceptance, loop, protocols, rules, sampling
from spec_jax.gamma import policy as policy_lib


UNKNOWN_SIZE = 2**31 - 1
"""The `vocab_size` of a state that was begun without one: it bounds no token."""


class Origin(enum.IntEnum):
    """Where a token of the sequence came from."""

    PROMPT = 0
    ACCEPTED = 1  # drafted, and kept by the target
    CORRECTION = 2  # the target's own token, in place of a rejected draft
    BONUS = 3  # the target's own token, after every draft was kept


@flax.struct.dataclass(kw_only=True)
class RoundState:
    """Everything that `generate` carries, for one sequence."""

    #
    # Evolving state
    #
    tokens: jax.Array  # [max_len] int32, committed tokens, then PAD
    length: jax.Array  # [] int32, number of committed tokens, n
    limit: jax.Array  # [] int32, the length at which generation ends
    done: jax.Array  # [] bool
    stopped: jax.Array  # [] bool, ended with a stop token
    starved: jax.Array  # [] bool, ended because the cache had no room
    capped: jax.Array  # [] bool, the limit is the cache's, below what was asked for
    vocab_size: jax.Array  # [] int32, of the target; `UNKNOWN_SIZE`
    cache: protocols.Cache  # the target's
    memory: protocols.Memory  # the drafter's
    # Of the target's own tokens; None: greedy, in a program that cannot draw.
    settings: sampling.SamplingSettings | None
    policy: policy_lib.State  # what a gamma policy has learnt; None without one
    #
    # Reported statistics
    #
    origins: jax.Array  # [max_len] int8, `Origin` of each token
    num_rounds: jax.Array  # [] int32
    num_proposed: jax.Array  # [] int32
    num_accepted: jax.Array  # [] int32
    num_cut: jax.Array  # [] int32, accepted by the round, but past a stop token
    accepted_hist: jax.Array  # [gamma_max + 1] int32, rounds by accepted drafts
    proposed_at: jax.Array  # [gamma_max] int32, rounds that reached draft i
    accepted_at: jax.Array  # [gamma_max] int32, rounds that kept draft i
    # [] int32, committed tokens chosen from logits that hold NaN or +inf, or are all
    # -inf: such tokens mean nothing. `session.check_state` raises for them.
    num_nonfinite: jax.Array


@functools.partial(jax.jit, static_argnames=("gamma_max",))
def init_state(
    tokens: Int[Array, " max_len"],
    *,
    length: Int[Array, ""],
    limit: Int[Array, ""],
    cache: protocols.Cache,
    memory: protocols.Memory,
    gamma_max: int,
    settings: sampling.SamplingSettings | None = None,
    policy: policy_lib.State = None,
    capped: Bool[Array, ""] | bool = False,
    vocab_size: Int[Array, ""] | int = UNKNOWN_SIZE,
) -> RoundState:
    """The state before the first round: `tokens[:length]` is the prompt.

    Greedy without `settings`. They and `policy`, the state of a gamma policy, are
    copied: the loop donates its state.

    Args:
      capped: whether `limit` is less than what was asked for, as the cache holds no
        more.
      vocab_size: tokens of the target, for `session.check_state`.
    """
    zero = functools.partial(jnp.zeros, dtype=jnp.int32)
    return RoundState(
        tokens=tokens,
        length=length,
        limit=limit,
        done=length >= limit,
        stopped=jnp.zeros((), bool),
        starved=jnp.zeros((), bool),
        capped=jnp.asarray(capped, bool),
        vocab_size=jnp.asarray(vocab_size, jnp.int32),
        cache=cache,
        memory=memory,
        settings=sampling.copied(settings),
        policy=jax.tree.map(jnp.array, policy),
        origins=jnp.zeros(tokens.shape, jnp.int8),
        num_rounds=zero(()),
        num_proposed=zero(()),
        num_accepted=zero(()),
        num_cut=zero(()),
        accepted_hist=zero((gamma_max + 1,)),
        proposed_at=zero((gamma_max,)),
        accepted_at=zero((gamma_max,)),
        num_nonfinite=zero(()),
    )


def run_round(
    target: protocols.Target,
    drafter: protocols.Drafter,
    params: tuple[protocols.Params, protocols.Params],
    state: RoundState,
    *,
    gamma: Int[Array, ""],
    stop_ids: Int[Array, " num_stop"],
    rule: rules.Rule = "sample-path",
    gamma_policy: policy_lib.GammaPolicy | None = None,
) -> RoundState:
    """Runs one round. A round that the cache has no room for commits nothing.

    Raises:
      ValueError: no rule of that name, or a gamma policy without its state.
    """
    target_params, draft_params = params
    gamma_max = drafter.gamma_max
    n = state.length
    if gamma_policy is not None:
        if state.policy is None:
            raise ValueError(
                "a gamma policy needs its first state: give `init_state` or "
                "`session.begin` what the policy's `init` makes, as `policy`"
            )
        gamma = jnp.minimum(gamma, gamma_policy.choose(state.policy))
    # At most `g + 1` tokens are committed, so the limit is met exactly.
    gamma = jnp.clip(jnp.minimum(gamma, state.limit - n - 1), 0, gamma_max)
    memory, proposal = drafter.propose(
        draft_params, state.memory, tokens=state.tokens, length=n, gamma=gamma
    )
    proposal = limit_proposal(proposal, gamma)
    window = jnp.concatenate([state.tokens[n - 1][None], proposal.tokens])
    num_live = proposal.num_drafted + 1
    cache, logits = target.forward(
        target_params,
        state.cache,
        tokens=window,
        start=n - 1,
        num_live=num_live,
    )
    starved = target.is_starved(cache)
    verdict, is_finite = rules.decide(
        target, state.settings, proposal, logits, first_position=n, rule=rule
    )
    if gamma_policy is not None:
        state = teach_policy(
            gamma_policy, state, verdict, proposal, gamma=gamma, starved=starved
        )
    state = commit_verdict(
        state.replace(cache=cache, memory=memory),
        verdict,
        proposal,
        is_finite=is_finite,
        starved=starved,
        stop_ids=stop_ids,
    )
    return state.replace(
        cache=target.truncate(cache, state.length - 1),
        memory=drafter.commit(draft_params, memory, state.length),
    )


def limit_proposal(
    proposal: protocols.Proposal, gamma: Int[Array, "*slots"]
) -> protocols.Proposal:
    """The proposal with `0 .. gamma` drafts, whatever number the drafter returned.

    The limit of the text and the room in the cache are met because of this, and not
    because a drafter keeps its promise. Its tokens need no such bound: no rule of
    `acceptance` keeps one outside the vocabulary.
    """
    return proposal.replace(num_drafted=jnp.clip(proposal.num_drafted, 0, gamma))


def teach_policy(
    gamma_policy: policy_lib.GammaPolicy,
    state: RoundState,
    verdict: acceptance.Verdict,
    proposal: protocols.Proposal,
    *,
    gamma: Int[Array, ""],
    starved: Bool[Array, ""],
) -> RoundState:
    """The state with what the policy learns from a round; from a starved one, nothing.

    Args:
      gamma: what the drafter was asked for.
    """
    judged = (gamma, proposal.num_drafted, verdict.num_accepted)
    gamma, drafted, accepted = (jnp.where(starved, 0, count) for count in judged)
    learnt = gamma_policy.update(
        state.policy, gamma=gamma, num_drafted=drafted, num_accepted=accepted
    )
    return state.replace(policy=learnt)


def commit_verdict(
    state: RoundState,
    verdict: acceptance.Verdict,
    proposal: protocols.Proposal,
    *,
    is_finite: Bool[Array, " gamma+1"],
    starved: Bool[Array, ""],
    stop_ids: Int[Array, " num_stop"],
) -> RoundState:
    """Commits a round's tokens, cut after the first stop token, and counts the round.

    Cache and memory stay as they are. A starved round commits and counts nothing.

    Args:
      is_finite: of each token of the verdict, whether the logits that it was chosen
        from are, see `finite_rows`.
    """
    offsets = jnp.arange(verdict.tokens.shape[0], dtype=jnp.int32)
    is_stop = rules.is_stop(verdict.tokens, stop_ids)
    is_stop = is_stop & (offsets <= verdict.num_accepted)
    num_kept = jnp.where(
        jnp.any(is_stop), jnp.argmax(is_stop) + 1, verdict.num_accepted + 1
    ).astype(jnp.int32)
    num_kept = jnp.where(starved, 0, num_kept)
    # Tokens that are not committed are aimed past the end, and dropped. (-1 would not
    # do: a negative index wraps around, even with mode="drop".)
    n = state.length
    at = jnp.where(offsets < num_kept, n + offsets, state.tokens.shape[0])
    length = n + num_kept
    state = state.replace(
        tokens=state.tokens.at[at].set(verdict.tokens, mode="drop"),
        origins=state.origins.at[at].set(
            _origins(verdict, proposal.num_drafted), mode="drop"
        ),
        length=length,
        done=starved | jnp.any(is_stop) | (length >= state.limit),
        stopped=~starved & jnp.any(is_stop),
        starved=starved,
        num_nonfinite=state.num_nonfinite
        + jnp.sum(~is_finite & (offsets < num_kept), dtype=jnp.int32),
    )
    return _count(state, verdict, proposal, num_kept, rounds=~starved)


def _origins(verdict: acceptance.Verdict, num_drafted: jax.Array) -> jax.Array:
    """The `Origin` of each token of the verdict, `[gamma + 1] int8`."""
    own = jnp.where(
        verdict.num_accepted == num_drafted, Origin.BONUS, Origin.CORRECTION
    )
    is_draft = (
        jnp.arange(verdict.tokens.shape[0], dtype=jnp.int32) < verdict.num_accepted
    )
    return jnp.where(is_draft, int(Origin.ACCEPTED), own).astype(jnp.int8)


def _count(
    state: RoundState,
    verdict: acceptance.Verdict,
    proposal: protocols.Proposal,
    num_kept: jax.Array,
    *,
    rounds: jax.Array,
) -> RoundState:
    """Adds one round to the statistics, or none where `rounds` is false."""
    rounds = rounds.astype(jnp.int32)
    a, g = verdict.num_accepted, proposal.num_drafted
    drafts = jnp.arange(proposal.tokens.shape[0], dtype=jnp.int32)
    reached = (drafts < g) & (drafts <= a)
    return state.replace(
        num_rounds=state.num_rounds + rounds,
        num_proposed=state.num_proposed + rounds * g,
        num_accepted=state.num_accepted + rounds * a,
        num_cut=state.num_cut + rounds * (a + 1 - num_kept),
        accepted_hist=state.accepted_hist.at[a].add(rounds),
        proposed_at=state.proposed_at + rounds * reached.astype(jnp.int32),
        accepted_at=state.accepted_at + rounds * (drafts < a).astype(jnp.int32),
    )


@loop.donates(static_argnames=("target", "drafter", "rule", "gamma_policy"))
def generate(
    target: protocols.Target,
    drafter: protocols.Drafter,
    params: tuple[protocols.Params, protocols.Params],
    state: RoundState,
    *,
    gamma: Int[Array, ""],
    stop_ids: Int[Array, " num_stop"],
    max_rounds: Int[Array, ""],
    rule: rules.Rule = "sample-path",
    gamma_policy: policy_lib.GammaPolicy | None = None,
) -> RoundState:
    """Runs rounds on the device until the sequence is done, or `max_rounds` passed.

    The tokens are those of `autoregressive.generate`, bit for bit, unless another rule
    is asked for. Called for a few rounds at a time (for progress or streaming) it
    returns the same bits from the same executable.

    Args:
      params: of the target and of the drafter.
      state: donated.
      gamma: tokens to draft a round, in `0 .. drafter.gamma_max`; of another number
        the nearest of these. On the host, `session.check_gamma` refuses it.
      stop_ids: tokens that end the sequence, as an array or a tuple, of which each
        length is compiled anew; -1 matches nothing.
      max_rounds: each unfinished round commits a token, so `limit` rounds suffice.
      rule: how drafts are judged.
      gamma_policy: chooses each round's gamma, at most `gamma`; None always asks for
        `gamma`. What it learns is in `state.policy`.

    Raises:
      ValueError: no rule of that name, or a gamma policy without its state.
    """

    def keep_going(carry):
        step, state = carry
        return ~state.done & (step < max_rounds)

    def body(carry):
        """One round more."""
        step, state = carry
        state = run_round(
            target,
            drafter,
            params,
            state,
            gamma=gamma,
            stop_ids=stop_ids,
            rule=rule,
            gamma_policy=gamma_policy,
        )
        return step + 1, state

    _, state = jax.lax.while_loop(keep_going, body, (jnp.int32(0), state))
    return state
