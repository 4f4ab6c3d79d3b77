"""Attention of a slab of rows over splits of the keys in their pages (Pallas Mosaic).

Flash decoding with splits of a fixed size at absolute positions, jobs and tiles as in
`paged_attention_triton`, and as there a program with jobs first writes the keys and
values of all rows to their pages: the same bytes to the same places, so that what it
reads is what it wrote itself, whoever else did; and whichever finishes the last job of
a tile adds the splits of its rows (`split_sums_mosaic`). A program `(kv_head, worker)`
holds a tile of 64 queries, has blocks of keys and values come by TMA, page by page and
`stages` at once, and multiplies them by `wgmma`.

No key is read unless every row of the job sees it. What a last block has past the end
of its job is not scored, and its values are zeros: pages hold anything, NaN included.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import (
    attention_plan as plan,
    branch_keys_mosaic as branch_keys,
    head_rotation,
    head_rotation_mosaic as rotation,
    row_jobs,
    split_sums as softmax,
    split_sums_mosaic as split_sums,
    warpgroup,
)


# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


def attend(
    heads: head_rotation.Heads,  # of arrays
    k_pages: Any,  # [P, C, K, H], a reference
    v_pages: Any,  # [P, C, K, H], a reference
    *,
    page_table: jax.Array,  # [S, M] int32
    jobs: row_jobs.RowJobs,
    eps: float,
    scale: float,
    lay: plan.Layout,
    config: plan.Config,
    branch: jax.Array | None,  # [R, A] int32
    interpret: Any,
) -> jax.Array:
    """Writes the rows that have a place, and attends.

    Returns the attended heads `[R, N, H]`: NaN of lost rows, padding rows
    uninitialised. `jobs.done` is counted in, and left as it was.
    """
    (_, C, K, H), dtype = k_pages.shape, heads.heads.dtype
    splits = pl.cdiv(page_table.shape[1] * C, config.split)
    workers = max(config.programs // K, 1)
    pieces = pl.cdiv(config.block, C)
    stages = min(config.num_stages, config.split // config.block)
    of_splits = split_sums.shape(K, lay, splits)
    R = heads.heads.shape[0]
    out = jax.ShapeDtypeStruct((R, K * lay.group, H), dtype)
    block = stages, config.block, H
    operand = functools.partial(plgpu.SMEM, dtype=dtype, transforms=warpgroup.OPERAND)
    scratch = [
        operand((warpgroup.ROWS, H)),
        operand(block),
        operand(block),
        operand((warpgroup.ROWS, config.block)),
        plgpu.SMEM((warpgroup.ROWS, of_splits.shape[-1]), jnp.float32),
        plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=stages),
        plgpu.SMEM((1,), jnp.int32),
    ]
    # The tile in which heads are turned has a branch's keys later.
    height = max(warpgroup.ROWS, branch_keys.height(config.block))
    scratch += rotation.scratch(H, lay.group, dtype, height=height)
    inputs = [heads.heads, heads.cos, heads.sin]
    inputs += [page_table, *jobs]
    has_norm, has_branch = heads.q_norm is not None, branch is not None
    if has_norm:
        inputs += [heads.q_norm, heads.k_norm]
    if branch is not None:
        inputs.append(branch)
        scratch += branch_keys.scratch(config.block, H, branch.shape[1], dtype)
    walk = _Walk(
        page_size=C,
        eps=eps,
        # exp(x) is exp2(x * log2(e)), and exp2 is an instruction.
        scale=scale * math.log2(math.e),
        lay=lay,
        config=config,
        stages=stages,
        workers=workers,
        interpret=interpret,
    )

    def paged_attention(*refs: Any) -> None:
        _work(_refs(refs, has_norm=has_norm, has_branch=has_branch), walk)

    out, _ = warpgroup.kernel(
        paged_attention,
        outputs=[out, of_splits],
        grid={"kv_head": K, "worker": workers},
        scratch=scratch,
        interpret=interpret,
    )(*inputs, k_pages, v_pages)
    return out


class _Walk(NamedTuple):
    """How a worker walks its jobs; all static."""

    page_size: int
    eps: float
    scale: float
    lay: plan.Layout
    config: plan.Config
    stages: int
    workers: int
    interpret: Any


class _Refs(NamedTuple):
    """What a worker reads, writes and holds in shared memory."""

    heads: head_rotation.Heads
    table: Any  # [S, M]
    jobs: row_jobs.RowJobs
    branch: Any  # [R, A] or None
    k: Any  # [P, C, K, H]
    v: Any  # [P, C, K, H]
    out: Any  # [R, N, H]
    splits: Any  # `split_sums_mosaic.shape`
    query_tile: Any  # [64, H]
    k_blocks: Any  # [stages, block, H]
    v_blocks: Any  # [stages, block, H]
    weights: Any  # [64, block]
    sums: Any  # [64, H + 32] float32
    loaded: Any  # barriers of each stage
    counted: Any  # [1] int32
    tiles: rotation.Tiles
    own: Any  # of `branch_keys_mosaic.scratch`, and the tile of its keys; or None


def _refs(refs, *, has_norm, has_branch) -> _Refs:
    """Those of `attend`, in order."""
    refs = list(refs)
    take = lambda count: [refs.pop(0) for _ in range(count)]
    heads, cos, sin = take(3)
    (table,), jobs = take(1), row_jobs.RowJobs(*take(7))
    q_norm, k_norm = take(2) if has_norm else (None, None)
    branch = refs.pop(0) if has_branch else None
    shared, tiles = take(11), rotation.Tiles(*take(6))
    inputs = [
        head_rotation.Heads(heads, q_norm, k_norm, cos, sin),
        table,
        jobs,
        branch,
    ]
    own = (tiles.heads, *refs) if has_branch else None
    return _Refs._make([*inputs, *shared, tiles, own])


def _work(refs, walk):
    """Does every job of a worker's turns."""
    kv_head, worker = jax.lax.axis_index("kv_head"), jax.lax.axis_index("worker")
    (R,), group = refs.jobs.job_ends.shape, walk.lay.group
    num_jobs = refs.jobs.job_ends[R - 1]
    turns = div(num_jobs - worker + walk.workers - 1, walk.workers)

    @pl.when(worker == 0)
    def _():
        split_sums.lose(refs.out, refs.jobs.lengths, kv_head=kv_head, group=group)

    @pl.when(turns > 0)
    def _():
        rotation.write_rows(
            refs.heads, refs.k, refs.v, refs.jobs.stored_at, refs.tiles,
            kv_head=kv_head, eps=walk.eps,
        )  # fmt: skip

    def do_job(turn, carry):
        """Attends one split of the keys for the rows that share it."""
        job = _find_job(worker + turn * walk.workers, refs.jobs, walk.config.split)
        tile = div(job.row, walk.lay.tile_rows)
        # What follows from the head is not worked out for all jobs at once, nor what
        # follows from the rows before their keys are seen: registers would be kept.
        own_head = jax.lax.optimization_barrier(kv_head)
        sums = _attend_split(refs, walk, job, own_head, tile)
        tile, own_head = jax.lax.optimization_barrier((tile, own_head))
        at = {"kv_head": own_head, "tile": tile}
        takes_part = functools.partial(_takes_part, job, tile, refs.jobs, walk.lay)
        split_sums.store(
            refs.splits, refs.sums, sums, takes_part,
            **at, split=job.split, lay=walk.lay,
        )  # fmt: skip
        is_last = split_sums.is_last(
            refs.jobs.done,
            refs.counted,
            **at,
            num_jobs=row_jobs.jobs_of_tile(tile, refs.jobs, walk.lay.tile_rows),
            interpret=walk.interpret,
        )

        @pl.when(is_last)
        def _():
            split_sums.finish(
                refs.splits, refs.out, refs.jobs.lengths,
                **at, lay=walk.lay, split=walk.config.split,
            )  # fmt: skip

        return carry

    jax.lax.fori_loop(0, turns, do_job, None)


