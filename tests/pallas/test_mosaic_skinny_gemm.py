"""The Mosaic skinny GEMM: interpreted, and compiled for an H100."""

import dataclasses
import functools
from unittest import mock

import gemm_oracle as oracle
import hopper
import hopper_launches as checks
import jax
import jax.numpy as jnp
import mosaic_interpreter
import numpy as np
import ptxas_log
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax import testing
from spec_jax.debug.microscope import fused
from spec_jax.pallas import skinny_gemm_mosaic as gemm, warpgroup


EPS = 1e-6
PLAN = gemm.Plan(block_n=16, block_k=64, stages=2)


@functools.cache
def _jitted(name):
    function = functools.partial(
        getattr(gemm, name), interpret=mosaic_interpreter.params()
    )
    static = {"project": ("eps", "out_dtype", "plan"), "gate": ("eps", "plan")}
    return jax.jit(function, static_argnames=static[name])


def inputs(rng, K=256, N=32, rows=16):
    x, w = oracle.normal(rng, rows, K), oracle.normal(rng, N, K)
    norm = 1 + oracle.normal(rng, K, scale=0.2)
    return x, w, norm, oracle.normal(rng, rows, N)


def project(
    x, w, *, norm=None, residual=None, out_dtype=jnp.bfloat16, plan=PLAN, live=None
):
    options = {"norm": norm, "residual": residual, "plan": plan, "eps": EPS}
    live = np.int32(len(x) if live is None else live)
    y = _jitted("project")(x, w, num_active=live, out_dtype=out_dtype, **options)
    return np.asarray(y)


def test_products_are_those_of_float64(rng):
    """Fails if a block is lost, or an epilogue rounds elsewhere."""
    x, w, norm, residual = inputs(rng)
    y = project(x, w, norm=norm, residual=residual)
    expected = oracle.project(x, w, norm=norm, residual=residual, eps=EPS)
    oracle.assert_rounded_alike(y, expected)
    logits = project(x, w, out_dtype=jnp.float32)
    expected = oracle.project(x, w, out_dtype=jnp.float32)
    testing.assert_rows_close(logits, expected, dtype="float32", reduction=256)
    gated = _jitted("gate")(
        x, w, num_active=np.int32(16), norm=norm, eps=EPS, plan=PLAN
    )
    oracle.assert_rounded_alike(gated, oracle.gate(x, w, norm=norm, eps=EPS))


def test_a_row_is_that_row_alone(rng):
    """Fails if a padding row is read, or a row's place or slab shows in its bits."""
    x, w, norm, _ = inputs(rng, N=16, rows=20)
    product = functools.partial(project, w=w, norm=norm, out_dtype=jnp.float32)
    together = product(x)
    testing.assert_same_bits(product(x[3:4])[0], together[3])
    alone = np.full_like(x, np.nan)
    alone[17] = x[3]
    testing.assert_same_bits(product(alone)[17], together[3])


@pytest.mark.parametrize(("rows", "live"), [(16, 3), (16, 8), (16, 13), (32, 17)])
def test_padding_rows_are_neither_read_nor_written(rng, rows, live):
    """Fails if more is stored than the active rows, or fewer are read or stored."""
    x, w, _, residual = inputs(rng, N=16, rows=rows)
    product = functools.partial(project, w=w)
    y = product(x, live=live, residual=residual[:, :16])
    testing.assert_same_bits(y[:live], product(x, residual=residual[:, :16])[:live])
    # What nothing is stored to is NaN where this is interpreted.
    assert np.isnan(y[live:].astype(np.float32)).all()
    # So are the rows that are not read, of those past the copy of eight or sixteen.
    x[live:] = np.nan
    testing.assert_same_bits(product(x, live=live, residual=residual[:, :16]), y)


def test_a_plan_by_the_number_of_rows_is_caught(rng):
    """Negative control: longer blocks for one row than for several."""
    x, w, _, _ = inputs(rng, N=16)
    logits = functools.partial(project, w=w, out_dtype=jnp.float32)
    long = dataclasses.replace(PLAN, block_k=256, stages=1)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(logits(x[:1], plan=long), logits(x)[:1])


