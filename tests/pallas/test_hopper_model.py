"""Whole steps and rounds of Qwen3-0.6B and 8B, compiled for an H100: no GPU.

Shown here is what XLA makes of them: which kernels run, in which order and how many of
them; that the pages stay where they are; and that XLA itself computes with no float
between two kernels.
"""

import dataclasses
import functools
import operator
import re

import hopper
import hopper_launches as checks
import hopper_models as models
import jax
import pytest
import xla_fusions

from spec_jax.drafters import tree_shapes
from spec_jax.engine import protocols


pytestmark = [pytest.mark.slow, pytest.mark.h100]

LAYER = (
    "skinny_gemm",
    "paged_attention",
    "skinny_gemm",
    "skinny_gemm_gate",
    "skinny_gemm",
)
"""The kernels of one layer, in order: nothing of XLA's is between them."""

END = ("skinny_gemm", "argmax_chunks", "argmax_rows")
DEPTH = {"qwen3-0.6b": 28, "qwen3-8b": 36}
LARGEST_FIRST = sorted(DEPTH, reverse=True)
STEP = {"qwen3-0.6b": 150, "qwen3-8b": 190}
ROUND = {"qwen3-0.6b": 769, "qwen3-8b": 809}
"""Launches: of a plain step; of a round of gamma 4 with a draft of `models.DRAFT`."""

MOST_OF_A_STEP = {"qwen3-0.6b": 150, "qwen3-8b": 190}
MOST_OF_A_ROUND = {"qwen3-0.6b": 770, "qwen3-8b": 810}


on_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason='impl="mosaic" is for jax 0.11 on'
)
IMPLS = ["triton", pytest.param("mosaic", marks=on_mosaic)]


@pytest.fixture(scope="module")
def compiled(compiler):
    """Compiles each program once."""
    return functools.cache(compiler.compile)


def ours(thunks) -> list[str]:
    """The names of the kernels of `spec_jax.pallas`, in order."""
    names = [re.sub(r"__\d+$", "", thunk.name) for thunk in thunks]
    return [name for name in names if name in (*LAYER, *END)]


def assert_in_graphs(report) -> None:
    """Asserts that our kernels are launched as CUDA graphs."""
    alone = [thunk for thunk in report.launches if not thunk.in_graph]
    assert not ours(alone)
    # What is left is the bookkeeping of loops.
    assert len(alone) <= 8


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("qwen3-0.6b", 2),
        ("qwen3-8b", 2),
        ("qwen3-0.6b", DEPTH["qwen3-0.6b"]),
    ],
)
def test_a_plain_step(compiled, name, depth):
    """Fails if a step spills, copies a pool, or has a launch more than it needs."""
    report = compiled(models.plain_step, name, layers=depth)
    report.assert_fits()
    checks.assert_launched_early(report)
    checks.assert_in_place(report, models.model(name, layers=depth))
    assert_in_graphs(report)
    assert ours(report.launches) == [*LAYER * depth, *END]
    # Without a loop: nothing is asked of the host.
    total = checks.launches(report)
    fixed = total - len(LAYER) * depth
    whole = fixed + len(LAYER) * DEPTH[name]
    checks.assert_near(whole, STEP[name], f"a plain step of {name}")
    assert whole <= MOST_OF_A_STEP[name]


def test_the_function_of_a_layer_is_compiled_away(compiled):
    """Fails if layers that are lowered once launch other kernels, or in other order."""
    reports = [
        compiled(build, "qwen3-0.6b", layers=2)
        for build in (models.plain_step, models.unrolled_step)
    ]
    one, other = ([dataclasses.replace(t, name="") for t in r.thunks] for r in reports)
    assert one == other
    one, other = (ours(report.launches) for report in reports)
    assert one == other
    sizes = operator.attrgetter("registers", "threads", "static_shared_bytes")
    one, other = (sorted(map(sizes, report.kernels)) for report in reports)
    assert one == other
    assert reports[0].temp_bytes == reports[1].temp_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DEPTH)
def test_a_verification(compiled, name):
    """Fails if verification has other kernels than plain decoding, or copies."""
    report = compiled(models.verify_step, name, layers=2)
    report.assert_fits()
    checks.assert_in_place(report, models.model(name, layers=2))
    assert_in_graphs(report)
    assert ours(report.launches) == [*LAYER * 2, *END]
    fixed = checks.launches(report) - len(LAYER) * 2
    whole = fixed + len(LAYER) * DEPTH[name]
    checks.assert_near(whole, STEP[name], f"a verification of {name}")
    assert whole <= MOST_OF_A_STEP[name]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DEPTH)
