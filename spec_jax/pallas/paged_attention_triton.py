"""Attention of a slab of rows over the pages of their slots, on Pallas Triton.

    out[r, n] = sum_t softmax_t(scale * q[r, n] . k[t, n // G]) v[t, n // G]
                over the positions t = 0 .. positions[r] of the row's slot

Flash decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding) with splits of
a fixed size, not a fixed number: a row's sums are grouped by absolute positions, and
so do not depend on the capacity, on the page size or on the other rows. Within a split
the keys go in blocks through an online softmax; a row combines its own splits in order.

Two launches. In the first, programs `(kv_head, worker)` walk the jobs of `row_jobs`:
the grid is static, the number of jobs follows the real lengths, and which worker does
a job leaves its bits alone. A program holds a tile of `tile` queries
(`tile / heads` rows by the group's heads, padded to `heads`), reads each key and value
of the split once, `4 * split * H` bytes in bfloat16, and writes `4 * (H + 2)` bytes for
each query and split. In the second, programs `(head, row)` read those and write `H`
values.

No key is read unless a row of the job sees it, so a masked key is never more than
padding of the last block: its score is -inf, its value zero.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from spec_jax.pallas import row_jobs
from spec_jax.typing import typed


MAX_HEAD = 256
MAX_GROUP = 16
NO_JOBS = 2**31 - 1  # no job list is as long

# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The kernels' plan. All but `programs` is part of a row's bits."""

    split: int = 256  # keys
    block: int = 64  # keys
    tile: int = 32  # queries: two tiles of the m16n8k16 product
    programs: int = 264  # two for each of the 132 multiprocessors of an H100
    num_warps: int = 4
    num_stages: int = 3


def default_config(head_dim: int, dtype: jnp.dtype, *, interpret: bool) -> Config:
    """The plan for heads of a size: nothing else may choose it."""
    config = Config()
    head_bytes = head_dim * jnp.dtype(dtype).itemsize
    if head_bytes > 256:  # Two blocks of keys and values wait in shared memory.
        config = dataclasses.replace(config, block=32)
    if head_bytes > 512:  # Products of wide float32 heads would spill registers.
        config = dataclasses.replace(config, block=16, num_warps=8)
    if interpret:  # Each program costs a copy of the pool, and one is as good as many.
        config = dataclasses.replace(config, programs=1)
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How queries lie: `[K, rows, heads, width]`, so that a tile is one piece."""

    group: int  # query heads of a key/value head
    heads: int  # the same, a power of two
    rows: int  # rows of the slab, in whole tiles
    tile_rows: int
    width: int  # head size, a power of two


def layout(num_rows: int, group: int, head_dim: int, *, tile: int) -> Layout:
    """Raises `NotImplementedError` for heads that the kernels cannot take."""
    if head_dim % 2 or not 16 <= head_dim <= MAX_HEAD:
        raise NotImplementedError(
            f"head size {head_dim} is odd, below 16 or above {MAX_HEAD}"
        )
    if group > MAX_GROUP:
        raise NotImplementedError(
            f"{group} query heads to a key/value head: at most {MAX_GROUP}"
        )
    heads = pl.next_power_of_2(group)
    tile_rows = tile // heads
    return Layout(
        group=group,
        heads=heads,
        rows=-(-num_rows // tile_rows) * tile_rows,
        tile_rows=tile_rows,
        width=max(pl.next_power_of_2(head_dim), 16),
    )


def whole(array: jax.Array) -> pl.BlockSpec:
    """The array as it is, to every program: a pointer."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


