"""The kernels at the shapes of Qwen3-0.6B and 8B, compiled for an H100: no GPU."""

import dataclasses
import itertools
import re
from typing import Any

import hopper
import hopper_checks as checks
import hopper_models as models
import jax
import jax.numpy as jnp
import ptxas_log
import pytest
from ops.row_contract import Product
from slow_cases import slow, slow_but

from spec_jax import compilation
from spec_jax.ops import projection
from spec_jax.pallas import (
    byte_gemm_triton as byte_gemm,
    row_attention_triton,
    skinny_gemm_triton as gemm,
)


ROWS = 16
VOCABULARY = models.VOCABULARY
TERMS_PER_PRODUCT = 16  # of a tensor-core instruction
BYTES_PER_COPY = 16  # of one thread's asynchronous copy to shared memory


HEAD = {"N": VOCABULARY, "out_dtype": "float32"}
ADDED = {"has_norm": False, "has_residual": True}  # The sum is normed.
WEIGHTS = {
    "8B qkv": Product(N=6144, K=4096),
    "8B out": Product(N=4096, K=4096, **ADDED),
    "8B gate": Product(N=24_576, K=4096, is_gate=True),
    "8B down": Product(N=4096, K=12_288, **ADDED),
    "8B head": Product(K=4096, **HEAD),
    "0.6B qkv": Product(N=4096, K=1024),
    "0.6B out": Product(N=1024, K=2048, **ADDED),
    "0.6B gate": Product(N=6144, K=1024, is_gate=True),
    "0.6B down": Product(N=1024, K=3072, **ADDED),
    "0.6B head": Product(K=1024, **HEAD),
}
BYTES = {
    name: dataclasses.replace(WEIGHTS[name], form="q8_0")
    for name in ("8B gate", "8B down", "8B head", "0.6B out")
}
OTHERS = {
    "split": (
        Product(N=1024, K=1024),
        gemm.Plan(block_n=32, block_k=128, splits=4),
    ),
    "odd": (Product(N=77, K=333, has_norm=False), None),
}


