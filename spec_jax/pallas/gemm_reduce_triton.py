"""The sums of a split product on a GPU (Pallas Triton): partial sums into one.

    y[r, n] = finish(partials[0][r, n] + partials[1][r, n] + ...)

One program owns 16 rows and `COLUMNS` columns, and adds the splits from first to last.
It reads `4 * splits` bytes for each sum of an active row; padding rows are neither read
nor written.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import early_launch, slab


COLUMNS = 64  # of one program


def reduce(
    partials: list[jax.Array],  # for each part [splits, R, N] float32
    residual: jax.Array | None,  # [R, N]
    result: jax.ShapeDtypeStruct,  # [R, N]
    *,
    num_active: jax.Array,  # [] int32
    name: str,
    interpret: bool,
) -> jax.Array:
    """Sums the splits of each part and applies `slab.finish`; `R` is whole slabs."""
    (splits, R, N), rows = partials[0].shape, slab.ROWS
    tile = pl.BlockSpec((rows, COLUMNS), lambda r, n: (r, n))
    partial = pl.BlockSpec((splits, rows, COLUMNS), lambda r, n: (0, r, n))
    return pl.pallas_call(
        functools.partial(_kernel, num_columns=N, interpret=interpret),
        grid=(R // rows, pl.cdiv(N, COLUMNS)),
        in_specs=[
            pl.BlockSpec((1,), lambda r, n: (0,)),
            [partial] * len(partials),
            None if residual is None else tile,
        ],
        out_specs=tile,
        out_shape=result,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name=name,
        interpret=interpret,
    )(num_active.reshape(1), partials, residual)


def _kernel(
    num_active_ref,  # [1]
    partial_refs,  # for each part [splits, 16, COLUMNS] float32
    residual_ref,  # [16, COLUMNS] or None
    out_ref,  # [16, COLUMNS]
    *,
    num_columns: int,
    interpret: bool,
):
    first_row = pl.program_id(0) * slab.ROWS
    first_row = early_launch.released(first_row, interpret=interpret)
    is_active = first_row + jnp.arange(slab.ROWS) < num_active_ref[0]
    columns = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)
    in_columns = columns < num_columns if num_columns % COLUMNS else None

    def accumulate(split, sums):
        partials = [
            slab.load(ref.at[split], is_active, in_columns) for ref in partial_refs
        ]
        return slab.each_added(sums, partials)

    zeros = jnp.zeros((slab.ROWS, COLUMNS), jnp.float32)
    splits = partial_refs[0].shape[0]
    sums = jax.lax.fori_loop(0, splits, accumulate, (zeros,) * len(partial_refs))
    residual = None if residual_ref is None else residual_ref.at[...]
    slab.finish(sums, residual, out_ref.at[...], is_active, in_columns)
