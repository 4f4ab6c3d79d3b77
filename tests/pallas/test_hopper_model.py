"""Whole steps and rounds of Qwen3-0.6B and 8B, compiled for an H100: no GPU.

The tests check what XLA makes of them: which kernels run, in which order and how many;
that the pages stay where they are; and that XLA itself computes with no float between
two kernels.
"""

import re

import hopper_launches as checks
import hopper_models as models
import pytest
import xla_fusions

from spec_jax.drafters import tree_shapes
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
    names = [re.sub(r"__\d+$", "", thunk.name) for thunk in thunks]
    return [name for name in names if name in (*LAYER, *END, *others)]


def loops(report) -> list[list[str]]:
    """Lists the names of our kernels in each loop."""
    tree = checks.nested(report.thunks)
    return [ours(checks.flat([each])) for each in tree if each[0].kind == "kWhile"]


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
    ("build", "name", "weights"),
    [
        (models.plain_step, "qwen3-0.6b", "dense"),
        pytest.param(models.plain_step, "qwen3-8b", "q8_0", marks=SLOW),
        pytest.param(models.verify_step, "qwen3-0.6b", "dense", marks=SLOW),
        pytest.param(models.plain_step, "qwen3-8b", "dense", marks=SLOW),
        pytest.param(models.verify_step, "qwen3-8b", "dense", marks=SLOW),
        pytest.param(models.plain_step, "llama-3.1-8b", "dense", marks=SLOW),
        pytest.param(models.plain_step, "qwen2.5-7b", "dense", marks=SLOW),
        pytest.param(models.verify_step, "qwen3-8b", "q8_0", marks=SLOW),
        pytest.param(models.plain_step, "qwen3-0.6b", "q8_0", marks=SLOW),
    ],
)
def test_a_step(compiled, build, name, weights):
    """Fails if a step spills, copies a pool, or has a launch more than it needs; if a
    verification, or a family without head norms, has other kernels; or if XLA computes
    more with floats than to add a bias to each sum. Tokens are looked up as integers,
    and a logit is only tested for being finite.

    With weights of eight bits, each product's rows are rounded first, and XLA looks up
    a token: its product of an integer and a scale has one rounding."""
    is_bytes, of_xla = weights != "dense", {BIAS} if "qwen2" in name else set()
    report = compiled(build, name, layers=1, weights=weights)
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
        (looked_up,) = xla_fusions.float_fusions(report.hlo)
        text = " ".join(looked_up)
        assert not re.search(r"\b(add|subtract|divide|dot|reduce)\(", text)
    else:
        assert xla_fusions.float_fusions(report.hlo) == of_xla
    # There is no loop: nothing is asked of the host.
    rest = checks.launches(report) - len(LAYER) - len(of_xla) - 5 * is_bytes
    what = f"{build.__name__} of {name}, {weights}, outside of its layers"
    checks.assert_near(rest, 12 if is_bytes else 11, what)
    assert rest <= 12 or is_bytes or not name.startswith("qwen3")


@SLOW
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_a_verification_of_a_tree(compiled, name):
    """Fails if 64 rows at once spill, copy a pool, or take other kernels.

    Fails if XLA computes floats for them.
    """
    report = compiled(models.verify_tree, name, layers=2)
    report.assert_fits()
    slabs = slab.MOST_ROWS // models.model(name).slab
    checks.assert_in_place(report, models.model(name, layers=2), copies=slabs + 1)
    # Moving the accepted path's keys and values is among them.
    assert set(ours(report.launches)) == {*LAYER, *END}
    assert len(ours(report.launches)) == 2 * len(LAYER) + len(END)
    checks.assert_near(checks.launches(report), 37, f"two layers of a tree, {name}")
    assert not xla_fusions.float_fusions(report.hlo)


@SLOW
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-0.6b"])
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
    assert not xla_fusions.float_fusions(report.hlo)
    tree = checks.nested(report.thunks)
    # There is one loop, of drafts: pages are allocated and freed without one.
    (drafts,) = (n for n, (thunk, _) in enumerate(tree) if thunk.kind == "kWhile")
    assert ours(checks.flat(tree[drafts : drafts + 1])) == [*LAYER * draft_depth, *END]
    assert ours(checks.flat(tree[drafts + 1 :])) == [*LAYER * depth, *END]
    checks.assert_few_launches(report, name, depth, draft_depth)


HEAD = (*LAYER[1:], *END[:2])
"""The kernels of a head's row, whose input XLA norms; with features, one more."""


@SLOW
def test_a_head_step(compiled):
    """Fails if a head at 8B's shapes spills, copies its pool, or has more launches."""
    report = compiled(models.head_step, "qwen3-8b")
    report.assert_fits()
    checks.assert_in_place(report, models.head("qwen3-8b").model)
    assert_in_graphs(report)
    assert ours(report.launches) == [*HEAD]
    total = checks.launches(report)
    checks.assert_near(total, 14, "a head's step")


