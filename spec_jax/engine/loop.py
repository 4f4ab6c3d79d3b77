"""A compiled function that donates its state, and raises when given a used one."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from spec_jax import compilation


class Loop(compilation.Jitted):
    """`compilation.Jitted` of a function that donates its argument `state`.

    Raises:
      ValueError: the function has no argument `state`.
    """

    def __init__(self, function: Callable, *, static_argnames: tuple[str, ...]):
        self._place = list(inspect.signature(function).parameters).index("state")
        super().__init__(
            function, static_argnames=static_argnames, donate_argnames=("state",)
        )

    def __call__(self, *args, **kwargs):
        """Runs the function, as `jax.jit` does.

        Raises:
          ValueError: a state whose buffers an earlier call was given.
        """
        states = args[self._place : self._place + 1], kwargs.get("state")
        if any(_is_deleted(leaf) for leaf in jax.tree.leaves(states)):
            raise ValueError(
                f"the state was used up by an earlier call, and its buffers are gone: "
                f"give {self.__qualname__} the state that the call returned, or a new "
                "one; to keep one, copy it first: jax.tree.map(jnp.copy, state)"
            )
        return super().__call__(*args, **kwargs)


def donates(*, static_argnames: tuple[str, ...]) -> Callable[[Callable], Loop]:
    """Decorates a function whose argument `state` is donated."""
    return functools.partial(Loop, static_argnames=static_argnames)


def _is_deleted(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and leaf.is_deleted()
