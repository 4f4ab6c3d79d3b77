"""Summaries: hand-computed speeds and shares, and timings of other runs refused."""

import dataclasses
import json

import pytest
import test_metrics

from experiments.lib import summaries
from spec_jax.analysis import metrics


HAND = dataclasses.replace(test_metrics.HAND, kept_by_rank=())


def timing(prefill_s: float, decode_s: float, tokens: int) -> summaries.Timing:
    return summaries.Timing(prefill_s=prefill_s, decode_s=decode_s, tokens=tokens)


def summarise(counters=HAND, **overrides) -> metrics.Metrics:
    keywords = dict(prompts=1, matched=True, verify_decode_mismatches=0)
    return summaries.summarise(counters, **(keywords | overrides))


def test_speeds_by_hand():
    # Two prompts of 2 and 6 tokens, three repeats. Totals, not means of rates: the
    # short prompt must not weigh as much as the long one.
    baseline = [
        [timing(1.0, 2.0, 2), timing(1.0, 6.0, 6)],  # 10 s, 8 s decoding
        [timing(1.0, 2.0, 2), timing(1.0, 6.0, 6)],
        [timing(2.0, 4.0, 2), timing(2.0, 12.0, 6)],  # A slow moment: 20 s, 16 s
    ]
    spec = [
        [timing(1.0, 1.0, 2), timing(1.0, 2.0, 6)],  # 5 s, 3 s decoding
        [timing(1.0, 1.0, 2), timing(1.0, 1.0, 6)],  # 4 s, 2 s
        [timing(2.0, 1.0, 2), timing(1.0, 4.0, 6)],  # 8 s, 5 s
    ]
    summary = summarise(prompts=2, baseline=baseline, spec=spec)
    assert summary["baseline_e2e_tpot_ms"] == pytest.approx(1250.0)
    assert summary["baseline_e2e_tok_s"] == pytest.approx(0.8)
    assert summary["baseline_decode_tpot_ms"] == pytest.approx(1000.0)
    assert summary["baseline_decode_tok_s"] == pytest.approx(1.0)
    assert summary["spec_e2e_tpot_ms"] == pytest.approx(625.0)
    assert summary["spec_decode_tok_s"] == pytest.approx(8 / 3)
    # Ratios 2, 2.5, 2.5 and, decoding only, 8/3, 4, 16/5.
    assert summary["speedup_e2e"] == pytest.approx(2.5)
    assert summary["speedup_e2e_p10"] == pytest.approx(2.1)
    assert summary["speedup_e2e_p90"] == pytest.approx(2.5)
    assert summary["speedup_decode"] == pytest.approx(3.2)
    assert summary["speedup_decode_p90"] == pytest.approx(3.2 + 0.8 * 0.8)


def test_nothing_measured_is_none_and_valid_json():
    plain = metrics.Counters(tokens=3, rounds=3, accepted_hist=(3,))
    empty = [[timing(1.0, 0.0, 0)]]
    for summary in (
        summarise(plain),
        summarise(metrics.Counters(), baseline=empty, spec=empty),
        summarise(metrics.Counters(), prompts=0),
    ):
        assert summary["speedup_e2e"] is None
        json.dumps(summary, allow_nan=False)
    # A clock that did not advance gives no rate either.
    instant = [[timing(0.0, 0.0, 8)]]
    assert summarise(baseline=instant, spec=instant)["spec_e2e_tok_s"] is None


def test_timings_must_be_of_the_counted_run():
    good, other = [[timing(1.0, 2.0, 8)]], [[timing(1.0, 2.0, 7)]]
    summarise(baseline=good, spec=good)
    summarise(baseline=other, spec=good, matched=False)
    with pytest.raises(metrics.IdentityError, match="timed spec tokens == tokens"):
        summarise(baseline=good, spec=other)
    with pytest.raises(metrics.IdentityError, match="7 against 8 in repeat 0, prompt"):
        summarise(baseline=other, spec=good)
    with pytest.raises(ValueError, match="1 baseline and 2 speculative repeats"):
        summarise(baseline=good, spec=good * 2)
    with pytest.raises(ValueError, match=r"of \[1, 2\] prompts: give pairs"):
        summarise(baseline=good, spec=[good[0] * 2])


def text(tokens: int, repetition: float, proposed: int, accepted: int):
    return summaries.TextCounts(
        tokens=tokens, repetition=repetition, proposed=proposed, accepted=accepted
    )


def of_texts(*texts: summaries.TextCounts) -> metrics.Metrics:
    """The summary of texts whose rounds drafted at most one token each."""
    tokens, proposed, accepted = (
        sum(getattr(one, name) for one in texts)
        for name in ("tokens", "proposed", "accepted")
    )
    rounds = tokens - accepted
    counters = metrics.Counters(
        tokens=tokens, rounds=rounds, proposed=proposed, accepted=accepted,
        accepted_hist=(rounds - accepted, accepted), proposed_at=(proposed,),
        accepted_at=(accepted,),
    )  # fmt: skip
    return summarise(counters, prompts=len(texts), texts=texts)


def test_acceptance_by_repetition_by_hand():
    """Fails if thirds are not by repetition, or means are not weighted by tokens."""
    summary = of_texts(
        text(20, 0.9, 8, 8),
        text(10, 0.0, 4, 1),
        text(30, 0.5, 0, 0),
        text(10, 0.6, 2, 1),
    )
    assert summary["tercile_prompts"] == [1, 1, 2]
    assert summary["tercile_repetition"] == [0.0, 0.5, pytest.approx(24 / 30)]
    assert summary["tercile_acceptance_rate"] == [0.25, None, 0.9]
    assert summary["repetition"] == pytest.approx(39 / 70)
