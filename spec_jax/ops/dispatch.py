"""The choice of the implementation of an op.

    xla        the reference form of each op, compiled by XLA; anywhere
    native     C++ kernels; on a CPU
    triton     Pallas Triton kernels; on a GPU
    interpret  the Triton kernels, interpreted op by op: slow, for tests; on a CPU

A named implementation runs or raises `NotImplementedError(why)`; only "auto" chooses,
once, where a model is built, and the choice is part of every result.

`spec_jax.pallas` is imported by the functions that use it: Pallas takes half as long to
import as jax itself, and most processes run no kernel of it.
"""

import functools
import importlib
import logging
from collections.abc import Callable

import jax

from spec_jax import compilation
from spec_jax.native import build
from spec_jax.typing import Impl, check_impl


PALLAS = ("triton", "interpret")
"""Implementations whose ops are the kernels of `spec_jax.pallas`."""


def backend() -> str:
    """Returns the platform that jax runs on, such as "cpu" or "gpu".

    Raises:
      ValueError: jax cannot start it; JAX_PLATFORMS names one that is not here.
    """
    try:
        return jax.default_backend()
    except (AssertionError, RuntimeError) as error:  # Without a GPU, "cuda" asserts.
        reason = str(error).partition("\n")[0] or "no such device"
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise ValueError(
            f"JAX_PLATFORMS={platforms}: jax cannot start it here "
            f"({reason}); leave JAX_PLATFORMS unset, and for a GPU install the extra "
            "cuda12 or cuda13"
        ) from None


def resolve(impl: Impl) -> str:
    """Resolves `impl` to an implementation on this machine.

    Raises:
      ValueError: not the name of an implementation, jax cannot start, or it has flags
        with which a GPU computes wrong results.
      NotImplementedError: a named implementation that cannot run here, and why.
    """
    check_impl(impl)
    platform = backend()
    if platform == "gpu":
        compilation.check_flags()
    if impl == "auto":
        if platform == "gpu":
            return "triton"
        return _choose() if platform == "cpu" else "xla"
    if impl in ("native", "interpret") and platform != "cpu":
        raise NotImplementedError(f"impl={impl!r} runs on the CPU, not on {platform}")
    if impl == "triton" and platform != "gpu":
        raise NotImplementedError(
            f"impl={impl!r} runs on a GPU, and jax's backend here is {platform}: use "
            "xla or native, or interpret for the same kernels slowly; for a GPU "
            "install the extra cuda12 or cuda13, and leave JAX_PLATFORMS unset"
        )
    if impl == "native":
        build.load()
    return impl


def is_fused(impl: str) -> bool:
    """Returns whether a resolved implementation runs a model's step in one call.

    The calls are those of `native.steps` and its neighbours. They have the bits of the
    operations one by one.
    """
    return impl == "native"


def kernel(name: str, impl: str, function: str | None = None) -> Callable:
    """Returns a function of `pallas/{name}_triton`, None: of the same name, whose
    kernels are interpreted if `impl`, one of `PALLAS`, says so."""
    from spec_jax.pallas import launch

    module = importlib.import_module(f"spec_jax.pallas.{name}_triton")
    of_impl = launch.interpreted(impl == "interpret")
    return of_impl(getattr(module, function or name))


def slab_rows(impl: str) -> int | None:
    """Returns the rows in a slab of a resolved implementation; None if any number.

    Plain decoding and verification of a short chain use the same height. The kernels
    have the same bits for any number of slabs, see `most_rows`.
    """
    if impl not in PALLAS:
        return None
    from spec_jax.pallas import slab

    return slab.ROWS


def most_rows(impl: str) -> int | None:
    """Returns the rows, in whole slabs, that share a read of weights; None if any.

    It bounds the rows of a window and of a block. `impl` is a resolved one.
    """
    if impl not in PALLAS:
        return None
    from spec_jax.pallas import slab

    return slab.MOST_ROWS


def whole_slabs(impl: str, num_rows: int) -> int:
    """Rounds `num_rows` up to whole slabs where there are slabs."""
    slab = slab_rows(impl) or 1
    return -(-num_rows // slab) * slab


def instruction_set(impl: str) -> str | None:
    """Returns the instruction set that a resolved implementation's own kernels use.

    Bits depend on it, so results report it. None for implementations whose kernels a
    compiler makes.
    """
    return build.load() if impl == "native" else None


@functools.cache
def _choose() -> str:
    """Chooses native kernels if available; else XLA, and logs a warning."""
    try:
        build.load()
    except build.BuildError as error:
        reason = str(error).partition("\n")[0]
        logging.getLogger(__name__).warning(
            "no native kernels, XLA runs instead: %s", reason
        )
        return "xla"
    return "native"
