"""The sum of each row, in a stated order, on a GPU (Pallas Mosaic): two launches.

As `row_sums_triton`; a chunk is a line of a warpgroup. The last chunk of a row ends
where the row does: what lies in the one before it too counts as zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import warpgroup


CHUNK = 2048  # elements of a program


def row_sums(x: jax.Array, *, interpret: Any) -> jax.Array:
    """See `row_sums_triton.row_sums`.

    Raises:
      ValueError: rows that `warpgroup.chunk_of` refuses.
    """
    while True:
        x = _sum_chunks(x, interpret)
        if x.shape[1] == 1:
            return x[:, 0]


def _sum_chunks(x, interpret):
    """The sums of chunks of each row: one, or a line of which those past them are 0."""
    R, V = x.shape
    size = warpgroup.chunk_of(V, CHUNK)
    chunks = pl.cdiv(V, size)
    width = chunks if chunks == 1 else warpgroup.whole(chunks)

    def row_sums(x_ref: Any, out_ref: Any) -> None:
        """One chunk of a row."""
        row, chunk = (jax.lax.axis_index(name) for name in ("r", "chunk"))

        @pl.when(row < R)
        def _():
            first = jnp.minimum(chunk * size, V - size)
            counts = first + warpgroup.line_numbers(size) >= chunk * size
            values = warpgroup.load(
                x_ref.at[row, pl.ds(first, size)], warpgroup.line(size)
            )
            out_ref[row, chunk] = jnp.sum(jnp.where(counts, values, 0.0))

    return warpgroup.kernel(
        row_sums,
        outputs=jax.ShapeDtypeStruct((R, width), jnp.float32),
        # A grid of one program is other code.
        grid={"r": max(R, 2), "chunk": width},
        interpret=interpret,
    )(x)
