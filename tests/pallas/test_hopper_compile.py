"""The kernels at the shapes of Qwen3-0.6B and 8B, compiled for an H100: no GPU."""

import dataclasses
import re
from typing import Any

import hopper
import hopper_models as models
import jax
import jax.numpy as jnp
import ptxas_log
import pytest
import xla_fusions
from slow_cases import slow

from spec_jax.pallas import byte_gemm_triton as byte_gemm, skinny_gemm_triton as gemm


ROWS = 16
VOCABULARY = models.VOCABULARY
TERMS_PER_PRODUCT = 16  # of a tensor-core instruction
BYTES_PER_COPY = 16  # of one thread's asynchronous copy to shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """One matrix of the row path: `N` rows of `K`, and what is done with its sums."""

    N: int
    K: int
    is_gate: bool = False
    has_norm: bool = False
    has_residual: bool = False
    out_dtype: str = "bfloat16"
    plan: gemm.Plan | None = None
    form: str | None = None

    @property
    def parts(self) -> int:
        return 2 if self.is_gate else 1

    @property
    def is_added(self) -> bool:
        """Whether its result is added to the residual, and the sum is normed."""
        return self.has_residual and not self.has_norm


GATE = {"is_gate": True, "has_norm": True}
HEAD = {"N": VOCABULARY, "has_norm": True, "out_dtype": "float32"}
WEIGHTS = {
    "8B qkv": Weights(N=6144, K=4096, has_norm=True),
    "8B out": Weights(N=4096, K=4096, has_residual=True),
    "8B gate": Weights(N=24_576, K=4096, **GATE),
    "8B down": Weights(N=4096, K=12_288, has_residual=True),
    "8B head": Weights(K=4096, **HEAD),
    "0.6B qkv": Weights(N=4096, K=1024, has_norm=True),
    "0.6B out": Weights(N=1024, K=2048, has_residual=True),
    "0.6B gate": Weights(N=6144, K=1024, **GATE),
    "0.6B down": Weights(N=1024, K=3072, has_residual=True),
    "0.6B head": Weights(K=1024, **HEAD),
}

SPLIT = gemm.Plan(block_n=32, block_k=128, splits=4)

OTHERS = {
    "split gate": Weights(N=6144, K=1024, plan=SPLIT, **GATE),
    "odd": Weights(N=77, K=333),
}


BYTES = {
    name: dataclasses.replace(WEIGHTS[name], form="q8_0")
    for name in ("8B gate", "8B down", "8B head", "0.6B out")
}


