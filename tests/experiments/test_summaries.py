"""Summaries: hand-computed speeds, and shares by repetition."""

import json

import pytest

from experiments.lib import runs, summaries
from spec_jax.analysis import metrics


def run(prefill_s: float, decode_s: float, tokens: int) -> runs.Run:
    timing = summaries.Timing(prefill_s=prefill_s, decode_s=decode_s)
    return runs.Run(tokens=[0] * tokens, timing=timing)


def test_speeds_by_hand():
    # Two prompts of 2 and 6 tokens, three repeats. Speeds are of totals, and not
    # means of rates: the short prompt must not weigh as much as the long one.
    baseline = [
        [run(1.0, 2.0, 2), run(1.0, 6.0, 6)],  # 10 s, 8 s decoding
        [run(1.0, 2.0, 2), run(1.0, 6.0, 6)],
        [run(2.0, 4.0, 2), run(2.0, 12.0, 6)],  # in a slow moment: 20 s, 16 s
    ]
    spec = [
        [run(1.0, 1.0, 2), run(1.0, 2.0, 6)],  # 5 s, 3 s decoding
        [run(1.0, 1.0, 2), run(1.0, 1.0, 6)],  # 4 s, 2 s
        [run(2.0, 1.0, 2), run(1.0, 4.0, 6)],  # 8 s, 5 s
    ]
    expected = {
        **{"baseline_e2e_tpot_ms": 1250.0, "baseline_e2e_tok_s": 0.8},
        **{"baseline_decode_tpot_ms": 1000.0, "baseline_decode_tok_s": 1.0},
        **{"spec_e2e_tpot_ms": 625.0, "spec_decode_tok_s": 8 / 3},
        # Ratios 2, 2.5, 2.5 and, decoding only, 8/3, 4, 16/5.
        **{"speedup_e2e": 2.5, "speedup_e2e_p10": 2.1, "speedup_e2e_p90": 2.5},
        **{"speedup_decode": 3.2, "speedup_decode_p90": 3.2 + 0.8 * 0.8},
    }
    found = summaries.speeds(baseline, spec)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    # One repeat has the spread of its prompts: ratios 3/2 and 7/3.
    alone = summaries.speeds(baseline[:1], spec[:1])
    assert alone["speedup_e2e"] == pytest.approx(2.0)
    assert alone["speedup_e2e_p10"] == pytest.approx(1.5 + 0.1 * (7 / 3 - 1.5))


@pytest.mark.parametrize(
    "repeats", [[], [[]], [[run(1.0, 0.0, 0)]], [[run(0.0, 0.0, 8)]]]
)
def test_nothing_measured_is_none_and_valid_json(repeats):
    """Fails if there is a rate without tokens, or by a clock that did not advance."""
    found = summaries.speeds(repeats, repeats)
    assert found["speedup_e2e"] is found["spec_e2e_tok_s"] is None
    json.dumps(found, allow_nan=False)


def test_acceptance_by_repetition_by_hand():
    """Fails if thirds are not by repetition, or means are not weighted by tokens."""
    # Shares of repeated 4-grams, of which the texts have 17, 7, 27 and 7.
    texts = [[0] * 20, list(range(10)), [*range(15), *range(15)], [*range(5)] * 2]
    repetition = [16 / 17, 0.0, 12 / 27, 2 / 7]
    assert [*map(metrics.repetition, texts)] == pytest.approx(repetition)
    counted = [
        metrics.Counters(proposed=proposed, accepted=accepted)
        for proposed, accepted in ((8, 8), (4, 1), (0, 0), (2, 1))
    ]
    found = summaries.by_repetition(texts, counted)
    assert found["tercile_prompts"] == [1, 1, 2]
    expected = [0.0, 2 / 7, (20 * 16 / 17 + 30 * 12 / 27) / 50]
    assert found["tercile_repetition"] == pytest.approx(expected)
    assert found["tercile_acceptance_rate"] == [0.25, 0.5, 1.0]
    assert found["repetition"] == pytest.approx((50 * expected[2] + 20 / 7) / 70)
    assert summaries.by_repetition([], [])["repetition"] is None
