"""Plans: rows and exit status of the script, and the parts of a prediction."""

import pytest
from script_runs import assert_has_fields_of, models_of, rows_of

from experiments import plan
from spec_jax.analysis import metrics
from spec_jax.gamma import costs as costs_lib


GAMMA, GEN_TOKENS = 2, 8
DRAFTERS = ("ngram", "spec_jax.drafters.ngram:PromptLookup")
"""Two names of the same drafter, so that both share their programs."""


@pytest.fixture(scope="module")
def planned(folders, tmp_path_factory):
    """Returns the file with the rows of one run."""
    folder = tmp_path_factory.mktemp("plan")
    prompts, out = folder / "prompts.txt", folder / "out.jsonl"
    prompts.write_text("def first(x):\nimport second\n")
    given = f"--gamma 1,{GAMMA} --prompts {prompts} --out {out} --page-size 16 "
    given += f"--gen-tokens {GEN_TOKENS} --repeats 2 --drafter {','.join(DRAFTERS)}"
    assert plan.main([*models_of(folders), *given.split()]) == plan.MATCHED == 0
    return out


def test_the_rows_of_a_plan(planned):
    """Fails if a run is missing, or an error does not follow from its two speed-ups."""
    rows = rows_of(planned, "plan")
    assert [(row["drafter"], row["gamma"]) for row in rows] == [
        (drafter, gamma) for drafter in DRAFTERS for gamma in (1, 2)
    ]
    for row in rows:
        assert row["matched"] and row["verify_decode_mismatches"] == 0
        assert row["prompts"] == 2 and row["tokens"] == 2 * GEN_TOKENS
        assert row["measured_speedup"] == row["speedup_decode"] > 0
        removed = ("is_best_predicted", "is_best_measured", "cost_repeats")
        assert_has_fields_of(row, "plan_native.jsonl", *removed)
        expected = row["predicted_speedup"] / row["measured_speedup"] - 1
        assert row["relative_error"] == pytest.approx(expected)
    for row in rows_of(planned, "plan_costs"):
        assert len(row["round_s"]) == 1 + GAMMA and min(row["round_s"]) > 0


def test_predictions_are_those_of_costs_and_acceptance(planned):
    """Fails if a run is compared with the prediction or costs of another."""
    rows, predictions = rows_of(planned, "plan"), rows_of(planned, "prediction")
    predicted = {(row["drafter"], row["drafts"]): row for row in predictions}
    for row in rows:
        own = predicted[row["drafter"], row["gamma"]]
        assert row["predicted_speedup"] == own["speedup"]
        assert row["predicted_tokens_per_round"] == own["tokens_per_round"]
        assert own["speedup"] == own["tokens_per_round"] / own["plain_steps"]
    # Predictions come from the run with the largest gamma: its rounds are the same.
    length = rows[1]["mean_accepted_length"]
    assert rows[1]["predicted_tokens_per_round"] == pytest.approx(length)
    for row in rows_of(planned, "plan_recommendation"):
        speedups = [predicted[row["drafter"], n]["speedup"] for n in (1, 2)]
        assert row["best"]["speedup"] == max(speedups)
        assert row["can_win"] == (max(speedups) > 1) == ("can win" in row["words"])


COSTS = costs_lib.RoundCosts(round_s=(10.0, 13.0, 19.0, 16.0))
COUNTERS = metrics.Counters(tokens=20, rounds=10, proposed=20, kept_by_rank=(6, 2, 2))
"""Counters of ten rounds that asked for three drafts each, and got two."""


def test_where_drafts_pay():
    """Compares tokens and times of rounds with numbers by hand, by drafts verified."""
    one, two, three = plan.expect(COUNTERS, COSTS, (1, 2, 3))
    tokens = [row["tokens_per_round"] for row in (one, two, three)]
    assert tokens == pytest.approx([1.6, 1.8, 2.0])
    assert one["rows_per_round"] == pytest.approx(1 + 2 / 3)
    assert three["rows_per_round"] == pytest.approx(3)
    # Lookups may find fewer drafts than asked for: times are interpolated linearly.
    assert one["speedup"] == pytest.approx(1.6 / 1.2)
    assert three["speedup"] == pytest.approx(2.0 / 1.9)
    row = plan.recommend("d", COUNTERS, COSTS, (one, two, three))
    assert row["can_win"] and row["words"].startswith("d: can win, 1.33x with 1 drafts")
    # Negative control: rows are dear.
    dear = costs_lib.RoundCosts(round_s=(10.0, 30.0, 40.0, 50.0))
    rows = plan.expect(COUNTERS, dear, (1, 2, 3))
    row = plan.recommend("d", COUNTERS, dear, rows)
    assert not row["can_win"] and "cannot win, 0.69x" in row["words"]
    assert row["acceptance"] == 0.6 and row["break_even"] == pytest.approx(2.0)