def _attend_split(refs, walk, job, kv_head, tile):
    """The running softmax of a tile's queries over the keys of a job."""
    rotation.fetch_queries(
        refs.heads, refs.tiles,
        kv_head=kv_head, tile=tile, tile_rows=walk.lay.tile_rows, group=walk.lay.group,
    )  # fmt: skip
    blocks = div(job.end - job.first + walk.config.block - 1, walk.config.block)
    fetch = functools.partial(_fetch, refs, walk, job, kv_head)
    for i in range(walk.stages):
        pl.when(i < blocks)(functools.partial(fetch, jnp.int32(i)))
    plgpu.barrier_wait(refs.tiles.queries_came)
    q_norm = refs.heads.q_norm
    rotation.turn(refs.tiles, q_norm, eps=walk.eps, to=refs.query_tile)
    plgpu.commit_smem()

    def attend_block(i, sums):
        sums = _attend_block(refs, walk, job, kv_head, i, sums)
        later = i + walk.stages
        pl.when(later < blocks)(functools.partial(fetch, later))
        return sums

    H = refs.query_tile.shape[1]
    return jax.lax.fori_loop(0, blocks, attend_block, split_sums.nothing(H))


def _find_job(number, jobs, split) -> row_jobs.Job:
    """The job of a number below the last of `jobs.job_ends`; references."""
    row, before = jnp.int32(0), jnp.int32(0)
    # All of a slab, one by one: the loads are in flight together.
    for r in range(jobs.job_ends.shape[0]):
        end = jobs.job_ends[r]
        row = jnp.where(end <= number, r + 1, row)
        before = jnp.where(end <= number, end, before)
    return row_jobs.job_of(row, number - before, jobs, split)


