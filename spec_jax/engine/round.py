"""Speculative rounds: draft, verify, accept, commit, until every sequence is done.

Functions here use a target and a drafter by their protocols alone, and know neither
pages nor models. For a slot with committed tokens `x[0, n)`:

    tokens        [0, n)       committed; x[n-1] is pending: it has no K/V yet
    target K/V    [0, n-1)
    draft memory  what the drafter keeps of [0, n-1)

    1 draft     d_1 .. d_g,  g = min(gamma, tokens still wanted - 1)
    2 verify    rows (x[n-1], n-1), (d_1, n), .., (d_g, n+g-1)     one target forward
                for the rows of all slots
    3 accept    t_i = the target's token by logits[i]: their argmax or, where the slot
                samples, what it draws with the noise of position n+i;
                a = length of the leading run with d_i == t_(i-1)
    4 commit    d_1 .. d_a and t_a, cut after the first stop token
    5 truncate  target to n'-1; the drafter forgets what was not committed

A proposal may be a tree (`tree`): its rows are stored one after the other, and have the
positions of their depths. Then 3 walks from the root to the children that hold t, and
before 5 the K/V of the accepted path move to their positions.

With a processor (`processing`), `logits` are the rows that it returns.

Functions of one sequence are mapped over the slots; only drafter and target see all of
them. gamma is data: the same executable with gamma 0 is autoregressive decoding. Rules
other than "coupled" keep the distribution alone.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import compilation, pytree
from spec_jax.engine import (
    commit as commit_lib,
    processing as processing_lib,
    protocols,
    state as state_lib,
    target as target_lib,
    verification,
)
from spec_jax.gamma import policy as policy_lib
from spec_jax.rules import acceptance, rule as rule_lib


State = state_lib.State
Slots = state_lib.Slots
Status = state_lib.Status
RoundInfo = commit_lib.RoundInfo

UNTIL_DONE = 1 << 30
"""A bound on rounds that no run reaches."""


class Speculator(pytree.Node):
    """The parts that all rounds of a generation share.

    Attributes:
      params: of the target and of the drafter.
      rule: a rule of acceptance, of `rules.rule`; or its name.
      gamma_policy: chooses each slot's gamma, at most `Slots.gamma`; None: always
        `Slots.gamma`. `Slots.policy` is its state.
    """

    params: tuple[protocols.Params, protocols.Params]
    target: target_lib.Target = pytree.static()
    drafter: protocols.SlotDrafter = pytree.static()
    rule: verification.Rule = pytree.static(default="coupled")
    gamma_policy: policy_lib.GammaPolicy | None = pytree.static(default=None)


def run_round(speculator: Speculator, state: State) -> tuple[State, RoundInfo]:
    """Runs one round of every slot that generates.

    A slot that finds no page commits nothing and ends with `Status.OUT_OF_PAGES`.

    Raises:
      ValueError: no rule of that name, a gamma policy without its state, or a drafter
        of trees whose drafts have no parents.
    """
    target, drafter = speculator.target, speculator.drafter
    target_params, draft_params = speculator.params
    slots, running = state.slots, state.slots.running
    gamma = _gamma(speculator, slots)
    memory, proposal = _draft(speculator, state, gamma)
    depth_max = protocols.depth_max(drafter)
    window = _window(slots, proposal, depth_max)
    taps = protocols.taps_of(drafter)
    # Not passed where none are asked for: most targets and drafters know no features.
    asked = {"taps": taps} if taps else {}
    cache, verified = target.verify(target_params, state.cache, window, **asked)
    processing = state.processing
    if processing is not None:
        verified = processing_lib.process_rows(processing, verified, window)
    outcome, is_finite = verification.decide(
        target,
        verified,
        proposal,
        slots.sampling,
        first_position=slots.length,
        rule=rule_lib.of(speculator.rule),
        depth_max=depth_max,
        wanted=slots.limit - slots.length - 1,
    )
    info = RoundInfo(
        gamma=gamma,
        proposal=proposal,
        window=window,
        outcome=outcome,
        is_finite=is_finite,
        out_of_pages=running & target.out_of_pages(cache),
    )
    if policy_lib.settles(speculator.gamma_policy):
        slots = commit_lib.settle(speculator.gamma_policy, slots, info)
        state = state.replace(slots=slots)
    after = _end(speculator, state, cache, memory, verified, info)
    if processing is not None:
        processing = processing_lib.commit(processing, slots.length, after.slots)
    return after.replace(processing=processing), info


def _end(
    speculator: Speculator,
    state: State,
    cache: protocols.Cache,
    memory: protocols.Memory,
    verified: protocols.Verified,
    info: RoundInfo,
) -> State:
    """Commits what was decided, and cuts target and drafter to it."""
    target, drafter = speculator.target, speculator.drafter
    before, running, outcome = state.slots.length, state.slots.running, info.outcome
    slots = state.slots
    if speculator.gamma_policy is not None:
        update = functools.partial(commit_lib.update_policy, speculator.gamma_policy)
        slots = slots.replace(policy=state_lib.map_slots(update, slots, info))
    slots = commit_lib.commit(slots, info)
    if outcome.path is not None:
        # The target's own token, the last that is committed, has no K/V yet.
        num_kept = slots.length - before - 1
        cache = target.keep_path(cache, outcome.path, num_kept, start=info.window.start)
    features = {}
    if protocols.taps_of(drafter):
        num_kept = slots.length - before
        features["features"] = _features(
            verified, outcome, num_kept, protocols.depth_max(drafter)
        )
    return State(
        slots=slots,
        cache=target.truncate(cache, slots.length - 1, asked=running),
        memory=drafter.commit(
            speculator.params[1], memory, slots.length, asked=running, **features
        ),
    )


def _draft(
    speculator: Speculator, state: State, gamma: Int[Array, " B"]
) -> tuple[protocols.Memory, protocols.Proposal]:
    """Returns the drafter's memory, and what it proposes, within `gamma`."""
    drafter, slots, processing = speculator.drafter, state.slots, state.processing
    # Passed to drafters that know processors, and only where there is one.
    knows = protocols.complete(drafter).reads_processing
    asked = {} if processing is None or not knows else {"processing": processing}
    memory, proposal = drafter.propose(
        speculator.params[1],
        state.memory,
        tokens=slots.tokens,
        length=slots.length,
        gamma=gamma,
        sampling=slots.sampling,
        **asked,
    )
    proposal = _clipped(proposal, gamma)
    if processing is not None:
        proposal = processing_lib.cut(processing, proposal)
    if policy_lib.schedules(speculator.gamma_policy):
        num_drafted = cast(Any, speculator.gamma_policy).trim(
            slots.policy,
            survival=protocols.survival_of(drafter, proposal),
            num_drafted=proposal.num_drafted,
            active=slots.running,
        )
        proposal = proposal.replace(num_drafted=num_drafted)
    if proposal.parents is None and protocols.is_tree(drafter):
        raise ValueError(
            f"{protocols.name_of(drafter)} has "
            f"depth_max={protocols.depth_max(drafter)}, and proposes no parents: name "
            "each draft's, or leave depth_max out"
        )
    return memory, proposal


