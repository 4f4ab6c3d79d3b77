"""Skinny GEMM on a GPU (Pallas Triton): a slab of rows times a weight matrix.

    y[r, n] = sum_k x[r, k] * w[n, k]       bfloat16 in, accumulated in float32

One program owns `block_n` columns, or of gated weights as many of the gate and of the
up half, for up to `slab.MOST_ROWS` rows, in tiles of 16: the height of one tensor-core
instruction, so that the second to the sixteenth row are free. It reads these weights
once, 2 * K bytes a column, walks K in blocks in ascending order, multiplies each block
by one tile after the other, and writes its tiles once, epilogue included. A row's sums
are the same products in the same order whatever the number of tiles.
It reads the active rows of `x`, 2 * K bytes each, from the L2 cache. 16 rows are as
many bytes as the weights if `block_n` is 16, so wide matrices have `block_n` 32 and
more.
Padding rows are neither read nor written. Rows are normed before: blocks go from shared
memory to the tensor cores unchanged. Norming them here cost 10 of 30 us at 50 MB of
weights (H200); a kernel of its own before takes 1 to 2 us.

With `splits` above one, each split of K has its own programs, which store partial sums
[splits, R, N] in float32; gates are not split. The norm that follows (`add`), or else
`gemm_reduce_triton`, adds them in ascending order. No atomics: nothing depends on which
program ends first. Narrow products are split: instructions on one sum wait for each
other, and few columns leave no other sums to fill the time. On an H100 the two of a
layer of 0.6B took 5.1 and 6.1 us whole, and take 3.3 and 4.0 us in splits of 512.

A plan is a function of the weight's shape and dtype. With it, and as an instruction
computes rows independently, the row contract holds: the product of a batch and that of
one row are the same machine code, and give the same bits.

The Triton backend of Pallas is deprecated from jax 0.11 on, and jax 0.12 still has it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import (
    byte_gemm_triton as byte_gemm,
    byte_rows_triton,
    gemm_reduce_triton,
    launch,
    rms_norm_triton,
    slab,
)


Weights = jax.Array | byte_gemm.Bytes

SPLIT = 512  # terms of one program of a narrow product
MIN_BLOCK = 16  # of a tensor-core instruction in any direction
SPARE_SHARED_BYTES = 16_384  # of `slab.MAX_SHARED_BYTES`: not for the pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a weight matrix is walked: depends on the matrix, never on the rows.

    Attributes:
      block_n: columns of the result of one program.
      block_k: terms of a sum between two steps of the pipeline.
      splits: parts of K with programs of their own, each of the same whole blocks.
      chains: parts of each block with sums of their own, added when all of K is done:
        tensor-core instructions on one sum wait for each other, and few columns to a
        program leave no other sums to fill the time.
      num_stages: stages of the pipeline; all but one are being loaded at any time.
    """

    block_n: int
    block_k: int
    splits: int = 1
    chains: int = 1
    num_warps: int = 4
    num_stages: int = 4


PLANS: dict[tuple[int, int, int], Plan] = {
    # 128 programs for 132 multiprocessors: one to each, with room for more stages.
    (1, 4096, 4096): Plan(block_n=32, block_k=256, chains=2, num_stages=6),
    (1, 4096, 12_288): Plan(block_n=32, block_k=256, chains=2, num_stages=6),
    (1, 4096, 1024): Plan(block_n=32, block_k=256, chains=2, num_stages=5),
}
"""Plans by `(parts, N, K)` that are better than the rule's. 20 to 70 plans were tried
for each product of 0.6B and 8B, in whole layers on an H200: for 8B none beat these by
more than two timings of one plan differed, 5 microseconds a layer."""