@typed
def paged_attention(
    q: Float[Array, "R N H"],
    k_pages: Float[Array, "P C K H"],
    v_pages: Float[Array, "P C K H"],
    *,
    page_table: Int[Array, "S M"],
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    num_live: Int[Array, ""],
    scale: float,
    interpret: bool,
    ancestors: Int[Array, "R A"] | None = None,
    config: Config | None = None,
) -> Float[Array, "R N H"]:
    """Attends each live row to positions `0 .. positions[r]` of its slot.

    Dead rows return zero; a live row whose slot, position or pages do not exist
    returns NaN. Bytes that a row may not see never reach it, NaN included.

    Args:
      ancestors: for the rows of a tree. `ancestors[r, a]` is the position in the
        pages where the key of position `positions[r] - A + 1 + a` lies: that position
        itself in the prefix, and anywhere in the slot on the row's branch. The last
        entry is the row's own. Entries of negative positions are not read.

    Raises:
      NotImplementedError: heads, groups, dtypes or pools that the kernels cannot take.
    """
    (P, C, K, H), (R, N) = k_pages.shape, q.shape[:2]
    config = config or default_config(H, q.dtype, interpret=interpret)
    lay = layout(R, N // K, H, tile=config.tile)
    jobs = row_jobs.row_jobs(
        page_table,
        slots,
        positions,
        num_live,
        num_pages=P,
        page_size=C,
        split=config.split,
        tile_rows=lay.tile_rows,
        ancestors=ancestors,
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
        ancestors=ancestors,
        interpret=interpret,
    )


def attend_packed(
    queries: jax.Array,  # [K, rows, heads, width] as `Layout` has them
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    *,
    page_table: jax.Array,  # [S, M] int32
    jobs: row_jobs.RowJobs,
    scale: float,
    lay: Layout,
    config: Config,
    ancestors: jax.Array | None,  # [R, A] int32
    interpret: bool,
) -> jax.Array:
    """`paged_attention` for queries that lie in tiles already. Returns `[R, N, H]`."""
    check_pools(queries, k_pages, v_pages)
    sums = attend_splits(
        queries,
        k_pages,
        v_pages,
        page_table=page_table,
        jobs=jobs,
        scale=scale,
        lay=lay,
        config=config,
        ancestors=ancestors,
        interpret=interpret,
    )
    return combine_splits(
        *sums,
        lengths=jobs.lengths,
        group=lay.group,
        head_dim=k_pages.shape[3],
        split=config.split,
        dtype=queries.dtype,
        interpret=interpret,
    )


def check_pools(x: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> None:
    """Raises unless the kernels can take arrays of these shapes and dtypes."""
    dtypes = {str(array.dtype) for array in (x, k_pages, v_pages)}
    if len(dtypes) != 1 or not dtypes <= {"float32", "bfloat16"}:
        raise NotImplementedError(
            f"the Triton kernels take float32 or bfloat16, one of them: {dtypes}"
        )
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"keys {k_pages.shape} against values {v_pages.shape}")
    if k_pages.size >= 2**31:
        raise NotImplementedError(f"{k_pages.size} elements of a pool: below 2**31")


def attend_splits(
    queries,
    k_pages,
    v_pages,
    *,
    page_table,
    jobs,
    scale,
    lay,
    config,
    ancestors,
    interpret,
):
    """Each query's unnormed sums, maximum and total over each of its row's splits.

    Returns:
      `[K, rows, heads, splits, width]` and twice `[K, rows, heads, splits]`, float32.
      What no job writes is uninitialised.
    """
    P, C, K, H = k_pages.shape
    splits = row_jobs.split_count(page_table.shape[1] * C, config.split)
    shape = (K, lay.rows, lay.heads, splits)
    inputs = [queries, *(pool.reshape(P * C, K, H) for pool in (k_pages, v_pages))]
    inputs += [page_table, *jobs[:-1]]
    if ancestors is not None:
        inputs.append(ancestors)
    workers = max(config.programs // K, 1)
    outputs = [
        jax.ShapeDtypeStruct(shape + (lay.width,), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    kernel = functools.partial(
        _split_kernel,
        page_size=C,
        head_dim=H,
        # exp(x) is exp2(x * log2(e)), and exp2 is an instruction.
        scale=scale * math.log2(math.e),
        lay=lay,
        split=config.split,
        block=config.block,
        workers=workers,
        branch=0 if ancestors is None else ancestors.shape[1],
    )
    return pl.pallas_call(
        kernel,
        grid=(K, workers),
        in_specs=[whole(x) for x in inputs],
        out_specs=[whole(x) for x in outputs],
        out_shape=outputs,
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_splits",
    )(*inputs)


def _split_kernel(
    q_ref,  # [K, rows, heads, width]
    k_ref,  # [P * C, K, H]
    v_ref,  # [P * C, K, H]
    table_ref,  # [S, M]
    slots_ref,  # this and the next four [R]
    lengths_ref,
    full_ref,
    led_ref,
    ends_ref,
    *refs,  # ancestors [R, A] if there is a branch; sums, maxima and totals
    page_size,
    head_dim,
    scale,
    lay,
    split,
    block,
    workers,
    branch,
):
    *ancestors_ref, sums_ref, maxima_ref, totals_ref = refs
    kv_head, worker = pl.program_id(0), pl.program_id(1)
    R = slots_ref.shape[0]
    every = jnp.arange(pl.next_power_of_2(R), dtype=jnp.int32)
    job_ends = plt.load(ends_ref.at[every], mask=every < R, other=NO_JOBS)
    width = jnp.arange(lay.width, dtype=jnp.int32)
    query = jnp.arange(lay.tile_rows * lay.heads, dtype=jnp.int32)

    def do_job(turn, carry):
        job = worker + turn * workers
        past = job_ends <= job  # rows whose jobs come before
        row = jnp.sum(past.astype(jnp.int32))
        step = job - jnp.max(jnp.where(past, job_ends, 0))
        slot, length, led = slots_ref[row], lengths_ref[row], led_ref[row]
        shared = step < led
        index = jnp.where(shared, step, full_ref[row] + step - led)
        first, end = index * split, (index + 1) * split
        # The leader of a shared split need not see it itself.
        end = jnp.where(shared, end, jnp.minimum(end, length))

        first_row = div(row, lay.tile_rows) * lay.tile_rows
        tile = q_ref[kv_head, pl.ds(first_row, lay.tile_rows)]
        tile = tile.reshape(lay.tile_rows * lay.heads, lay.width)

        def keys_of(i):
            return first + i * block + jnp.arange(block, dtype=jnp.int32)

        def tokens(i):
            """Where the keys lie in the pool; any token for those not seen."""
            keys = keys_of(i)
            seen = keys < end
            if branch:
                start = length - branch
                own = seen & (keys >= start) & ~shared
                (ref,) = ancestors_ref
                at = plt.load(ref.at[row, keys - start], mask=own, other=0)
                keys = jnp.where(own, at, keys)
            pages = plt.load(
                table_ref.at[slot, div(keys, page_size)], mask=seen, other=0
            )
            return pages * page_size + rem(keys, page_size)

        def attend_block(i, carry):
            at, sums = carry
            seen = keys_of(i) < end
            at = at[:, None], kv_head, width[None, :]
            mask = seen[:, None] & (width < head_dim)[None, :]
            k, v = (
                plt.load(ref.at[at], mask=mask, other=0.0) for ref in (k_ref, v_ref)
            )
            return tokens(i + 1), _accumulate(sums, tile, k, v, seen, scale)

        sums = (
            jnp.full(query.shape, -jnp.inf, jnp.float32),
            jnp.zeros(query.shape, jnp.float32),
            jnp.zeros((query.size, lay.width), jnp.float32),
        )
        blocks = div(end - first + block - 1, block)
        _, sums = jax.lax.fori_loop(0, blocks, attend_block, (tokens(0), sums))
        maximum, total, weighted = sums

        rows = first_row + div(query, lay.heads)
        heads = rem(query, lay.heads)
        inside = rows < R
        of_slot = plt.load(slots_ref.at[rows], mask=inside, other=0) == slot
        full = plt.load(full_ref.at[rows], mask=inside, other=0)
        mine = jnp.where(shared, of_slot & (full > index), rows == row)
        mine &= heads < lay.group
        at = kv_head, rows, heads, index
        plt.store(maxima_ref.at[at], maximum, mask=mine)
        plt.store(totals_ref.at[at], total, mask=mine)
        at = kv_head, rows[:, None], heads[:, None], index, width[None, :]
        plt.store(sums_ref.at[at], weighted, mask=mine[:, None])
        return carry

    jobs = ends_ref[R - 1]
    jax.lax.fori_loop(0, div(jobs - worker + workers - 1, workers), do_job, 0)


def _accumulate(sums, queries, keys, values, seen, scale):
    """One block of keys into the running softmax of a tile of queries, in float32."""
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


def combine_splits(
    sums, maxima, totals, *, lengths, group, head_dim, split, dtype, interpret
):
    """Each row's attended heads `[R, N, H]` from its own splits, in their order."""
    (R,), (K, _, _, splits, _) = lengths.shape, sums.shape
    kernel = functools.partial(
        _combine_kernel, group=group, head_dim=head_dim, split=split, splits=splits
    )
    inputs = sums, maxima, totals, lengths
    output = jax.ShapeDtypeStruct((R, K * group, head_dim), dtype)
    return pl.pallas_call(
        kernel,
        grid=(K * group, R),
        in_specs=[whole(x) for x in inputs],
        out_specs=whole(output),
        out_shape=output,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_attention_combine",
    )(*inputs)


AT_ONCE = 8  # splits whose loads are in flight together


def _combine_kernel(
    sums_ref,  # [K, rows, heads, splits, width]
    maxima_ref,  # [K, rows, heads, splits]
    totals_ref,  # [K, rows, heads, splits]
    lengths_ref,  # [R]
    out_ref,  # [R, N, H]
    *,
    group,
    head_dim,
    split,
    splits,
):
    head, row = pl.program_id(0), pl.program_id(1)
    at = div(head, group), row, rem(head, group)
    length = lengths_ref[row]
    count = div(jnp.maximum(length, 0) + split - 1, split)
    width = jnp.arange(sums_ref.shape[-1], dtype=jnp.int32)
    every = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    maxima = plt.load(maxima_ref.at[*at, every], mask=every < count, other=-jnp.inf)
    maximum = jnp.max(maxima)  # the same in any order
    shift = jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)

    def add(turn, carry):
        for i in range(AT_ONCE):
            index = turn * AT_ONCE + i
            mine = index < count
            at_split = *at, jnp.minimum(index, splits - 1)
            weight = jnp.exp2(maxima_ref[at_split] - shift)
            part = plt.load(sums_ref.at[*at_split, width]) * weight
            total, weighted = carry
            # By selection: what lies past the row's splits may be NaN.
            carry = (
                jnp.where(mine, total + totals_ref[at_split] * weight, total),
                jnp.where(mine, weighted + part, weighted),
            )
        return carry

    zero = jnp.float32(0), jnp.zeros(width.shape, jnp.float32)
    turns = div(count + AT_ONCE - 1, AT_ONCE)
    total, weighted = jax.lax.fori_loop(0, turns, add, zero)
    # A lost row has no splits, and 0 / 0 is its result.
    out = jnp.where(length == 0, 0.0, weighted / total).astype(out_ref.dtype)
    plt.store(out_ref.at[row, head, width], out, mask=width < head_dim)
