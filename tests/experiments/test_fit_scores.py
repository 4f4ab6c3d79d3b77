"""The tau that makes scores chances: fitted to tokens whose law is known."""

import dataclasses
import itertools
import types
from typing import Any

import numpy as np
from script_runs import models_of, rows_of

from experiments import fit_scores
from experiments.lib import confidences, runs
from spec_jax.analysis import calibration


def test_the_script_fits_and_calibrates(folders, tmp_path):
    out = tmp_path / "fits.jsonl"
    sizes = ("--prompts", "2", "--gen-tokens", "6", "--temperature", "0,1")
    sizes = (*models_of(folders), *sizes, "--gamma", "2")
    assert fit_scores.main([*sizes, "--out", str(out)]) == 0
    for row in rows_of(out, "fitted_scores"):
        assert 0.1 <= row["tau"] <= 4 and row["tokens"] <= 12
        assert 0 <= row["first_1"] <= row["first_8"] <= 1
    row, drawn = rows_of(out, "confidences")
    assert (row["temperature"], drawn["temperature"]) == (0, 1)
    assert row["drafter"] == "draft-model"
    for name in ("temperatures", "shifts", "ece", "ece_before", "ece_sts", "roc_auc"):
        assert len(row[name]) == row["gamma"] == 2
    # Of six tokens a round each, but for the last that have no room for drafts.
    assert 2 <= row["rounds"] <= 6 and 2 <= row["fitted_rounds"] <= 6


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What `confidences.fit` asks of a `LanguageModel`."""

    drafter: Any
    gamma_max: int


def test_calibration_is_judged_by_what_it_was_not_fitted_to(monkeypatch):
    """Fails if a prompt is of both halves. Nothing is drafted: each prompt's rounds are
    its number."""
    calls, seen = itertools.count(), {}

    def recorded(speculator, state, *, max_rounds):
        number = next(calls)
        return calibration.Rounds(
            logits=np.full((2, 3), number, np.float32),
            num_accepted=np.full((2,), number % 4, np.int32),
        )

    def noted(name, result):
        def call(rounds, *more):
            seen[name] = set(np.ravel(getattr(rounds, "logits", rounds)).tolist())
            return result

        return call

    scheduler = types.SimpleNamespace(speculator=None, begin=lambda request: None)
    monkeypatch.setattr(confidences.runs, "make_scheduler", lambda lm, s: scheduler)
    monkeypatch.setattr(confidences.runs, "make_request", lambda lm, s, prompt: None)
    monkeypatch.setattr(calibration, "record_rounds", recorded)
    scaling = calibration.unscaled(3)
    monkeypatch.setattr(calibration, "fit_platt", noted("fitted", scaling))
    monkeypatch.setattr(calibration, "fit_sts", noted("of the paper", scaling))
    monkeypatch.setattr(calibration, "report", noted("reported", {"ece": []}))
    lm = Drafting(drafter=types.SimpleNamespace(), gamma_max=3)
    settings = runs.Settings(gamma=3, gen_tokens=8, capacity=32, page_size=16)
    subject = types.SimpleNamespace(lm=lm, settings=settings, ids=[[1], [2], [3], [4]])
    row = confidences.fit(subject, 0.0, seed=0)
    assert seen["fitted"] == seen["of the paper"] == {0.0, 2.0}
    assert seen["reported"] == {1.0, 3.0}
    assert row["fitted_rounds"] == row["rounds"] == 4
