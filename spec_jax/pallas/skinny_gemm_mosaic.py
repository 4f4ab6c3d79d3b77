"""Skinny GEMM on a GPU (Pallas Mosaic, Hopper): chosen by name.

    y[r, n] = sum_k x[r, k] * w[n, k]       bfloat16 in, accumulated in float32

Weights and rows change places: a block of weights is the tall operand of `wgmma`, at
least 64 rows high, and the slab of 16 rows the narrow one. One program owns `block_n`
columns, one of `splits` parts of K and one slab; a pipeline of `stages` brings blocks
of both by TMA, the weights once, and the sums are taken in ascending order of K. The
partial sums [splits, N, R] are float32 and are added first to last, rounded and gated
by XLA: element by element, nothing that could be ordered otherwise.

As in `skinny_gemm_triton`, a plan is a function of the weight's shape alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import rms_norm_triton, slab


WGMMA_ROWS = 64  # of one instruction: `block_n` is a multiple
SWIZZLE_BYTES = 128  # of a row of a block in shared memory
TILE = SWIZZLE_BYTES // 2  # elements of that row: `block_k` is a multiple
MAX_SHARED_BYTES = 232_448  # of one program on an H100
PROGRAMS = 132  # one for each multiprocessor of an H100
MIN_SPLIT = 512  # terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a weight matrix is walked: a function of its shape, never of the rows."""

    block_n: int
    block_k: int
    splits: int = 1
    stages: int = 6


def plan_for(num_columns: int, num_terms: int) -> Plan:
    """The plan of weights `[N, K]`: as many splits as give each multiprocessor work.

    No timing is behind it yet.
    """
    block_k = 2 * TILE if num_terms % (2 * TILE) == 0 else TILE
    splits = 1
    while (
        splits * num_columns // WGMMA_ROWS < PROGRAMS
        and num_terms % (2 * splits * block_k) == 0
        and num_terms // (2 * splits) >= MIN_SPLIT
    ):
        splits *= 2
    return Plan(block_n=WGMMA_ROWS, block_k=block_k, splits=splits)


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
    """See `ops.projection.project`. All rows are computed, `num_active` or not.

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
    slab.check_bfloat16(x=x, w=w, norm=norm, residual=residual)
    total = _product(x, w, norm, eps=eps, plan=plan, interpret=interpret)
    if out_dtype == jnp.float32:
        return total
    y = _rounded(total).astype(out_dtype)
    return y if residual is None else residual + y


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
    """See `ops.gated_projection.gated_projection`. All rows are computed.

    Args:
      interpret: as in `project`.

    Raises:
      ValueError: shapes that do not fit, or that are not whole blocks.
      NotImplementedError: arrays that are not bfloat16.
    """
    (_, K), F = x.shape, w.shape[0] // 2
    slab.check_shapes(w=(w, (2 * F, K)), num_active=(num_active, ()))
    slab.check_bfloat16(x=x, w=w, norm=norm)
    total = _product(x, w, norm, eps=eps, plan=plan, interpret=interpret)
    gates, up = jnp.split(_rounded(total), 2, axis=-1)
    return (_rounded(jax.nn.silu(gates)) * up).astype(x.dtype)


def _rounded(x: jax.Array) -> jax.Array:
    """Float32 rounded to bfloat16: XLA may leave out a cast there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _product(x, w, norm, *, eps, plan, interpret):
    """`norm(x) w^T` in float32, `[R, N]`, splits added in their order."""
    R, rows = x.shape[0], slab.padded(x)
    if norm is not None:
        interpreted = bool(interpret)
        rows = rms_norm_triton.rms_norm(rows, norm, eps=eps, interpret=interpreted)
    plan = plan or plan_for(*w.shape)
    check_plan(plan, *w.shape)
    partials = _multiply(rows, w, plan=plan, interpret=interpret)
    total = partials[0]
    for split in range(1, plan.splits):
        total = total + partials[split]
    return total.T[:R]