def _takes_part(job, tile, jobs, lay):
    """For each row of a tile whether the job is for it: as a list of scalars."""
    found = []
    for i in range(lay.tile_rows):
        row = tile * lay.tile_rows + i
        shares = (jobs.slots[row] == job.slot) & (jobs.full_splits[row] > job.split)
        found.append(jnp.where(job.shared, shares, row == job.row))
    return found


def _fetch(refs, walk, job, kv_head, i):
    """Asks for block `i` of a job's keys and values, page by page."""
    P, C = refs.k.shape[:2]
    stage, step = rem(i, walk.stages), min(C, walk.config.block)
    first = job.first + i * walk.config.block
    end = job.end
    if refs.branch is not None:
        # Those on the row's own branch are fetched one by one.
        shared = jnp.maximum(job.length - refs.branch.shape[1], 0)
        end = jnp.where(job.shared, end, jnp.minimum(end, shared))
    last = div(jnp.maximum(end - 1, 0), C)
    for piece in range(walk.config.block // step):
        key = first + piece * step
        # Past the last page anything will do: what is there is not looked at.
        page = refs.table[job.slot, jnp.minimum(div(key, C), last)]
        page = jnp.clip(page, 0, P - 1)
        place = pl.ds(rem(key, C), step) if C > step else pl.ds(0, step)
        to = pl.ds(piece * step, step)
        for pages, blocks in ((refs.k, refs.k_blocks), (refs.v, refs.v_blocks)):
            plgpu.copy_gmem_to_smem(
                pages.at[page, place, kv_head],
                blocks.at[stage, to],
                refs.loaded.at[stage],
            )


def _attend_block(refs, walk, job, kv_head, i, sums):
    """Adds block `i` of a job's keys to the running softmax of the queries."""
    size, H = walk.config.block, refs.query_tile.shape[1]
    stage, first = rem(i, walk.stages), job.first + i * size
    k_block, v_block = refs.k_blocks.at[stage], refs.v_blocks.at[stage]
    plgpu.barrier_wait(refs.loaded.at[stage])
    if refs.branch is not None:
        branch_keys.replace(refs, job, kv_head, first, k_block, v_block)

    @pl.when(first + size > job.end)
    def _():
        values = warpgroup.load(v_block, warpgroup.TABLE)
        key = first + warpgroup.numbers((size, H), 0)
        v_block[...] = jnp.where(key < job.end, values, jnp.zeros_like(values))

    def score(acc):
        plgpu.wgmma(acc, refs.query_tile, warpgroup.transposed(k_block))
        return acc[...]

    def weigh(probs):
        refs.weights[...] = probs.astype(refs.weights.dtype)
        plgpu.commit_smem()

        def add(acc):
            plgpu.wgmma(acc, refs.weights, v_block)
            return acc[...]

        return pl.run_scoped(add, warpgroup.sums((warpgroup.ROWS, H)))

    shape = warpgroup.ROWS, size
    scores = pl.run_scoped(score, warpgroup.sums(shape)) * walk.scale
    seen = first + warpgroup.numbers(shape, 1) < job.end
    return softmax.with_block(sums, jnp.where(seen, scores, -jnp.inf), weigh)
