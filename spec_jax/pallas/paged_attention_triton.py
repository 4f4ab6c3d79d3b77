"""Attention of a slab of rows over the pages of their slots, on Pallas Triton.

    out[r, n] = sum_t softmax_t(scale * q[r, n] . k[t, n // G]) v[t, n // G]
                over the positions t = 0 .. positions[r] of the row's slot

Flash decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding) with splits of
a fixed size, not a fixed number: a row's sums are grouped by absolute positions, and
so do not depend on the capacity, on the page size or on the other rows. Within a split
the keys go in blocks through an online softmax; `combine_splits_triton` does the rest.

Programs `(kv_head, worker)` walk the jobs of `row_jobs`: the grid is static, the number
of jobs follows the real lengths, and which worker does a job leaves its bits alone. A
program holds a tile of queries (rows by the group's heads), reads each key and value
of a split once, `4 * split * H` bytes in bfloat16, and writes `4 * (H + 2)` bytes for
each query that the job is for.

No key is read unless every row of the job sees it. A masked key is never more than the
padding of a last block, and the keys of a row are masked for that row's sake alone.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from spec_jax.pallas import attention_plan as plan, combine_splits_triton, row_jobs
from spec_jax.typing import typed


NO_JOBS = 2**31 - 1  # no job list is as long

# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


@typed
def paged_attention(
    q: Float[Array, "R N H"],
    k_pages: Float[Array, "P C K H"],
    v_pages: Float[Array, "P C K H"],
    *,
    page_table: Int[Array, "S M"],
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    num_active: Int[Array, ""],
    scale: float,
    interpret: bool,
    branch: Int[Array, "R A"] | None = None,
    config: plan.Config | None = None,
) -> Float[Array, "R N H"]:
    """Attends each active row to positions `0 .. positions[r]` of its slot.

    Padding rows return zero; an active row whose slot, position or pages do not exist
    returns NaN. Bytes that a row may not see never reach it, NaN included.

    Args:
      branch: for the rows of a tree. `branch[r, a]` is the position in the
        pages where the key of position `positions[r] - A + 1 + a` lies: that position
        itself in the prefix, and anywhere in the slot on the row's branch. The last
        entry is the row's own. Entries of negative positions are not read.

    Raises:
      NotImplementedError: heads, groups, dtypes or pools that the kernels cannot take.
    """
    (P, C, K, H), (R, N) = k_pages.shape, q.shape[:2]
    config = config or plan.default_config(H, q.dtype, interpret=interpret)
    lay = plan.layout(R, N // K, H, tile=config.tile)
    jobs = row_jobs.row_jobs(
        page_table,
        slots,
        positions,
        num_active,
        num_pages=P,
        page_size=C,
        split=config.split,
        tile_rows=lay.tile_rows,
        branch=branch,
    )
    packed = q.reshape(R, K, lay.group, H).transpose(1, 0, 2, 3)
    pad = (0, lay.rows - R), (0, lay.heads - lay.group), (0, lay.width - H)
    return attend_packed(
        jnp.pad(packed, ((0, 0), *pad)),
        k_pages,
        v_pages,
        page_table=page_table,
        jobs=jobs,
        scale=scale,
        lay=lay,
        config=config,
        branch=branch,
        interpret=interpret,
    )


def attend_packed(
    queries: jax.Array,  # [K, rows, heads, width] as `plan.Layout` has them
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    *,
    page_table: jax.Array,  # [S, M] int32
    jobs: row_jobs.RowJobs,
    scale: float,
    lay: plan.Layout,
    config: plan.Config,
    branch: jax.Array | None,  # [R, A] int32
    interpret: bool,
) -> jax.Array:
    """`paged_attention` for queries that lie in tiles already. Returns `[R, N, H]`."""
    sums = attend_splits(
        queries,
        k_pages,
        v_pages,
        page_table=page_table,
        jobs=jobs,
        scale=scale,
        lay=lay,
        config=config,
        branch=branch,
        interpret=interpret,
    )
    return combine_splits_triton.combine_splits(
        *sums,
        lengths=jobs.lengths,
        lay=lay,
        split=config.split,
        dtype=queries.dtype,
        interpret=interpret,
    )


def attend_splits(
    queries: jax.Array,  # [K, rows, heads, width]
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    *,
    page_table: jax.Array,  # [S, M] int32
    jobs: row_jobs.RowJobs,
    scale: float,
    lay: plan.Layout,
    config: plan.Config,
    branch: jax.Array | None,  # [R, A] int32
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each query's unnormed sums, maximum and total over each of its row's splits.

    Returns:
      `[K, rows, heads, splits, width]` and twice `[K, rows, heads, splits]`, float32.
      What no job writes is uninitialised.
    """
    plan.check_pools(queries, k_pages, v_pages)
    P, C, K, H = k_pages.shape
    splits = row_jobs.split_count(page_table.shape[1] * C, config.split)
    shape = (K, lay.rows, lay.heads, splits)
    pools = [pool.reshape(P * C, K, H) for pool in (k_pages, v_pages)]
    # The kernel looks for `branch_width` before it looks at the branch.
    branch_width = 0 if branch is None else branch.shape[1]
    branch = page_table if branch is None else branch
    inputs = [queries, *pools, page_table, branch, *jobs[:-1]]
    outputs = [
        jax.ShapeDtypeStruct(shape + (lay.width,), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    workers = max(config.programs // K, 1)
    kernel = functools.partial(
        _kernel,
        page_size=C,
        # exp(x) is exp2(x * log2(e)), and exp2 is an instruction.
        scale=scale * math.log2(math.e),
        lay=lay,
        config=config,
        workers=workers,
        branch_width=branch_width,
    )
    return pl.pallas_call(
        kernel,
        grid=(K, workers),
        in_specs=[plan.whole(x) for x in inputs],
        out_specs=[plan.whole(x) for x in outputs],
        out_shape=outputs,
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_splits",
    )(*inputs)


def _kernel(
    q_ref,  # [K, rows, heads, width]
    k_ref,  # [P * C, K, H]
    v_ref,  # [P * C, K, H]
    table_ref,  # [S, M]
    branch_ref,  # [R, A] if there is a branch
    slots_ref,  # this and the next four [R]
    lengths_ref,
    full_ref,
    led_ref,
    ends_ref,
    sums_ref,  # [K, rows, heads, splits, width]
    maxima_ref,  # [K, rows, heads, splits]
    totals_ref,  # [K, rows, heads, splits]
    *,
    page_size,
    scale,
    lay,
    config,
    workers,
    branch_width,
):
    kv_head, worker = pl.program_id(0), pl.program_id(1)
    R = slots_ref.shape[0]
    width = jnp.arange(lay.width, dtype=jnp.int32)
    block = config.block

    def do_job(turn, carry):
        """Attends one split of the keys for the rows that share it."""
        job = _find_job(
            worker + turn * workers,
            (slots_ref, lengths_ref, full_ref, led_ref, ends_ref),
            config.split,
        )
        first_row = div(job.row, lay.tile_rows) * lay.tile_rows
        tile = q_ref[kv_head, pl.ds(first_row, lay.tile_rows)]
        tile = tile.reshape(lay.tile_rows * lay.heads, lay.width)
        locate = functools.partial(
            _locate, job, table_ref, branch_ref, page_size, branch_width
        )
        keys_of = lambda i: job.first + i * block + jnp.arange(block, dtype=jnp.int32)

        def attend_block(i, carry):
            tokens, sums = carry
            seen = keys_of(i) < job.end
            at = tokens[:, None], kv_head, width[None, :]
            mask = seen[:, None] & (width < lay.head_dim)[None, :]
            k, v = (
                plt.load(ref.at[at], mask=mask, other=0.0) for ref in (k_ref, v_ref)
            )
            # Where the next keys lie is looked up a block ahead: loads whose places
            # are known are what the compiler puts in flight early.
            return locate(keys_of(i + 1)), _accumulate(sums, tile, k, v, seen, scale)

        blocks = div(job.end - job.first + block - 1, block)
        zero = locate(keys_of(0)), _nothing(*tile.shape)
        _, sums = jax.lax.fori_loop(0, blocks, attend_block, zero)

        query = jnp.arange(lay.tile_rows * lay.heads, dtype=jnp.int32)
        rows, heads = first_row + div(query, lay.heads), rem(query, lay.heads)
        mine = (heads < lay.group) & _takes_part(rows, job, slots_ref, full_ref)
        at = kv_head, rows, heads, job.split
        for ref, values in zip((maxima_ref, totals_ref), sums[:2], strict=True):
            plt.store(ref.at[at], values, mask=mine)
        wide = kv_head, rows[:, None], heads[:, None], job.split, width[None, :]
        plt.store(sums_ref.at[wide], sums[2], mask=mine[:, None])
        return carry

    turns = div(ends_ref[R - 1] - worker + workers - 1, workers)
    jax.lax.fori_loop(0, turns, do_job, 0)


class _Job(NamedTuple):
    """One split for the rows that share it; all scalars."""

    row: jax.Array  # the first of the rows, and the only one unless shared
    slot: jax.Array
    length: jax.Array  # of `row`, which need not see a shared split itself
    shared: jax.Array  # bool
    split: jax.Array  # its number
    first: jax.Array  # keys `first .. end`
    end: jax.Array


def _find_job(number, refs, split) -> _Job:
    """The job of a number below the last of `ends_ref`."""
    slots_ref, lengths_ref, full_ref, led_ref, ends_ref = refs
    R = slots_ref.shape[0]
    every = jnp.arange(pl.next_power_of_2(R), dtype=jnp.int32)
    ends = plt.load(ends_ref.at[every], mask=every < R, other=NO_JOBS)
    past = ends <= number  # rows whose jobs come before
    row = jnp.sum(past.astype(jnp.int32))
    step = number - jnp.max(jnp.where(past, ends, 0))
    length, led = lengths_ref[row], led_ref[row]
    shared = step < led
    index = jnp.where(shared, step, full_ref[row] + step - led)
    first, end = index * split, (index + 1) * split
    return _Job(
        row=row,
        slot=slots_ref[row],
        length=length,
        shared=shared,
        split=index,
        first=first,
        end=jnp.where(shared, end, jnp.minimum(end, length)),
    )


def _takes_part(rows, job, slots_ref, full_ref):
    """Which rows the job is for: those that see all of a shared split, or its own."""
    inside = rows < slots_ref.shape[0]
    slots = plt.load(slots_ref.at[rows], mask=inside, other=0)
    full = plt.load(full_ref.at[rows], mask=inside, other=0)
    shares = (slots == job.slot) & (full > job.split)
    return jnp.where(job.shared, shares, rows == job.row)


def _locate(job, table_ref, branch_ref, page_size, branch_width, keys):
    """Where the job's keys lie in the pool; any token of it for those past the end."""
    seen = keys < job.end
    if branch_width:
        start = job.length - branch_width
        own = seen & (keys >= start) & ~job.shared
        at = plt.load(branch_ref.at[job.row, keys - start], mask=own, other=0)
        keys = jnp.where(own, at, keys)
    at = table_ref.at[job.slot, div(keys, page_size)]
    pages = plt.load(at, mask=seen, other=0)
    return pages * page_size + rem(keys, page_size)


def _nothing(queries: int, width: int):
    """The running softmax of a tile before its first key."""
    return (
        jnp.full((queries,), -jnp.inf, jnp.float32),  # maximum, to base 2
        jnp.zeros((queries,), jnp.float32),  # sum of exponentials
        jnp.zeros((queries, width), jnp.float32),  # weighted values
    )


def _accumulate(sums, queries, keys, values, seen, scale):
    """One block of keys into the running softmax of a tile, in float32."""
    maximum, total, weighted = sums
    # The highest precision is IEEE float32, and says nothing of bfloat16.
    dot = functools.partial(
        jax.lax.dot,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(seen[None, :], dot(queries, keys.T) * scale, -jnp.inf)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
    # Where every score was -inf so far, -inf - -inf would be NaN.
    shift = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
    rescale = jnp.exp2(maximum - shift)
    probs = jnp.exp2(scores - shift[:, None])
    return (
        new_maximum,
        total * rescale + jnp.sum(probs, axis=1),
        weighted * rescale[:, None] + dot(probs.astype(values.dtype), values),
    )
