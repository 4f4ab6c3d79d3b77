"""Attention of a slab of rows over the pages of their slots, on Pallas Triton.

    out[r, n] = sum_t softmax_t(scale * q[r, n] . k[t, n // G]) v[t, n // G]
                over the positions t = 0 .. positions[r] of the row's slot

The kernel norms and rotates queries and keys first, and writes the rows' own keys and
values to the pages, where the rows see them: one launch a layer.

Flash decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding) with splits of
a fixed size, not a fixed number: a row's sums are grouped by absolute positions, and
so do not depend on the capacity, on the page size or on the other rows. Within a split
the keys go in blocks through an online softmax; `split_sums` adds the splits.

Programs `(kv_head, worker)` walk the jobs of `row_jobs`: the grid is static, the number
of jobs follows the real lengths, and which worker does a job leaves its bits alone. A
program holds a tile of queries (rows by the group's heads), reads each key and value
of a split once, `4 * split * H` bytes in bfloat16, and writes `4 * (H + 2)` bytes for
each query that the job is for.

No program waits for another:

- Every program that has a job of a head writes all rows' keys and values of that head
  to their pages, before it reads any: all write the same bytes to the same places, so
  that a program reads what it wrote itself, whether or not others wrote it too.
- The program that finishes the last job of a tile adds the splits of the tile's rows;
  jobs are counted in `RowJobs.done`. The order of the sum does not depend on which
  program is last. A tile's only job stores its result at once, with the same bits.

At short contexts a layer's attention is a chain of loads that wait for one another,
half a microsecond each. So programs load early, even what they may not need.

Without `firsts` a key is read only if every row of the job sees it: masks hide nothing
but the padding of a last block, and no row's keys are masked for another row's sake.
With `firsts`, a job begins at the first block in which one of its rows sees a key, and
may have no such block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import (
    attention_plan as plan,
    early_launch,
    head_rotation,
    row_jobs,
    slab,
    split_sums,
)


NO_JOBS = 2**31 - 1  # above every number of jobs, and every position

# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


def attend(
    heads: head_rotation.Heads,  # of arrays
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    *,
    page_table: jax.Array,  # [S, M] int32
    jobs: row_jobs.RowJobs,
    eps: float,
    scale: float,
    lay: plan.Layout,
    config: plan.Config,
    branch: jax.Array | None,  # [R, A] int32
    firsts: jax.Array | None,  # [R] int32
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns attended heads `[R, N, H]` and the pages with rows written, in place.

    Rows are written to `jobs.stored_at`, and nowhere if that is `LOST`; lost rows are
    NaN, padding rows uninitialised. The kernel counts in `jobs.done` and zeroes it.
    """
    (P, C, K, H), R = k_pages.shape, heads.heads.shape[0]
    splits = -(-page_table.shape[1] * C // config.split)
    pools = [pool.reshape(P * C, K, H) for pool in (k_pages, v_pages)]
    inputs = [*heads, *pools, page_table, branch, firsts, *jobs]
    outputs = [
        jax.ShapeDtypeStruct((R, K * lay.group, H), heads.heads.dtype),
        *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        *split_sums.shapes(K, lay, splits),
    ]
    workers = max(config.programs // K, 1)
    kernel = functools.partial(
        _kernel,
        page_size=C,
        # exp(x) is exp2(x * log2(e)), and exp2 is an instruction.
        scale=scale * math.log2(math.e),
        eps=eps,
        lay=lay,
        config=config,
        workers=workers,
        interpret=interpret,
    )
    first_pool = sum(x is not None for x in heads)
    out, *pools = pl.pallas_call(
        kernel,
        grid=(K, workers),
        in_specs=[None if x is None else plan.whole(x) for x in inputs],
        out_specs=[plan.whole(x) for x in outputs],
        out_shape=outputs,
        input_output_aliases={first_pool: 1, first_pool + 1: 2},
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention",
    )(*inputs)[:3]
    k_pages, v_pages = (pool.reshape(P, C, K, H) for pool in pools)
    return out, k_pages, v_pages


class _Refs(NamedTuple):
    """Inputs and outputs of the kernel; the pages are the output references."""

    heads: head_rotation.Heads
    table: Any  # [S, M]
    branch: Any  # [R, A] or None
    firsts: Any  # [R] or None
    jobs: row_jobs.RowJobs
    out: Any  # [R, N, H]
    k: Any  # [P * C, K, H]
    v: Any  # [P * C, K, H]
    splits: split_sums.Splits


def _refs(heads, k, v, table, branch, firsts, jobs, out, splits) -> _Refs:
    return _Refs(
        heads=head_rotation.Heads(*heads),
        table=table,
        branch=branch,
        firsts=firsts,
        jobs=row_jobs.RowJobs(*jobs),
        out=out,
        k=k,
        v=v,
        splits=split_sums.Splits(*splits),
    )


def _kernel(*refs, page_size, scale, eps, lay, config, workers, interpret):
    """Runs one worker of a key/value head: `refs` are those of `attend`, in order."""
    heads, (_, _, table, branch, firsts), refs = refs[:5], refs[5:10], refs[10:]
    jobs, (out, k, v), splits = refs[:7], refs[7:10], refs[10:]
    refs = _refs(heads, k, v, table, branch, firsts, jobs, out, splits)
    kv_head, worker = pl.program_id(0), pl.program_id(1)
    num_jobs = refs.jobs.job_ends[refs.out.shape[0] - 1]
    turns = div(num_jobs - worker + workers - 1, workers)
    _write(refs, kv_head, turns > 0, lay, eps, interpret)
    barrier = (lambda: None) if interpret else plt.debug_barrier
    barrier()  # After it, all threads of the program see what was written.

    def do_job(turn, carry):
        """Attends one split of the keys for the rows that share it."""
        job = _find_job(worker + turn * workers, refs.jobs, config.split)
        tile = div(job.row, lay.tile_rows)
        query = jnp.arange(lay.tile_rows * lay.heads, dtype=jnp.int32)
        rows = tile * lay.tile_rows + div(query, lay.heads)
        heads = rem(query, lay.heads)
        is_query = (heads < lay.group) & (rows < refs.out.shape[0])
        at = {"kv_head": kv_head, "rows": rows, "heads": heads}
        queries = head_rotation.turned(
            refs.heads,
            refs.heads.q_norm,
            rows=rows,
            heads=kv_head * lay.group + heads,
            # Loads queries outside the job, too: no load waits for the job's rows.
            mask=is_query,
            lay=lay,
            eps=eps,
        )
        firsts = None
        if refs.firsts is not None:
            sees = is_query & _takes_part(rows, job, refs.jobs)
            firsts = plt.load(refs.firsts.at[rows], mask=sees, other=NO_JOBS)
        sums = _attend_split(
            refs, queries, kv_head, job, firsts, page_size, scale, lay, config.block
        )
        mine = is_query & _takes_part(rows, job, refs.jobs)
        of_tile = row_jobs.jobs_of_tile(tile, refs.jobs, lay.tile_rows)

        @pl.when(of_tile == 1)
        def _():
            out = split_sums.normed(split_sums.alone(sums))
            _store_tile(refs, out, **at, mask=mine, lay=lay)

        @pl.when(of_tile > 1)
        def _():
            split_sums.store(refs.splits, sums, **at, split=job.split, mask=mine)
            barrier()  # After it, all threads have stored: the job is done.
            one = jnp.minimum(job.end, 1)  # Interpret mode takes no constant here.
            done = plt.atomic_add(refs.jobs.done, (kv_head, tile), one)

            @pl.when(done == of_tile - 1)
            def _():
                _finish_tile(refs, **at, is_query=is_query, lay=lay, split=config.split)
                refs.jobs.done[kv_head, tile] = 0

        return carry

    jax.lax.fori_loop(0, turns, do_job, 0)
    # The last worker has the fewest jobs.
    _lose(refs, kv_head, worker == workers - 1, lay)


def _write(refs, kv_head, has_jobs, lay, eps, interpret):
    """Writes the rows' keys and values to their pages if the program has jobs."""
    R = refs.out.shape[0]
    group = jnp.arange(slab.ROWS, dtype=jnp.int32)
    group = early_launch.released(0, interpret=interpret) + group
    for first in range(0, R, slab.ROWS):
        rows = first + group
        at = refs.jobs.stored_at.at[rows]
        tokens = plt.load(at, mask=rows < R, other=row_jobs.LOST)
        head_rotation.write_rows(
            refs.heads,
            refs.k,
            refs.v,
            kv_head=kv_head,
            rows=rows,
            tokens=tokens,
            is_stored=(tokens >= 0) & has_jobs,
            lay=lay,
            eps=eps,
        )


def _attend_split(refs, queries, kv_head, job, firsts, page_size, scale, lay, block):
    """Returns the running softmax of a tile's queries over the keys of a job, from
    positions `firsts [queries]` on if these are given."""
    locate = functools.partial(_locate, job, refs.table, refs.branch, page_size)
    keys_of = lambda i: job.first + i * block + jnp.arange(block, dtype=jnp.int32)
    half = lay.head_dim // 2
    lane = jnp.arange(lay.half_width, dtype=jnp.int32)[None, :]
    column = jnp.arange(lay.width, dtype=jnp.int32)[None, :]

    def attend_block(i, carry):
        """Adds the keys of block `i`; the carry holds their places."""
        tokens, sums = carry
        seen = keys_of(i) < job.end

        def load(ref, columns, size, start=0):
            mask = seen[:, None] & (columns < size)
            at = tokens[:, None], kv_head, columns + start
            return plt.load(ref.at[at], mask=mask, other=0.0)

        keys = load(refs.k, lane, half), load(refs.k, lane, half, half)
        values = load(refs.v, column, lay.head_dim)
        # The places of keys are looked up a block ahead: the compiler starts loads
        # early only if their places are known.
        visible = seen[None, :]
        if firsts is not None:
            visible = visible & (keys_of(i)[None, :] >= firsts[:, None])
        sums = _accumulate(sums, queries, keys, values, visible, scale)
        return locate(keys_of(i + 1)), sums

    blocks = div(job.end - job.first + block - 1, block)
    zero = split_sums.nothing(lay.tile_rows * lay.heads, lay.width)
    begin: Any = 0
    if firsts is not None:
        hidden = jnp.minimum(jnp.min(firsts), job.end) - job.first
        begin = div(jnp.maximum(hidden, 0), block)
    begun = locate(keys_of(begin)), zero
    return jax.lax.fori_loop(begin, blocks, attend_block, begun)[1]


def _finish_tile(refs, *, kv_head, rows, heads, is_query, lay, split):
    """Adds the splits of a tile's rows, and stores the result."""
    lengths = plt.load(refs.jobs.lengths.at[rows], mask=is_query, other=0)
    counts = div(jnp.maximum(lengths, 0) + split - 1, split)
    at = {"kv_head": kv_head, "rows": rows, "heads": heads}
    out = split_sums.combine(refs.splits, **at, counts=counts)
    _store_tile(refs, out, **at, mask=counts > 0, lay=lay)


def _store_tile(refs, out, *, kv_head, rows, heads, mask, lay):
    """Stores the results of the queries of a tile where `mask` is true."""
    # Queries that are not stored point past the heads, so at no other's place.
    past = refs.out.shape[1]
    head = jnp.where(mask, kv_head * lay.group + heads, past)[:, None]
    column = jnp.arange(lay.width, dtype=jnp.int32)[None, :]
    at = refs.out.at[rows[:, None], head, column]
    mask = mask[:, None] & (column < lay.head_dim)
    plt.store(at, out.astype(refs.out.dtype), mask=mask)


def _lose(refs, kv_head, is_last, lay):
    """Stores NaN for lost rows, which have no jobs."""
    R = refs.out.shape[0]
    column = jnp.arange(lay.width, dtype=jnp.int32)[None, :]

    @pl.when(is_last)
    def _():
        for first in range(0, R, slab.ROWS):
            rows = first + jnp.arange(slab.ROWS, dtype=jnp.int32)
            lengths = plt.load(refs.jobs.lengths.at[rows], mask=rows < R, other=0)
            is_lost = (lengths == row_jobs.LOST)[:, None]
            mask = is_lost & (column < lay.head_dim)
            nothing = jnp.full(mask.shape, jnp.nan, refs.out.dtype)
            for head in range(lay.group):
                at = refs.out.at[rows[:, None], kv_head * lay.group + head, column]
                plt.store(at, nothing, mask=mask)


def _find_job(number, jobs, split) -> row_jobs.Job:
    """Returns job `number`, below the last of `job_ends`; `jobs` are references."""
    (R,) = jobs.slots.shape
    every = jnp.arange(pl.next_power_of_2(R), dtype=jnp.int32)
    ends = plt.load(jobs.job_ends.at[every], mask=every < R, other=NO_JOBS)
    past = ends <= number  # rows whose jobs come before
    row = jnp.sum(past.astype(jnp.int32))
    step = number - jnp.max(jnp.where(past, ends, 0))
    return row_jobs.job_of(row, step, jobs, split)


def _takes_part(rows, job, jobs):
    """Returns the mask of the job's rows: all that share its split, or its own row."""
    inside = rows < jobs.slots.shape[0]
    slots = plt.load(jobs.slots.at[rows], mask=inside, other=0)
    full = plt.load(jobs.full_splits.at[rows], mask=inside, other=0)
    shares = (slots == job.slot) & (full > job.split)
    return jnp.where(job.shared, shares, rows == job.row)


def _locate(job, table_ref, branch_ref, page_size, keys):
    """Returns the tokens of the pool that hold a job's keys; past its end, any."""
    seen = keys < job.end
    if branch_ref is not None:
        start = job.length - branch_ref.shape[1]
        own = seen & (keys >= start) & ~job.shared
        at = plt.load(branch_ref.at[job.row, keys - start], mask=own, other=0)
        keys = jnp.where(own, at, keys)
    at = table_ref.at[job.slot, div(keys, page_size)]
    pages = plt.load(at, mask=seen, other=0)
    return pages * page_size + rem(keys, page_size)


def _accumulate(sums, queries, keys, values, visible, scale):
    """Adds one block of keys to the running softmax of a tile, in float32."""
    # The highest precision is IEEE float32; bfloat16 products stay as they are.
    dot = functools.partial(
        jax.lax.dot,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    first, second = (dot(q, k.T) for q, k in zip(queries, keys, strict=True))
    scores = jnp.where(visible, (first + second) * scale, -jnp.inf)
    weigh = lambda probs: dot(probs.astype(values.dtype), values)
    return split_sums.with_block(sums, scores, weigh)
