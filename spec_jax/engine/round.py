"""Speculative rounds: draft, verify, accept, commit, until every sequence is done.

Functions here know a target and a drafter by what they do, and no more: neither pages
nor Qwen3. For a slot with committed tokens `x[0, n)`:

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

What concerns one sequence is written for one and mapped over the slots; only drafter
and target see all of them. gamma is data: the same executable with gamma 0 is
autoregressive decoding. Rules other than "coupled" keep the distribution alone.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import compilation, pytree
from spec_jax.engine import loop, protocols, state as state_lib, verification
from spec_jax.gamma import policy as policy_lib
from spec_jax.rules import acceptance


State = state_lib.State
Slots = state_lib.Slots
Status = state_lib.Status


class Speculator(pytree.Node):
    """What all rounds of a generation share.

    Attributes:
      params: of the target and of the drafter.
      rule: how drafts are accepted, one of `verification.RULES`.
      gamma_policy: chooses each slot's gamma, at most the slot's own; None always asks
        for that. What it learns is in `Slots.policy`.
    """

    params: tuple[protocols.Params, protocols.Params]
    target: protocols.Target = pytree.static()
    drafter: protocols.SlotDrafter = pytree.static()
    rule: verification.Rule = pytree.static(default="coupled")
    gamma_policy: policy_lib.GammaPolicy | None = pytree.static(default=None)


class RoundInfo(pytree.Node):
    """What happened in a round; of slots that sat out it means nothing."""

    gamma: jax.Array  # [B] int32, tokens that the drafter was asked for
    proposal: protocols.Proposal
    window: protocols.Window
    outcome: acceptance.Outcome  # leaves [B, ...]
    is_finite: jax.Array  # [B, R] bool, of the logits of each column
    out_of_pages: jax.Array  # [B] bool, the slot committed nothing


def run_round(speculator: Speculator, state: State) -> tuple[State, RoundInfo]:
    """Runs one round of every slot that generates.

    A slot that finds no page commits nothing and ends with `Status.OUT_OF_PAGES`.

    Raises:
      ValueError: no rule of that name, a gamma policy without its state, or a drafter
        of trees whose drafts have no parents.
    """
    verification.check_rule(speculator.rule)
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
    outcome, is_finite = verification.decide(
        target,
        verified,
        proposal,
        slots.sampling,
        first_position=slots.length,
        rule=speculator.rule,
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
    return _end(speculator, state, cache, memory, verified, info), info


@compilation.one_kernel
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
        update = functools.partial(_update_policy, speculator.gamma_policy)
        slots = slots.replace(policy=state_lib.map_slots(update, slots, info))
    slots = commit(slots, info)
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
    drafter, slots = speculator.drafter, state.slots
    memory, proposal = drafter.propose(
        speculator.params[1],
        state.memory,
        tokens=slots.tokens,
        length=slots.length,
        gamma=gamma,
        sampling=slots.sampling,
    )
    proposal = _clipped(proposal, gamma)
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
            f"{type(drafter).__name__} has depth_max={protocols.depth_max(drafter)}, "
            "and proposes no parents: name each draft's, or leave depth_max out"
        )
    return memory, proposal


@compilation.one_kernel
def _clipped(
    proposal: protocols.Proposal, gamma: Int[Array, " B"]
) -> protocols.Proposal:
    """Returns the proposal within `gamma`, whatever the drafter says of it."""
    # The limit of a sequence and the room in the cache are met because of this clip,
    # and not because a drafter keeps its promise. Its tokens need no such bound: no
    # rule accepts one outside the vocabulary.
    return proposal.replace(
        num_drafted=jnp.clip(proposal.num_drafted, 0, gamma),
        parents=_parents(proposal),
    )


@compilation.one_kernel
def _window(
    slots: Slots, proposal: protocols.Proposal, depth_max: int
) -> protocols.Window:
    """Returns the columns of a round: each slot's pending token, and its drafts."""
    pending = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)
    return protocols.Window(
        tokens=jnp.concatenate([pending, proposal.tokens], axis=1),
        start=slots.length - 1,
        num_active=jnp.where(slots.running, proposal.num_drafted + 1, 0),
        **_tree_of(proposal, depth_max),
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


def _parents(proposal: protocols.Proposal) -> Int[Array, "B W"] | None:
    """Returns each draft's parent, a column before its own whatever the drafter says.

    Rows and acceptance read the same tree, and so what is kept is right for any.
    """
    if proposal.parents is None:
        return None
    columns = jnp.arange(proposal.parents.shape[1], dtype=jnp.int32)[None]
    return jnp.clip(proposal.parents, 0, columns)


def _tree_of(proposal: protocols.Proposal, depth_max: int) -> dict[str, Any]:
    """Returns what a window says of trees: nothing of chains."""
    if proposal.parents is None:
        return {}
    parents = jnp.pad(proposal.parents, ((0, 0), (1, 0)))
    return {"parents": parents, "depth_max": depth_max}


@compilation.one_kernel
def _gamma(speculator: Speculator, slots: Slots) -> Int[Array, " B"]:
    """Returns what each slot asks for: nothing where it does not generate."""
    wanted = slots.limit - slots.length - 1
    if protocols.is_tree(speculator.drafter):
        # Of a tree one path is committed, which acceptance ends at the limit. The room
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


@compilation.one_kernel
def commit(slots: Slots, info: RoundInfo) -> Slots:
    """Commits each slot's tokens, cut after the first stop token; counts the round.

    A slot that does not generate stays as it is; a round that found no page commits and
    counts nothing.
    """
    return state_lib.map_slots(commit_slot, slots, info)


def commit_slot(slot: Slots, info: RoundInfo) -> Slots:
    """As `commit`, of ONE slot: leaves are without the axis of slots."""
    outcome = info.outcome
    counts = _counts(slot, info)
    offsets = jnp.arange(outcome.tokens.shape[0], dtype=jnp.int32)
    is_stop = verification.is_stop(outcome.tokens, slot.stop_ids)
    is_stop = is_stop & (offsets <= outcome.num_accepted)
    num_kept = jnp.where(
        jnp.any(is_stop), jnp.argmax(is_stop) + 1, outcome.num_accepted + 1
    ).astype(jnp.int32)
    num_kept = jnp.where(counts, num_kept, 0)
    length = slot.length + num_kept
    origins = _origins(outcome, _reached(info))
    slot = slot.replace(
        tokens=_write(slot.tokens, outcome.tokens, slot.length, num_kept),
        origins=_write(slot.origins, origins, slot.length, num_kept),
        length=length,
        status=_status(slot, length, jnp.any(is_stop), info.out_of_pages),
        num_nonfinite=slot.num_nonfinite
        + jnp.sum(
            ~_along(outcome, info.is_finite) & (offsets < num_kept), dtype=jnp.int32
        ),
    )
    return _count(slot, info, num_kept, rounds=counts.astype(jnp.int32))


def _counts(slot: Slots, info: RoundInfo) -> Bool[Array, ""]:
    """Returns whether a slot's round counts: it generates, and found its pages."""
    return slot.running & ~info.out_of_pages


def _write(
    row: jax.Array, values: jax.Array, start: jax.Array, count: jax.Array
) -> jax.Array:
    """Returns the row with the first `count` values in it, from `start` on."""
    # Not a scatter, which is several kernels. Near the end the window begins before.
    size = min(values.shape[0], row.shape[0])
    first = jnp.clip(start, 0, row.shape[0] - size)
    old = jax.lax.dynamic_slice(row, (first,), (size,))
    offsets = jnp.arange(size, dtype=jnp.int32) - (start - first)
    is_new = (offsets >= 0) & (offsets < count)
    new = jnp.where(is_new, values.at[offsets].get(mode="clip"), old)
    return jax.lax.dynamic_update_slice(row, new, (first,))


def _along(outcome: acceptance.Outcome, columns: Bool[Array, " R"]) -> jax.Array:
    """Returns what columns have that decide the outcome's tokens, `[D + 1]`."""
    if outcome.path is None:
        return columns
    return columns[jnp.pad(outcome.path, (1, 0))]


def _status(
    slot: Slots,
    length: Int[Array, ""],
    stops: Bool[Array, ""],
    out_of_pages: Bool[Array, ""],
) -> Int[Array, ""]:
    """Returns the slot's status after a round that made it `length` tokens long."""
    at_limit = jnp.where(slot.capped, int(Status.CAPACITY), int(Status.LENGTH))
    status = jnp.where(length >= slot.limit, at_limit, int(Status.RUNNING))
    status = jnp.where(stops, int(Status.STOP), status)
    status = jnp.where(out_of_pages, int(Status.OUT_OF_PAGES), status)
    return jnp.where(slot.running, status, slot.status).astype(jnp.int32)


def _update_policy(
    gamma_policy: policy_lib.GammaPolicy, slot: Slots, info: RoundInfo
) -> policy_lib.State:
    """Returns the policy's state after a round, or after zeros, which teach nothing."""
    counts = _counts(slot, info)
    numbers = info.gamma, info.proposal.num_drafted, info.outcome.num_accepted
    gamma, drafted, accepted = (jnp.where(counts, number, 0) for number in numbers)
    more = {}
    if policy_lib.reads_ranks(gamma_policy):
        ranks = _kept_ranks(slot, info)
        is_kept = jnp.zeros(slot.kept_by_rank.shape, bool)
        more["kept"] = is_kept.at[ranks].set(counts, mode="drop")
    return gamma_policy.update(
        slot.policy, gamma=gamma, num_drafted=drafted, num_accepted=accepted, **more
    )


def _kept_ranks(slot: Slots, info: RoundInfo) -> Int[Array, " D"]:
    """Returns the ranks of the drafts that were accepted; past them no rank."""
    outcome = info.outcome
    depths = jnp.arange(slot.accepted_at.shape[0], dtype=jnp.int32)
    ranks = depths if outcome.path is None else outcome.path - 1
    is_kept = depths < outcome.num_accepted
    return jnp.where(is_kept, ranks, slot.kept_by_rank.shape[0])


def _reached(info: RoundInfo) -> Bool[Array, " D"]:
    """Returns whether drafts of each depth were compared: those before were kept."""
    if info.outcome.reached is not None:
        return info.outcome.reached
    drafts = jnp.arange(info.outcome.tokens.shape[0] - 1, dtype=jnp.int32)
    is_drafted = drafts < info.proposal.num_drafted
    return is_drafted & (drafts <= info.outcome.num_accepted)


def _origins(outcome: acceptance.Outcome, reached: Bool[Array, " D"]) -> jax.Array:
    """Returns the `Origin` of each token of the outcome, `[D + 1] int8`."""
    # Drafts were rejected where the path was followed further than it was accepted.
    own = jnp.where(
        jnp.sum(reached, dtype=jnp.int32) == outcome.num_accepted,
        state_lib.Origin.BONUS,
        state_lib.Origin.CORRECTION,
    )
    offsets = jnp.arange(outcome.tokens.shape[0], dtype=jnp.int32)
    is_draft = offsets < outcome.num_accepted
    return jnp.where(is_draft, int(state_lib.Origin.ACCEPTED), own).astype(jnp.int8)


def _count(
    slot: Slots, info: RoundInfo, num_kept: jax.Array, *, rounds: jax.Array
) -> Slots:
    """Adds `rounds` rounds, 0 or 1, to the statistics."""
    a, g = info.outcome.num_accepted, info.proposal.num_drafted
    depths = jnp.arange(slot.accepted_at.shape[0], dtype=jnp.int32)
    is_kept = depths < a
    ranks = _kept_ranks(slot, info)
    return slot.replace(
        num_rounds=slot.num_rounds + rounds,
        num_proposed=slot.num_proposed + rounds * g,
        num_accepted=slot.num_accepted + rounds * a,
        num_cut=slot.num_cut + rounds * (a + 1 - num_kept),
        accepted_hist=_add_at(slot.accepted_hist, a[None], rounds),
        proposed_at=slot.proposed_at + rounds * _reached(info).astype(jnp.int32),
        accepted_at=slot.accepted_at + rounds * is_kept.astype(jnp.int32),
        kept_by_rank=_add_at(slot.kept_by_rank, ranks, rounds),
    )


def _add_at(counts: jax.Array, indices: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the counts with a number added at each index; past the end, to none."""
    # In no scatter, which `one_kernel` does not take.
    places = jnp.arange(counts.shape[0], dtype=jnp.int32)[None]
    return counts + number * jnp.sum(
        indices[:, None] == places, axis=0, dtype=jnp.int32
    )


@loop.donates(static_argnames=())
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
      ValueError: no rule of that name, a gamma policy without its state, or a state
        that was used up.
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
