"""Plans: rows and exit status of the script, and the parts of a prediction."""

import dataclasses

import numpy as np
import pytest
import tiny_pair
from script_runs import assert_has_fields_of, models_of, rows_of

from experiments import plan
from experiments.lib import costs, kernel_checks, planning, runs, subjects
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.gamma import theory


GAMMA, GEN_TOKENS, PAGE_SIZE = 2, 8, 16
PROMPTS = ("def first(x):", "import second")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft, and a file of two short prompts next to them."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "prompts.txt").write_text("".join(line + "\n" for line in PROMPTS))
    return tiny_pair.write(folder)


def command(folders, *more: str) -> list[str]:
    return [
        *(*models_of(folders), "--gamma", f"1,{GAMMA}"),
        *("--prompts", str(folders[0].parent / "prompts.txt")),
        *("--gen-tokens", str(GEN_TOKENS), "--page-size", str(PAGE_SIZE)),
        *("--repeats", "2", "--cost-repeats", "2", "--drafter", "draft-model,ngram"),
        *more,
    ]


@pytest.fixture(scope="module")
def planned(folders, tmp_path_factory):
    """The rows of one run."""
    out = tmp_path_factory.mktemp("out") / "out.jsonl"
    assert plan.main(command(folders, "--out", str(out))) == plan.MATCHED == 0
    return out


def test_the_rows_of_a_plan(planned):
    """Fails if a run is missing, or an error is not that of its two numbers."""
    rows = rows_of(planned, "plan")
    assert [(row["drafter"], row["gamma"]) for row in rows] == [
        (drafter, gamma) for drafter in ("draft-model", "ngram") for gamma in (1, 2)
    ]
    for row in rows:
        assert row["matched"] and row["verify_decode_mismatches"] == 0
        assert row["prompts"] == 2 and row["tokens"] == 2 * GEN_TOKENS
        assert row["measured_speedup"] == row["speedup_decode"] > 0
        removed = ("is_best_predicted", "is_best_measured")
        assert_has_fields_of(row, "plan_native.jsonl", *removed)
        if row["predicted_speedup"] is not None:
            expected = row["predicted_speedup"] / row["measured_speedup"] - 1
            assert row["relative_error"] == pytest.approx(expected)
    found = {row["cost"]: row for row in rows_of(planned, "plan_cost")}
    assert list(found)[:4] == [
        *("plain step", "1 active row", "2 active rows", "3 active rows")
    ]
    for drafter in ("draft-model", "ngram"):
        rounds = [found[f"{drafter}: round, gamma {n}"] for n in range(GAMMA + 1)]
        assert all(row["n"] == 2 and row["ms"] > 0 for row in rounds)
    shares = rows_of(planned, "plan_acceptance")
    # Both drafters commit the texts of autoregressive decoding.
    assert {row["repetition"] for row in (*shares, *rows)} == {rows[0]["repetition"]}


def test_predictions_are_those_of_costs_and_acceptance(planned):
    """The rows say enough to compute them again."""
    ratios = {row["cost"]: row["ratio"] for row in rows_of(planned, "plan_cost")}
    (kept, *_) = (row["kept"] for row in rows_of(planned, "plan_acceptance"))
    first, *_ = rows_of(planned, "plan")
    assert first["predicted_tokens_per_round"] == pytest.approx(1 + kept[0])
    # A draft model fills its windows, but for those at the end of the text: a round
    # verifies one row to two, where it was timed and where it is predicted.
    one, two = np.maximum.accumulate(
        [ratios[f"{n} active row{'s'[: n - 1]}"] for n in (1, 2)]
    )
    whole = ratios["draft-model: round, gamma 1"]
    quickest, slowest = max(0, whole - two) + one, max(0, whole - one) + two
    tokens_in_plain_steps = (1 + kept[0]) / first["predicted_speedup"]
    assert quickest * (1 - 1e-9) <= tokens_in_plain_steps <= slowest * (1 + 1e-9)


@pytest.fixture
def presets(monkeypatch):
    """Two presets of tiny random weights, and their flags."""
    for name in ("qwen3-8b", "qwen3-0.6b"):
        monkeypatch.setitem(subjects.PRESETS, name, tiny_pair.config())
    sizes = ("--gen-tokens", "12", "--repeats", "2", "--cost-repeats", "2")
    sizes += ("--gamma", "1,3", "--acceptance", "0.3,0.7")
    return ["--preset", "qwen3-8b", "--draft-preset", "qwen3-0.6b", *sizes]


