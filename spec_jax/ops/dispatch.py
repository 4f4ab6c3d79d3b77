"""Which implementation of an op runs.

A named implementation runs or raises `NotImplementedError(why)`; only "auto" chooses,
once, where a model is built, and the choice is part of every result.
"""

from spec_jax.typing import IMPLS, Impl


IMPLEMENTED: tuple[str, ...] = ("xla",)
"""Implementations that exist for every op of the row path."""


def resolve(impl: Impl) -> str:
    """The implementation that `impl` stands for on this machine.

    Raises:
      ValueError: not the name of an implementation.
      NotImplementedError: a named implementation that cannot run here.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLS)}")
    if impl == "auto":
        return "xla"
    if impl not in IMPLEMENTED:
        raise NotImplementedError(
            f"impl={impl!r} has no kernels yet; use one of {', '.join(IMPLEMENTED)}"
        )
    return impl
