"""RMSNorm on a GPU (Pallas Triton): one program a row, in slabs.

A program reads its row once, 2 D bytes, and writes it once. The row is one block of a
power of two, which depends on the width alone, so that its squares are summed in one
order: XLA's order depends on the number of rows. Programs of padding rows read no row.

If the row is the sum of a residual and of a product whose K is split, the program first
adds the partial sums, in ascending order: the sum costs no launch of its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import launch, slab


MAX_WIDTH = 16_384  # a row is held in registers
NUM_WARPS = 8


def _kernel(
    num_active_ref,  # [1]
    x_ref,  # [1, block]
    sums_ref,  # [splits, block] float32 or None
    weight_ref,  # [1, block]
    *out_refs,  # [1, block]: the normed row, and with `sums_ref` the sum
    width: int,
    eps: float,
):
    """Norms one row; elements past `width` are not read and count as zeros."""
    block = x_ref.shape[1]
    mask = jnp.arange(block)[None, :] < width if width % block else None
    load = functools.partial(plt.load, mask=mask, other=None if mask is None else 0)
    program = launch.program(0)

    @pl.when(program < num_active_ref[0])
    def _():
        x = load(x_ref.at[...])
        if sums_ref is not None:
            total = jnp.zeros((1, block), jnp.float32)
            for split in range(sums_ref.shape[0]):
                total += load(sums_ref.at[pl.ds(split, 1), :])
            x += total.astype(x.dtype)
            plt.store(out_refs[1].at[...], x, mask=mask)
        x, weight = x.astype(jnp.float32), load(weight_ref.at[...])
        mean_square = jnp.sum(x * x, axis=1, keepdims=True) / width
        normed = (x * jax.lax.rsqrt(mean_square + eps)).astype(x_ref.dtype)
        plt.store(out_refs[0].at[...], normed * weight, mask=mask)


def rms_norm(
    x: jax.Array,  # [R, D]
    weight: jax.Array,  # [D]
    *,
    num_active: jax.Array,  # [] int32
    eps: float,
) -> jax.Array:
    """Implements `ops.rms_norm.rms_norm`, for rows of at most `MAX_WIDTH` elements.

    Padding rows are uninitialised.

    Raises:
      ValueError: a weight of another shape or dtype, or empty or too wide rows.
    """
    normed, *_ = _call(x, None, weight, num_active, eps)
    return normed[: x.shape[0]]


def add_norm(
    x: jax.Array,  # [R, D], of whole slabs
    sums: jax.Array,  # [splits, R, D] float32
    weight: jax.Array,  # [D]
    *,
    num_active: jax.Array,  # [] int32
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns `x + round(sum of sums)` and its norm; raises as `rms_norm` does."""
    normed, added = _call(x, sums, weight, num_active, eps)
    return added, normed


def _call(x, sums, weight, num_active, eps):
    """Returns normed rows, and with `sums` the rows before the norm, in whole slabs."""
    D = x.shape[1]
    slab.check_shapes(weight=(weight, (D,)), num_active=(num_active, ()))
    if x.dtype != weight.dtype:
        raise ValueError(f"rows are {x.dtype} but the weight is {weight.dtype}")
    if not 0 < D <= MAX_WIDTH:
        raise ValueError(f"rows of {D} elements are not in 1..{MAX_WIDTH}")
    # The compiler makes other code for a grid of one program: whole slabs have more.
    x = slab.padded(x)
    R, block = x.shape[0], pl.next_power_of_2(D)
    row = pl.BlockSpec((1, block), lambda r: (r, 0))
    partial, count = None, 1
    if sums is not None:
        partial = pl.BlockSpec((sums.shape[0], None, block), lambda r: (0, r, 0))
        count = 2
    num_active = num_active.reshape(1)
    whole_row = pl.BlockSpec((1, block), lambda r: (0, 0))
    return launch.run(
        _kernel,
        (num_active, x, sums, weight.reshape(1, D)),
        [x] * count,
        in_specs=[launch.whole(num_active), row, partial, whole_row],
        out_specs=[row] * count,
        grid=(R,),
        num_warps=NUM_WARPS,
        name="rms_norm",
        width=D,
        eps=eps,
    )
