"""Cosines and sines of positions on a GPU (Pallas Mosaic): one launch.

As `angles_triton`: 64 rows and 8 columns a program, all of it elementwise.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import slab, warpgroup


COLUMNS = 8  # of one program


def angles(
    positions: jax.Array,  # [R] int32
    inv_freq: jax.Array,  # [H / 2] float32
    *,
    scale: float,
    dtype: jnp.dtype,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines `[R, H / 2]` in `dtype`.

    Raises:
      ValueError: positions or frequencies that are no vectors, or frequencies that are
        not whole eights.
    """
    R, half = positions.size, inv_freq.size
    slab.check_shapes(positions=(positions, (R,)), inv_freq=(inv_freq, (half,)))
    if not half or half % COLUMNS:
        raise ValueError(f"{half} frequencies are not whole {COLUMNS}s")
    shape, tiles = (warpgroup.ROWS, COLUMNS), pl.cdiv(R, warpgroup.ROWS)
    height = min(R, warpgroup.ROWS)

    def row_angles(positions_ref, inv_freq_ref, *refs):
        """Up to 64 rows of a few columns."""
        tile, first = (jax.lax.axis_index(name) for name in ("tile", "column"))
        columns = pl.ds(first * COLUMNS, COLUMNS)
        outs, places, tables = refs[:2], refs[2], refs[3:]
        for i in range(height):
            row = jnp.minimum(tile * warpgroup.ROWS + i, R - 1)
            places[i] = positions_ref[row]
        plgpu.commit_smem()

        def load(ref, layout, spread):
            loaded = warpgroup.load(ref, layout)
            return spread(loaded.astype(jnp.float32), shape)

        radians = load(places, warpgroup.OF_ROW, warpgroup.of_rows)
        radians *= load(
            inv_freq_ref.at[columns], warpgroup.OF_COLUMN, warpgroup.of_columns
        )
        for table, turn in zip(tables, (jnp.cos, jnp.sin), strict=True):
            table[...] = (turn(radians) * scale).astype(dtype)
        rows = pl.ds(tile * warpgroup.ROWS, height)
        warpgroup.store_from_shared(
            *(
                (table.at[pl.ds(0, height)], out.at[rows, columns])
                for table, out in zip(tables, outs, strict=True)
            )
        )

    out = jax.ShapeDtypeStruct((R, half), dtype)
    cos, sin = warpgroup.kernel(
        row_angles,
        outputs=[out, out],
        grid={"tile": tiles, "column": half // COLUMNS},
        scratch=[
            plgpu.SMEM((warpgroup.ROWS,), jnp.int32),
            *[plgpu.SMEM(shape, dtype)] * 2,
        ],
        interpret=interpret,
    )(positions, inv_freq.astype(jnp.float32))
    return cos, sin