@pytest.mark.parametrize(
    ("shape", "plan", "message"),
    [
        ((100, 128), None, "100 columns are not whole 8s"),
        ((64, 100), None, "100 terms are not whole 64s"),
        ((64, 0), None, "0 terms"),
        (
            (64, 64),
            dataclasses.replace(PLAN, block_n=20),
            "not in blocks of 8 by 64",
        ),
        ((512, 64), dataclasses.replace(PLAN, block_n=512), "256 of an instruction"),
        ((64, 64), dataclasses.replace(PLAN, stages=24), "needs 253952 of 232448"),
        ((64, 128), dataclasses.replace(PLAN, stages=1), "at least 2 stages"),
    ],
)
def test_refusals(shape, plan, message):
    """Fails if weights that are not whole blocks are read past their end."""
    x, w = np.ones((3, shape[1]), "bfloat16"), np.ones(shape, "bfloat16")
    options = {"num_active": np.int32(3), "norm": None, "residual": None, "eps": EPS}
    with pytest.raises(ValueError, match=message):
        gemm.project(x, w, out_dtype=jnp.bfloat16, plan=plan, **options)


def test_a_norm_of_another_width_is_refused():
    """Fails if a norm that is too short is read past its end, a longer one cut."""
    x, w = np.ones((3, 128), "bfloat16"), np.ones((64, 128), "bfloat16")
    options = {"num_active": np.int32(3), "eps": EPS}
    for width in (64, 256):
        norm = np.ones(width, "bfloat16")
        with pytest.raises(ValueError, match=rf"norm has shape \({width},\), not"):
            gemm.gate(x, w, norm=norm, **options)
        with pytest.raises(ValueError, match=rf"norm has shape \({width},\), not"):
            gemm.project(
                x, w, norm=norm, residual=None, out_dtype=jnp.bfloat16, **options
            )


WIDE = [(24_576, 4096, 2), (151_936, 1024, 1), (151_936, 4096, 1), (32_000, 2048, 1)]


@pytest.mark.parametrize(("N", "K", "parts"), [*WIDE, (12_288, 4096, 1)])
def test_a_step_is_loaded_while_another_is_multiplied(N, K, parts):
    """Fails if a program waits for copies that it asks for only later."""
    plan = gemm.plan_for(N, K, parts=parts)
    assert plan.stages >= 3 > gemm.MIN_STAGES
    gemm.check_plan(plan, N, K, parts=parts)


PREFETCHED = (1024, 2048), (6144, 4096, "norm"), (24_576, 4096, "gate")


def three_rows(
    N: int, K: int, kind: str = "plain", *, order: str = "weights first"
) -> hopper.Program:
    """A product; as negative controls those that read in another `order`."""
    kernel = warpgroup.kernel

    def reordered(body, *, prologue=None, **options):
        if prologue is None:  # The norm's.
            return kernel(body, **options)

        def early(*refs):
            prologue(*refs)
            if order == "rows first":
                x, x_blocks, loaded = (refs[place] for place in (0, 4, 6))
                block = x_blocks.at[0, pl.ds(0, 8)]
                rows = x.at[pl.ds(0, 8), pl.ds(0, block.shape[1])]
                plgpu.copy_gmem_to_smem(rows, block, loaded.at[0])

        def late(*refs):
            early(*refs)
            body(*refs)

        late.__name__ = body.__name__
        if order == "nothing first":
            return kernel(late, **options)
        return kernel(body, prologue=early, **options)

    def fn(x, w, num_active, norm):
        how = {"num_active": num_active, "eps": EPS}
        if order == "weights made":
            w = w[:, ::-1]
        with mock.patch.object(warpgroup, "kernel", reordered):
            if kind == "gate":
                return gemm.gate(x, w, norm=norm, **how)
            weight = norm if kind == "norm" else None
            return gemm.project(
                x, w, norm=weight, residual=None, out_dtype=jnp.bfloat16, **how
            )

    shapes = (3, K), (N, K), (), (K,)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bfloat16
    return hopper.Program(fn=fn, args=tuple(map(jax.ShapeDtypeStruct, shapes, dtypes)))


