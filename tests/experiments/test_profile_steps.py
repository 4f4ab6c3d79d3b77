"""Measured profiles of steps, calibrations, and rounds that are scheduled by them."""

import numpy as np
import pytest
from script_runs import (
    assert_fails_with,
    assert_has_fields_of,
    models_of,
    rows_from,
    rows_of,
    write_rows,
)

from experiments import profile_steps, spec_round
from experiments.lib import calibration, profiles, works


GAMMA = ("--gamma", "2")


@pytest.fixture(scope="module")
def measured(folders, tmp_path_factory):
    """Returns a profile of two slots, and how many rows each slot had in each call."""
    path, calls = tmp_path_factory.mktemp("profile") / "profile.jsonl", []
    real = works.repeat_forward

    def watched(*args, num_active, **kwargs):
        calls.append(np.asarray(num_active))
        return real(*args, num_active=num_active, **kwargs)

    sizes = ("--batch", "2", "--contexts", "9,5", "--steps", "2", "--repeats", "2")
    sizes += ("--calibrate", "0.7,1", "--prompts", "2", "--gen-tokens", "6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(works, "repeat_forward", watched)
        arguments = [*models_of(folders), *GAMMA, *sizes, "--out", str(path)]
        assert profile_steps.main(arguments) == 0
    return path, calls


def test_every_number_of_rows_is_measured(measured):
    """Fails if a number of rows is left out, or rows are not spread over the slots."""
    path, calls = measured
    rows = rows_of(path, profiles.KIND)
    assert [(row["context"], row["num_slots"]) for row in rows] == [(5, 2), (9, 2)]
    for row in rows:
        assert row["rows"] == [1, 2, 3, 4, 5, 6] and row["n"] == row["steps"] == 2
        assert (np.diff(row["step_s"]) >= 0).all() and min(row["median_s"]) > 0
        assert profile_steps.never_falling(row["median_s"]).tolist() == row["step_s"]
        assert row["draft_s"] >= 0 and row["drafter"] == "draft-model"
        assert_has_fields_of(row, "profile_dspark_native.jsonl")
    assert {(call.sum(), call.max() - call.min() <= 1) for call in calls} == {
        (rows, True) for rows in range(1, 7)
    }


def test_a_disturbed_time_does_not_make_the_next_rows_free():
    """Fails if the highest time so far is taken: an outlier would raise later ones."""
    found = profile_steps.never_falling([1.0, 2.0, 9.0, 3.0, 6.0, 7.0, 8.0])
    assert found.tolist() == [1.0, 2.0, 6.0, 6.0, 6.0, 7.0, 8.0]


def command(folders, profile, *more):
    sizes = ("--gen-tokens", "6", "--prompts", "3", "--batch", "2")
    return [*models_of(folders), *GAMMA, *sizes, "--schedule", str(profile), *more]


@pytest.mark.slow
def test_scheduled_rounds_match(folders, measured, tmp_path, capsys):
    """Checks sampled rounds of a batch, calibrated by rows of the same file."""
    profile, _ = measured
    more = ("--temperature", "0.7", "--gamma-policy", "threshold")
    given = command(folders, profile, *more)
    *_, summary = rows_from(spec_round.main, tmp_path, given)
    assert summary["matched"] and summary["gamma_policy"] == "threshold"
    assert summary["schedule"] == "profile.jsonl"
    other = command(folders, profile, "--temperature", "0")
    words = "at (temperature, drafts) [(0.7, 2), (1.0, 2)], and not at temperature 0"
    assert_fails_with(spec_round.main, capsys, other, words)


def test_costs_of_a_batch_are_the_profiles():
    """Fails if the time of drafting is in plain steps, too, or is left out."""
    made = profiles.Profile(
        step_s=np.array([1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0]),
        draft_s=0.5,
        temperatures=None,
        shifts=None,
    )
    assert made.round_s(2, 2).tolist() == [2.0, 5.5, 13.5]


def test_the_profile_of_the_fewest_drafts_is_taken(tmp_path):
    """Fails if a profile of more drafts than needed, or of another draft, is taken."""
    about = dict.fromkeys(profiles.SAME, "x") | {"num_slots": 1, "kind": profiles.KIND}
    rows = [
        about | {"gamma": gamma, "context": context, "draft_s": gamma + context / 100,
                 "step_s": [1.0] * (gamma + 1)}
        for gamma, context in ((7, 10), (4, 90), (4, 20), (2, 10))
    ]  # fmt: skip
    rows.insert(0, rows[2] | {"draft": "y", "draft_s": 0.0})
    path = write_rows(tmp_path / "profile.jsonl", rows)
    asked = {"num_slots": 1, "gamma": 4, "context": 10, "temperature": 0.0}
    assert profiles.read(path, about, **asked).draft_s == 4.2


OF_RUN = dict.fromkeys(profiles.SAME, "x") | {"drafter_sha256": "a1"}
CALIBRATED = OF_RUN | {
    "kind": profiles.CALIBRATION,
    "temperature": 0.5,
    "temperatures": [1.0, 2.0, 3.0],
    "shifts": [0.0, -1.0, 0.5],
}


def read_with(tmp_path, profile: dict, calibrated: dict):
    """Reads changed rows as a run of two drafts at temperature 0.5 does."""
    sizes = {"num_slots": 1, "gamma": 2, "context": 10}
    own = OF_RUN | sizes | {"kind": profiles.KIND, "draft_s": 0.0}
    own |= {"step_s": [1.0, 1.0, 1.0]}
    rows = [own | profile, CALIBRATED | calibrated]
    path = write_rows(tmp_path / "profile.jsonl", rows)
    return profiles.read(path, OF_RUN, **sizes, temperature=0.5)


def test_calibrations_are_of_the_drafter(tmp_path):
    """Fails if the drafter's calibration is not used, or not cut to two drafts."""
    found = read_with(tmp_path, {}, {})
    assert found.temperatures.tolist() == [1.0, 2.0]
    assert found.shifts.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("profile", "calibrated", "words"),
    [
        ({"num_slots": 4}, {}, "no profile of .* 1 slots .* --batch 1 --gamma 2"),
        ({"dtype": "y"}, {}, "no profile of .*'dtype': 'x'.*, but of .*'dtype': 'y'"),
        ({"step_s": [0.1, 0.3, 0.2]}, {}, "no times of steps .*falls from 0.3 s at 2"),
        ({}, {"drafter_sha256": "b2"}, "of a x with other weights"),
        ({}, {"temperature": 0.7}, "not at temperature 0.5 of 2 drafts"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, profile, calibrated, words):
    with pytest.raises(ValueError, match=f"profile.jsonl: .*{words}"):
        read_with(tmp_path, profile, calibrated)


def test_confidences_are_calibrated(measured):
    """Fails if a row lacks a draft, or rounds are left out."""
    rows = rows_of(measured[0], profiles.CALIBRATION)
    assert [row["temperature"] for row in rows] == [0.7, 1]
    for row in rows:
        assert row["drafter"] == "draft-model" and row["prompts"] == 2
        for name in ("temperatures", "shifts", "ece", "ece_before", "ece_sts"):
            assert len(row[name]) == row["gamma"] == 2
        # Six tokens are six rounds at most; the last ones have no room for two drafts.
        assert 2 <= row["rounds"] <= 6 and 2 <= row["fitted_rounds"] <= 6


def test_calibration_is_judged_by_what_it_was_not_fitted_to(rng):
    """Fails if a prompt is in both halves: fitted, and reported."""
    one, other = (
        calibration.Rounds(
            logits=rng.normal(size=(count, 3)), num_accepted=rng.integers(0, 4, count)
        )
        for count in (90, 80)
    )
    row = calibration.judge([one, other])
    found = calibration.fit_platt(*one)
    assert row["temperatures"] == found.temperatures.tolist()
    assert row["ece"] == calibration.report(other, found)["ece"]
    assert row["ece"] != calibration.report(one, found)["ece"]
    assert (row["fitted_rounds"], row["rounds"]) == (90, 80)
