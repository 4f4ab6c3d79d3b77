"""Planted faults that data select, so that a table of them is compiled once."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spec_jax.engine import round as round_lib


Fault = tuple[Any, str, Callable]
"""A function's owner, its name, and what makes a wrong function of the right one."""


@contextlib.contextmanager
def planted(faults: Sequence[Fault], number: jax.Array) -> Iterator[None]:
    """Replaces functions by wrong ones, in programs that are traced meanwhile.

    Args:
      number: the fault's place in the table, from 1 on; 0 plants no fault.
    """
    with pytest.MonkeyPatch.context() as patch:
        real = {(where, name): getattr(where, name) for where, name, _ in faults}
        for own, (where, name, plant) in enumerate(faults, 1):
            right, wrong = getattr(where, name), plant(real[where, name])

            def either(*args, own=own, right=right, wrong=wrong, **rest):
                return jax.tree.map(
                    lambda x, y: jnp.where(number == own, x, y),
                    wrong(*args, **rest),
                    right(*args, **rest),
                )

            patch.setattr(where, name, either)
        yield


def check_faults(
    speculator: round_lib.Speculator, begin: Callable, faults: Sequence[Fault], check
) -> None:
    """Fails unless rounds pass a check of their state, and fail it with each fault.

    Args:
      begin: makes the state before the first round.
    """

    @jax.jit
    def loop(state, number):
        with planted(faults, number):
            step = lambda _, s: round_lib.run_round(speculator, s)[0]
            return jax.lax.fori_loop(0, 60, step, state)

    check(loop(begin(), jnp.int32(0)))
    for number in range(1, len(faults) + 1):
        state = loop(begin(), jnp.int32(number))
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            check(state)
