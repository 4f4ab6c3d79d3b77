"""Exact programs compiled for an H100, in which XLA computes with no float: no GPU.

What XLA computes it may fuse, tile and round otherwise in another program or, choosing
by timing, in another process. Loops, sampled ones too, batches and the prefill by rows
leave nothing of that to it: it moves floats, and every sum is in a kernel of ours.
"""

import re

import hopper_launches as checks
import hopper_models as models
import pytest
import xla_fusions


SLOW = pytest.mark.slow
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
"""And the launches that stand in a program of so few layers, those of a loop once; of
each further layer five more (`test_hopper_model`)."""

DRAWING = ("sampling_top_k", "sampling_top_p", "sampling_noisy_weights")


def assert_only_kernels_compute(report) -> None:
    """Asserts that XLA does nothing with floats but move them."""
    work = xla_fusions.float_work(report.hlo)
    assert not work, f"XLA does {sorted(work)}"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("rounds, sampled", "qwen3-8b"),
        *(
            pytest.param(name, model, marks=SLOW)
            for name in PROGRAMS
            for model in ("qwen3-8b", "qwen3-0.6b")
            if (name, model) != ("rounds, sampled", "qwen3-8b")
        ),
    ],
)
def test_only_kernels_compute(compiler, name, model):
    """Fails if XLA has a float sum, product, transpose or fusion of its own.

    Or if a kernel spills, a pool is copied, or there are more launches than are stated.
    Two layers of a prompt: of the last one only keys and values are left.
    """
    build, options, launches = PROGRAMS[name]
    how = {"layers": 2 if name == "prefill" else 1, "impl": "triton"}
    report = compiler.compile(build, model, **how, **options)
    report.assert_fits()
    assert_only_kernels_compute(report)
    pools = [models.model(model, **how)]
    if "draft_layers" in options:
        pools.append(models.model(models.DRAFT, layers=1, impl="triton"))
    num_slots = options.get("num_slots", 1)
    # Of all slots' rows, and what is drawn from.
    copies = num_slots + ("draws" in options)
    checks.assert_in_place(report, *pools, copies=copies, num_slots=num_slots)
    checks.assert_near(len(report.launches), launches, f"{name} of {model}")
    # Rows run, and tokens are drawn where they are to be.
    launched = {re.sub(r"_+\d*$", "", thunk.name) for thunk in report.launches}
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
    or XLA adds floats in an order that it chooses.

    Of noise, a coupled tree has that of kernels: XLA has none of its logarithms of
    uniforms.
    """
    report = compiler.compile(
        models.spec_round, "qwen3-0.6b", layers=1, draft_layers=1, draws=True,
        rule=rule, tree=tree, impl="triton",
    )  # fmt: skip
    report.assert_fits()
    work = xla_fusions.float_work(report.hlo)
    assert not xla_fusions.float_sums(report.hlo)
    assert not work & {"dot", "cosine", "sine", "transpose"}
    assert ("log-plus-one" in work) == (rule != "coupled")
    assert xla_fusions.called(report.hlo) - {"__gpu$TopK"} == {xla_fusions.TRITON}


def test_distributions_sum_in_kernels(compiler):
    """Fails if a kernel spills, or XLA filters or sums; that it is seen to do so."""
    report = compiler.compile(models.distribution, 5, impl="triton")
    report.assert_fits()
    assert not xla_fusions.float_sums(report.hlo)
    # Negative control.
    by_xla = compiler.compile(models.distribution, 5, impl=None)
    assert xla_fusions.float_sums(by_xla.hlo)


@SLOW
def test_library_products_are_caught(compiler):
    """Negative control: the prefill that is not by rows."""
    report = compiler.compile(models.prefill, "qwen3-0.6b", layers=1, by_rows=False)
    with pytest.raises(AssertionError, match="'cosine'.*'dot'.*'reduce'.*'sine'"):
        assert_only_kernels_compute(report)
