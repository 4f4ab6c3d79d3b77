"""Exact programs compiled for an H100, in which XLA computes with no float: no GPU.

XLA may fuse, tile and round its own computations otherwise in another program or,
choosing by timing, in another process. Loops, sampled ones too, batches and the prefill
by rows leave it none of them: it moves floats, and every sum is in a kernel of ours.
"""

import itertools

import hopper_checks as checks
import hopper_models as models
import pytest
from slow_cases import slow_but


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
"""Programs, options, and the launches that stand in so few layers, those of a loop
once; each further layer has seven more (`test_hopper_model`)."""

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
    assert checks.float_fusions(report.hlo)  # `test_hopper_model` counts these.
