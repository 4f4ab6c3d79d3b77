"""Whole steps and rounds of Qwen3-0.6B and 8B, compiled for an H100: no GPU.

The tests check what XLA makes of them: which kernels run, in which order and how many;
that the pages stay where they are; and that XLA itself computes with no float between
two kernels. It may fuse, tile and round its own computations otherwise in another
program or, choosing by timing, in another process. Loops, sampled ones too, batches and
the prefill by rows leave it none of them: every sum is in a kernel of ours.
"""

import itertools
import re

import hopper_checks as checks
import hopper_models as models
import pytest
from slow_cases import slow, slow_but

from spec_jax.pallas import slab


SLOW = pytest.mark.slow
LAYER = (
    "rms_norm",
    "skinny_gemm",
    "paged_attention",
    "skinny_gemm",
    "rms_norm",
    "skinny_gemm_gate",
    "skinny_gemm",
)
"""The kernels of one layer, in order: nothing of XLA's is between them."""

END = ("rms_norm", "skinny_gemm", "argmax_chunks", "argmax_rows")


def ours(thunks, *others: str) -> list[str]:
    """Lists the names of kernels of a layer, of the end, and of others, in order."""
    return [each.base for each in thunks if each.base in (*LAYER, *END, *others)]


def assert_in_graphs(report) -> None:
    """Asserts that our kernels are launched as CUDA graphs."""
    alone = [thunk for thunk in report.launches if not thunk.in_graph]
    assert not ours(alone)
    # The rest is the bookkeeping of loops.
    assert len(alone) <= 8


BIAS = (
    "f32[4608]{0} convert()",
    "f32[16,4608]{1,0} add(, )",
    "bf16[16,4608]{1,0} convert()",
)
"""XLA's work on the bias of queries, keys and values: each sum is rounded once."""


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen3-0.6b", "dense"),
        slow("qwen3-8b", "q8_0"),
        slow("qwen3-8b", "dense"),
        slow("llama-3.1-8b", "dense"),
        slow("qwen2.5-7b", "dense"),
        slow("qwen3-0.6b", "q8_0"),
    ],
)
def test_a_step(compiler, name, weights):
    """Fails if a step spills, copies a pool, or has a launch more than it needs; if a
    family without head norms has other kernels; or if XLA computes more with floats
    than to add a bias to each sum. Tokens are looked up as integers, and a logit is
    only tested for being finite.

    With weights of eight bits, each product's rows are rounded first, and XLA looks up
    a token: its product of an integer and a scale has one rounding."""
    is_bytes, of_xla = weights != "dense", {BIAS} if "qwen2" in name else set()
    report = compiler(models.plain_step, name, layers=1, weights=weights)
    # Seven heads to a key/value head, without norms, spill six registers.
    report.assert_fits(most_spilt=24 if of_xla else 0)
    checks.assert_launched_early(report)
    checks.assert_in_place(report, models.model(name, layers=1))
    assert_in_graphs(report)
    expected = []
    for kernel in (*LAYER, *END):
        is_rounded = is_bytes and kernel.startswith("skinny_gemm")
        expected += ["byte_rows"] * is_rounded + [kernel]
    assert ours(report.launches, "byte_rows") == expected
    if is_bytes:
        (looked_up,) = checks.float_fusions(report.hlo)
        text = " ".join(looked_up)
        assert not re.search(r"\b(add|subtract|divide|dot|reduce)\(", text)
    else:
        assert checks.float_fusions(report.hlo) == of_xla
    # There is no loop: nothing is asked of the host.
    assert not checks.split(report)[1]
    rest = len(report.launches) - len(LAYER) - len(of_xla) - 5 * is_bytes
    what = f"a step of {name}, {weights}, outside of its layers"
    checks.assert_near(rest, 12 if is_bytes else 11, what)
    assert rest <= 12 or is_bytes or not name.startswith("qwen3")


