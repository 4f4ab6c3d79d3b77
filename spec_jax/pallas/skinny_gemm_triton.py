"""Skinny GEMM on a GPU (Pallas Triton): a slab of rows times a weight matrix.

    y[r, n] = sum_k x[r, k] * w[n, k]       bfloat16 in, accumulated in float32

One program owns `block_n` columns, or of gated weights as many of the gate and of the
up half, for up to 64 rows. It reads these weights once for all rows, 2 * K bytes a
column, walks K in blocks in ascending order (`gemm_kernel_triton`), and writes its
tiles once, epilogue included. One tensor-core instruction is 16 rows high, so that the
second to the sixteenth row are free.
It reads the active rows of `x`, 2 * K bytes each, from the L2 cache. 16 rows are as
many bytes as the weights if `block_n` is 16, so wide matrices have `block_n` 32 and
more.
Padding rows are neither read nor written. Where rows are to be normed, a kernel before
the product's does so.

With `splits` above one, each split of K has its own programs, which store partial sums
[splits, R, N] of each part in float32. The norm that follows (`add`), or otherwise
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
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import (
    byte_gemm_triton as byte_gemm,
    byte_rows_triton,
    gemm_kernel_triton,
    gemm_reduce_triton,
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
    w: Weights,  # [N, K]
    *,
    num_active: jax.Array,  # [] int32
    norm: jax.Array | None,  # [K]
    residual: jax.Array | None,  # [R, N]
    eps: float,
    out_dtype: jnp.dtype,
    plan: Plan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Implements `ops.projection.project`. Padding rows are uninitialised.

    Raises:
      ValueError: shapes that do not fit, or a plan that does not fit the weights.
      NotImplementedError: arrays that are not bfloat16, or another `out_dtype`.
    """
    return _product(
        x, w, norm, residual, num_active=num_active, eps=eps, plan=plan,
        out_dtype=jnp.dtype(out_dtype), name="skinny_gemm", interpret=interpret,
    )  # fmt: skip


