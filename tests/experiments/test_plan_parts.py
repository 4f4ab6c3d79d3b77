"""The parts of a plan: costs, acceptance, predictions, verdicts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from experiments.lib import timing
from experiments.support import (
    model_pair,
    paired_runs,
    plan_acceptance,
    plan_costs,
    plan_prediction,
    plan_report,
    plan_runs,
    prompt_files,
    prompt_runs,
)
from spec_jax.analysis import metrics
from spec_jax.engine import protocols
from spec_jax.gamma import theory


GAMMA, GEN_TOKENS, PAGE_SIZE = 2, 8, 16
PROMPT = "def first(x):"

COSTS = plan_costs.RoundCosts(
    plain_s=10.0,
    verify_s=(10.0, 12.0, 13.0),
    idle_s=11.0,
    propose_s=(0.5, 2.0, 3.0),
)


def test_the_curve_of_costs():
    """Fails if a part is left out, or counted twice."""
    curve = COSTS.curve()
    assert curve.draft_s == 1.0
    # What a round has beside its forward, and what a proposal has beside its draft.
    assert curve.overhead_s == (11.0 - 10.0) + (2.0 - 0.5 - 1.0)
    assert COSTS.round_s().tolist() == [11.0, 1.5 + 1.0 + 12.0, 1.5 + 2.0 + 13.0]
    one = dataclasses.replace(
        COSTS, verify_s=(10.0, 12.0), propose_s=(0.5, 2.0, 2.0)
    ).curve()
    assert (one.draft_s, one.overhead_s) == (1.5, 1.0)


def test_noise_is_no_gain():
    """Differences below zero count as none."""
    noisy = dataclasses.replace(COSTS, idle_s=9.0, propose_s=(2.0, 1.5, 1.0))
    assert noisy.curve().draft_s == noisy.curve().overhead_s == 0
    assert noisy.round_s()[0] == 9.0


def test_costs_are_compared_within_a_turn():
    """A turn that was slow as a whole leaves ratios as they are."""
    per_step = {
        **{"plain step": 1.0, "1 live row": 1.0, "2 live rows": 0.9},
        **{"d: round, gamma 0": 1.1, "d: proposal, gamma 0": 0.1},
        **{"d: proposal, gamma 1": 0.3},
        "d: proposal, nothing to catch up": 0.4,
        "d: proposal, 7 tokens to catch up": 1.1,
    }
    slow = (1.0, 1.0, 7.0)
    seconds = {name: [factor * s for factor in slow] for name, s in per_step.items()}
    timings = timing.Timings(warm_up={}, seconds=seconds)
    costs = plan_costs.costs_of("d", timings, gamma_max=1)
    assert costs.verify_s == (1.0, 1.0)  # two rows cannot take less than one
    assert costs.idle_s == pytest.approx(1.1)
    assert costs.propose_s == pytest.approx((0.1, 0.3, 0.3))
    assert costs.catch_up_s == pytest.approx(0.7 / 7)
    del seconds["d: proposal, 7 tokens to catch up"]
    assert plan_costs.costs_of("d", timings, gamma_max=1).catch_up_s is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """Writes down where it is asked, for how much, and what is committed."""

    gamma_max: int = GAMMA

    def propose(self, params, memory, *, tokens, length, gamma):
        del params, tokens
        asked, committed = memory
        drafts = jnp.full((self.gamma_max,), 5, jnp.int32)
        return (asked.at[length].set(gamma), committed), protocols.Proposal(
            tokens=drafts, num_drafted=gamma
        )

    def commit(self, params, memory, length):
        del params
        asked, committed = memory
        return asked, committed.at[length].add(1)


@pytest.mark.parametrize("stride", [1, 3])
def test_proposals_are_made_along_the_text(stride):
    """Fails if a proposal is left out, or the text is not committed between two."""
    memory = jnp.zeros((12,), jnp.int32), jnp.zeros((12,), jnp.int32)
    (asked, committed), seen = plan_costs._propose_along(
        Listing(),
        None,
        memory,
        jnp.zeros((12,), jnp.int32),
        start=jnp.int32(2),
        gamma=jnp.int32(2),
        steps=jnp.int32(3),
        stride=jnp.int32(stride),
    )
    places = [2 + i * stride for i in range(3)]
    assert np.flatnonzero(asked).tolist() == places
    assert np.flatnonzero(committed).tolist() == [n + stride for n in places]
    assert int(seen) == 3 * (2 * 5 + 2)  # every draft was looked at


def windows(*each: tuple[int, int, int]) -> list[plan_acceptance.Window]:
    return [
        plan_acceptance.Window(asked=asked, drafted=drafted, accepted=accepted)
        for asked, drafted, accepted in each
    ]


def test_acceptance_by_position():
    """Fails if short windows count at positions that they never asked for."""
    found = plan_acceptance.measure(
        windows((3, 3, 3), (3, 3, 1), (3, 1, 1), (3, 0, 0), (1, 1, 1)), gamma_max=3
    )
    assert found.kept == (4 / 5, 1 / 3, 1.0)
    assert found.drafted == (4 / 5, 2 / 4, 2 / 4)
    assert found.windows == 5 and found.known == found.kept


def test_positions_that_were_not_reached():
    never = plan_acceptance.measure(windows((2, 2, 0), (2, 2, 0)), gamma_max=2)
    assert never.kept == (0.0, 0.0)
    unknown = plan_acceptance.measure(windows((2, 2, 0), (1, 1, 1)), gamma_max=2)
    assert unknown.kept == (0.5, None) and unknown.known == (0.5,)
    with pytest.raises(ValueError, match="none of 1 rounds had room for 2 drafts"):
        plan_acceptance.measure(windows((1, 1, 1)), gamma_max=2)


@pytest.fixture(scope="module")
def self_drafting(tmp_path_factory):
    """The target drafts for itself, so that all is kept; and settings that fit."""
    target, _ = tiny_pair.write(tmp_path_factory.mktemp("pair"))
    pair = model_pair.load_pair(
        target, target, gamma_max=GAMMA, slab=GAMMA + 1, dtype=None, impl="auto"
    )
    settings = paired_runs.Settings(
        gamma=GAMMA, gen_tokens=GEN_TOKENS, capacity=32, page_size=PAGE_SIZE
    )
    return pair, settings


def test_recorded_windows_are_those_of_a_run(self_drafting):
    """As integers; and near the end a round asks for less."""
    pair, settings = self_drafting
    prompt = pair.tokenizer.encode(PROMPT)
    recorded, text = plan_acceptance.record(pair, settings, prompt)
    run = paired_runs.run_speculative(pair, settings, prompt)
    counters = run.counters
    assert text == metrics.text_counts(run.tokens, counters)
    assert len(recorded) == counters.rounds
    assert sum(w.drafted for w in recorded) == counters.proposed
    assert sum(w.accepted for w in recorded) == counters.accepted
    assert [w.asked for w in recorded] == [2, 2, 1]
    assert all(w.asked == w.drafted == w.accepted for w in recorded)


def test_one_text_is_replayed_once(self_drafting, monkeypatch):
    pair, settings = self_drafting
    replayed = []
    real = prompt_runs.mismatches_of

    def counted(*arguments):
        replayed.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(prompt_runs, "mismatches_of", counted)
    designs = {
        gamma: plan_runs.Design(
            pair=pair, settings=dataclasses.replace(settings, gamma=gamma)
        )
        for gamma in (1, 2)
    }
    prompt = prompt_files.Prompt(id="1", text=PROMPT, category=None)
    ids = [pair.tokenizer.encode(prompt.text)]
    results = plan_runs.run(designs, [prompt], ids, repeats=2)
    assert len(replayed) == 1
    assert [len(results[gamma][0].spec) for gamma in (1, 2)] == [2, 2]
    assert results[1][0].plain is results[2][0].plain
    assert all(result.matched for (result,) in results.values())


def full_windows(*kept: float) -> plan_acceptance.Acceptance:
    return plan_acceptance.Acceptance(
        kept=kept, drafted=(1.0,) * len(kept), windows=100
    )


def curve(draft_s: float, *verify_s: float, overhead_s=0.0) -> theory.CostCurve:
    return theory.CostCurve(
        plain_s=1.0,
        rows=tuple(range(1, len(verify_s) + 1)),
        verify_s=verify_s,
        draft_s=draft_s,
        overhead_s=overhead_s,
    )


def test_predictions_are_those_of_the_paper():
    """One acceptance for all positions, verification free: Theorem 3.8."""
    found = plan_prediction.predict(full_windows(0.8, 0.8, 0.8), curve(0.1, 1, 1, 1, 1))
    assert [prediction.gamma for prediction in found] == [1, 2, 3]
    for prediction in found:
        expected = theory.walltime_improvement(0.8, 0.1, prediction.gamma)
        assert prediction.speedup == pytest.approx(expected)


def test_windows_that_end_early_cost_less():
    """Negative control: those of the same acceptance that were always full."""
    kept = (0.4, 0.4)
    rare = plan_acceptance.Acceptance(kept=kept, drafted=(0.5, 0.25), windows=100)
    costs = curve(0.1, 1, 1.5, 2)
    found = plan_prediction.predict(rare, costs)
    assert [p.round_s for p in found] == pytest.approx([1.3, 1.45])
    full = plan_prediction.predict(full_windows(*kept), costs)
    assert [p.round_s for p in full] == pytest.approx([1.6, 2.2])
    assert all(a.speedup > b.speedup for a, b in zip(found, full, strict=True))


def test_ceilings_are_those_of_the_theory():
    costs = curve(0.2, 1, 1.3, 1.6, overhead_s=0.05)
    verdict = plan_prediction.judge(full_windows(0.7, 0.6), costs)
    for free, found in verdict.ceilings.items():
        best = theory.ceiling([0.7, 0.6], costs, free=free)
        assert found == pytest.approx(best)
    assert verdict.can_win
    assert "can win" in verdict.words("draft-model")


def test_a_pair_that_cannot_win_is_told_so():
    """By numbers: what free verification would bring, and the condition of Leviathan
    et al., which fails, or holds where verification is what costs."""
    dear = plan_prediction.judge(full_windows(0.2, 0.1), curve(0.3, 1, 1.2, 1.4))
    assert not dear.can_win
    words = dear.words("draft-model")
    assert "draft-model: cannot win, 0.80x with gamma 1" in words
    assert "free verification at most 0.92x" in words and "with both 1.22x" in words
    assert "a = 0.200" in words and "not above" in words and "c = 0.300" in words
    assert "Corollary 3.9" in words

    rows_cost = plan_prediction.judge(full_windows(0.4), curve(0.1, 1, 1.9))
    assert not rows_cost.can_win
    words = rows_cost.words("suffix")
    assert f"free verification at most {1.4 / 1.1:.2f}x" in words
    assert "which is above" in words and "1.000 plain steps longer" in words
    # Negative control: the same drafts, kept more often.
    assert plan_prediction.judge(full_windows(0.95), curve(0.1, 1, 1.5)).can_win


def test_marks_of_the_best():
    """Of equals the smallest gamma; what is unknown is never best."""
    rows = [
        {"drafter": "a", "gamma": 1, "predicted_speedup": 2.0, "measured_speedup": 1.0},
        {"drafter": "a", "gamma": 2, "predicted_speedup": 2.0, "measured_speedup": 3.0},
        {"drafter": "b", "gamma": 1, "predicted_speedup": None, "measured_speedup": 1},
    ]
    marked = plan_report.mark_best(rows)
    assert [row["is_best_predicted"] for row in marked] == [True, False, False]
    assert [row["is_best_measured"] for row in marked] == [False, True, True]
    assert plan_report.relative_error(1.1, 1.0) == pytest.approx(0.1)
    assert plan_report.relative_error(None, 1.0) is None