@SLOW
def test_a_round_with_a_head(compiled):
    """Fails if a tree of 32 rows of an EAGLE-3 head of 8B copies a pool."""
    report = compiled(models.head_round, "qwen3-8b", layers=4)
    report.assert_fits()
    target, drafts = models.model("qwen3-8b", layers=4), models.head("qwen3-8b").model
    # The logits of all rows, and what the search keeps of a level.
    checks.assert_in_place(report, target, drafts, copies=2 * 2 + 1)
    # Pairs are taken in, levels are grown, and the path is walked.
    assert loops(report) == [["skinny_gemm", *HEAD], [*HEAD], []]
    rest = checks.launches(report, 0, 0, 0)
    once = [[int(at == loop) for at in range(3)] for loop in range(3)]
    turn = [checks.launches(report, *turns) - rest for turns in once]
    depth = tree_shapes.parse(models.TREE).depth
    turns = 1, depth - 1, depth
    total = checks.launches(report, *turns)
    print(f"{total} launches of a round of 32 rows: {turns} * {turn} + {rest}")
    for found, known in zip([*turn, rest], (21, 41, 5, 103), strict=True):
        checks.assert_near(found, known, "a part of it")


@SLOW
@pytest.mark.parametrize(("size", "num_blocks"), [(17, 1), (64, 1), (17, 3)])
def test_a_block_of_several_slabs(compiled, size, num_blocks):
    """Fails if a block of more than 16 rows spills, copies a pool, reads the weights
    twice, or XLA computes floats for it."""
    report = compiled(models.block_step, "qwen3-8b", size=size, num_blocks=num_blocks)
    report.assert_fits()
    checks.assert_launched_early(report)
    drafter = models.block_head("qwen3-8b", size=size, depth=1)
    slabs = -(-size * num_blocks // 16)
    checks.assert_in_place(
        report, drafter.model, copies=slabs + 1, num_slots=num_blocks
    )
    assert not xla_fusions.float_fusions(report.hlo)
    kernels = [re.sub(r"__\d+$", "", each.name) for each in report.launches]
    # Queries are a separate product of the same normed rows: XLA norms these once.
    names = {*LAYER} - {"paged_attention", "rms_norm"}
    products = sum(kernels.count(name) for name in names)
    assert (kernels.count("paged_attention"), products) == (1, 6)
    assert kernels.count("rms_norm") == 3
    what = f"{num_blocks} blocks of {size}"
    checks.assert_near(checks.launches(report), 16, what)


@SLOW
@pytest.mark.parametrize("size", [models.BLOCK, 17])
def test_a_scheduled_round_of_blocks(compiled, size):
    """Fails if a batch's round with DSpark at 8B's shapes is not one program, or copies
    a pool, or runs its backbone more than once."""
    num_slots, layers = 2, 6
    how = {"layers": layers, "num_slots": num_slots, "size": size}
    report = compiled(models.scheduled_round, "qwen3-8b", **how)
    report.assert_fits()
    target = models.model("qwen3-8b", layers=layers)
    drafter = models.block_head("qwen3-8b", size=size)
    # The logits of the target's rows, those of the blocks, and what is chosen from.
    slabs = -(-num_slots * (size + 1) // 16)
    copies = 3 * slabs
    checks.assert_in_place(
        report, target, drafter.model, copies=copies, num_slots=num_slots
    )
    # Context: the fused features, normed, and keys and values of each layer.
    context, blocks, *bookkeeping = loops(report)
    depth = drafter.head.layer.num_layers
    assert context == ["skinny_gemm", "rms_norm", *["skinny_gemm"] * depth]
    # Blocks: layers, whose queries are a separate product, and logits. Then, in a loop
    # of its own over the drafts, the addition of the sequential head to the logits.
    head = ["skinny_gemm"]
    layer = ("rms_norm", "skinny_gemm", *LAYER[1:])
    assert blocks == [*layer * depth, "rms_norm", "skinny_gemm", *head]
    assert not any(bookkeeping)
    stated = {models.BLOCK: 183, 17: 188}[size]
    checks.assert_near(len(report.launches), stated, f"two blocks of {size}")


@SLOW
def test_a_round_of_dflash(compiled):
    """Fails if DFlash runs its block more than once a round, or has more launches."""
    report = compiled(models.block_round, "qwen3-8b", layers=6)
    report.assert_fits()
    depth = models.block_head("qwen3-8b", kind="dflash").head.layer.num_layers
    # Context: the fused features, and keys and values of each layer. Block: layers,
    # whose queries are a separate product, and logits. The target is outside of loops.
    context, block = loops(report)
    assert context == ["skinny_gemm", "rms_norm", *["skinny_gemm"] * depth]
    layer = [*LAYER[:2], "skinny_gemm", *LAYER[2:]]
    assert block == [*layer * depth, "rms_norm", "skinny_gemm"]
    checks.assert_near(len(report.launches), 165, "a round of DFlash")


@SLOW
def test_a_float_between_kernels_is_caught(compiled):
    """Negative control: logits that are scaled by XLA before the choice."""
    report = compiled(models.scaled_step, "qwen3-0.6b", layers=1)
    (operations,) = xla_fusions.float_fusions(report.hlo)
    assert "multiply" in str(operations)


@SLOW
def test_a_copied_pool_is_caught(compiled):
    """Negative control: a state that is not donated."""
    report = compiled(models.plain_step, "qwen3-0.6b", layers=1, donate=())
    with pytest.raises(AssertionError):
        checks.assert_in_place(report, models.model("qwen3-0.6b", layers=1))
