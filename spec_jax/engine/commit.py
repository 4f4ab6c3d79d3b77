"""Commit: how a round changes each slot's tokens, status and statistics.

Functions here know a round's outcome, and neither targets nor drafters. Functions of
one sequence are mapped over the slots.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import pytree
from spec_jax.engine import protocols, state as state_lib
from spec_jax.gamma import policy as policy_lib
from spec_jax.rules import acceptance


Slots = state_lib.Slots
Status = state_lib.Status


class RoundInfo(pytree.Node):
    """The data and the outcome of a round; undefined for slots that sat out."""

    gamma: jax.Array  # [B] int32, tokens that the drafter was asked for
    proposal: protocols.Proposal
    window: protocols.Window
    outcome: acceptance.Outcome  # leaves [B, ...]
    is_finite: jax.Array  # [B, R] bool, of the logits of each column
    out_of_pages: jax.Array  # [B] bool, the slot committed nothing


def commit(slots: Slots, info: RoundInfo) -> Slots:
    """Commits each slot's tokens, cut after the first stop token; counts the round.

    A slot that does not generate stays as it is; a round that found no page commits and
    counts nothing.
    """
    return state_lib.map_slots(commit_slot, slots, info)


def commit_slot(slot: Slots, info: RoundInfo) -> Slots:
    """Does as `commit`, for ONE slot: leaves lack the axis of slots."""
    outcome = info.outcome
    counts = _counts(slot, info)
    offsets = jnp.arange(outcome.tokens.shape[0], dtype=jnp.int32)
    is_stop = jnp.any(outcome.tokens[:, None] == slot.stop_ids[None], axis=-1)
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


def _counts(slot: Slots, info: RoundInfo) -> Bool[Array, "..."]:
    """Returns whether a slot's round counts: it generates, and found its pages."""
    return slot.running & ~info.out_of_pages


def _write(
    row: jax.Array, values: jax.Array, start: jax.Array, count: jax.Array
) -> jax.Array:
    """Returns the row with the first `count` values in it, from `start` on."""
    # Not a scatter, which is several kernels. Near the end the window begins earlier.
    size = min(values.shape[0], row.shape[0])
    first = jnp.clip(start, 0, row.shape[0] - size)
    old = jax.lax.dynamic_slice(row, (first,), (size,))
    offsets = jnp.arange(size, dtype=jnp.int32) - (start - first)
    is_new = (offsets >= 0) & (offsets < count)
    new = jnp.where(is_new, values.at[offsets].get(mode="clip"), old)
    return jax.lax.dynamic_update_slice(row, new, (first,))


def _along(outcome: acceptance.Outcome, columns: Bool[Array, " R"]) -> jax.Array:
    """Returns the values of columns that decide the outcome's tokens, `[D + 1]`."""
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


def update_policy(
    gamma_policy: policy_lib.GammaPolicy, slot: Slots, info: RoundInfo
) -> policy_lib.State:
    """Returns the policy's state after a round.

    A round that does not count (see `_counts`), such as any while the slot is empty, is
    handed on as zeros. A policy whose gamma is 0 at present takes it for one of the
    rounds that it waits before a probe; nothing else changes.
    """
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


def settle(gamma_policy: Any, slots: Slots, info: RoundInfo) -> Slots:
    """Returns the slots with what a policy learned from the round of all of them."""
    counts = _counts(slots, info)
    total = lambda numbers: jnp.sum(jnp.where(counts, numbers, 0), dtype=jnp.int32)
    policy = gamma_policy.settle(
        slots.policy,
        asked=jnp.where(counts, info.gamma, 0),
        num_active=total(1),
        num_verified=total(info.proposal.num_drafted),
        num_accepted=total(info.outcome.num_accepted),
    )
    return slots.replace(policy=policy)


def _kept_ranks(slot: Slots, info: RoundInfo) -> Int[Array, " D"]:
    """Returns the ranks of accepted drafts, then `gamma_max`, which is no rank."""
    outcome = info.outcome
    depths = jnp.arange(slot.accepted_at.shape[0], dtype=jnp.int32)
    ranks = depths if outcome.path is None else outcome.path - 1
    is_kept = depths < outcome.num_accepted
    return jnp.where(is_kept, ranks, slot.kept_by_rank.shape[0])


def _reached(info: RoundInfo) -> Bool[Array, " D"]:
    """Returns for each depth whether drafts were compared: all before were kept."""
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
    """Returns the counts, a number added at each index; drops those past the end."""
    # Not a scatter: see `_write`.
    places = jnp.arange(counts.shape[0], dtype=jnp.int32)[None]
    return counts + number * jnp.sum(
        indices[:, None] == places, axis=0, dtype=jnp.int32
    )