def test_a_verification_of_a_tree(compiled, name):
    """Fails if 64 rows at once spill, copy a pool, or take other kernels.

    Fails if XLA computes floats for them.
    """
    report = compiled(models.verify_tree, name, layers=2)
    report.assert_fits()
    slabs = protocols.MAX_TREE_ROWS // models.model(name).slab
    checks.assert_in_place(report, models.model(name, layers=2), copies=slabs + 1)
    # Moving the accepted path's keys and values is among them.
    assert set(ours(report.launches)) == {*LAYER, *END}
    assert len(ours(report.launches)) == 2 * len(LAYER) + len(END)
    checks.assert_near(checks.launches(report), 32, f"two layers of a tree, {name}")
    assert not xla_fusions.float_kernels(report)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LARGEST_FIRST)
def test_a_round(compiled, name):
    """Fails if a round is not `gamma` draft steps and one verification."""
    depth, draft_depth = 2, 3
    report = compiled(models.spec_round, name, layers=depth, draft_layers=draft_depth)
    report.assert_fits()
    target = models.model(name, layers=depth)
    checks.assert_in_place(
        report, target, models.model(models.DRAFT, layers=draft_depth)
    )
    assert_in_graphs(report)
    tree = checks.nested(report.thunks)
    loops = [number for number, (thunk, _) in enumerate(tree) if thunk.kind == "kWhile"]
    # One loop, of drafts: pages change hands at once.
    (drafts,) = loops
    assert ours(checks.flat(tree[drafts : drafts + 1])) == [*LAYER * draft_depth, *END]
    assert ours(checks.flat(tree[drafts + 1 :])) == [*LAYER * depth, *END]
    assert_few_launches(report, name, depth, draft_depth)


def assert_few_launches(report, name, depth, draft_depth) -> None:
    """Asserts what a round launches of models as deep as they are released."""
    gamma = models.GAMMA_MAX
    without, once = (checks.launches(report, times) for times in (0, 1))
    step = once - without + len(LAYER) * (DEPTH[models.DRAFT] - draft_depth)
    rest = without + len(LAYER) * (DEPTH[name] - depth)
    total = rest + gamma * step
    checks.assert_near(total, ROUND[name], f"a round of {name}, {gamma} * {step}")
    assert total <= MOST_OF_A_ROUND[name]


HEAD = (*LAYER, *END[:1])
"""The kernels of a row of a head, whose input XLA norms; of its features, one more."""


def test_a_head_step(compiled):
    """Fails if a head at 8B's shapes spills, copies its pool, or has more launches."""
    report = compiled(models.head_step, "qwen3-8b")
    report.assert_fits()
    checks.assert_in_place(report, models.head("qwen3-8b").model)
    assert_in_graphs(report)
    assert ours(report.launches) == [*HEAD]
    total = checks.launches(report)
    checks.assert_near(total, 12, "a head's step")


@pytest.mark.rest
def test_a_round_with_a_head(compiled):
    """Fails if a tree of 32 rows of an EAGLE-3 head of 8B copies a pool."""
    report = compiled(models.head_round, "qwen3-8b", layers=4)
    report.assert_fits()
    target, drafts = models.model("qwen3-8b", layers=4), models.head("qwen3-8b").model
    # The logits of all rows, and what the search keeps of a level.
    checks.assert_in_place(report, target, drafts, copies=2 * 2 + 1)
    tree = checks.nested(report.thunks)
    loops = [ours(checks.flat([each])) for each in tree if each[0].kind == "kWhile"]
    # Pairs are taken in, levels are grown, and the path is walked.
    assert loops == [["skinny_gemm", *HEAD], [*HEAD], []]
    rest = checks.launches(report, 0, 0, 0)
    once = [[int(at == loop) for at in range(3)] for loop in range(3)]
    turn = [checks.launches(report, *turns) - rest for turns in once]
    depth = tree_shapes.parse(models.TREE).depth
    turns = 1, depth - 1, depth
    total = checks.launches(report, *turns)
    print(f"{total} launches of a round of 32 rows: {turns} * {turn} + {rest}")
    for found, known in zip([*turn, rest], (19, 39, 5, 94), strict=True):
        checks.assert_near(found, known, "a part of it")


