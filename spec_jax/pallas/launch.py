"""Launches of kernels; the next one is set up while one runs.

XLA launches our kernels so that one may begin before the one before it has ended, and
puts a wait before each kernel's first instruction: a kernel reads nothing before it
sees all that was written (programmatic dependent launch). A kernel can say early that
the next one may be set up. All kernels here say so near their beginning, and so hide
the time that a launch takes.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


_interpreted = contextvars.ContextVar[bool | None]("interpreted", default=None)

_RELEASE = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"


def run(
    kernel: Callable[..., None],
    inputs: tuple,
    outputs: Any,
    *,
    name: str,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    in_specs: Any = None,
    out_specs: Any = None,
    aliases: dict[int, int] | None = None,
    **static: Any,
) -> Any:
    """Runs `kernel(*inputs, *outputs, **static)` for each program.

    Args:
      inputs, outputs: pytrees of arrays, or for outputs of what has their shapes and
        dtypes; the kernel gets references in the same pytrees.
      in_specs, out_specs: each program's blocks; None: it gets `whole` arrays.
      aliases: the number of the output that an input becomes, both counted as leaves.

    Returns:
      Arrays in the place of `outputs`.
    """
    return pl.pallas_call(
        functools.partial(kernel, **static),
        grid=grid,
        in_specs=in_specs or jax.tree.map(whole, inputs),
        out_specs=out_specs or jax.tree.map(whole, outputs),
        out_shape=jax.tree.map(_shape_of, outputs),
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=is_interpreted(),
        name=name,
    )(*inputs)


def whole(array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """Passes the whole array to every program, as a pointer."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _shape_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@contextlib.contextmanager
def interpreted(is_so: bool) -> Iterator[None]:
    """Decides whether kernels that are traced within are interpreted, or compiled."""
    token = _interpreted.set(is_so)
    try:
        yield
    finally:
        _interpreted.reset(token)


def is_interpreted() -> bool:
    """Returns whether kernels are interpreted: by default anywhere but on a GPU."""
    is_so = _interpreted.get()
    return jax.default_backend() != "gpu" if is_so is None else is_so


def released(number: jax.Array | int) -> jax.Array:
    """Returns `number`, int32 `[1]`, after it lets the next kernel start.

    The kernel must use the result: without a use, the instruction is not compiled.
    """
    number = jnp.full((1,), number, jnp.int32)
    if is_interpreted():
        return number
    (number,) = plt.elementwise_inline_asm(
        _RELEASE,
        args=[number],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return number


def program(axis: int) -> jax.Array:
    """Returns the program's number, a scalar, after it lets the next kernel start."""
    return jnp.sum(released(pl.program_id(axis)))


def meet() -> None:
    """Waits for all threads of the program, which then see what any has written."""
    if not is_interpreted():
        plt.debug_barrier()
