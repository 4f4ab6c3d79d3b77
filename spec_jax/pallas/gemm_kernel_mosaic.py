"""The kernel of the skinny GEMM on Pallas Mosaic: one program of a product.

It walks its columns of the weights once, for up to 64 rows. What is asked for comes by
TMA into the shared memory of a stage, and a barrier of the stage says that it is there.
Rows are normed by a kernel before this one, as on Triton and for its reason.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import slab, warpgroup


ROWS_OF_COPY = 8  # as high as the tiles of an operand


class Walk(NamedTuple):
    """How a program walks its weights; all static."""

    plan: Any  # `skinny_gemm_mosaic.Plan`
    parts: int
    height: int  # rows
    num_columns: int  # of each part
    steps: int
    stages: int
    has_residual: bool

    @property
    def heights(self) -> list[int]:
        """How many rows a copy may have, in ascending order."""
        sizes = ROWS_OF_COPY, 2 * ROWS_OF_COPY, 4 * ROWS_OF_COPY
        return [*(size for size in sizes if size < self.height), self.height]


class Refs(NamedTuple):
    """What a program reads, writes and holds in shared memory; None is not there."""

    x: Any  # [R, K]
    w: Any  # [parts * N, K]
    num_active: Any  # [1]
    residual: Any  # [R, N]
    out: Any  # [R, N]
    x_blocks: Any  # [stages, 64, block_k]
    w_blocks: Any  # [stages, columns, block_k]
    loaded: Any  # barriers, one for each stage
    out_tile: Any  # [64, block_n]
    added_tile: Any  # [64, block_n], of the residual
    added: Any  # its barrier


def _refs(refs, walk) -> Refs:
    """What a kernel is given, in order."""
    refs = iter(refs)
    has = dict.fromkeys(("residual", "added_tile", "added"), walk.has_residual)
    return Refs._make(
        next(refs) if has.get(name, True) else None for name in Refs._fields
    )


def load_first(refs: Sequence[Any], walk: Walk) -> None:
    """Asks for the weights of the first steps, which no kernel writes."""
    refs = _refs(refs, walk)
    for step in range(walk.stages):
        _load_weights(refs, walk, jnp.int32(step))


def _load_weights(refs, walk, step):
    """Asks for the weights of a step."""
    block_n, block_k = walk.plan.block_n, walk.plan.block_k
    first = jax.lax.axis_index("n") * block_n
    stage, terms = jax.lax.rem(step, walk.stages), pl.ds(step * block_k, block_k)
    ready = refs.loaded.at[stage]
    for part in range(walk.parts):
        own = pl.ds(first + part * walk.num_columns, block_n)
        block = refs.w_blocks.at[stage, pl.ds(part * block_n, block_n)]
        plgpu.copy_gmem_to_smem(refs.w.at[own, terms], block, ready)


def _load_rows(refs, walk, num_live, step):
    """Asks for a step's terms of the rows."""
    block_k = walk.plan.block_k
    stage, terms = jax.lax.rem(step, walk.stages), pl.ds(step * block_k, block_k)

    def load(first, count):
        block = refs.x_blocks.at[stage, pl.ds(0, count)]
        source = refs.x.at[pl.ds(first, count), terms]
        plgpu.copy_gmem_to_smem(source, block, refs.loaded.at[stage])

    _load_live(load, walk, num_live)


def _load_live(load, walk, num_live):
    """Calls `load(first, count)` once, of the rows of this program: all live ones.

    And a few more: a copy has a fixed height.
    """
    first, least = jax.lax.axis_index("r") * walk.height, -1
    for count in walk.heights:
        # The last one is for all the others.
        fits = num_live <= count if count < walk.height else True
        pl.when((num_live > least) & fits)(functools.partial(load, first, count))
        least = count


def multiply(refs: Sequence[Any], walk: Walk) -> None:
    """Stores up to 64 rows of a block of columns; `load_first` is on its way."""
    refs = _refs(refs, walk)
    plan, height, out_tile = walk.plan, walk.height, refs.out_tile
    first = jax.lax.axis_index("r") * height
    num_live = jnp.clip(refs.num_active[0] - first, 0, height)
    columns = pl.ds(jax.lax.axis_index("n") * plan.block_n, plan.block_n)
    load_rows = functools.partial(_load_rows, refs, walk, num_live)
    for step in range(walk.stages):
        load_rows(jnp.int32(step))
    if walk.has_residual:

        def load_residual(first, count):
            block = refs.added_tile.at[pl.ds(0, count)]
            source = refs.residual.at[pl.ds(first, count), columns]
            plgpu.copy_gmem_to_smem(source, block, refs.added)

        _load_live(load_residual, walk, num_live)

    def load(step):
        _load_weights(refs, walk, step)
        load_rows(step)

    total = _total(refs, load, walk)
    if walk.parts == 2:
        halves = total[:, : plan.block_n], total[:, plan.block_n :]
        result = slab.gated(*halves, dtype=refs.out.dtype)
    else:
        residual = None
        if walk.has_residual:
            plgpu.barrier_wait(refs.added)
            residual = warpgroup.load(refs.added_tile, warpgroup.TABLE)
        result = slab.added(total, residual, out_dtype=refs.out.dtype)
    out_tile[...] = result
    _store_live(out_tile, refs.out, first, num_live, columns)


def _store_live(tile, out, first, num_live, columns):
    """Stores the live rows of a tile, as many as can be eight by eight."""
    whole = jax.lax.div(num_live, ROWS_OF_COPY)

    def store(number, count):
        rows = pl.ds(number * count, count)
        to = out.at[pl.ds(first + number * count, count), columns]
        plgpu.copy_smem_to_gmem(tile.at[rows], to)

    plgpu.commit_smem()
    jax.lax.fori_loop(0, whole, lambda i, _: store(i, ROWS_OF_COPY), None)
    rest = whole * ROWS_OF_COPY
    jax.lax.fori_loop(rest, num_live, lambda i, _: store(i, 1), None)
    plgpu.wait_smem_to_gmem(0)


def _total(refs, load, walk):
    """The sums of a program, float32 `[64, columns]`: block after block of k."""

    def accumulate(sums_ref):
        """Adds each block, and asks for the one that takes its place."""

        def add(step, _):
            stage = jax.lax.rem(step, walk.stages)
            plgpu.barrier_wait(refs.loaded.at[stage])
            block = warpgroup.transposed(refs.w_blocks.at[stage])
            plgpu.wgmma(sums_ref, refs.x_blocks.at[stage], block)
            # All but the last are done: the stage before is free.
            plgpu.wgmma_wait(1)
            later = step - 1 + walk.stages
            pl.when((step > 0) & (later < walk.steps))(lambda: load(later))

        jax.lax.fori_loop(0, walk.steps, add, None)
        return sums_ref[...]

    shape = warpgroup.ROWS, refs.w_blocks.shape[1]
    return pl.run_scoped(accumulate, warpgroup.sums(shape))
