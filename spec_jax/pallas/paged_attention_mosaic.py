"""Attention of a slab of rows over splits of the keys in their pages (Pallas Mosaic).

Flash decoding with splits of a fixed size at absolute positions, jobs and tiles as in
`paged_attention_triton`, and as there a program with jobs first writes the keys and
values of all rows to their pages: the same bytes to the same places, so that what it
reads is what it wrote itself, whoever else did. The splits of a row are added by
`split_sums_mosaic`. A program `(kv_head, worker)` holds a tile of 64 queries, has
blocks of keys and values come by TMA, page by page and `stages` at once, and multiplies
them by `wgmma`.

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

    Returns what each query has of each split, `split_sums_mosaic.shape`.
    """
    (_, C, K, H), dtype = k_pages.shape, heads.heads.dtype
    splits = pl.cdiv(page_table.shape[1] * C, config.split)
    workers = max(config.programs // K, 1)
    pieces = pl.cdiv(config.block, C)
    stages = min(config.num_stages, config.split // config.block)
    out = split_sums.shape(K, lay, splits)
    block = stages, config.block, H
    operand = functools.partial(plgpu.SMEM, dtype=dtype, transforms=warpgroup.OPERAND)
    scratch = [
        operand((warpgroup.ROWS, H)),
        operand(block),
        operand(block),
        operand((warpgroup.ROWS, config.block)),
        plgpu.SMEM((warpgroup.ROWS, out.shape[-1]), jnp.float32),
        plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=stages),
    ]
    # The tile in which heads are turned has a branch's keys later.
    height = max(warpgroup.ROWS, branch_keys.height(config.block))
    scratch += rotation.scratch(H, lay.tile_rows, dtype, height=height)
    inputs = [heads.heads, heads.cos, heads.sin]
    inputs += [_of_queries(angles, lay) for angles in (heads.cos, heads.sin)]
    inputs += [page_table, *jobs[:5], jobs.stored_at]
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
    )

    def paged_attention(*refs: Any) -> None:
        _work(_refs(refs, has_norm=has_norm, has_branch=has_branch), walk)

    return warpgroup.kernel(
        paged_attention,
        outputs=out,
        grid={"kv_head": K, "worker": workers},
        scratch=scratch,
        interpret=interpret,
    )(*inputs, k_pages, v_pages)


def _of_queries(angles, lay):
    """What turns each query of each tile, from what turns each row."""
    missing = lay.rows - angles.shape[0]
    padded = jnp.pad(angles, ((0, missing), (0, 0))) if missing else angles
    return jnp.repeat(padded, lay.group, axis=0)


class _Walk(NamedTuple):
    """How a worker walks its jobs; all static."""

    page_size: int
    eps: float
    scale: float
    lay: plan.Layout
    config: plan.Config
    stages: int
    workers: int


class _Refs(NamedTuple):
    """What a worker reads, writes and holds in shared memory."""

    heads: head_rotation.Heads
    of_queries: tuple[Any, Any]  # cosines and sines [tiles * queries, H / 2]
    table: Any  # [S, M]
    jobs: row_jobs.RowJobs
    stored_at: Any  # [R]
    branch: Any  # [R, A] or None
    k: Any  # [P, C, K, H]
    v: Any  # [P, C, K, H]
    splits: Any  # `split_sums_mosaic.shape`
    query_tile: Any  # [64, H]
    k_blocks: Any  # [stages, block, H]
    v_blocks: Any  # [stages, block, H]
    weights: Any  # [64, block]
    sums: Any  # [64, H + 32] float32
    loaded: Any  # barriers of each stage
    tiles: rotation.Tiles
    own: Any  # of `branch_keys_mosaic.scratch`, and the tile of its keys; or None


def _refs(refs, *, has_norm, has_branch) -> _Refs:
    """Those of `attend`, in order; of jobs there are the first five."""
    refs = list(refs)
    take = lambda count: [refs.pop(0) for _ in range(count)]
    heads, cos, sin, *of_queries = take(5)
    (table,), jobs, (stored_at,) = take(1), take(5), take(1)
    q_norm, k_norm = take(2) if has_norm else (None, None)
    branch = refs.pop(0) if has_branch else None
    shared, tiles = take(9), rotation.Tiles(*take(6))
    inputs = [
        head_rotation.Heads(heads, q_norm, k_norm, cos, sin),
        tuple(of_queries),
        table,
        row_jobs.RowJobs._make([*jobs, None, None]),
        stored_at,
        branch,
    ]
    own = (tiles.heads, *refs) if has_branch else None
    return _Refs._make([*inputs, *shared, tiles, own])


def _work(refs, walk):
    """Does every job of a worker's turns."""
    kv_head, worker = jax.lax.axis_index("kv_head"), jax.lax.axis_index("worker")
    (R,) = refs.jobs.job_ends.shape
    num_jobs = refs.jobs.job_ends[R - 1]
    turns = div(num_jobs - worker + walk.workers - 1, walk.workers)

    @pl.when(turns > 0)
    def _():
        rotation.write_rows(
            refs.heads, refs.k, refs.v, refs.stored_at, refs.tiles,
            kv_head=kv_head, eps=walk.eps,
        )  # fmt: skip

    def do_job(turn, _):
        """Attends one split of the keys for the rows that share it."""
        job = _find_job(worker + turn * walk.workers, refs.jobs, walk.config.split)
        tile = div(job.row, walk.lay.tile_rows)
        rotation.fetch_queries(
            refs.heads, refs.of_queries, refs.tiles,
            kv_head=kv_head, tile=tile, tile_rows=walk.lay.tile_rows,
            group=walk.lay.group,
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
        sums = jax.lax.fori_loop(0, blocks, attend_block, split_sums.nothing(H))
        # Nothing of the rows is worked out before this, and kept in registers for it.
        tile = jax.lax.optimization_barrier(tile)
        split_sums.store(
            refs.splits, refs.sums, sums, _takes_part(job, tile, refs.jobs, walk.lay),
            kv_head=kv_head, split=job.split, lay=walk.lay, tile=tile,
        )  # fmt: skip

    jax.lax.fori_loop(0, turns, do_job, None)


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
    (R,) = jobs.slots.shape
    found = []
    for i in range(lay.tile_rows):
        row = tile * lay.tile_rows + i
        at = jnp.minimum(row, R - 1)
        shares = (jobs.slots[at] == job.slot) & (jobs.full_splits[at] > job.split)
        mine = jnp.where(job.shared, shares, row == job.row)
        found.append(mine & (row < R))
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
