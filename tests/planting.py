"""Planted faults that are data, so that all of a table share one compilation."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest


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