def _shape(*shape, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def product(
    weights: Product, rows: int = ROWS, *, plan: gemm.Plan | None = None
) -> hopper.Program:
    """Builds a product or a gate, as `weights` say."""
    N, K = weights.N, weights.K
    w: Any = _shape(N, K)
    if weights.form:
        pairs = -(-K // 64)
        w = _shape(2 * pairs, N, 32, dtype="int8"), _shape(pairs, N, dtype="int32")
    arrays = {"x": _shape(rows, K), "w": w, "num_active": _shape(dtype="int32")}
    arrays["norm"] = _shape(K) if weights.has_norm else None
    call, how = projection.by_kernels, {"plan": plan, "eps": 1e-6}
    if weights.has_residual:
        call, arrays["norm"], arrays["residual"] = gemm.add, _shape(N), _shape(rows, N)
    else:
        how |= {"impl": "triton", "parts": weights.parts}
        how["out_dtype"] = jnp.dtype(weights.out_dtype or weights.dtype)
    return hopper.Program(fn=lambda arrays: call(**arrays, **how), args=(arrays,))


def assert_sums_in_order(kernel: ptxas_log.Kernel) -> None:
    """Asserts that a kernel waits, and releases the next, once, and adds atomically to
    nothing."""
    assert kernel.count("PREEXIT") == kernel.count("ACQBULK") == 1
    assert_no_atomics(kernel)


def assert_no_atomics(kernel: ptxas_log.Kernel) -> None:
    assert not any("ATOM" in line or "RED." in line for line in kernel.sass)


@pytest.mark.parametrize(
    ("name", "rows"),
    [*(slow(x, ROWS) if x[0] == "0" else (x, ROWS) for x in WEIGHTS), ("8B gate", 64)],
)
def test_products_read_their_weights_once(compiler, name, rows):
    """Fails if a kernel spills, does not fit, or copies more than weights and rows; if
    rows past the slab read the weights again, or are not multiplied as a slab is."""
    weights = WEIGHTS[name]
    report = compiler(product, weights, rows=rows)
    report.assert_fits()
    names = [launch.name for launch in report.launches]
    expected = ["skinny_gemm_gate" if weights.is_gate else "skinny_gemm"]
    expected += ["rms_norm"] * weights.has_residual
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
    # (More tiles of `x` may leave room for fewer stages.)
    block_bytes = 2 * (rows + columns) * plan.block_k
    copies = kernel.count("LDGSTS")
    stages, rest = divmod(copies * BYTES_PER_COPY * launch.threads, block_bytes)
    assert not rest and 1 < stages <= plan.num_stages
    assert stages == plan.num_stages or rows > ROWS
    assert sum("LDGSTS" in line and ".128 " in line for line in kernel.sass) == copies
    # Other reads are the number of active rows; and the residual, two bytes a sum, but
    # not where partial sums are stored.
    others = kernel.count("LDG") - 1
    reads_residual = weights.has_residual and plan.splits == 1
    assert 0 < others <= 4 if reads_residual else not others
    assert kernel.count("HMMA.16816.F32.BF16") == kernel.count("HMMA") > 0
    assert kernel.count("LDL") == kernel.count("HGMMA") == 0
    assert_sums_in_order(kernel)


@pytest.mark.parametrize(
    ("rows", "name"),
    slow_but(list(itertools.product((ROWS, 64), BYTES)), (ROWS, "8B gate")),
)
def test_products_of_eight_bits(compiler, name, rows):
    """Fails if a kernel spills, reads anything but weights, rows and scales, splits K,
    or adds a product that was not rounded. A block of 32 is one instruction of integers
    for eight columns."""
    weights = BYTES[name]
    report = compiler(product, weights, rows=rows)
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
    rounding = report.kernel("byte_rows")
    for each in (kernel, rounding):
        assert_sums_in_order(each)
    assert rounding.count("LDG") == 2  # The row, and the number of active rows.


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_and_plans_fit(compiler, name):
    """Fails if a layout, a split or a ragged end spills or cannot be compiled."""
    weights, plan = OTHERS[name]
    report = compiler(product, weights, plan=plan)
    report.assert_fits()
    kernels = [kernel for kernel in report.kernels if "skinny_gemm" in kernel.name]
    assert len(kernels) == (2 if plan else 1)
    for kernel in kernels:
        assert_no_atomics(kernel)


def test_spills_are_reported(compiler):
    """Negative control: twice 16 times 256 sums do not fit one warp's registers."""
    plan = gemm.Plan(block_n=256, block_k=32, chains=2, num_warps=1)
    report = compiler(product, Product(N=256, K=64, has_norm=False), plan=plan)
    with pytest.raises(AssertionError, match="bytes are spilt"):
        report.assert_fits()


def sums(is_exact: bool) -> hopper.Program:
    shape = _shape(8, 1024, dtype="float32")
    return hopper.Program(fn=lambda x: x + 1, args=(shape,), is_exact=is_exact)


def test_nothing_is_chosen_by_timing(compiler):
    """Fails if the options of exact programs do not reach XLA's compiler for a GPU."""
    wanted = {name: str(on).lower() for name, on in compilation.options("gpu").items()}
    for is_exact in (True, False):  # The other way is the negative control.
        told = compiler(sums, is_exact).options
        assert (wanted.items() <= told.items()) == is_exact


ARGMAX = ["argmax_chunks", "argmax_rows"]
# A filter has eight launches for the bits of a logit, top-p five more for those of an
# index, and both a last one.
FILTERS = ["sampling_top_k"] * 9 + ["sampling_top_p"] * 14


@pytest.mark.slow
def test_drawing_is_a_few_launches(compiler):
    """Fails if a row is drawn by other code than five, or a kernel spills or is added.
    XLA's own work moves integers and makes zeros; filters are skipped together."""
    one, five = (compiler(models.drawing, rows) for rows in (1, 5))
    for report in (one, five):
        report.assert_fits()
        names = [thunk.base for thunk in report.launches]
        ours = [name for name in names if name.startswith(("sampling", "argmax"))]
        assert ours == [*ARGMAX, *FILTERS, "sampling_noisy_weights", *ARGMAX]
        assert sum(thunk.kind == "kConditional" for thunk in report.thunks) == 2
        assert all(thunk.in_graph for thunk in report.launches)
        checks.assert_launched_early(report)
        assert len(report.launches) <= len(ours) + 14
        assert not checks.float_work(report.hlo)
    for name in (*sorted(set(FILTERS)), "sampling_noisy_weights"):
        kernel = five.kernel(name)
        assert kernel.sass == one.kernel(name).sass and kernel.count("LDL") == 0
        assert_no_atomics(kernel)


def each_number_of_rows(
    weights: Product, single: gemm.Plan | None = None
) -> hopper.Program:
    """Builds the product of 1, of 2, .. of 16 rows; `single` is a plan for 1 row."""
    programs = [product(weights, rows) for rows in range(1, ROWS + 1)]
    programs[0] = product(weights, 1, plan=single)

    def each_of(*args):
        return [x.fn(*own) for x, own in zip(programs, args, strict=True)]

    return hopper.Program(fn=each_of, args=tuple(x.args for x in programs))


@pytest.mark.parametrize(
    ("name", "single"),
    [
        ("0.6B out", None),
        slow("0.6B gate", None),
        slow("0.6B out", gemm.Plan(block_n=16, block_k=256)),
    ],
)
def test_one_row_and_sixteen_are_one_kernel(compiler, name, single):
    """Fails if the kernel that is compiled depends on the number of rows. XLA keeps one
    copy of equal kernels, before it compiles them. Negative control: a plan of its own
    for one row gives another kernel."""
    report = compiler(each_number_of_rows, WEIGHTS[name], single)
    found = [x.name for x in report.kernels if x.name.startswith("skinny_gemm")]
    assert len(found) == (1 if single is None else 2)
    launched = [x.name for x in report.launches if x.name in found]
    assert len(launched) == ROWS


QWEN3 = {"0.6B": (16, 8, 128), "8B": (32, 8, 128)}  # (N, K, H)


def attention(
    N, K, H, *, page_size=16, context=32_768, dtype="bfloat16", branch=0
) -> hopper.Program:
    """Builds the row attention of one layer and one slot, with donated pools."""
    shape, R = jax.ShapeDtypeStruct, 16
    width = context // page_size
    pool = shape((width + 8, page_size, K, H), dtype)
    inputs = {
        "heads": shape((R, (N + 2 * K) * H), dtype),
        "q_norm": shape((H,), dtype),
        "k_norm": shape((H,), dtype),
        "cos": shape((R, H // 2), dtype),
        "sin": shape((R, H // 2), dtype),
        "page_table": shape((1, width), jnp.int32),
        "slots": shape((R,), jnp.int32),
        "positions": shape((R,), jnp.int32),
        "num_active": shape((), jnp.int32),
    }
    if branch:
        inputs["branch"] = shape((R, branch), jnp.int32)

    def attend(pools, inputs):
        how = {"eps": 1e-6, "scale": H**-0.5}
        k, v = pools
        return row_attention_triton.attend(k_pages=k, v_pages=v, **how, **inputs)

    return hopper.Program(fn=attend, args=((pool, pool), inputs), donate=(0,))


@pytest.mark.parametrize("model", ["8B", slow("0.6B")])
def test_attention_of_qwen3(compiler, model):
    """Fails if a kernel spills, is too large, or runs one block where two would fit.
    Fails if loads do not overlap products, or tensor cores do not multiply."""
    report = compiler(attention, *QWEN3[model])
    report.assert_fits()
    kernel, launch = report.kernel("paged_attention"), report.launch("paged_attention")
    assert launch.shared_bytes <= 80_000
    assert hopper.blocks_per_multiprocessor(kernel, launch) == 2
    # The grid has as many as are resident at once: it does not grow with the context.
    assert launch.grid[0] * launch.grid[1] <= 264
    # Two blocks of keys and two of values in flight, four bytes a lane and 128 lanes.
    assert kernel.count("HMMA.16816.F32.BF16") == 64
    assert kernel.count("LDGSTS") >= 48
    # A job is counted after all of it is stored, and the last program reads none of it
    # from a cache that is older.
    (counted,) = (n for n, line in enumerate(kernel.sass) if "ATOM" in line)
    assert "MEMBAR" in "".join(kernel.sass[counted - 4 : counted])
    assert "CCTL.IVALL" in kernel.sass[counted + 1]
    for name in ("row_jobs", "paged_attention"):
        assert report.kernel(name).count("PREEXIT") == 1


@pytest.mark.parametrize(
    ("heads", "changes"),
    [
        slow((14, 2, 80), {"page_size": 64}),
        ((8, 4, 256), {"dtype": "float32", "context": 4096}),
    ],
)
def test_other_heads(compiler, heads, changes):
    """Fails if the plan of other head sizes, groups and dtypes does not fit."""
    report = compiler(attention, *heads, **changes)
    report.assert_fits()
    kernel, launch = report.kernel("paged_attention"), report.launch("paged_attention")
    # Wide float32 heads take eight warps, of which there is room for one block.
    blocks = 1 if launch.threads > 128 else 2
    assert hopper.blocks_per_multiprocessor(kernel, launch) >= blocks


def test_a_tree_computes_as_a_chain(compiler):
    """Fails if the kernel for trees has other arithmetic than the plain one."""
    arithmetic = []
    for branch in (0, 16):
        report = compiler(attention, *QWEN3["8B"], branch=branch)
        report.assert_fits()
        code = "\n".join(report.kernel("paged_attention").sass)
        opcodes = re.findall(r"\b(?:HMMA|FADD|FMUL|FFMA|MUFU|F2FP|FMNMX)\S*", code)
        arithmetic.append(sorted(opcodes))
    assert arithmetic[0] == arithmetic[1] and len(arithmetic[0]) > 100