@SLOW
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_a_verification_of_a_tree(compiler, name):
    """Fails if 64 rows at once spill, copy a pool, or take other kernels. Fails if XLA
    computes floats for them."""
    report = compiler(models.verify_tree, name, layers=2)
    report.assert_fits()
    slabs = slab.MOST_ROWS // models.model(name).slab
    checks.assert_in_place(report, models.model(name, layers=2), copies=slabs + 1)
    # Moving the accepted path's keys and values is among them.
    assert sorted(ours(report.launches)) == sorted([*LAYER * 2, *END])
    checks.assert_near(len(report.launches), 37, f"two layers of a tree, {name}")
    assert not checks.float_fusions(report.hlo)


OF_A_LAYER = 7  # launches
DEPTH = {"qwen3-0.6b": 28, "qwen3-8b": 36}
MOST_OF_A_ROUND = {"qwen3-0.6b": 1056, "qwen3-8b": 1112}
"""Launches of a round of gamma 4 with a draft of `models.DRAFT`, or two fewer."""


@SLOW
@pytest.mark.parametrize(
    ("name", "weights"),
    [("qwen3-0.6b", "dense"), ("qwen3-8b", "dense"), ("qwen3-8b", "q8_0")],
)
def test_a_round(compiler, name, weights):
    """Fails if a round is not `gamma` draft steps and one verification, with the
    kernels of a step and as few launches."""
    depth, draft_depth = 2, 3
    how = {"layers": depth, "draft_layers": draft_depth, "weights": weights}
    report = compiler(models.spec_round, name, **how)
    report.assert_fits()
    pair = (name, depth), (models.DRAFT, draft_depth)
    checks.assert_in_place(report, *(models.model(n, layers=d) for n, d in pair))
    assert_in_graphs(report)
    checks.assert_launched_early(report)
    is_bytes = weights != "dense"  # XLA looks up tokens.
    assert len(checks.float_fusions(report.hlo)) == is_bytes
    # There is one loop, of drafts: pages are allocated and freed without one.
    outside, (drafts,) = checks.split(report)
    assert ours(drafts) == [*LAYER * draft_depth, *END]
    assert ours(outside) == [*LAYER * depth, *END]
    # A round of models as deep as they are released; the loop's condition is evaluated
    # once more than its body.
    step, rest = (sum(each.is_launch for each in part) for part in (drafts, outside))
    step += OF_A_LAYER * (DEPTH[models.DRAFT] - draft_depth)
    rest += 1 - is_bytes * (4 * depth + 1)  # Rows are rounded before each product.
    total = rest + OF_A_LAYER * (DEPTH[name] - depth) + models.GAMMA_MAX * step
    most = MOST_OF_A_ROUND[name]
    checks.assert_near(total, most - 2, f"a round of {name}, 4 * {step}")
    assert total <= most


HEAD = (*LAYER[1:], *END[:2])
"""The kernels of a head's row, whose input XLA norms; with features, one more."""


@SLOW
def test_a_round_with_a_head(compiler):
    """Fails if a tree of 32 rows of an EAGLE-3 head of 8B spills, copies a pool, or has
    more launches."""
    report = compiler(models.head_round, "qwen3-8b", layers=4)
    report.assert_fits()
    target, drafts = models.model("qwen3-8b", layers=4), models.head("qwen3-8b").model
    # The logits of all rows, and what the search keeps of a level.
    checks.assert_in_place(report, target, drafts, copies=2 * 2 + 1)
    assert_in_graphs(report)
    outside, loops = checks.split(report)
    # Pairs are taken in, levels are grown, and the path is walked.
    assert list(map(ours, loops)) == [["skinny_gemm", *HEAD], [*HEAD], []]
    for part, stated in zip([*loops, outside], (21, 41, 5, 100), strict=True):
        found = sum(each.is_launch for each in part)
        checks.assert_near(found, stated, "a part of a round of 32 rows")