def _clipped(
    proposal: protocols.Proposal, gamma: Int[Array, " B"]
) -> protocols.Proposal:
    """Returns the proposal within `gamma`, and each parent a column before its draft's,
    whatever the drafter says of them."""
    # The limit of a sequence and the room in the cache are met because of this clip,
    # and not because a drafter keeps its promise. Its tokens need no such bound: no
    # rule accepts one outside the vocabulary.
    parents = proposal.parents
    if parents is not None:
        # Rows and acceptance read the same tree, and so what is kept is right for any.
        columns = jnp.arange(parents.shape[1], dtype=jnp.int32)[None]
        parents = jnp.clip(parents, 0, columns)
    num_drafted = jnp.clip(proposal.num_drafted, 0, gamma)
    return proposal.replace(num_drafted=num_drafted, parents=parents)


def _window(
    slots: Slots, proposal: protocols.Proposal, depth_max: int
) -> protocols.Window:
    """Returns the columns of a round: each slot's pending token, and its drafts."""
    pending = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)
    tree: dict[str, Any] = {}
    if proposal.parents is not None:
        parents = jnp.pad(proposal.parents, ((0, 0), (1, 0)))
        tree = {"parents": parents, "depth_max": depth_max}
    return protocols.Window(
        tokens=jnp.concatenate([pending, proposal.tokens], axis=1),
        start=slots.length - 1,
        num_active=jnp.where(slots.running, proposal.num_drafted + 1, 0),
        **tree,
    )


