"""Skinny GEMM on a GPU (Pallas Mosaic, Hopper): chosen by name.

    y[r, n] = sum_k x[r, k] * w[n, k]       bfloat16 in, accumulated in float32

One program owns `block_n` columns, of the gate and of the up half where the weights are
gated, for up to 64 rows: that is how high an instruction of `wgmma` is, and rows that
are not there cost nothing that a product bound by memory would feel. Blocks of weights
and rows come by TMA, `stages` of them on their way, the weights once; the sums are
taken in ascending order of K. The epilogue is the program's own.

No kernel writes weights: the first blocks of them are asked for before the kernel that
makes the rows has ended. Of the rows the first 8, 16, 32 or all are read, as many as
cover the active ones; only the active ones are written.

As in `skinny_gemm_triton`, a plan is a function of the weight's shape alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import gemm_kernel_mosaic, rms_norm_mosaic, slab, warpgroup


MIN_COLUMNS, MAX_COLUMNS = 8, 128  # of one program
MIN_STAGES, MAX_STAGES = 2, 12  # a step asks for what a later one multiplies


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

    As wide as gives each multiprocessor a program. Where there are more programs than
    multiprocessors, two of them fit on each, so that one loads while the other begins
    or ends; blocks are then shorter if that is needed for three stages. From sizes: no
    timing is behind it yet.
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
    plan = Plan(block_n=block_n, block_k=block_k, stages=3)
    room = slab.MAX_SHARED_BYTES
    if columns // block_n > warpgroup.PROGRAMS:
        room = room // 2 - 1024  # the system's share of each
        if _needed_bytes(plan, parts) > room:
            plan = dataclasses.replace(plan, block_k=warpgroup.TILE)
    fits = (room - _epilogue_bytes(plan)) // _stage_bytes(plan, parts)
    return dataclasses.replace(plan, stages=min(MAX_STAGES, fits))


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
    """See `ops.projection.project`. Padding rows are uninitialised.

    Args:
      w: no result of an operation in the same program, which may still be at it: it is
        read before the kernel waits for others.
      interpret: False, or jax's `InterpretGPUParams()`; `True` interprets no copies.

    Raises:
      ValueError: shapes that do not fit, or that are not whole blocks.
      NotImplementedError: arrays that are not bfloat16, or another `out_dtype`.
    """
    (R, K), N = x.shape, w.shape[0]
    out_dtype = jnp.dtype(out_dtype)
    slab.check_product(
        x, w, (N, K), num_columns=N, num_active=num_active, norm=norm,
        residual=residual, out_dtype=out_dtype,
    )  # fmt: skip
    if residual is not None:
        residual = slab.padded(residual)
    x = _rows(x, norm, num_active=num_active, eps=eps, interpret=interpret)
    y = _multiply(x, w, residual, num_active=num_active, plan=plan or plan_for(N, K),
                  parts=1, out_dtype=out_dtype, interpret=interpret)  # fmt: skip
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
    """See `ops.gated_projection.gated_projection`. Padding rows are uninitialised.

    Args:
      w: as in `project`.
      interpret: as in `project`.

    Raises:
      ValueError: shapes that do not fit, or that are not whole blocks.
      NotImplementedError: arrays that are not bfloat16.
    """
    (R, K), F = x.shape, w.shape[0] // 2
    slab.check_product(
        x, w, (2 * F, K), num_columns=F, num_active=num_active, norm=norm,
        residual=None, out_dtype=x.dtype,
    )  # fmt: skip
    x = _rows(x, norm, num_active=num_active, eps=eps, interpret=interpret)
    y = _multiply(x, w, None, num_active=num_active,
                  plan=plan or plan_for(2 * F, K, parts=2), parts=2,
                  out_dtype=x.dtype, interpret=interpret)  # fmt: skip
    return y[:R]


def _rows(x, norm, *, num_active, eps, interpret):
    """`x` in whole slabs, normed by `norm` unless that is None."""
    x = slab.padded(x)
    if norm is None:
        return x
    how = {"num_active": num_active, "eps": eps, "interpret": interpret}
    return rms_norm_mosaic.rms_norm(x, norm, **how)


def _multiply(x, w, residual, *, num_active, plan, parts, out_dtype, interpret):
    """The kernel: `[16 n, N]`, of the columns of one of the parts of `w`."""
    R, (num_columns, K) = x.shape[0], w.shape
    N = num_columns // parts
    check_plan(plan, num_columns, K, parts=parts)
    height, stages = slab.height(R), min(plan.stages, K // plan.block_k)
    tile = warpgroup.ROWS, plan.block_n
    width = parts * plan.block_n
    walk = gemm_kernel_mosaic.Walk(
        plan=plan,
        parts=parts,
        height=height,
        num_columns=N,
        steps=K // plan.block_k,
        stages=stages,
        has_residual=residual is not None,
    )
    operands = [x, w, num_active.reshape(1)]
    scratch = [
        plgpu.SMEM((stages, warpgroup.ROWS, plan.block_k), x.dtype,
                   transforms=warpgroup.OPERAND),
        plgpu.SMEM((stages, width, plan.block_k), w.dtype,
                   transforms=warpgroup.OPERAND),
        plgpu.Barrier(num_arrivals=1 + parts, num_barriers=stages),
        plgpu.SMEM(tile, out_dtype),
    ]  # fmt: skip
    if residual is not None:
        operands.append(residual)
        scratch += [plgpu.SMEM(tile, residual.dtype), plgpu.Barrier()]

    def first_weights(*refs: Any) -> None:
        gemm_kernel_mosaic.load_first(refs, walk)

    def skinny_gemm(*refs: Any) -> None:
        gemm_kernel_mosaic.multiply(refs, walk)

    return warpgroup.kernel(
        skinny_gemm,
        outputs=jax.ShapeDtypeStruct((R, N), out_dtype),
        grid={"r": R // height, "n": N // plan.block_n},
        scratch=scratch,
        prologue=first_weights,
        interpret=interpret,
    )(*operands)


def _stage_bytes(plan: Plan, parts: int) -> int:
    """Of the weights and of the rows."""
    return 2 * (parts * plan.block_n + warpgroup.ROWS) * plan.block_k


def _epilogue_bytes(plan: Plan) -> int:
    """At most: of a float32 result, or of a bfloat16 one and a residual.

    With barriers, each in whole kilobytes.
    """
    return 4 * warpgroup.ROWS * plan.block_n + 4 * 1024


def _needed_bytes(plan: Plan, parts: int) -> int:
    return _stage_bytes(plan, parts) * plan.stages + _epilogue_bytes(plan)


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
    least = min(MIN_STAGES, num_terms // plan.block_k)
    if plan.stages < least:
        raise ValueError(f"{plan}: {num_terms} terms need at least {least} stages")
    needed = _needed_bytes(plan, parts)
    if needed > slab.MAX_SHARED_BYTES:
        raise ValueError(
            f"{plan} needs {needed} of {slab.MAX_SHARED_BYTES} bytes of shared memory"
        )