@SLOW
@pytest.mark.parametrize(("size", "num_blocks"), [(17, 1), (64, 1), (17, 3)])
def test_a_block_of_several_slabs(compiler, size, num_blocks):
    """Fails if a block of more than 16 rows spills, copies a pool, reads the weights
    twice, or XLA computes floats for it."""
    sizes = {"size": size, "num_blocks": num_blocks}
    report = compiler(models.block_step, "qwen3-8b", **sizes)
    report.assert_fits()
    checks.assert_launched_early(report)
    drafter = models.block_head("qwen3-8b", size=size, depth=1)
    copies = -(-size * num_blocks // 16) + 1
    checks.assert_in_place(report, drafter.model, copies=copies, num_slots=num_blocks)
    assert not checks.float_fusions(report.hlo)
    kernels = ours(report.launches)
    # Queries are a separate product of the same normed rows: XLA norms these once.
    assert kernels.count("paged_attention") == 1 and kernels.count("rms_norm") == 3
    assert sum(name.startswith("skinny_gemm") for name in kernels) == 6
    checks.assert_near(len(report.launches), 16, f"{num_blocks} blocks of {size}")


@SLOW
@pytest.mark.parametrize(
    ("kind", "size", "num_slots", "stated"),
    [("dspark", models.BLOCK, 2, 183), ("dspark", 17, 2, 188), ("dflash", 16, 1, 165)],
)
def test_a_round_of_blocks(compiler, kind, size, num_slots, stated):
    """Fails if a round with DSpark, of a batch and scheduled, or DFlash is not one
    program, copies a pool, has more launches, or runs its backbone more than once."""
    how = {"kind": kind, "size": size, "num_slots": num_slots}
    report = compiler(models.block_round, "qwen3-8b", layers=6, **how)
    report.assert_fits()
    target = models.model("qwen3-8b", layers=6)
    drafter = models.block_head("qwen3-8b", kind=kind, size=size)
    # The logits of the target's rows, those of the blocks, and what is chosen from.
    copies = 3 * -(-num_slots * (size + 1) // 16)
    sizes = {"copies": copies, "num_slots": num_slots}
    checks.assert_in_place(report, target, drafter.model, **sizes)
    # Context: the fused features, normed, and keys and values of each layer.
    context, blocks, *others = map(ours, checks.split(report)[1])
    depth = drafter.head.layer.num_layers
    assert context == ["skinny_gemm", "rms_norm", *["skinny_gemm"] * depth]
    # Blocks: layers, whose queries are a separate product, and logits. Then, in a loop
    # of its own over the drafts, the addition of the sequential head to the logits.
    layer = [*LAYER[:2], "skinny_gemm", *LAYER[2:]]
    logits = ["rms_norm", "skinny_gemm"]
    sequential = ["skinny_gemm"] * (kind == "dspark")
    assert blocks == [*layer * depth, *logits, *sequential]
    assert not any(others) and (kind == "dspark" or not others)
    checks.assert_near(len(report.launches), stated, f"a round of {kind} of {size}")


@SLOW
def test_a_copied_pool_is_caught(compiler):
    """Negative control: a state that is not donated."""
    report = compiler(models.plain_step, "qwen3-0.6b", layers=1, donate=())
    with pytest.raises(AssertionError):
        checks.assert_in_place(report, models.model("qwen3-0.6b", layers=1))


PROGRAMS = {
    "rounds, sampled": (
        models.spec_generate, {"draft_layers": 1, "draws": True}, 144),
    "rounds": (models.spec_generate, {"draft_layers": 1}, 57),
    "plain": (models.plain_generate, {}, 20),
    "prefill": (models.prefill, {}, 26),
    "plain, sampled": (models.plain_generate, {"draws": True}, 66),
    "batch": (models.spec_generate, {"draft_layers": 1, "num_slots": 4}, 58),
    "batch, sampled": (
        models.spec_generate, {"draft_layers": 1, "num_slots": 4, "draws": True}, 143),
}  # fmt: skip
"""Programs, options, and the launches that stand in so few layers, those of a loop
once; each further layer has seven more."""

DRAWING = ("sampling_top_k", "sampling_top_p", "sampling_noisy_weights")


def assert_only_kernels_compute(report) -> None:
    """Asserts that XLA does nothing with floats but move them."""
    work = checks.float_work(report.hlo)
    assert not work, f"XLA does {sorted(work)}"


@pytest.mark.parametrize(
    ("name", "model"),
    slow_but(
        list(itertools.product(PROGRAMS, ("qwen3-8b", "qwen3-0.6b"))),
        ("rounds, sampled", "qwen3-8b"),
    ),
)
def test_only_kernels_compute(compiler, name, model):
    """Fails if XLA has a float sum, product, transpose or fusion of its own. Fails if a
    kernel spills, a pool is copied, or launches are not as many as stated. A prefill
    has two layers: the last one only computes keys and values."""
    build, options, launches = PROGRAMS[name]
    layers = 2 if name == "prefill" else 1
    report = compiler(build, model, layers=layers, **options)
    report.assert_fits()
    assert_only_kernels_compute(report)
    pools = [models.model(model, layers=layers)]
    if "draft_layers" in options:
        pools.append(models.model(models.DRAFT, layers=1))
    num_slots = options.get("num_slots", 1)
    # The logits of all slots' rows, and what is drawn from.
    copies = num_slots + ("draws" in options)
    checks.assert_in_place(report, *pools, copies=copies, num_slots=num_slots)
    checks.assert_near(len(report.launches), launches, f"{name} of {model}")
    # Rows run in kernels, and so do draws, in sampled programs only.
    launched = {thunk.base for thunk in report.launches}
    assert {"row_angles", "skinny_gemm", "paged_attention"} <= launched
    assert (set(DRAWING) <= launched) == ("draws" in options)


@SLOW
@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        ("rejection", None),
        ("block", None),
        ("rejection", "2-2-1"),
        ("coupled", "4x4:12"),
    ],
)
def test_other_rules_sum_in_kernels(compiler, rule, tree):
    """Fails if a round of another rule, or of a drawn tree, spills or calls a library,
    or XLA adds floats in an order that it chooses. A coupled tree's noise is that of
    kernels, and XLA computes none of the logarithms of uniforms."""
    report = compiler(
        models.spec_round, "qwen3-0.6b", layers=1, draft_layers=1, draws=True,
        rule=rule, tree=tree,
    )  # fmt: skip
    # From jax 0.11 on the compiler spills eleven registers of a tree's attention, to
    # have three programs on a multiprocessor; with two or four stages it spills none.
    report.assert_fits(most_spilt=44 if tree else 0)
    work = checks.float_work(report.hlo)
    assert not checks.float_sums(report.hlo)
    assert not work & {"dot", "cosine", "sine", "transpose"}
    assert ("log-plus-one" in work) == (rule != "coupled")
    assert checks.called(report.hlo) - {"__gpu$TopK"} == {checks.TRITON}


def test_distributions_sum_in_kernels(compiler):
    """Fails if a kernel spills, or XLA filters or sums floats."""
    report = compiler(models.distribution, 5, impl="triton")
    report.assert_fits()
    assert not checks.float_sums(report.hlo)
    # Negative control: XLA is seen to sum.
    by_xla = compiler(models.distribution, 5, impl="xla")
    assert checks.float_sums(by_xla.hlo)


@SLOW
def test_library_products_are_caught(compiler):
    """Negative control: the prefill that is not by rows."""
    report = compiler(models.prefill, "qwen3-0.6b", layers=1, by_rows=False)
    with pytest.raises(AssertionError, match="'cosine'.*'dot'.*'reduce'.*'sine'"):
        assert_only_kernels_compute(report)
    assert checks.float_fusions(report.hlo)  # `test_a_step` counts these.
