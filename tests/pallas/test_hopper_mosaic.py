"""Whole steps and rounds of Qwen3-0.6B and 8B on Mosaic, compiled for an H100: no GPU.

As `test_hopper_model`, of kernels of Mosaic's alone.
"""

import re

import hopper_launches as checks
import hopper_models as models
import pytest
import xla_fusions

from spec_jax.engine import protocols


pytestmark = [pytest.mark.slow, pytest.mark.h100, checks.on_mosaic]

LAYER = (
    "rms_norm",
    "skinny_gemm",
    "paged_attention",
    "skinny_gemm",
    "rms_norm",
    *["skinny_gemm"] * 2,
)
END = ("rms_norm", "skinny_gemm", "argmax_chunks", "argmax_rows")
HEAD = (*LAYER[1:], *END[:2])
"""As in `test_hopper_model`."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "build", "layers"),
    [
        ("qwen3-0.6b", models.verify_tree, 1),  # The round below is of 8B.
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
    expected += [*LAYER * layers, *END]
    expected += ["truncate_each"] * (build is not models.plain_step)
    assert sorted(xla_fusions.mosaic_kernels(report.hlo)) == sorted(expected)
    ours = sum(each.kind == "kCustomCall" for each in report.launches)
    assert ours == len(expected)
    total = checks.launches(report)
    whole = total + len(LAYER) * (checks.DEPTH[name] - layers)
    if is_tree:
        checks.assert_near(total, 28, f"a layer of a tree, {name} on mosaic")
    else:
        checks.assert_near(whole, checks.STEP[name], f"a step of {name} on mosaic")
        assert whole <= checks.MOST_OF_A_STEP[name]


@pytest.mark.rest
def test_a_head_step_on_mosaic(compiled):
    """Fails if a head at 8B's shapes has a kernel of Triton or a launch more."""
    report = compiled(models.head_step, "qwen3-8b", impl="mosaic")
    report.assert_fits()
    checks.assert_launched_early(report)
    assert xla_fusions.called(report.hlo) == {xla_fusions.MOSAIC}
    checks.assert_in_place(report, models.head("qwen3-8b", impl="mosaic").model)
    expected = ["list_jobs", "row_angles", *HEAD]
    assert sorted(xla_fusions.mosaic_kernels(report.hlo)) == sorted(expected)
    checks.assert_near(checks.launches(report), 12, "a head's step on mosaic")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("build", "options", "norms", "stated", "copies"),
    [
        # The norms of a tree's 32 rows, of four layers and the end.
        (models.head_round, {"layers": 4}, 2 * 4 + 1, 165, 2 * 2 + 1),
        # The last one of the blocks.
        (models.scheduled_round, {"layers": 6, "num_slots": 2}, 1, 164, 3),
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
    assert {*LAYER, *END} <= set(kernels)
    assert kernels.count("rms_norm") == norms
    own = models.model("qwen3-8b", layers=options["layers"], impl="mosaic")
    head = models.head if build is models.head_round else models.block_head
    drafts, num_slots = head("qwen3-8b", impl="mosaic"), options.get("num_slots", 1)
    checks.assert_in_place(
        report, own, drafts.model, copies=copies, num_slots=num_slots
    )
    checks.assert_near(len(report.launches), stated, build.__name__)


@pytest.mark.rest
@pytest.mark.parametrize("name", checks.LARGEST_FIRST)
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
    checks.assert_few_launches(report, name, depth, draft_depth)


def test_drawing_on_mosaic(compiled):
    """Fails if draws have a kernel of Triton, one spills, or XLA has floats."""
    report = compiled(models.drawing, 5, impl="mosaic")
    report.assert_fits()
    checks.assert_launched_early(report)
    assert xla_fusions.called(report.hlo) == {xla_fusions.MOSAIC}
    assert not xla_fusions.float_work(report.hlo)
    drawing = {"sampling_top_k", "sampling_top_p", "sampling_noisy_weights"}
    assert drawing <= set(xla_fusions.mosaic_kernels(report.hlo))


def test_whoever_is_last_reads_what_others_stored(compiled):
    """Fails if the splits of a row may come from a cache that is not told of others."""
    report = compiled(models.plain_step, "qwen3-0.6b", layers=2, impl="mosaic")
    sass = "\n".join(report.kernel("paged_attention").sass)
    assert sass.count("ATOMG.E.INC.STRONG.GPU") == 1
    assert "CCTL.IVALL" in sass.partition("ATOMG")[2]
    assert not re.search(r"LDG\S*\.CONSTANT", sass)


def test_triton_in_a_mosaic_program_is_caught(compiled):
    """Negative control: a choice by Triton's kernels beside one by Mosaic's."""
    report = compiled(models.choices, "mosaic", "triton")
    both = {xla_fusions.MOSAIC, xla_fusions.TRITON}
    assert xla_fusions.called(report.hlo) == both
