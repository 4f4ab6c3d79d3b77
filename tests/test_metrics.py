"""Metrics: hand-computed numbers, and identities that catch planted faults."""

import dataclasses
import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from spec_jax.analysis import metrics


# Four rounds that drafted 3, 3, 3 and 1 tokens and kept 3, 0, 1 and 1 of them; the
# last round committed two tokens, of which the limit cut one off.
HAND = metrics.Counters(
    tokens=8, rounds=4, proposed=10, accepted=5, cut=1, accepted_hist=(1, 2, 0, 1),
    proposed_at=(4, 2, 1), accepted_at=(3, 1, 1), kept_by_rank=(3, 1, 1),
)  # fmt: skip


def test_counted_numbers_by_hand():
    summary = metrics.summarise(HAND)
    assert summary["target_steps"] == summary["verify_steps"] == summary["rounds"] == 4
    assert summary["acceptance_rate"] == 0.5
    assert summary["conditional_acceptance"] == [0.75, 0.5, 1.0]
    assert summary["mean_accepted_length"] == 9 / 4
    assert summary["tokens"] + summary["cut"] == 9
    assert summary["tokens_per_target_step"] == 2.0
    assert summary["accepted_hist"] == [1, 2, 0, 1]
    assert summary["rows_per_round"] == 14 / 4
    assert summary["kept_by_rank"] == [3, 1, 1]


def test_nothing_counted_is_none_and_valid_json():
    plain = metrics.Counters(tokens=3, rounds=3, accepted_hist=(3,))
    for counters in (plain, metrics.Counters()):
        summary = metrics.summarise(counters)
        assert summary["acceptance_rate"] is None
        json.dumps(summary, allow_nan=False)
    assert metrics.summarise(plain)["tokens_per_target_step"] == 1.0
    assert metrics.summarise(metrics.Counters())["mean_accepted_length"] is None


ROUNDS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).map(lambda x: (max(x), min(x))),
    max_size=40,
)


def simulate(rounds: list[tuple[int, int]], gamma_max: int, cut: int):
    """Counts rounds, each given as (drafted, kept), token by token."""
    hist = [0] * (gamma_max + 1)
    reached, kept_at = [0] * gamma_max, [0] * gamma_max
    committed = 0
    for drafted, kept in rounds:
        for i in range(drafted):
            reached[i] += 1
            if i == kept:
                break
            kept_at[i] += 1
            committed += 1
        committed += 1
        hist[kept] += 1
    cut = min(cut, committed)
    return metrics.Counters(
        tokens=committed - cut, rounds=len(rounds),
        proposed=sum(drafted for drafted, _ in rounds),
        accepted=sum(kept for _, kept in rounds), cut=cut, accepted_hist=tuple(hist),
        proposed_at=tuple(reached), accepted_at=tuple(kept_at),
    )  # fmt: skip


@hypothesis.settings(deadline=None)
@hypothesis.given(
    rounds=ROUNDS, more=ROUNDS, gamma_max=st.integers(7, 9), cut=st.integers(0, 7)
)
def test_simulated_rounds_satisfy_the_identities(rounds, more, gamma_max, cut):
    first, second = simulate(rounds, gamma_max, cut), simulate(more, 7, 0)
    metrics.identities(first)
    assert first + second == dataclasses.replace(
        simulate(rounds + more, gamma_max, 0),
        tokens=first.tokens + second.tokens,
        cut=first.cut,
    )
    summary = metrics.summarise(first + second)
    json.dumps(summary, allow_nan=False)
    # The chance to keep i drafts is the product of the conditional chances wherever
    # every round drafted at least i tokens: this is another way to the same histogram.
    if rounds and not more:
        shortest = min(drafted for drafted, _ in rounds)
        for i in range(1, shortest + 1):
            chances = summary["conditional_acceptance"][:i]
            if None not in chances:
                kept = sum(summary["accepted_hist"][i:]) / summary["rounds"]
                assert math.prod(chances) == pytest.approx(kept)


@pytest.mark.parametrize(
    ("identity", "fault"),
    [
        ("accepted + rounds == tokens + cut", dict(tokens=9)),
        ("accepted + rounds == tokens + cut", dict(cut=0)),
        ("sum(hist) == rounds", dict(accepted_hist=(2, 2, 0, 1))),
        ("sum(i * hist[i]) == accepted", dict(accepted_hist=(0, 3, 0, 1))),
        ("sum(accepted_at) == accepted", dict(accepted_at=(3, 1, 0))),
        ("accepted <= sum(proposed_at) <= proposed", dict(proposed=6)),
        ("accepted_at[i] <= proposed_at[i]", dict(proposed_at=(4, 0, 3))),
        ("accepted_at[i] == sum(hist[i+1:])", dict(accepted_at=(2, 2, 1))),
        ("proposed_at[i] <= accepted_at[i-1]", dict(proposed_at=(4, 2, 2))),
        ("proposed_at[i] <= accepted_at[i-1]", dict(proposed_at=(5, 2, 1))),
        (
            "len(hist) - 1 == len(proposed_at) == len(accepted_at)",
            dict(accepted_hist=(1, 2, 0, 1, 0)),
        ),
        ("0 <= every counter", dict(cut=-1, tokens=10)),
        ("0 <= every counter", dict(accepted_hist=(2, 2, -1, 1))),
    ],
)
def test_planted_fault_is_named(identity, fault):
    """Fails if an identity is not checked, or another one is blamed."""
    metrics.identities(HAND)
    with pytest.raises(metrics.IdentityError) as caught:
        metrics.summarise(dataclasses.replace(HAND, **fault))
    assert caught.value.identity == identity
    assert f"`{identity}` fails: " in str(caught.value)


def repetition_oracle(tokens: list[int]) -> float:
    """Computes repetition by definition: each 4-gram against all that start earlier."""
    if len(tokens) < 5:
        return 0.0
    repeated = 0
    for i in range(len(tokens) - 3):
        gram = tokens[i : i + 4]
        repeated += any(tokens[j : j + 4] == gram for j in range(i))
    return repeated / (len(tokens) - 3)


@hypothesis.settings(deadline=None)
@hypothesis.given(tokens=st.lists(st.integers(0, 2), max_size=60))
def test_repetition_is_that_of_the_definition(tokens):
    share = metrics.repetition(tokens)
    assert share == repetition_oracle(tokens) and 0 <= share < 1
    assert metrics.repetition([token + 5 for token in tokens]) == share
