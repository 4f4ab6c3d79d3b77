"""Ends that the host finds between calls of the rounds, such as stop texts.

Functions here know slots and counts of tokens. Tokens that a round committed behind the
end are cut, and counted as tokens behind a stop token are.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from spec_jax import compilation
from spec_jax.engine import state as states


Ends = Callable[[int, Sequence[int]], int | None]
"""Takes a request's number and all that it generated so far; returns how many of these
tokens stay where it has ended, else None."""


def apply(
    state: states.State,
    slots: states.Slots,
    running: Mapping[int, int],
    ends: Ends,
) -> tuple[states.State, states.Slots]:
    """Ends the slots whose requests have ended.

    Args:
      state: donated where one has.
      slots: those of the state, on the host.
      running: numbers of requests, by slot.

    Returns:
      The state, in which these slots generate no more, and the slots on the host, in
      which they are cut to the tokens that stay and have `Status.STOP`.
    """
    is_new = slots.origins != int(states.Origin.PROMPT)
    length = np.array(slots.length)
    is_ended = np.zeros(length.shape, bool)
    for slot, number in running.items():
        generated = slots.tokens[slot][is_new[slot]].tolist()
        if (num_kept := ends(number, generated)) is not None:
            length[slot] += num_kept - len(generated)
            is_ended[slot] = True
    if not is_ended.any():
        return state, slots
    is_kept = np.arange(is_new.shape[1]) < length[:, None]
    stop, prompt = np.int32(states.Status.STOP), np.int8(states.Origin.PROMPT)
    slots = slots.replace(
        tokens=np.where(is_kept, slots.tokens, np.int32(0)),
        origins=np.where(is_kept, slots.origins, prompt),
        status=np.where(is_ended, stop, slots.status),
        num_cut=slots.num_cut + slots.length - length,
        length=length,
    )
    return _stopped(state, is_ended), slots


@functools.partial(compilation.jit, donate_argnames=("state",))
def _stopped(state: states.State, is_ended: Bool[Array, " B"]) -> states.State:
    """Returns the state with slots that generate no more."""
    slots = state.slots
    status = jnp.where(is_ended, int(states.Status.STOP), slots.status)
    return state.replace(slots=slots.replace(status=status.astype(jnp.int32)))
