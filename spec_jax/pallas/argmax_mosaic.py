"""Argmax over a vocabulary on a GPU (Pallas Mosaic): two kernels with fixed blocks.

As `argmax_triton`, in integers: the same indices. The last chunk of a row ends where
the row does, and may begin in the one before: what is seen twice is no larger.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import argmax_order as order, warpgroup


CHUNK = 4096  # logits of one program of the first kernel


def argmax(
    logits: jax.Array,  # [R, V] float32 or bfloat16
    *,
    num_active: jax.Array,  # [] int32
    interpret: Any = False,
) -> jax.Array:  # [R] int32
    """The index of each active row's largest logit: the first of equals, or of NaN.

    As `jnp.argmax`. A row's result depends on that row alone; that of a padding row is
    0.

    Raises:
      ValueError: too few logits, or rows that do not begin where a load may.
      NotImplementedError: logits that are neither float32 nor bfloat16.
    """
    R, V = logits.shape
    order.check(logits)
    size = warpgroup.chunk_of(V, CHUNK)
    if R == 0:
        return jnp.zeros((0,), jnp.int32)
    num_chunks = pl.cdiv(V, size)
    width, num_active = warpgroup.whole(num_chunks), num_active.reshape(1)

    def argmax_chunks(num_active_ref, x_ref, key_ref, index_ref):
        row, chunk = jax.lax.axis_index("r"), jax.lax.axis_index("chunk")

        @pl.when(row < num_active_ref[0])
        def _():
            first = jnp.minimum(chunk * size, V - size)
            view = x_ref.at[row, pl.ds(first, size)]
            keys = order.ordered(warpgroup.load(view, warpgroup.line(size)))
            index = first + warpgroup.line_numbers(size)
            largest, index = order.first_of_largest(keys, index)
            key_ref[row, chunk], index_ref[row, chunk] = largest, index

    def argmax_rows(num_active_ref, key_ref, index_ref, out_ref):
        """Finds the highest of the chunks of a row."""
        row = jax.lax.axis_index("r")
        inside = warpgroup.line_numbers(width) < num_chunks

        @pl.when(row < num_active_ref[0])
        def _():
            keys = jnp.where(inside, key_ref[row], order.NOTHING)
            indices = jnp.where(inside, index_ref[row], order.NAN)
            out_ref[row] = order.first_of_largest(keys, indices)[1]

        @pl.when(row >= num_active_ref[0])
        def _():
            out_ref[row] = jnp.int32(0)

    partial = jax.ShapeDtypeStruct((R, width), jnp.int32)
    found = warpgroup.kernel(
        argmax_chunks,
        outputs=[partial, partial],
        grid={"r": R, "chunk": num_chunks},
        interpret=interpret,
    )(num_active, logits)
    return warpgroup.kernel(
        argmax_rows,
        outputs=jax.ShapeDtypeStruct((R,), jnp.int32),
        grid={"r": R},
        interpret=interpret,
    )(num_active, *found)
