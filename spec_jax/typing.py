"""The shape vocabulary of the package, and checks of shapes, names and numbers.

- S  slots: sequences with their own page list   - L  layers
- B  sequences in a batch                        - D  model width
- T  tokens per sequence in a call               - F  MLP width
- R  rows of a slab (token, slot, position)      - V  vocabulary
- N  query heads                                 - P  physical pages in the pool
- K  key/value heads                             - M  page-table width, in pages
- H  head size                                   - C  page capacity, in tokens
- gamma  tokens drafted per round; in `engine`, P: packed rows, and C: columns
"""

import numbers
from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import jaxtyping


try:
    from beartype import beartype as _typechecker
except ImportError:  # Not a runtime dependency: only the tests check shapes.
    _typechecker = None  # type: ignore[assignment]

_F = TypeVar("_F", bound=Callable)

Impl = Literal["auto", "xla", "native", "triton", "interpret"]
"""Names of kernel implementations; `spec_jax.ops.dispatch` says which can run."""

IMPLS: tuple[str, ...] = get_args(Impl)

REMOVED_IMPLS = {
    "mosaic": "impl='mosaic' was removed: a step of Qwen3-0.6B on an H100 took 1.60 ms "
    "with it and 1.09 ms with 'triton'; commit 9b82177 has it"
}
"""Errors for the names of implementations that were removed."""


def check_impl(impl: object) -> None:
    """Raises `ValueError` unless `impl` is the name of an implementation."""
    if impl in REMOVED_IMPLS:
        raise ValueError(REMOVED_IMPLS[str(impl)])
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLS)}")


def check_whole(*, least: int = 1, most: int = 2**31 - 1, **values: int) -> None:
    """Raises `ValueError` unless each, by its name, is a whole number in that range."""
    for name, value in values.items():
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_whole or value < least:
            raise ValueError(
                f"{name}={value!r} must be a whole number of at least {least}"
            )
        if value > most:
            raise ValueError(f"{name}={value!r} is above {most}: give less")


def typed(fn: _F) -> _F:
    """Checks `fn`'s array annotations when it is traced (if beartype is installed)."""
    return jaxtyping.jaxtyped(typechecker=_typechecker)(fn)
