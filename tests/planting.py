"""Planted faults that are data, so that all of a table share one compilation."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spec_jax.engine import round as round_lib


Fault = tuple[Any, str, Callable]
"""Where a function is, its name, and what makes a wrong one of the right one."""


@contextlib.contextmanager
def planted(faults: Sequence[Fault], number: jax.Array) -> Iterator[None]:
    """Has functions do, in what is traced meanwhile, what a fault makes of them.

    Args:
      number: the fault's in the table, from 1 on; 0 is none.
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
    """Fails unless rounds pass a check of their state, and none with a fault does.

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
