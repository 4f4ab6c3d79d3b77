"""The Mosaic skinny GEMM: interpreted, and compiled for an H100."""

import dataclasses
import functools

import gemm_oracle as oracle
import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax import testing
from spec_jax.pallas import skinny_gemm_mosaic as gemm


EPS = 1e-6
PLAN = gemm.Plan(block_n=64, block_k=64, stages=2)
SPLIT = dataclasses.replace(PLAN, splits=2)


def _interpreter():
    """Of the GPU's memories, copies and barriers; public from jax 0.11 on."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.InterpretGPUParams()


_project = jax.jit(
    functools.partial(gemm.project, interpret=_interpreter()),
    static_argnames=("eps", "out_dtype", "plan"),
)
_gate = jax.jit(
    functools.partial(gemm.gate, interpret=_interpreter()),
    static_argnames=("eps", "plan"),
)


def inputs(rng, K=128, N=128, rows=16):
    x, w = oracle.normal(rng, rows, K), oracle.normal(rng, N, K)
    norm = 1 + oracle.normal(rng, K, scale=0.2)
    return x, w, norm, oracle.normal(rng, rows, N)


def project(x, w, *, norm=None, residual=None, out_dtype=jnp.bfloat16, plan=PLAN):
    options = {"norm": norm, "residual": residual, "plan": plan, "eps": EPS}
    live = np.int32(len(x))
    return np.asarray(_project(x, w, num_active=live, out_dtype=out_dtype, **options))


@pytest.mark.parametrize("plan", [PLAN, SPLIT])
def test_products_are_those_of_float64(rng, plan):
    """Fails if a block or a split is lost, or an epilogue rounds elsewhere."""
    x, w, norm, residual = inputs(rng)
    y = project(x, w, norm=norm, residual=residual, plan=plan)
    expected = oracle.project(x, w, norm=norm, residual=residual, eps=EPS)
    oracle.assert_rounded_alike(y, expected)
    logits = project(x, w, out_dtype=jnp.float32, plan=plan)
    expected = oracle.project(x, w, out_dtype=jnp.float32)
    testing.assert_rows_close(logits, expected, dtype="float32", reduction=128)
    gated = _gate(x, w, num_active=np.int32(16), norm=norm, eps=EPS, plan=plan)
    oracle.assert_rounded_alike(gated, oracle.gate(x, w, norm=norm, eps=EPS))


def test_a_row_is_that_row_alone(rng):
    """Fails if a padding row is read, or a row's place or slab shows in its bits."""
    x, w, _, _ = inputs(rng, N=64, rows=20)
    logits = functools.partial(project, w=w, out_dtype=jnp.float32)
    together = logits(x)
    testing.assert_same_bits(logits(x[3:4])[0], together[3])
    testing.assert_same_bits(logits(x[16:])[:4], together[16:])
    alone = np.full_like(x, np.nan)
    alone[7] = x[3]
    testing.assert_same_bits(logits(alone)[7], together[3])


def test_a_plan_by_the_number_of_rows_is_caught(rng):
    """Negative control: two splits for one row, one for several."""
    x, w, _, _ = inputs(rng, K=256, N=64)
    logits = functools.partial(project, w=w, out_dtype=jnp.float32)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(logits(x[:1], plan=SPLIT), logits(x)[:1])


@pytest.mark.parametrize(
    ("shape", "plan", "message"),
    [
        ((100, 128), None, "100 columns are not whole 64s"),
        ((64, 100), None, "100 terms are not 1 splits of whole 64s"),
        ((64, 0), None, "0 terms"),
        ((64, 64), SPLIT, "64 terms are not 2 splits"),
        ((64, 64), gemm.Plan(block_n=32, block_k=64), "not in blocks of 64 by 64"),
        (
            (64, 64),
            dataclasses.replace(PLAN, stages=24),
            "needs 245760 of 232448",
        ),
    ],
)
def test_refusals(shape, plan, message):
    """Fails if weights that are not whole blocks are read past their end."""
    with pytest.raises(ValueError, match=message):
        project(
            np.ones((3, shape[1]), "bfloat16"), np.ones(shape, "bfloat16"), plan=plan
        )


def logits_program(N: int, K: int, rows: int = 16) -> hopper.Program:
    def fn(x, w, num_active):
        options = {"norm": None, "residual": None, "eps": 0.0}
        return gemm.project(
            x, w, num_active=num_active, out_dtype=jnp.float32, **options
        )

    shapes = jnp.zeros((rows, K), jnp.bfloat16), jnp.zeros((N, K), jnp.bfloat16)
    shapes = jax.eval_shape(lambda: (*shapes, jnp.int32(0)))
    return hopper.Program(fn=fn, args=shapes)


@pytest.mark.parametrize("shape", [(24_576, 4096), (1024, 2048)])
def test_it_compiles_for_the_tensor_cores(compiler, shape):
    """Fails if it spills, or the weights do not come by TMA to `wgmma`."""
    report = compiler.compile(logits_program, *shape)
    report.assert_fits()
    kernel = report.kernel("mosaic")
    assert kernel.count("HGMMA.64x16x16.F32.BF16") > 0
    assert kernel.count("UTMALDG.4D") > 0
    assert kernel.count("LDG") == kernel.count("LDL") == 0


def test_one_row_and_sixteen_are_one_kernel(compiler):
    """Fails if a kernel is made for a number of rows.

    Up to jax 0.10 Mosaic keeps what it compiled; later, the same code comes again.
    """
    shape = 1024, 3072
    first = compiler.compile(logits_program, *shape, rows=1).kernel("mosaic")
    assert first.count("HGMMA") > 0
    second = compiler.compile(logits_program, *shape, rows=16)
    assert "mosaic_gpu" in second.hlo
    again = [kernel.sass for kernel in second.kernels if "mosaic" in kernel.name]
    assert again in ([], [first.sass])
