"""Metrics: hand-computed numbers, and identities that catch planted faults.

`decoding.assert_as_decoded` checks the identities of rounds that were run.
"""

import dataclasses
import json

import pytest

from spec_jax.analysis import metrics


# Four rounds that drafted 3, 3, 3 and 1 tokens and kept 3, 0, 1 and 1 of them; the
# last round committed two tokens, of which the limit cut one off.
HAND = metrics.Counters(
    tokens=8, rounds=4, proposed=10, accepted=5, cut=1, accepted_hist=(1, 2, 0, 1),
    proposed_at=(4, 2, 1), accepted_at=(3, 1, 1), kept_by_rank=(3, 1, 1),
)  # fmt: skip


def test_counted_numbers_by_hand():
    assert metrics.summarise(HAND) == {
        "tokens": 8, "rounds": 4, "target_steps": 4, "verify_steps": 4, "proposed": 10,
        "accepted": 5, "acceptance_rate": 0.5, "cut": 1, "nonfinite_logits": 0,
        "conditional_acceptance": [0.75, 0.5, 1.0], "mean_accepted_length": 9 / 4,
        "tokens_per_target_step": 2.0, "accepted_hist": [1, 2, 0, 1],
        "rows_per_round": 14 / 4, "kept_by_rank": [3, 1, 1],
    }  # fmt: skip


PLAIN = metrics.Counters(tokens=3, rounds=3, accepted_hist=(3,))


def test_nothing_counted_is_none_and_valid_json():
    for counters in (PLAIN, metrics.Counters()):
        summary = metrics.summarise(counters)
        assert summary["acceptance_rate"] is None
        json.dumps(summary, allow_nan=False)
    assert metrics.summarise(PLAIN)["tokens_per_target_step"] == 1.0
    assert metrics.summarise(metrics.Counters())["mean_accepted_length"] is None


def test_counters_are_added_by_position():
    """Fails if a counter is lost, or one that only one of the two has."""
    one = dataclasses.replace(HAND, nonfinite=1)
    assert one + one == metrics.Counters(
        tokens=16, rounds=8, proposed=20, accepted=10, cut=2, nonfinite=2,
        proposed_at=(8, 4, 2), accepted_at=(6, 2, 2), kept_by_rank=(6, 2, 2),
        accepted_hist=(2, 4, 0, 2),
    )  # fmt: skip
    both = dataclasses.replace(HAND, tokens=11, rounds=7, accepted_hist=(4, 2, 0, 1))
    assert HAND + PLAIN == PLAIN + HAND == metrics.total([HAND, PLAIN]) == both


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


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        ([5] * 4, 0.0),
        ([5] * 7, 3 / 4),
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 3 / 6),
        ([1, 2, 3, 4, 5, 1, 2, 3, 5, 4], 0.0),
    ],
)
def test_repetition_is_the_share_of_repeated_runs_of_four(tokens, share):
    assert metrics.repetition(tokens) == share
