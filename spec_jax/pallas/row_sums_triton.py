"""The sum of each row, in a stated order, on a GPU (Pallas Triton).

Program `(r, c)` adds `CHUNK` elements of row `r` by one reduction of a block of fixed
size. The same kernel then adds these sums, until one is left: two launches up to
`CHUNK ** 2` elements. The order depends on nothing but the width.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import launch


CHUNK = 2048  # elements of a program


def row_sums(x: jax.Array) -> jax.Array:
    """Sums rows `[R, V]`, float32; returns `[R]`.

    Raises:
      ValueError: rows without elements, or of another dtype.
    """
    if not x.shape[1] or x.dtype != jnp.float32:
        raise ValueError(f"sums of rows {x.dtype}[{x.shape[0]}, {x.shape[1]}]")
    while True:
        x = _sum_chunks(x)
        if x.shape[1] == 1:
            return x[:, 0]


def _sum_chunks(x):
    """Returns the sum of each chunk of each row, `[R, chunks]`."""
    R, V = x.shape
    out = jax.ShapeDtypeStruct((R, pl.cdiv(V, CHUNK)), jnp.float32)
    # The compiler makes other code for a grid of one program: it knows which it is.
    grid = max(R, 2), out.shape[1]
    return launch.run(_kernel, (x,), out, grid=grid, name="row_sums", num_rows=R)


def _kernel(x_ref, out_ref, *, num_rows):
    row, chunk = pl.program_id(0), pl.program_id(1)

    @pl.when(launch.program(0) < num_rows)
    def _():
        index = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        inside = index < x_ref.shape[1]
        out_ref[row, chunk] = jnp.sum(
            plt.load(x_ref.at[row, index], mask=inside, other=0.0)
        )
