"""Plans: rows and exit status of the script, and the parts of a prediction."""

import dataclasses
import typing

import pytest
import tiny_pair
from script_runs import assert_has_fields_of, models_of, rows_of

from experiments import plan
from experiments.lib import bench, costs, planning
from spec_jax.analysis import metrics


GAMMA, GEN_TOKENS, PAGE_SIZE = 2, 8, 16
PROMPTS = ("def first(x):", "import second")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The rows of one run."""
    folder = tmp_path_factory.mktemp("pair")
    prompts, out = folder / "prompts.txt", folder / "out.jsonl"
    prompts.write_text("".join(line + "\n" for line in PROMPTS))
    given = [
        *(*models_of(tiny_pair.write(folder)), "--gamma", f"1,{GAMMA}"),
        *("--prompts", str(prompts), "--out", str(out)),
        *("--gen-tokens", str(GEN_TOKENS), "--page-size", str(PAGE_SIZE)),
        *("--repeats", "2", "--cost-repeats", "2", "--drafter", "draft-model,ngram"),
    ]
    assert plan.main(given) == plan.MATCHED == 0
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
        expected = row["predicted_speedup"] / row["measured_speedup"] - 1
        assert row["relative_error"] == pytest.approx(expected)
    for drafter in ("draft-model", "ngram"):
        found = [r for r in rows_of(planned, "plan_cost") if r["drafter"] == drafter]
        assert [row["cost"] for row in found] == [
            *("plain step", "1 active row", "2 active rows", "3 active rows"),
            *(f"round, gamma {gamma}" for gamma in range(GAMMA + 1)),
        ]
        assert all(row["n"] == 2 and row["ms"] > 0 for row in found)


def test_predictions_are_those_of_costs_and_acceptance(planned):
    """Fails if a run is compared with the prediction of another, or with costs of
    another drafter; the words are of the best."""
    predicted = {
        (row["drafter"], row["drafts"]): row for row in rows_of(planned, "prediction")
    }
    for row in rows_of(planned, "plan"):
        own = predicted[row["drafter"], row["gamma"]]
        assert row["predicted_speedup"] == own["speedup"]
        assert row["predicted_tokens_per_round"] == own["tokens_per_round"]
        assert own["speedup"] == own["tokens_per_round"] / own["plain_steps"]
    # The largest gamma was run to know what is kept: rounds are those of the run.
    row = rows_of(planned, "plan")[1]
    assert row["predicted_tokens_per_round"] == pytest.approx(
        row["mean_accepted_length"]
    )
    for row in rows_of(planned, "plan_recommendation"):
        speedups = [predicted[row["drafter"], n]["speedup"] for n in (1, 2)]
        assert row["best"]["speedup"] == max(speedups)
        assert row["can_win"] == (max(speedups) > 1) == ("can win" in row["words"])


COSTS = costs.RoundCosts(
    plain_s=10.0,
    drafts=(0, 1, 3),
    verify_s=(10.0, 12.0, 20.0),
    beyond_s=(1.0, 2.0, 3.0),
)
COUNTERS = metrics.Counters(tokens=20, rounds=10, proposed=20, kept_by_rank=(6, 2, 2))
"""Rounds that asked for three drafts, and had two."""


def test_the_costs_of_a_round():
    """Fails if a part is left out, or counted twice; differences below 0 are noise."""
    assert COSTS.seconds(1, drafted=1) == 2 + 12
    # Between measured windows on a line: lookups may find fewer than they are asked.
    assert COSTS.seconds(3, drafted=2) == 3 + 16
    assert COSTS.draft_s == 0.5  # The first costs more.
    one = dataclasses.replace(
        COSTS, drafts=(0, 1), verify_s=(10.0, 12.0), beyond_s=(1.0, 2.5)
    )
    assert one.draft_s == 1.5
    assert dataclasses.replace(COSTS, beyond_s=(1.0, 3.0, 2.0)).draft_s == 0
    rounds = {
        free: COSTS.without(free).seconds(3, drafted=3)
        for free in typing.get_args(costs.Free)
    }
    assert rounds == {"drafting": 21.0, "verification": 13.0, "both": 11.0}


def test_costs_are_compared_within_a_turn():
    """A turn that was slow as a whole leaves ratios as they are."""
    per_step = {
        **{"plain step": 1.0, "1 active row": 1.0, "2 active rows": 0.9},
        **{"round, gamma 0": 1.1, "round, gamma 1": 1.3},
    }
    slow = (1.0, 1.0, 7.0)
    seconds = {name: [factor * s for factor in slow] for name, s in per_step.items()}
    timings = bench.Timings(warm_up={}, seconds=seconds)
    found = costs.costs_of(timings, {0: 0.0, 1: 0.5})
    assert found.verify_s == (1.0, 1.0)  # two rows cannot take less than one
    assert found.beyond_s == pytest.approx((0.1, 0.3))
    # A lookup that found no more than half: the rest of its rows was not verified.
    seconds["2 active rows"] = [1.2 * s for s in slow]
    found = costs.costs_of(timings, {0: 0.0, 1: 0.5})
    assert found.beyond_s == pytest.approx((0.1, 0.2))


def test_where_drafts_pay():
    """A round's rows and what else it costs, over the tokens it keeps."""
    one, two, three = planning.predict(COUNTERS, COSTS)
    tree = planning.predict(COUNTERS, COSTS, is_tree=True)
    assert [row["drafts"] for row in tree] == [1, 3] and tree == [one, three]
    tokens = [row["tokens_per_round"] for row in (one, two, three)]
    assert tokens == pytest.approx([1.6, 1.8, 2.0])
    assert one["rows_per_round"] == pytest.approx(1 + 2 / 3)
    assert three["rows_per_round"] == pytest.approx(3)
    assert one["speedup"] == pytest.approx(1.6 / (0.2 + 1 + 0.2 * 2 / 3))
    assert three["speedup"] == pytest.approx(2.0 / (0.3 + 1.6))
    # Rows that cost nothing: more drafts pay, as far as drafting lets them.
    assert one["free_rows_speedup"] == pytest.approx(1.6 / 1.2)
    assert three["free_rows_speedup"] == pytest.approx(2.0 / 1.3)
    row = planning.recommend("d", COUNTERS, COSTS)
    assert row["can_win"] and row["words"].startswith("d: can win, 1.2")
    # Negative control: dear rows.
    dear = dataclasses.replace(COSTS, verify_s=(10.0, 30.0, 40.0))
    row = planning.recommend("d", COUNTERS, dear)
    assert not row["can_win"] and "1.54x with free verification" in row["words"]
    assert row["acceptance"] == 0.6 and row["break_even"] == pytest.approx(2.2)


def test_predictions_are_those_of_the_paper():
    """One acceptance for all positions, verification free: Theorem 3.8."""
    kept = tuple(round(1000 * 0.8**n) for n in (1, 2, 3))
    counters = metrics.Counters(tokens=1, rounds=1000, proposed=3000, kept_by_rank=kept)
    parts = costs.RoundCosts(
        plain_s=1.0,
        drafts=(0, 1, 2, 3),
        verify_s=(1.0,) * 4,
        beyond_s=(0.0, 0.1, 0.2, 0.3),
    )
    for row in planning.predict(counters, parts):
        drafts = row["drafts"]
        expected = sum(0.8**n for n in range(drafts + 1)) / (1 + 0.1 * drafts)
        assert row["speedup"] == pytest.approx(expected, rel=1e-3)
