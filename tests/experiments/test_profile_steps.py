"""Measured profiles of steps, calibrations, and rounds that are scheduled by them."""

import dataclasses

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


@pytest.fixture(scope="module")
def measured(folders, tmp_path_factory):
    """Returns a profile of two slots, and how many rows each slot had in each call."""
    path, calls = tmp_path_factory.mktemp("profile") / "profile.jsonl", []
    real = works.repeat_forward

    def watched(*args, num_active, **kwargs):
        calls.append(np.asarray(num_active))
        return real(*args, num_active=num_active, **kwargs)

    sizes = "--batch 2 --contexts 9,5 --steps 2 --repeats 2 --calibrate 0.7,1 "
    sizes += f"--gamma 2 --prompts 2 --gen-tokens 6 --out {path}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(works, "repeat_forward", watched)
        assert profile_steps.main([*models_of(folders), *sizes.split()]) == 0
    return path, calls


def test_every_number_of_rows_is_measured(measured):
    """Fails if a number of rows, a calibration or rounds are left out."""
    path, calls = measured
    rows = rows_of(path, profiles.KIND)
    assert [(row["context"], row["num_slots"]) for row in rows] == [(5, 2), (9, 2)]
    for row in rows:
        assert row["rows"] == [1, 2, 3, 4, 5, 6] and row["n"] == row["steps"] == 2
        assert (np.diff(row["step_s"]) >= 0).all() and min(row["median_s"]) > 0
        assert profile_steps.never_falling(row["median_s"]).tolist() == row["step_s"]
        assert row["draft_s"] >= 0 and row["drafter"] == "draft-model"
        assert_has_fields_of(row, "profile_dspark_native.jsonl")
    assert {int(call.sum()) for call in calls} == {1, 2, 3, 4, 5, 6}
    assert max(call.max() - call.min() for call in calls) <= 1
    rows = rows_of(path, profiles.CALIBRATION)
    assert [row["temperature"] for row in rows] == [0.7, 1]
    for row in rows:
        assert row["drafter"] == "draft-model" and row["prompts"] == 2
        for name in ("temperatures", "shifts", "ece", "ece_before"):
            assert len(row[name]) == row["gamma"] == 2
        # Six tokens are six rounds at most; the last ones have no room for two drafts.
        assert 2 <= row["rounds"] <= 6 and 2 <= row["fitted_rounds"] <= 6


def test_a_disturbed_time_does_not_make_the_next_rows_free():
    """Fails if the highest time so far is taken: an outlier would raise later ones."""
    found = profile_steps.never_falling([1.0, 2.0, 9.0, 3.0, 6.0, 7.0, 8.0])
    assert found.tolist() == [1.0, 2.0, 6.0, 6.0, 6.0, 7.0, 8.0]


@pytest.mark.slow
def test_scheduled_rounds_match(folders, measured, tmp_path, capsys):
    """Checks sampled rounds of a batch, calibrated by rows of the same file."""
    profile, _ = measured
    given = f"--gen-tokens 6 --prompts 3 --batch 2 --gamma 2 --schedule {profile}"
    given = [*models_of(folders), *given.split()]
    more = ["--temperature", "0.7", "--gamma-policy", "threshold"]
    *_, summary = rows_from(spec_round.main, tmp_path, [*given, *more])
    assert summary["matched"] and summary["gamma_policy"] == "threshold"
    assert summary["schedule"] == "profile.jsonl"
    words = "at (temperature, drafts) [(0.7, 2), (1.0, 2)], and not at temperature 0"
    assert_fails_with(spec_round.main, capsys, [*given, "--temperature", "0"], words)


def test_the_profile_of_the_fewest_drafts_is_taken(tmp_path):
    """Fails if a profile of more drafts than needed, or of another draft, is taken."""
    about = OF_RUN | {"num_slots": 1, "kind": profiles.KIND}
    rows = [
        about | {"gamma": gamma, "context": context, "draft_s": gamma + context / 100,
                 "step_s": [1.0] * (gamma + 1), "draft": draft}
        for draft, gamma, context in (
            ("y", 4, 10), ("x", 7, 10), ("x", 4, 90), ("x", 4, 20), ("x", 2, 10)
        )
    ]  # fmt: skip
    path = write_rows(tmp_path / "profile.jsonl", rows)
    asked = {"num_slots": 1, "gamma": 4, "context": 10, "temperature": 0.0}
    assert profiles.read(path, OF_RUN, **asked).draft_s == 4.2


SIZES = {"num_slots": 1, "gamma": 2, "context": 10}
OF_RUN = dict.fromkeys(profiles.SAME, "x") | {"drafter_sha256": "a1"}
CALIBRATED = OF_RUN | {
    "kind": profiles.CALIBRATION,
    "temperature": 0.5,
    "temperatures": [1.0, 2.0, 3.0],
    "shifts": [0.0, -1.0, 0.5],
}


def read_with(tmp_path, profile: dict, calibrated: dict):
    """Reads changed rows as a run of two drafts at temperature 0.5 does."""
    own = OF_RUN | SIZES | {"kind": profiles.KIND, "draft_s": 0.5}
    own |= {"step_s": [1.0, 1.0, 2.0]}
    rows = [own | profile, CALIBRATED | calibrated]
    path = write_rows(tmp_path / "profile.jsonl", rows)
    return profiles.read(path, OF_RUN, **SIZES, temperature=0.5)


def test_a_profile_as_it_is_read(tmp_path):
    """Fails if its calibration is not the drafter's, or drafting counts twice."""
    found = read_with(tmp_path, {}, {})
    assert found.temperatures.tolist() == [1.0, 2.0]
    assert found.shifts.tolist() == [0.0, -1.0]
    found = dataclasses.replace(found, step_s=np.array([1, 1, 2, 3, 5, 8, 13.0]))
    assert found.round_s(2, 2).tolist() == [2.0, 5.5, 13.5]


def test_files_that_cannot_be_used(tmp_path):
    for profile, calibrated, words in (
        ({"num_slots": 4}, {}, "no profile of .* 1 slots .* --batch 1 --gamma 2"),
        ({"dtype": "y"}, {}, "no profile of .*'dtype': 'x'.*, but of .*'dtype': 'y'"),
        ({"step_s": [0.1, 0.3, 0.2]}, {}, "no times of steps .*falls from 0.3 s at 2"),
        ({}, {"drafter_sha256": "b2"}, "of a x with other weights"),
        ({}, {"temperature": 0.7}, "not at temperature 0.5 of 2 drafts"),
    ):
        with pytest.raises(ValueError, match=f"profile.jsonl: .*{words}"):
            read_with(tmp_path, profile, calibrated)


def test_calibration_is_judged_by_what_it_was_not_fitted_to(rng):
    """Fails if a prompt is in both halves: fitted, and reported."""
    rounds = lambda count: calibration.Rounds(
        logits=rng.normal(size=(count, 3)), num_accepted=rng.integers(0, 4, count)
    )
    one, other = rounds(90), rounds(80)
    row = calibration.judge([one, other])
    found = calibration.fit_platt(*one)
    assert row["temperatures"] == found.temperatures.tolist()
    assert row["ece"] == calibration.report(other, found)["ece"]
    assert row["ece"] != calibration.report(one, found)["ece"]
    assert (row["fitted_rounds"], row["rounds"]) == (90, 80)