def _shape(*shape, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def product(weights: Weights, rows: int = ROWS) -> hopper.Program:
    """Builds a product or a gate, as `weights` say."""
    N, K = weights.N, weights.K
    w: Any = _shape(N, K)
    if weights.form:
        pairs = -(-K // 64)
        w = _shape(2 * pairs, N, 32, dtype="int8"), _shape(pairs, N, dtype="int32")
    shapes = _shape(rows, K), w, _shape(dtype="int32")
    options = {"plan": weights.plan, "eps": 1e-6}

    def gate(x, w, num_active, norm):
        return gemm.gate(x, w, num_active=num_active, norm=norm, **options)

    def project(x, w, num_active, *others):
        others = list(others)
        given = {
            "norm": others.pop(0) if weights.has_norm else None,
            "residual": others.pop(0) if weights.has_residual else None,
        }
        how = {"num_active": num_active, "out_dtype": jnp.dtype(weights.out_dtype)}
        return gemm.project(x, w, **given, **how, **options)

    def add(x, w, num_active, residual, norm):
        return gemm.add(x, w, residual, norm, num_active=num_active, **options)

    norm = (_shape(K),) if weights.has_norm else ()
    added = (_shape(rows, N),) if weights.has_residual else ()
    if weights.is_added:
        return hopper.Program(fn=add, args=(*shapes, *added, _shape(N)))
    fn = gate if weights.is_gate else project
    return hopper.Program(fn=fn, args=(*shapes, *norm, *added))


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x[0] == "0" else ()) for x in WEIGHTS],
)
def test_products_read_their_weights_once(compiler, name):
    """Fails if a kernel spills, does not fit, or copies more than weights and rows."""
    weights = WEIGHTS[name]
    report = compiler.compile(product, weights)
    report.assert_fits()
    names = [launch.name for launch in report.launches]
    expected = ["skinny_gemm_gate" if weights.is_gate else "skinny_gemm"]
    expected += ["rms_norm"] * weights.is_added
    assert names == ["rms_norm"] * weights.has_norm + expected
    kernel, launch = report.kernel("skinny_gemm"), report.launch("skinny_gemm")

    # Every program has its own columns, and there are no more programs than that.
    plan = gemm.plan_for(weights.N, weights.K, parts=weights.parts)
    columns = weights.parts * plan.block_n
    assert launch.grid == (1, weights.N // columns, plan.splits)
    assert weights.N % columns == weights.K % plan.block_k == 0
    # Instructions on one sum wait for each other: a program of few columns has few.
    terms = weights.K // plan.splits // plan.chains
    assert columns > 16 or terms // TERMS_PER_PRODUCT <= 32
    # The code holds the copies of one block of K per stage: before the loop, and one
    # in it. Each is that block's bytes and not one more, straight to shared memory.
    block_bytes = 2 * (ROWS + columns) * plan.block_k
    copies = plan.num_stages * block_bytes // (BYTES_PER_COPY * launch.threads)
    assert kernel.count("LDGSTS") == copies
    assert sum("LDGSTS" in line and ".128 " in line for line in kernel.sass) == copies
    # Other reads are the number of active rows; and the residual, two bytes a sum, but
    # not where partial sums are stored.
    others = kernel.count("LDG") - 1
    reads_residual = weights.has_residual and plan.splits == 1
    assert 0 < others <= 4 if reads_residual else not others
    assert kernel.count("PREEXIT") == kernel.count("ACQBULK") == 1
    assert kernel.count("HMMA") > 0 and kernel.count("LDL") == 0
    assert not any("ATOM" in line or "RED." in line for line in kernel.sass)


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        pytest.param(
            rows, name, marks=[pytest.mark.slow] * ((rows, name) != (ROWS, "8B gate"))
        )
        for rows in (ROWS, 64)
        for name in BYTES
    ],
)
def test_products_of_eight_bits(compiler, name, rows):
    """Fails if a kernel spills, reads anything but weights, rows and scales, splits K,
    or adds a product that was not rounded.

    A block of 32 is one instruction of integers for eight columns.
    """
    weights = BYTES[name]
    report = compiler.compile(product, weights, rows=rows)
    report.assert_fits()
    kernel, launch = report.kernel("skinny_gemm"), report.launch("skinny_gemm")
    parts = weights.parts
    plan = gemm.plan_for(weights.N, weights.K, parts=parts)
    plan = byte_gemm.plan_for(plan, parts=parts)
    columns = parts * plan.block_n
    assert launch.grid == (1, -(-weights.N // columns), 1)
    # In each stage, every block of each part and of each tile has one copy.
    tiles = rows // ROWS
    blocks = 2 * max(plan.block_k // 64 // tiles, 1)
    # Triton gives turns of four blocks and four tiles three stages at most.
    stages = min(plan.num_stages, 3) if blocks == tiles == 4 else plan.num_stages
    assert kernel.count("LDGSTS") == stages * blocks * (parts + tiles)
    assert kernel.count("FADD") >= blocks * rows * columns // launch.threads
    assert kernel.count("FFMA") == 0 or weights.is_gate
    assert kernel.count("IMMA.16832.S8.S8") == kernel.count("IMMA") > 0
    assert kernel.count("PREEXIT") == kernel.count("ACQBULK") == 1
    assert not any("ATOM" in line or "RED." in line for line in kernel.sass)
    rounding = report.kernel("byte_rows")
    assert rounding.count("PREEXIT") == rounding.count("ACQBULK") == 1
    assert rounding.count("LDG") == 2  # The row, and the number of active rows.


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_and_plans_fit(compiler, name):
    """Fails if a layout, a split or a ragged end spills or cannot be compiled."""
    report = compiler.compile(product, OTHERS[name])
    report.assert_fits()
    kernels = [kernel for kernel in report.kernels if "skinny_gemm" in kernel.name]
    assert len(kernels) == (2 if OTHERS[name].plan else 1)
    for kernel in kernels:
        assert not any("ATOM" in line or "RED." in line for line in kernel.sass)


ARGMAX = ["argmax_chunks", "argmax_rows"]
# A filter has eight launches for the bits of a logit, top-p five more for those of an
# index, and both a last one.
FILTERS = ["sampling_top_k"] * 9 + ["sampling_top_p"] * 14


@pytest.mark.slow
def test_drawing_is_a_few_launches(compiler):
    """Fails if a row is drawn by other code than five, or a kernel spills or is added.

    XLA's own work moves integers and makes zeros; filters are skipped together.
    """
    one, five = (compiler.compile(models.drawing, rows) for rows in (1, 5))
    for report in (one, five):
        report.assert_fits()
        ours = [re.sub(r"__\d+$", "", thunk.name) for thunk in report.launches]
        ours = [name for name in ours if name.startswith(("sampling", "argmax"))]
        assert ours == [*ARGMAX, *FILTERS, "sampling_noisy_weights", *ARGMAX]
        assert sum(thunk.kind == "kConditional" for thunk in report.thunks) == 2
        assert all(thunk.in_graph for thunk in report.launches)
        # No kernel reads anything before it waits, and each releases the next one.
        kernels = [each for each in report.kernels if each.is_ours]
        assert {re.sub(r"__\d+$", "", each.name) for each in kernels} == set(ours)
        assert not sum(each.ahead(*ptxas_log.ACCESSES) for each in kernels)
        assert len(report.launches) <= len(ours) + 14
        assert not xla_fusions.float_work(report.hlo)
    for name in (*sorted(set(FILTERS)), "sampling_noisy_weights"):
        kernel = five.kernel(name)
        assert kernel.sass == one.kernel(name).sass
        assert not any("ATOM" in line or "RED." in line for line in kernel.sass)
        assert kernel.count("LDL") == 0


def each_number_of_rows(
    weights: Weights, single: gemm.Plan | None = None
) -> hopper.Program:
    """Builds the product of 1, of 2, .. of 16 rows; `single` is a plan for 1 row."""
    programs = [product(weights, rows) for rows in range(1, ROWS + 1)]
    programs[0] = product(dataclasses.replace(weights, plan=single), 1)
    return hopper.Program(
        fn=lambda *args: [
            program.fn(*each) for program, each in zip(programs, args, strict=True)
        ],
        args=tuple(program.args for program in programs),
    )


def assert_one_kernel(report: hopper.Report, name: str) -> None:
    """Asserts that one kernel is launched for every number of rows.

    XLA keeps one copy of equal kernels, before it compiles them.
    """
    kernels = [kernel.name for kernel in report.kernels if name in kernel.name]
    assert kernels == [name]
    launches = [launch.name for launch in report.launches if name in launch.name]
    assert launches == [name] * ROWS


@pytest.mark.parametrize("is_gate", [False, slow(True)])
def test_one_row_and_sixteen_are_one_kernel(compiler, is_gate):
    """Fails if the kernel that is compiled depends on the number of rows."""
    weights = WEIGHTS["0.6B gate" if is_gate else "0.6B out"]
    report = compiler.compile(each_number_of_rows, weights)
    assert_one_kernel(report, "skinny_gemm_gate" if is_gate else "skinny_gemm")


@pytest.mark.slow
def test_a_plan_by_the_number_of_rows_is_caught(compiler):
    """Negative control: a plan of its own for one row gives another kernel."""
    single = gemm.Plan(block_n=16, block_k=256)
    report = compiler.compile(each_number_of_rows, WEIGHTS["0.6B out"], single)
    with pytest.raises(AssertionError, match="skinny_gemm__1"):
        assert_one_kernel(report, "skinny_gemm")


def test_more_tiles_share_one_read_of_the_weights(compiler, rows=64):
    """Fails if rows past the slab spill, do not fit, or read the weights again."""
    weights = WEIGHTS["8B gate"]
    report = compiler.compile(product, weights, rows=rows)
    report.assert_fits()
    kernel, launch = report.kernel("skinny_gemm"), report.launch("skinny_gemm")
    plan = gemm.plan_for(weights.N, weights.K, parts=weights.parts)
    columns = weights.parts * plan.block_n
    assert launch.grid == (1, weights.N // columns, plan.splits)
    # Copies are those of a slab, and of the other tiles of `x`.
    copied = kernel.count("LDGSTS") * BYTES_PER_COPY * launch.threads
    assert copied % (2 * (rows + columns) * plan.block_k) == 0
    # The instructions are those of a tile of 16 rows.
    assert kernel.count("HMMA.16816.F32.BF16") == kernel.count("HMMA") > 0
    assert not kernel.count("HGMMA")
