"""Skinny GEMM on a GPU (Pallas Mosaic, Hopper): chosen by name.

    y[r, n] = sum_k x[r, k] * w[n, k]       bfloat16 in, accumulated in float32

One program owns `block_n` columns, of the gate and of the up half where the weights are
gated, for up to 64 rows: that is how high an instruction of `wgmma` is, and rows that
are not there cost nothing that a product bound by memory would feel. Blocks of weights
and rows come by TMA, `stages` of them on their way, the weights once; the sums are
taken in ascending order of K. The epilogue is the program's own.

As in `skinny_gemm_triton`, a plan is a function of the weight's shape alone. Rows are
normed by a kernel of their own, `rms_norm_mosaic`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import rms_norm_mosaic, slab, warpgroup


MIN_COLUMNS, MAX_COLUMNS = 8, 128  # of one program
MAX_STAGES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a weight matrix is walked: a function of its shape, never of the rows.

    Attributes:
      block_n: columns of one program, in each part of the weights.
      block_k: terms of a sum between two steps of the pipeline.
      stages: of the pipeline.
    """

    block_n: int
    block_k: int
    stages: int


def plan_for(num_columns: int, num_terms: int, *, parts: int = 1) -> Plan:
    """The plan of weights `[N, K]`, `parts` of which are walked by one program.

    As wide as gives each multiprocessor a program; two fit where there are more. From
    sizes: no timing is behind it yet.
    """
    block_k = 2 * warpgroup.TILE if num_terms % (2 * warpgroup.TILE) == 0 else (
        warpgroup.TILE
    )  # fmt: skip
    columns = num_columns // parts
    block_n = MAX_COLUMNS // parts
    while block_n > MIN_COLUMNS and (
        columns % block_n or columns // block_n < warpgroup.PROGRAMS - 4
    ):
        block_n //= 2
    plan = Plan(block_n=block_n, block_k=block_k, stages=1)
    room = warpgroup.MAX_SHARED_BYTES
    if columns // block_n > warpgroup.PROGRAMS:
        room = room // 2 - 1024  # the system's share of each
    room -= _epilogue_bytes(plan)
    return dataclasses.replace(
        plan, stages=max(1, min(MAX_STAGES, room // _stage_bytes(plan, parts)))
    )


def project(
    x: jax.Array,  # [R, K]
    w: jax.Array,  # [N, K]
    *,
    num_active: jax.Array,  # [] int32
    norm: jax.Array | None,  # [K]
    residual: jax.Array | None,  # [R, N]
    eps: float,
    out_dtype: jnp.dtype,
    plan: Plan | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `ops.projection.project`. Padding rows are unspecified.

    Args:
      interpret: False, or jax's `InterpretGPUParams()`; `True` interprets no copies.

    Raises:
      ValueError: shapes that do not fit, or that are not whole blocks.
      NotImplementedError: arrays that are not bfloat16, or another `out_dtype`.
    """
    (R, K), N = x.shape, w.shape[0]
    slab.check_shapes(w=(w, (N, K)), num_active=(num_active, ()))
    out_dtype = jnp.dtype(out_dtype)
    if out_dtype not in (x.dtype, jnp.float32):
        raise NotImplementedError(f"a product of {x.dtype} cannot give {out_dtype}")
    if residual is not None:
        slab.check_shapes(residual=(residual, (R, N)))
        if out_dtype != x.dtype:
            raise ValueError(f"a residual of {x.dtype} cannot give {out_dtype}")
        residual = slab.padded(residual)
    slab.check_bfloat16(x=x, w=w, norm=norm, residual=residual)
    rows = _rows(x, norm, num_active, eps, interpret)
    plan = plan or plan_for(N, K)
    y = _multiply(rows, w, residual, plan=plan, parts=1, out_dtype=out_dtype,
                  interpret=interpret)  # fmt: skip
    return y[:R]


def gate(
    x: jax.Array,  # [R, K]
    w: jax.Array,  # [2F, K]
    *,
    num_active: jax.Array,  # [] int32
    norm: jax.Array,  # [K]
    eps: float,
    plan: Plan | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `ops.gated_projection.gated_projection`. Padding rows are unspecified.

    Args:
      interpret: as in `project`.

    Raises:
      ValueError: shapes that do not fit, or that are not whole blocks.
      NotImplementedError: arrays that are not bfloat16.
    """
    (R, K), F = x.shape, w.shape[0] // 2
    slab.check_shapes(w=(w, (2 * F, K)), num_active=(num_active, ()))
    slab.check_bfloat16(x=x, w=w, norm=norm)
    rows = _rows(x, norm, num_active, eps, interpret)
    plan = plan or plan_for(2 * F, K, parts=2)
    y = _multiply(rows, w, None, plan=plan, parts=2, out_dtype=x.dtype,
                  interpret=interpret)  # fmt: skip
    return y[:R]


def _rows(x, norm, num_active, eps, interpret):
    """Whole slabs of rows, normed where there is a norm."""
    x = slab.padded(x)
    if norm is None:
        return x
    return rms_norm_mosaic.rms_norm(
        x, norm, num_active=num_active, eps=eps, interpret=interpret
    )


def _multiply(x, w, residual, *, plan, parts, out_dtype, interpret):
    """The kernel: `[16 n, N]`, of the columns of one of the parts of `w`."""
    (R, K), N = x.shape, w.shape[0] // parts
    check_plan(plan, w.shape[0], K, parts=parts)
    height = _height(R)
    steps, stages = K // plan.block_k, min(plan.stages, K // plan.block_k)
    tile = warpgroup.ROWS, plan.block_n
    width = parts * plan.block_n
    scratch = [
        plgpu.SMEM((stages, warpgroup.ROWS, plan.block_k), x.dtype,
                   transforms=warpgroup.OPERAND),
        plgpu.SMEM((stages, width, plan.block_k), w.dtype,
                   transforms=warpgroup.OPERAND),
        plgpu.Barrier(num_arrivals=1 + parts, num_barriers=stages),
        plgpu.SMEM(tile, out_dtype),
    ]  # fmt: skip
    if residual is not None:
        scratch += [plgpu.SMEM(tile, residual.dtype), plgpu.Barrier()]

    walk = _Walk(
        plan=plan,
        parts=parts,
        height=height,
        num_columns=N,
        steps=steps,
        stages=stages,
        has_residual=residual is not None,
    )

    def skinny_gemm(*refs: Any) -> None:
        _program(refs, walk)

    operands = [x, w] if residual is None else [x, w, residual]
    return warpgroup.kernel(
        skinny_gemm,
        outputs=jax.ShapeDtypeStruct((R, N), out_dtype),
        grid={"r": R // height, "n": N // plan.block_n},
        scratch=scratch,
        interpret=interpret,
    )(*operands)


class _Walk(NamedTuple):
    """How a program walks its weights; all static."""

    plan: Plan
    parts: int
    height: int  # rows
    num_columns: int  # of each part
    steps: int
    stages: int
    has_residual: bool


def _program(refs, walk):
    """Up to 64 rows by one block of columns: `refs` are those of `_multiply`."""
    x_ref, w_ref, *refs = refs
    residual_ref, *refs = refs if walk.has_residual else (None, *refs)
    out_ref, x_blocks, w_blocks, loaded, out_tile, *rest = refs
    plan, height = walk.plan, walk.height
    rows = pl.ds(jax.lax.axis_index("r") * height, height)
    first = jax.lax.axis_index("n") * plan.block_n
    columns = pl.ds(first, plan.block_n)

    def load(step):
        """Asks for the blocks of a step."""
        stage = jax.lax.rem(step, walk.stages)
        terms, ready = pl.ds(step * plan.block_k, plan.block_k), loaded.at[stage]
        for part in range(walk.parts):
            own = pl.ds(first + part * walk.num_columns, plan.block_n)
            block = w_blocks.at[stage, pl.ds(part * plan.block_n, plan.block_n)]
            plgpu.copy_gmem_to_smem(w_ref.at[own, terms], block, ready)
        block = x_blocks.at[stage, pl.ds(0, height)]
        plgpu.copy_gmem_to_smem(x_ref.at[rows, terms], block, ready)

    for step in range(walk.stages):
        load(jnp.int32(step))
    if residual_ref is not None:
        added_tile, added = rest
        block = added_tile.at[pl.ds(0, height)]
        plgpu.copy_gmem_to_smem(residual_ref.at[rows, columns], block, added)
    total = _total(x_blocks, w_blocks, loaded, load, walk)
    if walk.parts == 2:
        halves = total[:, : plan.block_n], total[:, plan.block_n :]
        result = slab.gated(*halves, dtype=out_ref.dtype)
    else:
        residual = None
        if residual_ref is not None:
            plgpu.barrier_wait(added)
            residual = warpgroup.load(added_tile, warpgroup.TABLE)
        result = slab.added(total, residual, out_dtype=out_ref.dtype)
    out_tile[...] = result
    done = out_tile.at[pl.ds(0, height)], out_ref.at[rows, columns]
    warpgroup.store_from_shared(done)


def _total(x_blocks, w_blocks, loaded, load, walk):
    """The sums of a program, float32 `[64, columns]`: block after block of k."""

    def accumulate(sums_ref):
        def add(step, _):
            stage = jax.lax.rem(step, walk.stages)
            plgpu.barrier_wait(loaded.at[stage])
            block = warpgroup.transposed(w_blocks.at[stage])
            plgpu.wgmma(sums_ref, x_blocks.at[stage], block)
            # All but the last are done: the stage before is free.
            plgpu.wgmma_wait(1)
            later = step - 1 + walk.stages
            pl.when((step > 0) & (later < walk.steps))(lambda: load(later))

        jax.lax.fori_loop(0, walk.steps, add, None)
        return sums_ref[...]

    shape = warpgroup.ROWS, w_blocks.shape[1]
    return pl.run_scoped(accumulate, warpgroup.sums(shape))


def _height(num_rows: int) -> int:
    """The rows of one program, of whole slabs that share one read of the weights."""
    slabs = num_rows // slab.ROWS
    most = warpgroup.ROWS // slab.ROWS
    return slab.ROWS * max(n for n in range(1, most + 1) if slabs % n == 0)


def _stage_bytes(plan: Plan, parts: int) -> int:
    return 2 * (parts * plan.block_n + warpgroup.ROWS) * plan.block_k


def _epilogue_bytes(plan: Plan) -> int:
    """At most: of the result, and of a residual; with what barriers take."""
    return 6 * warpgroup.ROWS * plan.block_n + 1024


def check_plan(plan: Plan, num_columns: int, num_terms: int, *, parts: int = 1) -> None:
    """Raises `ValueError` where weights `[N, K]` are not whole blocks of the plan."""
    block_n = plan.block_n
    if block_n < MIN_COLUMNS or block_n % MIN_COLUMNS or plan.block_k % warpgroup.TILE:
        raise ValueError(
            f"{plan} is not in blocks of {MIN_COLUMNS} by {warpgroup.TILE}"
        )
    if parts * block_n > 256:
        raise ValueError(f"{plan} has more columns than the 256 of an instruction")
    if num_columns % (parts * block_n):
        raise ValueError(f"{num_columns} columns are not whole {parts * block_n}s")
    if not num_terms or num_terms % plan.block_k:
        raise ValueError(f"{num_terms} terms are not whole {plan.block_k}s")
    needed = _stage_bytes(plan, parts) * plan.stages + _epilogue_bytes(plan)
    if plan.stages < 1 or needed > warpgroup.MAX_SHARED_BYTES:
        raise ValueError(
            f"{plan} needs {needed} of {warpgroup.MAX_SHARED_BYTES} bytes of shared "
            "memory, and at least a stage"
        )
