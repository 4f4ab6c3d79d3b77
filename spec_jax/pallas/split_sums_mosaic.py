"""What the splits of a row's keys give, and their sum (Pallas Mosaic).

As `split_sums`, whose sum this is, by a kernel of its own: one warpgroup a query. What
a query has of a split is one row of float32: `H` sums, its maximum to base 2 in each of
the next 16, and its total in each of the last 16.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import attention_plan as plan, row_jobs, split_sums, warpgroup


STATISTICS = 16  # places of each: rows of shared memory are copied in 128 bytes

# Nothing here is negative: no need for the signs of `//` and `%`.
div = jax.lax.div


def shape(num_kv_heads: int, lay: plan.Layout, splits: int) -> jax.ShapeDtypeStruct:
    """The array for so many splits of each row; what no job writes is uninitialised."""
    sizes = num_kv_heads, lay.rows, splits, lay.group, lay.head_dim + 2 * STATISTICS
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def nothing(head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The running softmax of 64 queries before their first key."""
    layouts = warpgroup.OF_ROW, warpgroup.OF_ROW, warpgroup.TABLE
    empty = split_sums.nothing(warpgroup.ROWS, head_dim)
    return tuple(map(plgpu.layout_cast, empty, layouts))


def store(splits_ref, tile_ref, values, takes_part, *, kv_head, split, lay, tile):
    """Stores a running softmax as one split of the rows that take part.

    Args:
      tile_ref: shared memory `[64, H + 32]` float32.
      takes_part: for each row of the tile a scalar.
    """
    maximum, total, weighted = values
    H = lay.head_dim
    wide = warpgroup.ROWS, STATISTICS
    tile_ref[:, pl.ds(0, H)] = weighted
    tile_ref[:, pl.ds(H, STATISTICS)] = warpgroup.of_rows(maximum, wide)
    tile_ref[:, pl.ds(H + STATISTICS, STATISTICS)] = warpgroup.of_rows(total, wide)
    plgpu.commit_smem()
    for i, mine in enumerate(takes_part):
        row = tile * lay.tile_rows + i

        @pl.when(mine)
        def _(i=i, row=row):
            own = tile_ref.at[pl.ds(i * lay.group, lay.group)]
            plgpu.copy_smem_to_gmem(own, splits_ref.at[kv_head, row, split])

    plgpu.wait_smem_to_gmem(0)


def combine(
    splits: jax.Array,  # `shape`
    *,
    jobs: row_jobs.RowJobs,
    dtype: jnp.dtype,
    lay: plan.Layout,
    split: int,
    interpret: Any,
) -> jax.Array:
    """The attended heads `[R, N, H]`: NaN of lost rows, padding rows uninitialised."""
    (K, _, _, group, _), (R,) = splits.shape, jobs.lengths.shape
    H = lay.head_dim

    def combine_splits(lengths_ref, splits_ref, out_ref):
        """One query: its splits one after another, in the order of their positions."""
        row, head = jax.lax.axis_index("r"), jax.lax.axis_index("head")
        length = lengths_ref[row]
        mine = splits_ref.at[div(head, group), row]
        count = div(jnp.maximum(length, 0) + split - 1, split)

        def load(index):
            view = mine.at[index, jax.lax.rem(head, group)]
            return view[H], view[H + STATISTICS], view[pl.ds(0, H)]

        def add(turn, carry):
            first = turn * split_sums.AT_ONCE
            steps = [first + i for i in range(split_sums.AT_ONCE)]
            coming = [load(jnp.minimum(step, count - 1)) for step in steps]
            for step, values in zip(steps, coming, strict=True):
                added = split_sums.added(carry, values)
                # By selection: what is not the query's own adds nothing, not even 0.
                carry = [
                    jnp.where(step < count, new, old)
                    for new, old in zip(added, carry, strict=True)
                ]
            return tuple(carry)

        @pl.when(length > 0)
        def _():
            turns = div(count + split_sums.AT_ONCE - 1, split_sums.AT_ONCE)
            zeros = plgpu.layout_cast(
                jnp.zeros((H,), jnp.float32),
                plgpu.Layout.WG_STRIDED((H,), vec_size=H // warpgroup.THREADS),
            )
            begun = jnp.float32(-jnp.inf), jnp.float32(0), zeros
            _, total, weighted = jax.lax.fori_loop(0, turns, add, begun)
            out_ref[row, head] = (weighted / total).astype(dtype)

        @pl.when(length == row_jobs.LOST)
        def _():
            out_ref[row, head] = jnp.full((H,), jnp.nan, dtype)

    return warpgroup.kernel(
        combine_splits,
        outputs=jax.ShapeDtypeStruct((R, K * group, H), dtype),
        grid={"r": R, "head": K * group},
        interpret=interpret,
    )(jobs.lengths, splits)