def test_presets_are_planned_at_forced_acceptance(presets, tmp_path):
    """Fails if a prediction is not that of the costs, or a run is of another gamma."""
    out = tmp_path / "out.jsonl"
    assert plan.main([*presets, "--out", str(out)]) == plan.MATCHED == 0
    costs_of = {row["cost"]: row for row in rows_of(out, "plan_cost")}
    windows = ("1 active row", "2 active rows", "4 active rows")
    assert list(costs_of) == ["plain step", *windows, "draft step"]
    plain = costs_of["plain step"]["ms"]
    rows = rows_of(out, "plan_forced")
    cells = [(1, 0.3), (1, 0.7), (3, 0.3), (3, 0.7)]
    assert [(row["gamma"], row["forced_rate"]) for row in rows] == cells
    for row in rows:
        assert row["acceptance"] == "forced" and row["equal"] and row["matched"]
        assert_has_fields_of(row, "plan_qwen3_0.6b.jsonl")
        assert row["target"] == "qwen3-8b" and row["draft"] == "qwen3-0.6b"
        assert row["acceptance_rate"] == pytest.approx(row["forced_rate"], abs=0.15)
        gamma = row["gamma"]
        parts = gamma * costs_of["draft step"]["ratio"]
        parts += costs_of[f"{gamma + 1} active rows"]["ratio"]
        assert row["predicted_round_ms"] == pytest.approx(plain * parts)
        # So many drafts are kept of gamma.
        tokens = 1 + gamma * row["forced_rate"]
        assert row["predicted_tokens_per_round"] == pytest.approx(tokens)
        assert row["predicted_speedup"] == pytest.approx(tokens / parts)
        error = row["predicted_speedup"] / row["speedup"] - 1
        assert row["relative_error"] == pytest.approx(error)


def test_a_preset_that_differs_is_told(presets, monkeypatch):
    """Negative control of exit status 2: one bit of K/V."""
    monkeypatch.setattr(kernel_checks, "differing", lambda found, expected: 1)
    more = ("--gamma", "1", "--acceptance", "0.5", "--repeats", "1")
    assert plan.main([*presets, *more]) == plan.NOT_MATCHED == 2


def test_where_a_tree_pays():
    """A round's rows and what else it costs, over the tokens it keeps."""
    parts = costs.RoundCosts(
        plain_s=10.0,
        drafts=(0, 1, 3),
        verify_s=(10.0, 12.0, 20.0),
        beyond_s=(1.0, 2.0, 3.0),
    )
    assert parts.seconds(1, drafted=1) == 2 + 12
    # Between measured windows on a line: lookups may find fewer than they are asked.
    assert parts.seconds(3, drafted=2) == 3 + 16
    counters = metrics.Counters(
        tokens=20, rounds=10, proposed=20, kept_by_rank=(6, 2, 2)
    )
    one, three = planning.predict_tree(counters, parts)
    assert (one["tokens_per_round"], three["tokens_per_round"]) == (1.6, 2.0)
    assert (one["rows_per_round"], three["rows_per_round"]) == (2, 3)
    assert one["speedup"] == pytest.approx(1.6 / 1.4)
    # Rows that cost nothing: more nodes pay, as far as their drafting lets them.
    assert one["free_rows_speedup"] == pytest.approx(1.6 / 1.2)
    assert three["free_rows_speedup"] == pytest.approx(2.0 / 1.3)
    assert planning.words_of_tree("d", [one, three]) == (
        "d: here it pays with 1, 3 nodes; 1.14x with 1; if rows cost nothing, as on a "
        "GPU, it pays with 1, 3 nodes; 1.54x with 3"
    )
    # And rows as in another curve, where plain steps are twice as fast.
    assert one["other_rows_speedup"] is None
    elsewhere = theory.CostCurve(
        plain_s=5.0, rows=(1, 2, 4), verify_s=(5.5, 7.0, 7.5), draft_s=0.0
    )
    moved = parts.with_rows_of(elsewhere)
    assert moved.verify_s == (11.0, 14.0, 15.0)
    assert moved.seconds(1, drafted=1) == 2 + 14
    found = planning.predict_tree(counters, parts, rows_of=elsewhere)
    assert found[1]["other_rows_speedup"] == pytest.approx(2.0 / 1.75)
    # Negative control: dear rows.
    dear = dataclasses.replace(parts, verify_s=(10.0, 30.0, 40.0))
    found = planning.predict_tree(counters, dear)
    assert "here it does not pay" in planning.words_of_tree("d", found)


