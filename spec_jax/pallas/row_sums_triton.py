"""The sum of each row, in a stated order, on a GPU (Pallas Triton).

Program `(r, c)` adds `CHUNK` elements of row `r` by one reduction of a block of fixed
size. The same kernel then adds these sums, until one is left: two launches up to
`CHUNK ** 2` elements. The order depends on nothing but the width.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan, early_launch


CHUNK = 2048  # elements of a program


def row_sums(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Sums rows `[R, V]`, float32; returns `[R]`.

    Raises:
      ValueError: rows without elements, or of another dtype.
    """
    if not x.shape[1] or x.dtype != jnp.float32:
        raise ValueError(f"sums of rows {x.dtype}[{x.shape[0]}, {x.shape[1]}]")
    while True:
        x = _sum_chunks(x, interpret)
        if x.shape[1] == 1:
            return x[:, 0]


def _sum_chunks(x, interpret):
    """Returns the sum of each chunk of each row, `[R, chunks]`."""
    R, V = x.shape
    out = jax.ShapeDtypeStruct((R, pl.cdiv(V, CHUNK)), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, num_rows=R, interpret=interpret),
        # The compiler makes other code for a grid of one program: it knows which it is.
        grid=(max(R, 2), out.shape[1]),
        in_specs=[plan.whole(x)],
        out_specs=plan.whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="row_sums",
    )(x)


def _kernel(x_ref, out_ref, *, num_rows, interpret):
    row, chunk = pl.program_id(0), pl.program_id(1)

    @pl.when(early_launch.program(0, interpret=interpret) < num_rows)
    def _():
        index = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        inside = index < x_ref.shape[1]
        out_ref[row, chunk] = jnp.sum(
            plt.load(x_ref.at[row, index], mask=inside, other=0.0)
        )
