"""Admission: how a request begins in a slot."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax import compilation
from spec_jax.engine import (
    held as held_lib,
    protocols,
    requests,
    rows,
    state as states,
)
from spec_jax.gamma import policy as policy_lib


@functools.partial(
    compilation.jit,
    static_argnames=("target", "drafter", "refills", "gamma_policy"),
    donate_argnames=("state",),
)
def occupy(
    target,
    drafter,
    draft_params,
    state,
    slot,
    *,
    refills,
    gamma_policy,
    request,
    kept=None,
):
    """Initialises a slot and, with `refills`, frees the pages of slots that ended.

    Admission counts those pages as free, so they are freed here at the latest. A
    policy that `keeps_state` goes on from the state of the slot.

    Args:
      kept: positions that the slot keeps. The other slots then keep all their pages,
        in the target and in a drafter that `shares_prompts`, as later requests may
        share them. None: all slots that ended are freed.
    """
    slots = state.slots
    # All counts are zero, and nothing is committed after the prompt.
    one = jax.tree.map(jnp.zeros_like, requests.slot_of(slots, 0))
    one = one.replace(status=jnp.int32(states.Status.RUNNING), **request)
    occupied = jax.tree.map(lambda all_, x: all_.at[slot].set(x), slots, one)
    if not refills:
        return state.replace(slots=occupied)
    if policy_lib.keeps_state(gamma_policy):
        before = requests.slot_of(slots, slot).policy
        learnt = policy_lib.renewed(gamma_policy, before)
        put = lambda all_, x: all_.at[slot].set(x)
        occupied = occupied.replace(policy=jax.tree.map(put, slots.policy, learnt))
    is_slot = jnp.arange(state.num_slots, dtype=jnp.int32) == slot
    asked = ~slots.running | is_slot
    zeros = jnp.zeros_like(slots.length)
    keeps = {} if kept is None else {"new_len": zeros + kept, "asked": is_slot}
    to_target = {"new_len": zeros, "asked": asked} | keeps
    to_drafter = to_target if protocols.complete(drafter).shares_prompts else {}
    length, asked = to_drafter.get("new_len", zeros) + 1, to_drafter.get("asked", asked)
    return state.replace(
        slots=occupied,
        cache=target.truncate(state.cache, **to_target),
        memory=drafter.commit(draft_params, state.memory, length, asked=asked),
    )


def take_in(
    target: rows.SlotRows,
    drafter: protocols.SlotDrafter,
    params: protocols.Params,
    kv: protocols.Cache,
    prompt: list[int],
    slot: int,
    *,
    begun: held_lib.Begun | None,
    by_rows: bool | None,
) -> tuple[protocols.Cache, Any]:
    """Returns the target's cache with the prompt, and features for the drafter.

    Args:
      begun: the beginning of the prompt that a slot holds: another slot, or this
        one, which kept it; None: no slot holds one.
      by_rows: see `row_model.RowModel.prefill`.
    """
    how: dict[str, Any] = {"slot": slot, "by_rows": by_rows}
    if begun is not None:
        if begun.source != slot:
            kv = target.share(kv, begun.source, slot, begun.length)
        if begun.length == len(prompt) - 1:
            return kv, begun.features
        how |= {"begun": begun.length, "before": begun.features}
    if taps := protocols.taps_of(drafter):
        return target.prefill_features(params, kv, prompt, taps=taps, **how)
    return target.prefill(params, kv, prompt, **how), None