def add(
    x: jax.Array,  # [R, K]
    w: Weights,  # [N, K]
    residual: jax.Array,  # [R, N]
    norm: jax.Array,  # [N]
    *,
    num_active: jax.Array,  # [] int32
    eps: float,
    plan: Plan | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Implements `ops.projection.add`: `project` with a residual, and the next RMSNorm.

    Returns the sum and its norm, `[R, N]` each. Raises as `project` does.
    """
    (R, K), N = x.shape, _num_outputs(w)
    _check(
        x, w, (N, K), num_columns=N, num_active=num_active, norm=None,
        residual=residual, out_dtype=x.dtype,
    )  # fmt: skip
    residual = slab.padded(residual)
    how: dict[str, Any] = {"num_active": num_active, "interpret": interpret}
    sums = _multiply(
        slab.padded(x), w, residual, plan=plan, out_dtype=x.dtype, name="skinny_gemm",
        **how,
    )  # fmt: skip
    how |= {"eps": eps}
    if isinstance(sums, list):
        (partials,) = sums
        added, normed = rms_norm_triton.add_norm(residual, partials, norm, **how)
    else:
        added, normed = sums, rms_norm_triton.rms_norm(sums, norm, **how)
    return added[:R], normed[:R]


def gate(
    x: jax.Array,  # [R, K]
    w: Weights,  # [2F, K]
    *,
    num_active: jax.Array,  # [] int32
    norm: jax.Array | None,  # [K]
    eps: float,
    plan: Plan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Implements `ops.gated_projection.gated_projection`; padding is uninitialised.

    Raises:
      ValueError: shapes that do not fit, or a plan that does not fit the weights.
      NotImplementedError: arrays that are not bfloat16.
    """
    return _product(
        x, w, norm, None, num_active=num_active, eps=eps, plan=plan,
        out_dtype=x.dtype, name="skinny_gemm_gate", interpret=interpret, parts=2,
    )  # fmt: skip


def _product(
    x, w, norm, residual, *, num_active, eps, plan, out_dtype, name, interpret, parts=1
):
    """Returns `x`, normed if `norm` is given, times `w`: `[R, N / parts]`."""
    (R, K), N = x.shape, _num_outputs(w)
    _check(
        x, w, (N, K), num_columns=N // parts, num_active=num_active, norm=norm,
        residual=residual, out_dtype=out_dtype,
    )  # fmt: skip
    x, how = slab.padded(x), {"num_active": num_active, "interpret": interpret}
    residual = None if residual is None else slab.padded(residual)
    if norm is not None:
        x = rms_norm_triton.rms_norm(x, norm, eps=eps, **how)
    sums = _multiply(
        x, w, residual, plan=plan, out_dtype=out_dtype, name=name, parts=parts, **how
    )
    if isinstance(sums, list):
        result = jax.ShapeDtypeStruct(sums[0].shape[1:], out_dtype)
        sums = gemm_reduce_triton.reduce(
            sums, residual, result, name=f"{name}_reduce", **how
        )
    return sums[:R]


def _check(x, w, shape, **how) -> None:
    """Checks as `slab.check_product` does, and weights of eight bits, too."""
    if isinstance(w, tuple):
        byte_gemm.check(w, shape)
        w = None
    slab.check_product(x, w, shape, **how)


def _num_outputs(w: Weights) -> int:
    return w[0].shape[1] if isinstance(w, tuple) else w.shape[0]


def _multiply(
    x,
    w,
    residual,
    *,
    num_active,
    plan,
    out_dtype,
    name,
    interpret,
    parts=1,
):
    """Returns the finished product of `x` and the parts of `w`, `[R, N / parts]`.

    Where K is split, returns a list: of each part the sums `[splits, R, N / parts]`.
    """
    (R, K), N = x.shape, _num_outputs(w) // parts
    is_bytes = isinstance(w, tuple)
    x_spec: Any
    w_spec: Callable[..., Any]
    if plan is None:
        plan = plan_for(parts * N, K, parts=parts)
        plan = byte_gemm.plan_for(plan, parts=parts) if is_bytes else plan
    check_plan(plan, K, parts=parts)
    height = slab.height(R)
    result = jax.ShapeDtypeStruct((R, N), out_dtype)
    tile = pl.BlockSpec((height, plan.block_n), lambda r, n, s: (r, n))
    out_shapes, out_specs = [result], [tile]
    if plan.splits > 1:
        partial = jax.ShapeDtypeStruct((plan.splits, R, N), jnp.float32)
        spec = pl.BlockSpec((None, height, plan.block_n), lambda r, n, s: (s, r, n))
        out_shapes, out_specs = [partial] * parts, [spec] * parts
    if is_bytes:
        how = {"num_active": num_active, "interpret": interpret}
        x, w = byte_rows_triton.round_rows(x, **how), byte_gemm.by_parts(w, parts)
        x_spec, w_spec = byte_gemm.row_specs(x, height), byte_gemm.part_specs
    else:
        terms = pl.cdiv(K, plan.block_k) * plan.block_k
        w = w.reshape(parts, N, K)
        x_spec = pl.BlockSpec((height, terms), lambda r, n, s: (r, 0))
        w_spec = functools.partial(_part_spec, terms)
    has_residual = residual is not None and plan.splits == 1
    walk = gemm_kernel_triton.Walk(
        plan=plan,
        num_columns=N,
        num_terms=K,
        height=height,
        interpret=interpret,
    )
    outputs = pl.pallas_call(
        functools.partial(gemm_kernel_triton.multiply, walk=walk),
        # Rows are the fastest axis: further rows find the weights in the cache.
        grid=(R // height, pl.cdiv(N, plan.block_n), plan.splits),
        in_specs=[
            pl.BlockSpec((1,), lambda r, n, s: (0,)),
            x_spec,
            [w_spec(w, part, plan.block_n) for part in range(parts)],
            tile if has_residual else None,
        ],
        out_specs=[out_specs],
        out_shape=[out_shapes],
        compiler_params=plt.CompilerParams(
            num_warps=plan.num_warps,
            num_stages=_num_stages(plan, height, parts),
        ),
        name=name,
        interpret=interpret,
    )(num_active.reshape(1), x, [w] * parts, residual if has_residual else None)[0]
    return outputs[0] if plan.splits == 1 else list(outputs)


def _num_stages(plan: Plan, height: int, parts: int) -> int:
    """Returns how many of the plan's stages fit; no bit depends on that."""
    room = slab.MAX_SHARED_BYTES - SPARE_SHARED_BYTES
    return min(plan.num_stages, room // _stage_bytes(plan, height, parts) + 1)


def _stage_bytes(plan: Plan, height: int, parts: int) -> int:
    return 2 * (height + parts * plan.block_n) * plan.block_k


def _part_spec(terms: int, w: jax.Array, part: int, block_n: int) -> pl.BlockSpec:
    """Returns a program's columns in one part of the weights, with all of K."""
    del w
    return pl.BlockSpec((None, block_n, terms), lambda r, n, s: (part, n, 0))


def check_plan(plan: Plan, num_terms: int, *, parts: int) -> None:
    """Raises `ValueError` if a kernel would miss terms or exceed shared memory."""
    for name in ("block_n", "block_k", "chains", "num_warps"):
        value = getattr(plan, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name}={value} is not a power of two")
    if min(plan.block_n, plan.block_k // plan.chains) < MIN_BLOCK:
        raise ValueError(f"{plan} has a block below {MIN_BLOCK}, the tensor core's")
    if min(plan.splits, plan.num_stages) < 1:
        raise ValueError(f"{plan} has no split, or no stage")
    if num_terms < 1:
        raise ValueError(f"sums of {num_terms} terms")
    if plan.splits > 1 and num_terms % (plan.splits * plan.block_k):
        raise ValueError(
            f"{num_terms} terms are not {plan.splits} splits of whole {plan.block_k}s"
        )
    stage = _stage_bytes(plan, slab.ROWS, parts)
    needed = stage * max(plan.num_stages - 1, 1)
    if needed > slab.MAX_SHARED_BYTES:
        raise ValueError(
            f"{plan} needs {needed} of {slab.MAX_SHARED_BYTES} bytes of shared memory"
        )
