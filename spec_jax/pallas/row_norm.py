"""RMSNorm within a product on Pallas Triton: what a slab's rows are scaled by.

    rms_norm(x)[k] = round(round(x[k] * scale) * weight[k]),  scale = 1 / rms(x)

A product reads all of its rows anyway, so that each program finds their scales for
itself, in `2 * K` bytes of an active row from the L2 cache, and none waits for another
kernel. The order of a row's squares is of the plan, and so of the weight's shape.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import slab


GROUP = 8  # rows at once: a window seldom has more


def scales(
    x_ref,  # [rows, K], and so to the end of a block
    num_live: jax.Array,  # [] int32, of these rows
    *,
    first_row: int,
    num_terms: int,
    block: int,
    eps: float,
) -> jax.Array:  # [16] float32
    """One over the root of the mean square of 16 rows; 0 for groups of none."""
    div = jax.lax.div
    rows, of_group = jnp.arange(slab.ROWS), jnp.arange(GROUP)

    def add_group(group, found):
        """Adds what one group of rows gives to what others gave."""
        first = group * GROUP
        is_live = first + of_group < num_live
        squares = jnp.zeros((GROUP, block), jnp.float32)
        # Unrolled: the loads of all blocks are in flight together.
        for start in range(0, num_terms, block):
            in_terms = None
            if start + block > num_terms:
                in_terms = start + jnp.arange(block) < num_terms
            group_rows = pl.ds(first_row + first, GROUP)
            view = x_ref.at[group_rows, pl.ds(start, block)]
            x = slab.load(view, is_live, in_terms).astype(jnp.float32)
            squares += x * x
        mean_square = jnp.sum(squares, axis=1) / num_terms
        scale = jax.lax.rsqrt(mean_square + eps)
        is_row = rows[:, None] == (first + of_group)[None, :]
        own = jnp.sum(jnp.where(is_row, scale[None, :], 0.0), axis=1)
        return jnp.where(div(rows, GROUP) == group, own, found)

    num_groups = div(jnp.minimum(num_live, slab.ROWS) + GROUP - 1, GROUP)
    zeros = jnp.zeros((slab.ROWS,), jnp.float32)
    return jax.lax.fori_loop(0, num_groups, add_group, zeros)


def normed(
    x: jax.Array,  # [16, n] bfloat16
    scale: jax.Array,  # [16] float32
    weight: jax.Array,  # [n] bfloat16
    *,
    interpret: bool,
) -> jax.Array:
    """A block of rows, with the roundings of `ops.rms_norm`."""
    scaled = x.astype(jnp.float32) * scale[:, None]
    if not interpret:
        return scaled.astype(x.dtype) * weight[None, :]
    # XLA leaves out a cast there and back.
    rounded = functools.partial(
        jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7
    )
    result = rounded(scaled) * weight[None, :].astype(jnp.float32)
    return rounded(result).astype(x.dtype)
