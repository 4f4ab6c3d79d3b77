"""The next kernel is set up while this one runs: programmatic dependent launch.

XLA launches our kernels so that one may begin before the one before it has ended, and
puts a wait before each kernel's first instruction: a kernel reads nothing before it
sees all that was written. A kernel can say early that the next one may be set up. All
kernels here say so near their beginning, and so hide the time that a launch takes.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

import os

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


VARIABLE = "SPEC_JAX_EARLY_LAUNCH"
"""Environment variable: 0 turns early launches off, to measure their worth."""

IS_EARLY = os.environ.get(VARIABLE, "1") != "0"

_RELEASE = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"


def released(number: jax.Array | int, *, interpret: bool) -> jax.Array:
    """Returns `number`, int32 `[1]`, after it lets the next kernel start.

    The kernel must use the result: without a use, the instruction is not compiled.
    """
    number = jnp.full((1,), number, jnp.int32)
    if interpret or not IS_EARLY:
        return number
    (number,) = plt.elementwise_inline_asm(
        _RELEASE,
        args=[number],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return number


def program(axis: int, *, interpret: bool) -> jax.Array:
    """Returns the program's number, a scalar, after it lets the next kernel start."""
    return jnp.sum(released(pl.program_id(axis), interpret=interpret))
