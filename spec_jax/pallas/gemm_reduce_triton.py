"""The sums of a split product on a GPU (Pallas Triton): partial sums into one.

    y[r, n] = finish(partials[0, r, n] + partials[1, r, n] + ...)

One program owns 16 rows and `COLUMNS` columns, and adds the splits from first to last.
It reads `4 * splits` bytes for each sum of an active row; padding rows are neither read
nor written.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import launch, slab


COLUMNS = 64  # of one program


def reduce(
    partials: jax.Array,  # [splits, R, N] float32
    residual: jax.Array | None,  # [R, N]
    *,
    num_active: jax.Array,  # [] int32
    out_dtype: jnp.dtype,
) -> jax.Array:
    """Sums the splits and applies `slab.finish`; `R` is whole slabs."""
    (splits, R, N), rows = partials.shape, slab.ROWS
    tile = pl.BlockSpec((rows, COLUMNS), lambda r, n: (r, n))
    partial = pl.BlockSpec((splits, rows, COLUMNS), lambda r, n: (0, r, n))
    num_active = num_active.reshape(1)
    return launch.run(
        _kernel,
        (num_active, partials, residual),
        jax.ShapeDtypeStruct((R, N), out_dtype),
        in_specs=[
            launch.whole(num_active),
            partial,
            None if residual is None else tile,
        ],
        out_specs=tile,
        grid=(R // rows, pl.cdiv(N, COLUMNS)),
        name="skinny_gemm_reduce",
        num_columns=N,
    )


def _kernel(
    num_active_ref,  # [1]
    partials_ref,  # [splits, 16, COLUMNS] float32
    residual_ref,  # [16, COLUMNS] or None
    out_ref,  # [16, COLUMNS]
    *,
    num_columns: int,
):
    first_row = pl.program_id(0) * slab.ROWS
    first_row = launch.released(first_row)
    is_active = first_row + jnp.arange(slab.ROWS) < num_active_ref[0]
    columns = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)
    in_columns = columns < num_columns if num_columns % COLUMNS else None

    def accumulate(split, total):
        return total + slab.load(partials_ref.at[split], is_active, in_columns)

    zeros = jnp.zeros((slab.ROWS, COLUMNS), jnp.float32)
    total = jax.lax.fori_loop(0, partials_ref.shape[0], accumulate, zeros)
    residual = None if residual_ref is None else residual_ref.at[...]
    slab.finish((total,), residual, out_ref.at[...], is_active, in_columns)