@pytest.mark.rest
@pytest.mark.parametrize("impl", IMPLS)
def test_a_head_of_several_slots(compiled, impl):
    """Fails if more rows of a head than a slab, those of four trees, spill or copy.

    Of a level they are two slabs, and of the target two tiles of 64.
    """
    num_slots, how = 4, {"layers": 4, "impl": impl}
    report = compiled(models.head_round, "qwen3-8b", num_slots=num_slots, **how)
    report.assert_fits()
    target, head = models.model("qwen3-8b", **how), models.head("qwen3-8b", impl=impl)
    # The logits of all rows, and what the search keeps of a level.
    copies = 2 * 2 * num_slots + 4
    checks.assert_in_place(
        report, target, head.model, copies=copies, num_slots=num_slots
    )
    assert not xla_fusions.float_work(report.hlo) & {"dot", "cosine", "sine"}
    stated = {"triton": 235, "mosaic": 244}[impl]
    checks.assert_near(len(report.launches), stated, f"trees of four slots, {impl}")


@pytest.mark.few(2)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("size", "num_blocks"), [(17, 1), (64, 1), (17, 3)])
def test_a_block_of_several_slabs(compiled, size, num_blocks, impl):
    """Fails if a block of more than 16 rows spills, copies a pool, reads the weights
    twice, or XLA computes floats for it."""
    report = compiled(
        models.block_step, "qwen3-8b", size=size, num_blocks=num_blocks, impl=impl
    )
    report.assert_fits()
    checks.assert_launched_early(report)
    drafter = models.block_head("qwen3-8b", size=size, depth=1, impl=impl)
    slabs = -(-size * num_blocks // 16)
    checks.assert_in_place(
        report, drafter.model, copies=slabs + 1, num_slots=num_blocks
    )
    assert not xla_fusions.float_kernels(report)
    if impl == "mosaic":
        assert xla_fusions.called(report.hlo) == {xla_fusions.MOSAIC}
        kernels = xla_fusions.mosaic_kernels(report.hlo)
    else:
        kernels = [re.sub(r"__\d+$", "", each.name) for each in report.launches]
    # Queries are a product apart, and the last norm is a kernel.
    products = sum(kernels.count(name) for name in {*LAYER} - {"paged_attention"})
    assert (kernels.count("paged_attention"), products) == (1, 6)
    assert kernels.count("rms_norm") == (1 if impl == "triton" else 4)
    what = f"{num_blocks} blocks of {size} on {impl}"
    checks.assert_near(checks.launches(report), 17 if impl == "mosaic" else 14, what)


@pytest.mark.rest
@pytest.mark.parametrize("size", [models.BLOCK, 17])
def test_a_scheduled_round_of_blocks(compiled, size):
    """Fails if a batch's round with DSpark at 8B's shapes is not one program, or copies
    a pool, or runs its backbone more than once."""
    num_slots, layers = 2, 6
    report = compiled(
        models.scheduled_round,
        "qwen3-8b",
        layers=layers,
        num_slots=num_slots,
        size=size,
    )
    report.assert_fits()
    target = models.model("qwen3-8b", layers=layers)
    drafter = models.block_head("qwen3-8b", size=size)
    # The logits of the target's rows, those of the blocks, and what is chosen from.
    slabs = -(-num_slots * (size + 1) // 16)
    copies = 3 * slabs
    checks.assert_in_place(
        report, target, drafter.model, copies=copies, num_slots=num_slots
    )
    tree = checks.nested(report.thunks)
    loops = [ours(checks.flat([each])) for each in tree if each[0].kind == "kWhile"]
    # Context: the fused features, and keys and values of each layer.
    context, blocks, *bookkeeping = loops
    depth = drafter.head.layer.num_layers
    assert context == ["skinny_gemm"] * (1 + depth)
    # Of each slot: its block, whose queries are a product apart, and its logits. And
    # what the sequential head adds to those, in a loop of its own over the drafts.
    head = ["skinny_gemm"]
    assert blocks == [*("skinny_gemm", *LAYER) * depth, "skinny_gemm", *head]
    assert not any(bookkeeping)
    stated = {models.BLOCK: 214, 17: 220}[size]
    checks.assert_near(len(report.launches), stated, f"two blocks of {size}")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DEPTH)
def test_xla_computes_no_float(compiled, name):
    """Fails if a float is computed outside our kernels, or angles by another code.

    Tokens are looked up as integers, and a logit is looked at to see whether it is
    finite.
    """
    reports = (
        compiled(models.plain_step, name, layers=2),
        compiled(models.verify_step, name, layers=2),
        compiled(models.spec_round, name, layers=2, draft_layers=3),
    )
    assert not any(map(xla_fusions.float_kernels, reports))
    assert len({report.kernel("row_angles").sass for report in reports}) == 1


MOSAIC_LAYER = ("skinny_gemm", "paged_attention", *["skinny_gemm"] * 3)
MOSAIC_END = ("skinny_gemm", "argmax_chunks", "argmax_rows")


@on_mosaic
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "build", "layers"),
    [
        ("qwen3-0.6b", models.plain_step, 2),
        ("qwen3-8b", models.plain_step, 2),
        ("qwen3-8b", models.verify_tree, 1),
        ("qwen3-0.6b", models.verify_step, 1),
        ("qwen3-8b", models.verify_step, 2),
    ],
)
def test_mosaic(compiled, name, build, layers):
    """Fails if a kernel of Triton is left, one spills, or a pool is copied.

    Fails if XLA computes with floats, or a launch is added.
    """
    report = compiled(build, name, layers=layers, impl="mosaic")
    report.assert_fits()
    checks.assert_launched_early(report)
    assert xla_fusions.called(report.hlo) == {xla_fusions.MOSAIC}
    assert not xla_fusions.float_kernels(report)
    is_tree = build is models.verify_tree
    slabs = protocols.MAX_TREE_ROWS // 16 if is_tree else 1
    target = models.model(name, layers=layers, impl="mosaic")
    checks.assert_in_place(report, target, copies=slabs + is_tree)
    assert not any(
        each.kind == "kCustomCall" and not each.in_graph for each in report.launches
    )
    expected = ["append_each", "list_jobs", "row_angles"]
    expected += [*MOSAIC_LAYER * layers, *MOSAIC_END]
    expected += ["truncate_each"] * (build is not models.plain_step)
    # Of more rows than a slab each norm is a kernel.
    expected += ["rms_norm"] * is_tree * (2 * layers + 1)
    assert sorted(xla_fusions.mosaic_kernels(report.hlo)) == sorted(expected)
    ours = sum(each.kind == "kCustomCall" for each in report.launches)
    assert ours == len(expected)
    total = checks.launches(report)
    whole = total + len(MOSAIC_LAYER) * (DEPTH[name] - layers)
    if is_tree:
        checks.assert_near(total, 31, f"a layer of a tree, {name} on mosaic")
    else:
        checks.assert_near(whole, STEP[name], f"a step of {name} on mosaic")
        assert whole <= MOST_OF_A_STEP[name]