def windows(*numbers: tuple[int, int, int]) -> list[planning.Window]:
    names = ("asked", "drafted", "accepted")
    return [planning.Window(**dict(zip(names, n, strict=True))) for n in numbers]


def test_acceptance_by_position():
    """Fails if short windows count at positions that they never asked for."""
    found = planning.measure(
        windows((3, 3, 3), (3, 3, 1), (3, 1, 1), (3, 0, 0), (1, 1, 1)), gamma_max=3
    )
    assert found.kept == (4 / 5, 1 / 3, 1.0)
    assert found.drafted == (4 / 5, 2 / 4, 2 / 4)
    assert found.windows == 5 and found.known == found.kept
    never = planning.measure(windows((2, 2, 0), (2, 2, 0)), gamma_max=2)
    assert never.kept == (0.0, 0.0)
    unknown = planning.measure(windows((2, 2, 0), (1, 1, 1)), gamma_max=2)
    assert unknown.kept == (0.5, None) and unknown.known == (0.5,)
    with pytest.raises(ValueError, match="none of 1 rounds had room for 2 drafts"):
        planning.measure(windows((1, 1, 1)), gamma_max=2)


@pytest.fixture(scope="module")
def self_drafting(folders):
    """The target drafts for itself, so that all is kept; and settings that fit."""
    lm = loading.load(folders[0], draft=folders[0], gamma_max=GAMMA, slab=GAMMA + 1)
    return lm, runs.Settings(
        gamma=GAMMA, gen_tokens=GEN_TOKENS, capacity=32, page_size=PAGE_SIZE
    )


def test_recorded_windows_are_those_of_a_run(self_drafting):
    """As integers; and near the end a round asks for less."""
    lm, settings = self_drafting
    prompt = lm.tokenizer.encode(PROMPTS[0])
    recorded, text = planning.record(lm, settings, prompt)
    run = runs.run_speculative(lm, settings, prompt)
    assert text == metrics.text_counts(run.tokens, run.counters)
    assert len(recorded) == run.counters.rounds
    assert sum(w.drafted for w in recorded) == run.counters.proposed
    assert sum(w.accepted for w in recorded) == run.counters.accepted
    assert [w.asked for w in recorded] == [2, 2, 1]
    assert all(w.asked == w.drafted == w.accepted for w in recorded)


def full_windows(*kept: float) -> planning.Acceptance:
    return planning.Acceptance(kept=kept, drafted=(1.0,) * len(kept), windows=100)


def of_rounds(draft_s: float, *verify_s: float) -> costs.RoundCosts:
    return costs.RoundCosts(
        plain_s=1.0,
        drafts=tuple(range(len(verify_s))),
        verify_s=verify_s,
        beyond_s=tuple(draft_s * n for n in range(len(verify_s))),
    )


def test_predictions_are_those_of_the_paper():
    """One acceptance for all positions, verification free: Theorem 3.8."""
    found = planning.predict(full_windows(0.8, 0.8, 0.8), of_rounds(0.1, 1, 1, 1, 1))
    assert [prediction.gamma for prediction in found] == [1, 2, 3]
    for prediction in found:
        expected = theory.walltime_improvement(0.8, 0.1, prediction.gamma)
        assert prediction.speedup == pytest.approx(expected)


def test_windows_that_end_early_cost_less():
    """Negative control: those of the same acceptance that were always full."""
    kept = (0.4, 0.4)
    rare = planning.Acceptance(kept=kept, drafted=(0.5, 0.25), windows=100)
    parts = of_rounds(0.1, 1, 1.5, 2)
    found = planning.predict(rare, parts)
    # What drafting costs was measured in rounds that ask for as many, found or not.
    assert [p.round_s for p in found] == pytest.approx([0.1 + 1.25, 0.2 + 1.375])
    full = planning.predict(full_windows(*kept), parts)
    assert [p.round_s for p in full] == pytest.approx([1.6, 2.2])