def plan_for(num_columns: int, num_terms: int, *, parts: int = 1) -> Plan:
    """Returns the plan of weights `[N, K]`, whose `parts` one program walks together.

    The rule keeps about 16 KiB in a stage: of weights, or of weights and 16 rows where
    programs have few columns. Wide programs read less of `x` for their weights, but few
    columns do not make enough wide programs for 132 multiprocessors. Narrow programs
    have 16 columns, two instructions wide, one for each of two warps (four warps took 2
    to 3 of 8 us longer on an H200).
    """
    if (parts, num_columns, num_terms) in PLANS:
        return PLANS[parts, num_columns, num_terms]
    is_wide = num_columns >= (16_384 if parts == 1 else 4096)
    width = 64 if is_wide else 32 if num_columns >= 2048 else 16
    block_n = _block(num_columns // parts, width // parts)
    is_narrow = block_n == MIN_BLOCK
    terms = (4096 if is_narrow else 8192) // width
    if parts == 1 and is_narrow and num_terms >= 2 * SPLIT and num_terms % SPLIT == 0:
        block_k = SPLIT // 2
        return Plan(
            block_n=MIN_BLOCK,
            block_k=block_k,
            splits=num_terms // SPLIT,
            num_warps=2,
            num_stages=SPLIT // block_k + 1,
        )
    return Plan(
        block_n=block_n,
        block_k=max(2 * MIN_BLOCK, _block(num_terms, terms)),
        # The gate's and the up half's sums do not wait for each other.
        chains=1 if width == 64 or parts == 2 or is_narrow else 2,
        num_warps=2 if is_narrow else 4,
        num_stages=7 if is_narrow else 4,
    )


def _block(size: int, largest: int) -> int:
    return max(MIN_BLOCK, min(largest, pl.next_power_of_2(max(size, 1))))


def project(
    x: jax.Array,  # [R, K]
    w: Weights,  # [parts * N, K]
    *,
    num_active: jax.Array,  # [] int32
    residual: jax.Array | None = None,  # [R, N]
    out_dtype: jnp.dtype | None = None,
    parts: int = 1,
    plan: Plan | None = None,
) -> jax.Array:
    """Implements `ops.projection.project` of normed rows, and gates of two `parts`.

    Padding rows are uninitialised.

    Raises:
      ValueError: shapes that do not fit, or a plan that does not fit the weights.
      NotImplementedError: arrays that are not bfloat16, or another `out_dtype`.
    """
    R, out_dtype = x.shape[0], jnp.dtype(out_dtype or x.dtype)
    x, residual = _checked(x, w, residual, num_active, out_dtype, parts)
    sums = _multiply(x, w, residual, num_active, plan, out_dtype, parts)
    if sums.ndim > 2:
        sums = gemm_reduce_triton.reduce(
            sums, residual, num_active=num_active, out_dtype=out_dtype
        )
    return sums[:R]


def add(
    x: jax.Array,  # [R, K]
    w: Weights,  # [N, K]
    residual: jax.Array,  # [R, N]
    norm: jax.Array,  # [N]
    *,
    num_active: jax.Array,  # [] int32
    eps: float,
    plan: Plan | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Implements `ops.projection.add`: `project` with a residual, and the next RMSNorm.

    Returns the sum and its norm, `[R, N]` each. Raises as `project` does.
    """
    R = x.shape[0]
    how: dict[str, Any] = {"num_active": num_active, "eps": eps}
    x, residual = _checked(x, w, residual, num_active, x.dtype)
    sums = _multiply(x, w, residual, num_active, plan, x.dtype)
    if sums.ndim > 2:
        added, normed = rms_norm_triton.add_norm(residual, sums, norm, **how)
    else:
        added, normed = sums, rms_norm_triton.rms_norm(sums, norm, **how)
    return added[:R], normed[:R]


def _checked(x, w, residual, num_active, out_dtype, parts=1):
    """Returns rows and residual in whole slabs; raises the errors of `project`."""
    (R, K), N = x.shape, _num_outputs(w)
    is_bytes = isinstance(w, tuple)
    if is_bytes:
        byte_gemm.check(w, (N, K))
    else:
        slab.check_shapes(w=(w, (N, K)))
    slab.check_shapes(num_active=(num_active, ()), residual=(residual, (R, N // parts)))
    if out_dtype not in (x.dtype, jnp.float32):
        raise NotImplementedError(f"a product of {x.dtype} cannot give {out_dtype}")
    slab.check_bfloat16(x=x, w=None if is_bytes else w, residual=residual)
    return slab.padded(x), None if residual is None else slab.padded(residual)


def _num_outputs(w: Weights) -> int:
    return w[0].shape[1] if isinstance(w, tuple) else w.shape[0]


def _multiply(x, w, residual, num_active, plan, out_dtype, parts=1):
    """Returns the finished product of `x` and the parts of `w`, `[R, N / parts]`; or,
    where K is split, its sums `[splits, R, N]`."""
    (R, K), N = x.shape, _num_outputs(w) // parts
    is_bytes = isinstance(w, tuple)
    if plan is None:
        plan = plan_for(parts * N, K, parts=parts)
        plan = byte_gemm.plan_for(plan, parts=parts) if is_bytes else plan
    if plan.splits > 1 and (parts > 1 or K % (plan.splits * plan.block_k)):
        raise ValueError(f"{plan} does not split {K} terms of {parts} parts")
    height = slab.height(R)
    tile = pl.BlockSpec((height, plan.block_n), lambda r, n, s: (r, n))
    out_spec, out = tile, jax.ShapeDtypeStruct((R, N), out_dtype)
    if plan.splits > 1:
        block = None, height, plan.block_n
        out_spec = pl.BlockSpec(block, lambda r, n, s: (s, r, n))
        out = jax.ShapeDtypeStruct((plan.splits, R, N), jnp.float32)
        residual = None
    specs: Callable[..., Any]
    if is_bytes:
        x = byte_rows_triton.round_rows(x, num_active=num_active)
        w, specs = byte_gemm.by_parts(w, parts), byte_gemm.specs
    else:
        w, specs = w.reshape(parts, N, K), _specs
    num_active = num_active.reshape(1)
    x_spec, w_specs = specs(x, w, height, plan)
    return launch.run(
        _kernel,
        (num_active, x, [w] * parts, residual),
        out,
        in_specs=[
            launch.whole(num_active),
            x_spec,
            w_specs,
            None if residual is None else tile,
        ],
        out_specs=out_spec,
        # Rows are the fastest axis: further rows find the weights in the cache.
        grid=(R // height, pl.cdiv(N, plan.block_n), plan.splits),
        num_warps=plan.num_warps,
        num_stages=_num_stages(plan, height, parts),
        name="skinny_gemm" if parts == 1 else "skinny_gemm_gate",
        plan=plan,
        num_columns=N,
        num_terms=K,
        height=height,
    )


def _specs(x, w, height, plan):
    """Returns a program's rows, and of each part of the weights its columns."""
    parts, _, K = w.shape
    terms = pl.cdiv(K, plan.block_k) * plan.block_k

    def of_part(part):
        block = None, plan.block_n, terms
        return pl.BlockSpec(block, lambda r, n, s: (part, n, 0))

    rows = pl.BlockSpec((height, terms), lambda r, n, s: (r, 0))
    return rows, [of_part(part) for part in range(parts)]


def _num_stages(plan: Plan, height: int, parts: int) -> int:
    """Returns how many of the plan's stages fit; no bit depends on that."""
    room = slab.MAX_SHARED_BYTES - SPARE_SHARED_BYTES
    return min(plan.num_stages, room // _stage_bytes(plan, height, parts) + 1)


def _stage_bytes(plan: Plan, height: int, parts: int) -> int:
    return 2 * (height + parts * plan.block_n) * plan.block_k


class Refs(NamedTuple):
    """Inputs and outputs of a program; K is padded to whole blocks."""

    num_active: Any  # [1]
    x: Any  # [16 * tiles, K]; for weights of eight bits see `byte_gemm_triton`
    weights: list[Any]  # one, or the gate's and up's: [block_n, K]
    residual: Any  # [16 * tiles, block_n] or None
    out: Any  # [16 * tiles, block_n]


def _kernel(*refs, plan, num_columns, num_terms, height):
    """Stores one program's tiles of the result, or of a split's partial sums."""
    refs = Refs(*refs)
    columns = pl.program_id(1) * plan.block_n + jnp.arange(plan.block_n)
    in_columns = columns < num_columns if num_columns % plan.block_n else None
    first_row = pl.program_id(0) * height
    is_row = launch.released(first_row)
    is_row = is_row + jnp.arange(slab.ROWS)
    tiles = range(0, height, slab.ROWS)
    active = [is_row + tile < refs.num_active[0] for tile in tiles]
    rows = list(zip(tiles, active, strict=True))
    if isinstance(refs.x, tuple):
        sums = byte_gemm.sums(refs, plan, rows, in_columns)
    else:
        sums = _sums(refs, plan, rows, in_columns, num_terms)
    for (tile, is_active), parts in zip(rows, sums, strict=True):
        at = pl.ds(tile, slab.ROWS)
        out = refs.out.at[at, :]
        if plan.splits > 1:
            (total,) = parts
            slab.store(out, total, is_active, in_columns)
        else:
            residual = None if refs.residual is None else refs.residual.at[at, :]
            slab.finish(parts, residual, out, is_active, in_columns)


def _sums(refs, plan, rows, in_columns, num_terms):
    """Returns the sums of each weight for each of `rows`, float32 `[16, block_n]`."""
    num_blocks = num_terms // plan.block_k // plan.splits
    first_block = pl.program_id(2) * num_blocks if plan.splits > 1 else 0
    add_block = functools.partial(_add_block, refs, plan, rows, in_columns)

    def whole_block(block, sums):
        return add_block(sums, (first_block + block) * plan.block_k)

    zeros = jnp.zeros((slab.ROWS, plan.block_n), jnp.float32)
    parts = (zeros,) * len(refs.weights)
    sums = ((parts,) * plan.chains,) * len(rows)
    if num_blocks:
        sums = jax.lax.fori_loop(0, num_blocks, whole_block, sums)
    if num_terms % plan.block_k:
        sums = add_block(sums, num_blocks * plan.block_k, num_terms)
    return [functools.reduce(slab.each_added, chains) for chains in sums]


def _add_block(refs, plan, rows, in_columns, sums, start, end=None):
    """Adds one block of terms to the sum of each chain, for each of `rows`.

    Args:
      end: of the terms, if it is in the block.
    """
    width = plan.block_k // plan.chains
    added: list[list[tuple[jax.Array, ...]]] = [[] for _ in rows]
    for chain in range(plan.chains):
        first = start + chain * width
        terms = pl.ds(first, width)
        in_terms = None if end is None else first + jnp.arange(width) < end
        weights = [
            slab.load(ref.at[:, terms], in_columns, in_terms, last_use=True).T
            for ref in refs.weights
        ]
        for number, (tile, is_active) in enumerate(rows):
            view = refs.x.at[pl.ds(tile, slab.ROWS), terms]
            x = slab.load(view, is_active, in_terms)
            products = [plt.dot(x, each) for each in weights]
            added[number].append(slab.each_added(sums[number][chain], products))
    return tuple(map(tuple, added))