def _features(
    verified: protocols.Verified,
    outcome: acceptance.Outcome,
    num_kept: Int[Array, " B"],
    depth_max: int,
) -> Float[Array, "B A taps D"]:
    """Returns the features of the rows that decided on the tokens kept, in order."""
    at = verified.at[:, : depth_max + 1]
    if outcome.path is not None:
        columns = jnp.pad(outcome.path, ((0, 0), (1, 0)))
        at = jnp.take_along_axis(verified.at, columns, axis=1)
    steps = jnp.arange(at.shape[1], dtype=jnp.int32)[None]
    # Past the end, and so zero.
    at = jnp.where(steps < num_kept[:, None], at, verified.logits.shape[0])
    return cast(jax.Array, verified.features).at[at].get(mode="fill", fill_value=0)


def _gamma(speculator: Speculator, slots: Slots) -> Int[Array, " B"]:
    """Returns how many drafts each slot asks for: 0 where it does not generate."""
    wanted = slots.limit - slots.length - 1
    if protocols.is_tree(speculator.drafter):
        # One path of a tree is committed, which acceptance ends at the limit. The room
        # in the cache bounds its nodes: one token less than the buffer of tokens.
        room = slots.tokens.shape[1] - 1 - slots.length
        wanted = jnp.where(wanted > 0, room, 0)
    # At most `g + 1` tokens of a chain are committed, so the limit is met exactly.
    gamma = jnp.minimum(slots.gamma, wanted)
    if speculator.gamma_policy is not None:
        if slots.policy is None:
            raise ValueError(
                "a gamma policy needs its first state: give the scheduler what the "
                "policy's `init` makes, as `policy_state`"
            )
        chosen = state_lib.map_slots(speculator.gamma_policy.choose, slots.policy)
        gamma = jnp.minimum(gamma, chosen)
    gamma = jnp.clip(gamma, 0, speculator.drafter.gamma_max)
    return jnp.where(slots.running, gamma, 0)


@functools.partial(compilation.jit, donate_argnames=("state",))
def generate(
    speculator: Speculator,
    state: State,
    *,
    max_rounds: Int[Array, ""],
    until_one_ends: Bool[Array, ""] | bool = False,
) -> State:
    """Runs rounds on the device until no slot generates, or `max_rounds` passed.

    With the rule "coupled" each slot's tokens are those of `baseline.generate` of its
    request alone, bit for bit. Called for a few rounds at a time (for progress or
    streaming) it returns the same bits from the same executable.

    Args:
      state: donated.
      max_rounds: each round commits a token in each slot that generates, so as many
        rounds as tokens are wanted suffice.
      until_one_ends: return as soon as a slot ends, so that it can be refilled. Data:
        the same executable.

    Raises:
      ValueError: as `run_round`, or a state that was used up by an earlier call.
    """
    running_before = state.slots.running
    until_one_ends = jnp.asarray(until_one_ends, bool)

    def keep_going(carry):
        step, state = carry
        running = state.slots.running
        has_ended = jnp.any(running_before & ~running)
        return jnp.any(running) & (step < max_rounds) & ~(until_one_ends & has_ended)

    def body(carry):
        step, state = carry
        state, _ = run_round(speculator, state)
        return step + 1, state

    _, state = jax.lax.while_loop(keep_going, body, (jnp.int32(0), state))
    return state


def run(
    speculator: Speculator,
    state: State,
    *,
    max_rounds: int = UNTIL_DONE,
    until_one_ends: bool = False,
) -> State:
    """Calls `generate` with numbers of the host: one program for all of them."""
    return generate(
        speculator,
        state,
        max_rounds=jnp.int32(max_rounds),
        until_one_ends=jnp.bool_(until_one_ends),
    )