@on_mosaic
@pytest.mark.rest
def test_a_head_step_on_mosaic(compiled):
    """Fails if a head at 8B's shapes has a kernel of Triton or a launch more."""
    report = compiled(models.head_step, "qwen3-8b", impl="mosaic")
    report.assert_fits()
    checks.assert_launched_early(report)
    assert xla_fusions.called(report.hlo) == {xla_fusions.MOSAIC}
    checks.assert_in_place(report, models.head("qwen3-8b", impl="mosaic").model)
    expected = ["list_jobs", "row_angles", *MOSAIC_LAYER, "skinny_gemm"]
    assert sorted(xla_fusions.mosaic_kernels(report.hlo)) == sorted(expected)
    checks.assert_near(checks.launches(report), 12, "a head's step on mosaic")


@on_mosaic
@pytest.mark.rest
@pytest.mark.parametrize(
    ("build", "options", "norms", "stated", "copies"),
    [
        # The norms of a tree's 32 rows, of four layers and the end.
        (models.head_round, {"layers": 4}, 2 * 4 + 1, 175, 2 * 2 + 1),
        # The last one of the blocks.
        (models.scheduled_round, {"layers": 6, "num_slots": 2}, 1, 219, 3),
    ],
)
def test_rounds_with_heads_on_mosaic(compiled, build, options, norms, stated, copies):
    """Fails if a round with EAGLE-3's or DSpark's head at 8B's shapes has a kernel of
    Triton, spills, copies a pool, or norms in more kernels than it must."""
    report = compiled(build, "qwen3-8b", impl="mosaic", **options)
    report.assert_fits()
    checks.assert_launched_early(report)
    # The search of a tree's best is XLA's: drafts may be any.
    called = xla_fusions.called(report.hlo) - {"__gpu$TopK"}
    assert called == {xla_fusions.MOSAIC}
    kernels = xla_fusions.mosaic_kernels(report.hlo)
    assert {*MOSAIC_LAYER, *MOSAIC_END} <= set(kernels)
    assert kernels.count("rms_norm") == norms
    own = models.model("qwen3-8b", layers=options["layers"], impl="mosaic")
    head = models.head if build is models.head_round else models.block_head
    drafts, num_slots = head("qwen3-8b", impl="mosaic"), options.get("num_slots", 1)
    checks.assert_in_place(
        report, own, drafts.model, copies=copies, num_slots=num_slots
    )
    checks.assert_near(len(report.launches), stated, build.__name__)