def _multiply(x, w, *, plan, interpret):
    """The kernel: partial sums `[splits, N, R]` in float32."""
    (R, K), N = x.shape, w.shape[0]
    steps = K // plan.splits // plan.block_k
    behind = min(1, steps - 1)  # a block is free when the next one is multiplied
    tiled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(SWIZZLE_BYTES))

    def weights_spec(n, first):
        """Blocks of k of one block of weight rows, from block `first`."""
        return plgpu.BlockSpec(
            (plan.block_n, plan.block_k),
            lambda k: (n, first + k),
            transforms=tiled,
            delay_release=behind,
        )

    def rows_spec(r, first):
        """Blocks of k of one slab of rows, from block `first`."""
        # The interpreter of jax 0.10 has no views: there `x` comes transposed.
        if interpret:
            block = (plan.block_k, slab.ROWS)
            return plgpu.BlockSpec(
                block, lambda k: (first + k, r), delay_release=behind
            )
        return plgpu.BlockSpec(
            (slab.ROWS, plan.block_k),
            lambda k: (r, first + k),
            transforms=tiled,
            delay_release=behind,
        )

    def skinny_gemm(x_ref, w_ref, out_ref):
        """One slab of rows by one block of weight rows over one split of k."""
        r, n, split = (jax.lax.axis_index(name) for name in ("r", "n", "split"))

        def accumulate(sums_ref):
            """Streams the blocks of k of this split through the tensor cores."""

            def step(_, w_block, x_block):  # [block_n, block_k], [16, block_k]
                if not interpret:
                    x_block = _transposed(x_block)
                plgpu.wgmma(sums_ref, w_block, x_block)
                plgpu.wgmma_wait(behind)

            first = split * steps
            plgpu.emit_pipeline(
                step,
                grid=(steps,),
                in_specs=[weights_spec(n, first), rows_spec(r, first)],
                max_concurrent_steps=min(plan.stages, steps),
            )(w_ref, x_ref)
            return sums_ref[...]

        columns = pl.ds(n * plan.block_n, plan.block_n)
        # jax does not list it as a public name.
        shape = plan.block_n, slab.ROWS
        sums = plgpu.ACC(shape, jnp.float32)  # type: ignore[attr-defined]
        out_ref[split, columns, pl.ds(r * slab.ROWS, slab.ROWS)] = pl.run_scoped(
            accumulate, sums
        )

    return plgpu.kernel(
        skinny_gemm,
        out_type=jax.ShapeDtypeStruct((plan.splits, N, R), jnp.float32),
        grid=(R // slab.ROWS, N // plan.block_n, plan.splits),
        grid_names=("r", "n", "split"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(x.T if interpret else x, w)


def _transposed(ref):
    # A method from jax 0.11 on, where the function is deprecated.
    return ref.T if hasattr(type(ref), "T") else plgpu.transpose_ref(ref, (1, 0))


def check_plan(plan: Plan, num_columns: int, num_terms: int) -> None:
    """Raises `ValueError` where weights `[N, K]` are not whole blocks of the plan."""
    if plan.block_n < 1 or plan.block_n % WGMMA_ROWS or plan.block_k % TILE:
        raise ValueError(f"{plan} is not in blocks of {WGMMA_ROWS} by {TILE}")
    if num_columns % plan.block_n:
        raise ValueError(f"{num_columns} columns are not whole {plan.block_n}s")
    if not num_terms or num_terms % (plan.splits * plan.block_k):
        raise ValueError(
            f"{num_terms} terms are not {plan.splits} splits of whole {plan.block_k}s"
        )
    needed = 2 * (plan.block_n + slab.ROWS) * plan.block_k * plan.stages
    if needed > MAX_SHARED_BYTES:
        raise ValueError(
            f"{plan} needs {needed} of {MAX_SHARED_BYTES} bytes of shared memory"
        )
