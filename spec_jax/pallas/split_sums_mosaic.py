"""What the splits of a row's keys give, and their sum within a kernel (Pallas Mosaic).

As `split_sums`, whose sum this is. What a query has of a split is one row of float32:
`H` sums, its maximum to base 2 in each of the next 16, and its total in each of the
last 16.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import attention_plan as plan, row_jobs, split_sums, warpgroup


STATISTICS = 16  # places of each: rows of shared memory are copied in 128 bytes
HEADS_AT_ONCE = 4  # whose loads are in flight together

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
      tile_ref: shared memory `[64, H + 32]` float32, head by head the tile's rows.
      takes_part: gives for each row of the tile a scalar.
    """
    maximum, total, weighted = values
    H = lay.head_dim
    wide = warpgroup.ROWS, STATISTICS
    tile_ref[:, pl.ds(0, H)] = weighted
    tile_ref[:, pl.ds(H, STATISTICS)] = warpgroup.of_rows(maximum, wide)
    tile_ref[:, pl.ds(H + STATISTICS, STATISTICS)] = warpgroup.of_rows(total, wide)
    plgpu.commit_smem()
    for i, mine in enumerate(takes_part()):
        row = tile * lay.tile_rows + i

        @pl.when(mine)
        def _(i=i, row=row):
            for head in range(lay.group):
                own = tile_ref.at[head * lay.tile_rows + i]
                plgpu.copy_smem_to_gmem(own, splits_ref.at[kv_head, row, split, head])

    plgpu.wait_smem_to_gmem(0)


def is_last(
    done: Any,  # [K, tiles] int32
    place: Any,  # [1] int32 in shared memory
    *,
    kv_head: jax.Array,  # [] int32
    tile: jax.Array,  # [] int32
    num_jobs: jax.Array,  # [] int32
    interpret: Any,
) -> jax.Array:
    """Counts a job of a tile as done: whether it was the last of them.

    What any program stored before it counted is seen by the one that was last, which
    leaves the count at zero.
    """
    last = num_jobs - 1
    if interpret:  # One program after another.
        before = done[kv_head, tile]
        done[kv_head, tile] = jnp.where(before == last, 0, before + 1)
        return before == last
    counter, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(counter, counter, scalar))
    def count(_, counter, place, last):
        """Adds one, and leaves in `place` what was there before."""
        # Pallas has no addition that says what was there. This one wraps around.
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            mgpu.utils.inline_ptx(  # type: ignore[attr-defined] # from jax 0.11 on
                "{ .reg .b32 before; "
                "atom.acq_rel.gpu.global.inc.u32 before, [$0], $2; "
                "st.shared.u32 [$1], before; }",
                mgpu.utils.memref_ptr(counter),
                mgpu.utils.memref_ptr(place),
                last.registers.item(),
                has_side_effects=True,
            )
        mgpu.warpgroup_barrier()

    count(done.at[kv_head, tile], place, last)
    return place[0] == last


def finish(
    splits: Any,  # `shape`, a reference
    out: Any,  # [R, N, H], a reference
    lengths: Any,  # [R] int32, a reference
    *,
    kv_head: jax.Array,  # [] int32
    tile: jax.Array,  # [] int32
    lay: plan.Layout,
    split: int,
) -> None:
    """Adds the splits of a tile's rows, of a key/value head, and stores their sums.

    The splits of a query one after another, in the order of their positions.
    """
    group = lay.group
    first, num_rows = tile * lay.tile_rows, jnp.int32(0)
    for i in range(lay.tile_rows):
        num_rows = jnp.where(lengths[first + i] > 0, i + 1, num_rows)
    at_once = max(n for n in range(1, HEADS_AT_ONCE + 1) if group % n == 0)
    parts = group // at_once

    def finish_row(turn, carry):
        """Adds the splits of some heads of a row."""
        row, part = first + div(turn, parts), jax.lax.rem(turn, parts)
        length, head = lengths[row], part * at_once

        @pl.when(length > 0)
        def _():
            count = div(length + split - 1, split)
            summed = _summed(splits.at[kv_head, row], head, at_once, count, lay)
            for i, (_, total, weighted) in enumerate(summed):
                attended = (weighted / total).astype(out.dtype)
                out[row, kv_head * group + head + i] = attended

        return carry

    jax.lax.fori_loop(0, num_rows * parts, finish_row, None)


def _summed(splits, head, heads, count, lay):
    """The sums of some queries of a row over its splits, each on its own."""
    H = lay.head_dim

    def load(index, i):
        view = splits.at[index, head + i]
        return view[H], view[H + STATISTICS], view[pl.ds(0, H)]

    def add(turn, sums):
        """Adds the next splits, in order."""
        steps = [turn * split_sums.AT_ONCE + i for i in range(split_sums.AT_ONCE)]
        coming = [
            [load(jnp.minimum(step, count - 1), i) for i in range(heads)]
            for step in steps
        ]
        for step, values in zip(steps, coming, strict=True):
            added = [split_sums.added(*each) for each in zip(sums, values, strict=True)]
            # By selection: what is not the query's own adds nothing, not even 0.
            sums = jax.tree.map(
                lambda new, old, step=step: jnp.where(step < count, new, old),
                added,
                sums,
            )
        return sums

    zeros = plgpu.layout_cast(
        jnp.zeros((H,), jnp.float32),
        plgpu.Layout.WG_STRIDED((H,), vec_size=H // warpgroup.THREADS),
    )
    begun = [(jnp.float32(-jnp.inf), jnp.float32(0), zeros)] * heads
    turns = div(count + split_sums.AT_ONCE - 1, split_sums.AT_ONCE)
    return jax.lax.fori_loop(0, turns, add, begun)


def lose(out: Any, lengths: Any, *, kv_head: jax.Array, group: int) -> None:
    """Stores NaN for the rows that have no pages: no job is theirs."""
    (R,), H = lengths.shape, out.shape[2]
    lost = jnp.int32(0)
    for row in range(R):
        lost = jnp.where(lengths[row] == row_jobs.LOST, row + 1, lost)

    def lose_row(row, carry):
        @pl.when(lengths[row] == row_jobs.LOST)
        def _():
            for i in range(group):
                nothing = jnp.full((H,), jnp.nan, out.dtype)
                out[row, kv_head * group + i] = nothing

        return carry

    jax.lax.fori_loop(0, lost, lose_row, None)
