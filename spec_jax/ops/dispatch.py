"""Which implementation of an op runs.

A named implementation runs or raises `NotImplementedError(why)`; only "auto" chooses,
once, where a model is built, and the choice is part of every result.
"""

import functools
import logging

import jax

from spec_jax.native import build
from spec_jax.typing import IMPLS, Impl


def resolve(impl: Impl) -> str:
    """The implementation that `impl` stands for on this machine.

    Raises:
      ValueError: not the name of an implementation.
      NotImplementedError: a named implementation that cannot run here, and why.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLS)}")
    if impl == "auto":
        return _choose() if jax.default_backend() == "cpu" else "xla"
    if impl == "native":
        if jax.default_backend() != "cpu":
            raise NotImplementedError(
                f"impl='native' runs on the CPU, not on {jax.default_backend()}"
            )
        build.load()
    elif impl != "xla":
        raise NotImplementedError(
            f"impl={impl!r} has no kernels yet; use xla or native"
        )
    return impl


def instruction_set(impl: str) -> str | None:
    """The instruction set that a resolved implementation's own kernels use.

    Part of what decides bits, and so of what results report. None where the kernels
    are a compiler's.
    """
    return build.load() if impl == "native" else None


@functools.cache
def _choose() -> str:
    """The native kernels where they can be had; else XLA, with a line that says so."""
    try:
        build.load()
    except build.BuildError as error:
        reason = str(error).partition("\n")[0]
        logging.getLogger(__name__).warning(
            "no native kernels, XLA runs instead: %s", reason
        )
        return "xla"
    return "native"