def assert_weights_come_first(report, N, K, kind="plain") -> None:
    """Asserts that the first weights, and no rows, are asked for before the wait."""
    kernel = report.kernel("skinny_gemm_mosaic")
    parts = 2 if kind == "gate" else 1
    plan = gemm.plan_for(N, K, parts=parts)
    stages = min(plan.stages, K // plan.block_k)
    copies = stages * parts
    assert kernel.ahead(*ptxas_log.ACCESSES) == kernel.ahead("UTMALDG") == copies
    # Of eight rows, and of sixteen.
    assert kernel.count("UTMALDG") >= copies + 2 * stages


@pytest.mark.parametrize("product", PREFETCHED)
def test_weights_come_before_what_other_kernels_write(compiler, product):
    """Fails if weights wait for the kernel before, or anything else does not."""
    report = compiler.compile(three_rows, *product)
    report.assert_fits()
    assert_weights_come_first(report, *product)


@pytest.mark.parametrize(
    ("order", "found"), [("nothing first", "0 == 12"), ("rows first", "13 == 12")]
)
def test_another_order_is_caught(compiler, order, found):
    """Negative control: weights that wait too, and rows that do not."""
    report = compiler.compile(three_rows, *PREFETCHED[0], order=order)
    with pytest.raises(AssertionError, match=found):
        assert_weights_come_first(report, *PREFETCHED[0])


def test_weights_that_are_made_are_caught(compiler):
    """Fails if what would be read before it is there is not seen in a program."""
    if jax.__version_info__ < (0, 11):
        pytest.skip(f"jax {jax.__version__} names no kernel in a program: 0.11 does")
    product = 1024, 1024, "norm"
    checks.assert_launched_early(compiler.compile(three_rows, *product))
    # Negative control.
    report = compiler.compile(three_rows, *product, order="weights made")
    with pytest.raises(AssertionError, match="are weights that"):
        checks.assert_launched_early(report)
    checks.assert_launched_early(compiler.compile(read_by_the_microscope))


def read_by_the_microscope(rows: int = 3, width: int = 1024) -> hopper.Program:
    """What a product norms, which on a CPU is its product with an identity."""

    def fn(x, weight, num_active):
        return fused.normed(x, weight, num_active=num_active, eps=EPS, impl="mosaic")

    shapes, dtypes = ((rows, width), (width,), ()), (jnp.bfloat16,) * 2 + (jnp.int32,)
    return hopper.Program(fn=fn, args=tuple(map(jax.ShapeDtypeStruct, shapes, dtypes)))


def logits_program(N: int, K: int, rows: int = 16) -> hopper.Program:
    def fn(x, w, num_active):
        options = {"norm": None, "residual": None, "eps": 0.0}
        return gemm.project(
            x, w, num_active=num_active, out_dtype=jnp.float32, **options
        )

    shapes = jnp.zeros((rows, K), jnp.bfloat16), jnp.zeros((N, K), jnp.bfloat16)
    shapes = jax.eval_shape(lambda: (*shapes, jnp.int32(0)))
    return hopper.Program(fn=fn, args=shapes)


@pytest.mark.parametrize(("shape", "width"), [((24_576, 4096), 128), ((1024, 2048), 8)])
def test_it_compiles_for_the_tensor_cores(compiler, shape, width):
    """Fails if it spills, or the weights do not come by TMA to `wgmma`."""
    report = compiler.compile(logits_program, *shape)
    report.assert_fits()
    kernel = report.kernel("skinny_gemm_mosaic")
    assert kernel.count(f"HGMMA.64x{width}x16.F32.BF16") > 0
    assert kernel.count("UTMALDG.4D") > 0
    assert kernel.count("UTMASTG.2D") > 0
    # What is read otherwise is the number of active rows.
    assert (kernel.count("LDG"), kernel.count("STG", "LDL")) == (1, 0)


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
