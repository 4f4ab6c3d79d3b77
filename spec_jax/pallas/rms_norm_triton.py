"""RMSNorm on a GPU (Pallas Triton): one program a row, in slabs.

A program reads its row once, 2 D bytes, and writes it once. The row is one block of a
power of two, the same whatever is beside it, so that its squares are summed in one
order: XLA chooses its own by the number of rows. Programs of padding rows read nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import early_launch, slab


MAX_WIDTH = 16_384  # a row is held in registers
NUM_WARPS = 8


def _kernel(
    num_active_ref,  # [1]
    x_ref,  # [1, block]
    weight_ref,  # [1, block]
    out_ref,  # [1, block]
    *,
    width: int,
    eps: float,
    interpret: bool,
):
    """One row; elements past `width` are zeros that are not read."""
    block = x_ref.shape[1]
    mask = jnp.arange(block)[None, :] < width if width % block else None
    other = None if mask is None else 0

    @pl.when(early_launch.program(0, interpret=interpret) < num_active_ref[0])
    def _():
        x = plt.load(x_ref.at[...], mask=mask, other=other).astype(jnp.float32)
        weight = plt.load(weight_ref.at[...], mask=mask, other=other)
        mean_square = jnp.sum(x * x, axis=1, keepdims=True) / width
        normed = (x * jax.lax.rsqrt(mean_square + eps)).astype(x_ref.dtype)
        plt.store(out_ref.at[...], normed * weight, mask=mask)


def rms_norm(
    x: jax.Array,  # [R, D]
    weight: jax.Array,  # [D]
    *,
    num_active: jax.Array,  # [] int32
    eps: float,
    interpret: bool = False,
) -> jax.Array:
    """See `ops.rms_norm.rms_norm`, for rows of at most `MAX_WIDTH` elements.

    Padding rows are uninitialised.

    Raises:
      ValueError: a weight of another shape or dtype, or rows that are too wide.
    """
    R, D = x.shape
    slab.check_shapes(weight=(weight, (D,)), num_active=(num_active, ()))
    if x.dtype != weight.dtype:
        raise ValueError(f"rows are {x.dtype} but the weight is {weight.dtype}")
    if not 0 < D <= MAX_WIDTH:
        raise ValueError(f"rows of {D} elements are not in 1..{MAX_WIDTH}")
    # A grid of one program is other code: the compiler knows which program it is.
    x = slab.padded(x)
    block = pl.next_power_of_2(D)
    row = pl.BlockSpec((1, block), lambda r: (r, 0))
    y = pl.pallas_call(
        functools.partial(_kernel, width=D, eps=eps, interpret=interpret),
        grid=(x.shape[0],),
        in_specs=[
            pl.BlockSpec((1,), lambda r: (0,)),
            row,
            pl.BlockSpec((1, block), lambda r: (0, 0)),
        ],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        name="rms_norm",
        interpret=interpret,
    )(num_active.reshape(1), x, weight.reshape(1, D))
    return y[:R]
