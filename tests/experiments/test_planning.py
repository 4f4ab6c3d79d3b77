"""What plans are made of: acceptance, recorded windows, and predictions from costs."""

import pytest
import tiny_pair

from experiments.lib import (
    costs,
    planning,
    runs,
)
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.gamma import theory


GAMMA, GEN_TOKENS, PAGE_SIZE = 2, 8, 16
PROMPT = "def first(x):"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


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
    prompt = lm.tokenizer.encode(PROMPT)
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


def test_a_pair_that_cannot_win_is_told_so():
    """By numbers: what free verification would bring, and the condition of Leviathan
    et al., which fails, or holds where verification is what costs."""
    dear = planning.recommend("d", full_windows(0.2, 0.1), of_rounds(0.3, 1, 1.2, 1.4))
    assert not dear["can_win"] and "cannot win, 0.80x with gamma 1" in dear["words"]
    assert dear["ceilings"]["verification"] == pytest.approx(1.2 / 1.3)
    assert dear["ceilings"]["both"] == pytest.approx(1.22)
    assert dear["acceptance"] == 0.2 and dear["cost"] == pytest.approx(0.3)
    rows_cost = planning.recommend("d", full_windows(0.4), of_rounds(0.1, 1, 1.9))
    assert rows_cost["ceilings"]["verification"] == pytest.approx(1.4 / 1.1)
    assert rows_cost["break_even"] == pytest.approx(1)
    # Negative control: the same drafts, kept more often.
    wins = planning.recommend("d", full_windows(0.95), of_rounds(0.1, 1, 1.5))
    assert wins["can_win"] and "can win" in wins["words"]