@on_mosaic
@pytest.mark.few(1)
@pytest.mark.parametrize("name", LARGEST_FIRST)
def test_a_round_on_mosaic(compiled, name):
    """Fails if a kernel of Triton is left in a round, or a launch is added."""
    depth, draft_depth = 1, 2
    report = compiled(
        models.spec_round, name, layers=depth, draft_layers=draft_depth, impl="mosaic"
    )
    report.assert_fits()
    checks.assert_launched_early(report)
    assert xla_fusions.called(report.hlo) == {xla_fusions.MOSAIC}
    assert not xla_fusions.float_kernels(report)
    own = models.model(name, layers=depth, impl="mosaic")
    draft = models.model(models.DRAFT, layers=draft_depth, impl="mosaic")
    checks.assert_in_place(report, own, draft)
    assert_few_launches(report, name, depth, draft_depth)


@on_mosaic
def test_drawing_on_mosaic(compiled):
    """Fails if draws have a kernel of Triton, one spills, or XLA has floats."""
    report = compiled(models.drawing, 5, impl="mosaic")
    report.assert_fits()
    checks.assert_launched_early(report)
    assert xla_fusions.called(report.hlo) == {xla_fusions.MOSAIC}
    assert not xla_fusions.float_work(report.hlo)
    drawing = {"sampling_top_k", "sampling_top_p", "sampling_noisy_weights"}
    assert drawing <= set(xla_fusions.mosaic_kernels(report.hlo))


@on_mosaic
def test_whoever_is_last_reads_what_others_stored(compiled):
    """Fails if the splits of a row may come from a cache that is not told of others."""
    report = compiled(models.plain_step, "qwen3-0.6b", layers=2, impl="mosaic")
    sass = "\n".join(report.kernel("paged_attention").sass)
    assert sass.count("ATOMG.E.INC.STRONG.GPU") == 1
    assert "CCTL.IVALL" in sass.partition("ATOMG")[2]
    assert not re.search(r"LDG\S*\.CONSTANT", sass)


@on_mosaic
def test_triton_in_a_mosaic_program_is_caught(compiled):
    """Negative control: a choice by Triton's kernels beside one by Mosaic's."""
    report = compiled(models.choices, "mosaic", "triton")
    both = {xla_fusions.MOSAIC, xla_fusions.TRITON}
    assert xla_fusions.called(report.hlo) == both


def test_a_float_between_kernels_is_caught(compiled):
    """Negative control: logits that are scaled by XLA before the choice."""
    report = compiled(models.scaled_step, "qwen3-0.6b", layers=1)
    ((operations, code),) = xla_fusions.float_kernels(report).items()
    assert "multiply" in str(operations) and len(code) == 1


def test_other_arithmetic_is_caught():
    """Negative control of the comparison itself."""
    one, other = ({("add",): {("RET ;", f"{name} R0 ;")}} for name in ("FADD", "FFMA"))
    moved = {("add",): {("LDG.E.CONSTANT R0 ;", "@P0 FADD R1 ;", "RET ;")}}
    xla_fusions.assert_same_arithmetic(one, moved)
    with pytest.raises(AssertionError):
        xla_fusions.assert_same_arithmetic(one, other)


def test_other_numbers_of_launches_are_caught():
    """Negative control: six more than stated, and six fewer."""
    checks.assert_near(155, 150, "a step")
    for found in (156, 144):
        with pytest.raises(AssertionError, match=f"{found} launches, not 150"):
            checks.assert_near(found, 150, "a step")


def test_a_copied_pool_is_caught(compiled):
    """Negative control: a state that is not donated."""
    report = compiled(models.plain_step, "qwen3-0.6b", layers=1, donate=())
    with pytest.raises(AssertionError):
        checks.assert_in_place(report, models.model("qwen3-0.6b", layers=1))


@pytest.mark.rest
def test_a_round_is_one_graph_where_loops_may_be(monkeypatch):
    """Fails if something in a round cannot be part of a CUDA graph.

    Loops are not captured by default: the host asks each time whether to go on.
    """
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=+WHILE")
    with hopper.Compiler() as compiler:
        report = compiler.compile(
            models.spec_round, "qwen3-0.6b", layers=1, draft_layers=1
        )
    outside = [thunk.kind for thunk in report.thunks if not thunk.in_graph]
    assert outside == ["kCommandBuffer"]
