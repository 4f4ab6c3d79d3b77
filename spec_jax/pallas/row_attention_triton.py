"""Attention of a slab of rows over the pages of their slots, on Pallas Triton.

    out[r, n] = sum_t softmax_t(scale * q[r, n] . k[t, n // G]) v[t, n // G]
                over the positions t = 0 .. positions[r] of the row's slot

The kernel norms and rotates queries and keys first, and writes the rows' own keys and
values to the pages, where the rows see them: one launch a layer. The job list, integers
that are the same for all layers, is one launch for a step (`row_jobs`).

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
    head_rotation,
    launch,
    row_jobs,
    slab,
    split_sums,
)


NO_JOBS = 2**31 - 1  # above every number of jobs, and every position

# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


def attend(
    heads: jax.Array,  # [R, (N + 2K) * H]
    q_norm: jax.Array | None,  # [H]
    k_norm: jax.Array | None,  # [H]
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    eps: float,
    scale: float,
    branch: jax.Array | None = None,  # [R, A] int32
    firsts: jax.Array | None = None,  # [R] int32
    places: jax.Array | None = None,  # [R] int32
    config: plan.Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implements `ops.row_attention.row_attention`. The pages are updated in place.

    An active row whose slot, position or pages do not exist writes nothing, and its
    result is NaN; padding rows write nothing, and their result is uninitialised.
    Without `firsts`, no bytes that a row may not see reach it, NaN included.

    Args:
      branch: for the rows of a tree. `branch[r, a]` is the position in the
        pages where the key of position `positions[r] - A + 1 + a` lies: that position
        itself in the prefix, and anywhere in the slot on the row's branch. The last
        entry is the place where the row itself is written. Entries of negative
        positions are not read.
      firsts: the first position that each row sees, not past its own; None: 0. Earlier
        values that are read for the row's tile must be finite.
      places: the position where each row itself is written, if it is not the last that
        the row sees; not past it. All rows of a slot must then see the same keys. Not
        together with `branch`.

    Raises:
      ValueError: shapes that do not fit together.
      NotImplementedError: heads, groups, dtypes or pools that the kernels cannot take.
    """
    (P, C, K, H), R = k_pages.shape, heads.shape[0]
    N = heads.shape[1] // H - 2 * K
    if N < 1 or N % K:
        raise ValueError(f"{N} query heads for {K} key/value heads")
    slab.check_shapes(
        heads=(heads, (R, (N + 2 * K) * H)),
        q_norm=(q_norm, (H,)),
        k_norm=(k_norm, (H,)),
        cos=(cos, (R, H // 2)),
        sin=(sin, (R, H // 2)),
        slots=(slots, (R,)),
        positions=(positions, (R,)),
        num_active=(num_active, ()),
    )
    config = config or plan.default_config(H, heads.dtype)
    lay = plan.layout(R, N // K, H, tile=config.tile)
    plan.check_pools(heads, k_pages, v_pages)
    jobs = row_jobs.row_jobs(
        page_table,
        slots,
        positions,
        num_active,
        num_pages=P,
        page_size=C,
        split=config.split,
        tile_rows=lay.tile_rows,
        num_kv_heads=K,
        branch=branch,
        places=places,
    )
    inputs = head_rotation.Heads(
        heads.reshape(R, N + 2 * K, H), q_norm, k_norm, cos, sin
    )
    pools = [pool.reshape(P * C, K, H) for pool in (k_pages, v_pages)]
    first_pool = len(jax.tree.leaves(inputs))
    splits = -(-page_table.shape[1] * C // config.split)
    workers = max(config.programs // K, 1)
    out, *pools, _ = launch.run(
        _kernel,
        (inputs, pools, page_table, branch, firsts, jobs),
        (
            jax.ShapeDtypeStruct((R, N, H), heads.dtype),
            *pools,
            split_sums.shapes(K, lay, splits),
        ),
        grid=(K, workers),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={first_pool: 1, first_pool + 1: 2},
        name="paged_attention",
        workers=workers,
        page_size=C,
        # exp(x) is exp2(x * log2(e)), and exp2 is an instruction.
        scale=scale * math.log2(math.e),
        eps=eps,
        lay=lay,
        config=config,
    )
    k_pages, v_pages = (pool.reshape(P, C, K, H) for pool in pools)
    return out.reshape(R, N * H), k_pages, v_pages


class _Work(NamedTuple):
    """Inputs and outputs of the kernel, in their order; and numbers, all static."""

    heads: head_rotation.Heads
    pools: Any  # the same memory as the outputs `k` and `v`
    table: Any  # [S, M]
    branch: Any  # [R, A] or None
    firsts: Any  # [R] or None
    jobs: row_jobs.RowJobs
    out: Any  # [R, N, H]
    k: Any  # [P * C, K, H]
    v: Any  # [P * C, K, H]
    splits: split_sums.Splits
    page_size: int
    scale: float
    eps: float
    lay: plan.Layout
    config: plan.Config


def _kernel(*refs, workers, **numbers):
    """Runs one worker of a key/value head."""
    work = _Work(*refs, **numbers)
    lay, jobs, split = work.lay, work.jobs, work.config.split
    kv_head, worker = pl.program_id(0), pl.program_id(1)
    num_jobs = jobs.job_ends[work.out.shape[0] - 1]
    turns = div(num_jobs - worker + workers - 1, workers)
    head_rotation.write_rows(
        work.heads,
        work.k,
        work.v,
        jobs.stored_at,
        kv_head=kv_head,
        has_jobs=turns > 0,
        lay=lay,
        eps=work.eps,
    )
    # After it, all threads of the program see what was written.
    launch.meet()

    def do_job(turn, carry):
        """Attends one split of the keys for the rows that share it."""
        job = _find_job(worker + turn * workers, jobs, split)
        tile = div(job.row, lay.tile_rows)
        query = jnp.arange(lay.tile_rows * lay.heads, dtype=jnp.int32)
        rows = tile * lay.tile_rows + div(query, lay.heads)
        heads = rem(query, lay.heads)
        is_query = (heads < lay.group) & (rows < work.out.shape[0])
        at = {"kv_head": kv_head, "rows": rows, "heads": heads}
        queries = head_rotation.turned(
            work.heads,
            work.heads.q_norm,
            rows=rows,
            heads=kv_head * lay.group + heads,
            # Loads queries outside the job, too: no load waits for the job's rows.
            mask=is_query,
            lay=lay,
            eps=work.eps,
        )
        firsts = None
        if work.firsts is not None:
            sees = is_query & _takes_part(rows, job, jobs)
            firsts = plt.load(work.firsts.at[rows], mask=sees, other=NO_JOBS)
        sums = _attend_split(work, queries, kv_head, job, firsts)
        mine = is_query & _takes_part(rows, job, jobs)
        of_tile = row_jobs.jobs_of_tile(tile, jobs, lay.tile_rows)

        @pl.when(of_tile == 1)
        def _():
            out = split_sums.normed(split_sums.alone(sums))
            _store_tile(work, out, **at, mask=mine)

        @pl.when(of_tile > 1)
        def _():
            split_sums.store(work.splits, sums, **at, split=job.split, mask=mine)
            # After it, all threads have stored: the job is done.
            launch.meet()
            one = jnp.minimum(job.end, 1)  # Interpret mode takes no constant here.
            done = plt.atomic_add(jobs.done, (kv_head, tile), one)

            @pl.when(done == of_tile - 1)
            def _():
                _finish_tile(work, **at, is_query=is_query)
                jobs.done[kv_head, tile] = 0

        return carry

    jax.lax.fori_loop(0, turns, do_job, 0)
    # The last worker has the fewest jobs.
    _lose(work, kv_head, worker == workers - 1)


def _attend_split(work, queries, kv_head, job, firsts):
    """Returns the running softmax of a tile's queries over the keys of a job, from
    positions `firsts [queries]` on if these are given."""
    lay, block = work.lay, work.config.block
    locate = functools.partial(_locate, work, job)
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

        keys = load(work.k, lane, half), load(work.k, lane, half, half)
        values = load(work.v, column, lay.head_dim)
        # The places of keys are looked up a block ahead: the compiler starts loads
        # early only if their places are known.
        visible = seen[None, :]
        if firsts is not None:
            visible = visible & (keys_of(i)[None, :] >= firsts[:, None])
        sums = _accumulate(sums, queries, keys, values, visible, work.scale)
        return locate(keys_of(i + 1)), sums

    blocks = div(job.end - job.first + block - 1, block)
    zero = split_sums.nothing(lay.tile_rows * lay.heads, lay.width)
    begin: Any = 0
    if firsts is not None:
        hidden = jnp.minimum(jnp.min(firsts), job.end) - job.first
        begin = div(jnp.maximum(hidden, 0), block)
    begun = locate(keys_of(begin)), zero
    return jax.lax.fori_loop(begin, blocks, attend_block, begun)[1]


def _finish_tile(work, *, kv_head, rows, heads, is_query):
    """Adds the splits of a tile's rows, and stores the result."""
    split = work.config.split
    lengths = plt.load(work.jobs.lengths.at[rows], mask=is_query, other=0)
    counts = div(jnp.maximum(lengths, 0) + split - 1, split)
    at = {"kv_head": kv_head, "rows": rows, "heads": heads}
    out = split_sums.combine(work.splits, **at, counts=counts)
    _store_tile(work, out, **at, mask=counts > 0)


def _store_tile(work, out, *, kv_head, rows, heads, mask):
    """Stores the results of the queries of a tile where `mask` is true."""
    # Queries that are not stored point past the heads, so at no other's place.
    lay, past = work.lay, work.out.shape[1]
    head = jnp.where(mask, kv_head * lay.group + heads, past)[:, None]
    column = jnp.arange(lay.width, dtype=jnp.int32)[None, :]
    at = work.out.at[rows[:, None], head, column]
    mask = mask[:, None] & (column < lay.head_dim)
    plt.store(at, out.astype(work.out.dtype), mask=mask)


def _lose(work, kv_head, is_last):
    """Stores NaN for lost rows, which have no jobs."""
    R, lay = work.out.shape[0], work.lay
    column = jnp.arange(lay.width, dtype=jnp.int32)[None, :]

    @pl.when(is_last)
    def _():
        for first in range(0, R, slab.ROWS):
            rows = first + jnp.arange(slab.ROWS, dtype=jnp.int32)
            lengths = plt.load(work.jobs.lengths.at[rows], mask=rows < R, other=0)
            is_lost = (lengths == row_jobs.LOST)[:, None]
            mask = is_lost & (column < lay.head_dim)
            nothing = jnp.full(mask.shape, jnp.nan, work.out.dtype)
            for head in range(lay.group):
                at = work.out.at[rows[:, None], kv_head * lay.group + head, column]
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


def _locate(work, job, keys):
    """Returns the tokens of the pool that hold a job's keys; past its end, any."""
    seen = keys < job.end
    if work.branch is not None:
        start = job.length - work.branch.shape[1]
        own = seen & (keys >= start) & ~job.shared
        at = plt.load(work.branch.at[job.row, keys - start], mask=own, other=0)
        keys = jnp.where(own, at, keys)
    at = work.table.at[job.slot, div(keys, work.page_size)]
    pages = plt.load(at, mask=seen, other=0)
    return pages * work.page_size + rem(keys, work.page_size)


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
