"""Curves of figures: which rows share one, what it is called, and the caption."""

import figure_rows as made
import pytest

from experiments.lib import curves as curves_lib


def test_curves_over_gamma():
    """Sorted by gamma; settings with a single one are no curve."""
    xla = [made.summary(gamma) for gamma in (1, 4, 2)]
    native = [made.summary(gamma, impl="native") for gamma in (2, 4)]
    rows = [*xla, *native, made.summary(3, dtype="bfloat16")]
    curves = curves_lib.by_gamma(rows)
    assert [curve.label for curve in curves] == ["native", "xla"]
    assert [row["gamma"] for row in curves[1].rows] == [1, 2, 4]
    labelled = curves_lib.by_gamma([*rows, made.summary(7, dtype="bfloat16")])
    labels = [curve.label for curve in labelled]
    assert labels == ["native, float32", "xla, bfloat16", "xla, float32"]


def test_values_that_are_there_twice_are_refused():
    """Its two values would be joined by an upright line."""
    with pytest.raises(ValueError, match="gamma 2 of xla, .* 2 times"):
        curves_lib.by_gamma([made.summary(2), made.summary(2), made.summary(3)])
    steps = [made.step(number) for number in (2, 1)]
    with pytest.raises(ValueError, match="num_active 1 of xla is there 2 times"):
        curves_lib.by_active_rows([*steps, steps[1]])
    with pytest.raises(ValueError, match="long prompts .* twice"):
        curves_lib.comparison(
            [row for row in made.comparison() * 2 if row["length"] == "long"]
        )


def test_the_largest_gamma_is_drawn_and_equal_curves_are_one():
    rows = [
        made.summary(4),
        made.summary(4, page_size=64),
        made.summary(2),
        made.summary(4, impl="native"),
    ]
    curves = curves_lib.of_largest_gamma(rows, "accepted_hist")
    assert [curve.label for curve in curves] == ["native", "xla"]
    assert {curve.rows[0]["gamma"] for curve in curves} == {4}


def test_curves_of_a_sweep():
    """All categories together; a file of prompts is called by its name."""
    rows = [made.cell("ngram", gamma, name) for gamma in (4, 2) for name in ("a", "b")]
    rows += [made.cell("suffix", 2, None)]
    curves = curves_lib.cells_by_gamma(rows)
    assert [curve.label for curve in curves] == ["ngram", "suffix"]
    assert [row["gamma"] for row in curves[0].rows] == [2, 4]
    assert [row["prompts"] for row in curves[0].rows] == [2, 2]
    assert curves[0].rows[0]["speedup_e2e"] == pytest.approx(2.0)
    names, curves = curves_lib.cells_by_category(rows[:4])
    assert names == ["a", "b"] and [len(curve.rows) for curve in curves] == [2]
    other = made.cell("ngram", 4, "a", prompt_source="more/prompts.jsonl")
    _, curves = curves_lib.cells_by_category([*rows, other])
    assert [curve.label for curve in curves] == ["prompts.jsonl", "questions.jsonl"]


def test_cells_of_two_sweeps_are_refused():
    rows = [made.cell("ngram", 4, "a")]
    with pytest.raises(ValueError, match="2 times; name the file of one sweep"):
        curves_lib.cells_by_category(rows * 2)
    with pytest.raises(ValueError, match="2 times; name the file of one sweep"):
        curves_lib.cells_by_gamma(rows * 2)
    with pytest.raises(ValueError, match="no cells of two gammas"):
        curves_lib.cells_by_gamma(rows)


def test_captions():
    """Several values are listed, many are counted, and GPUs go by their own name."""
    xla = made.PROVENANCE | {"impl": "xla", "native_isa": None, "prompt_source": "50@7"}
    words = curves_lib.caption([made.PROVENANCE, xla])
    assert "native / xla" in words and "avx2 / chosen by XLA" in words
    assert "gsm8k/test.jsonl:50 / bundled (50@7)" in words
    lengths = [made.PROVENANCE | {"gen_tokens": n} for n in range(4)]
    assert "4 different tokens each" in curves_lib.caption(lengths)
    gpu = made.PROVENANCE | {"platform": "gpu", "device_kind": "NVIDIA H100"}
    assert "machine: NVIDIA H100, jax 0.10.2" in curves_lib.caption([gpu])
    alone = curves_lib.caption([made.PROVENANCE | {"draft": None}])
    assert "model: target Qwen3-8B, bfloat16" in alone and "draft" not in alone
    assert curves_lib.digests([{"a": 1, "b": 2}]) == curves_lib.digests(
        [{"b": 2, "a": 1}]
    )
