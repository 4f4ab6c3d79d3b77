"""Confidences of a drafter: recorded rounds, and the scaling that they fit."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.lib import calibration, models, profiles, runs
from spec_jax.engine import protocols
from spec_jax.rules import sampling


COLUMNS = {
    "temperature": "g",
    "draft": "d",
    "of its confidence": ("temperatures", ".2f"),
    "shift": ("shifts", ".2f"),
    "ECE before": ("ece_before", ".3f"),
    "by STS": ("ece_sts", ".3f"),
    "ECE": ("ece", ".3f"),
    "ROC-AUC before": ("roc_auc_before", ".3f"),
    "ROC-AUC": ("roc_auc", ".3f"),
}
"""Of the table of `by_draft`'s lines."""


def fit(subject: models.Subject, temperature: float, *, seed: int) -> dict[str, Any]:
    """Returns the row of a temperature of the target's draws.

    Half of the prompts fit; the errors and rankings are of the other half. `ece_sts` is
    the error that the paper's sequential temperature scaling leaves, to compare with.

    Raises:
      ValueError: a drafter without confidences, one prompt, of which no half is left
        to report, or texts too short for a whole round.
    """
    if len(subject.ids) < 2:
        raise ValueError("one prompt fits and none is left to report: give --prompts 2")
    drafter = protocols.complete(subject.lm.drafter).for_schedule()
    lm, draws = dataclasses.replace(subject.lm, drafter=drafter), None
    if temperature:
        draws = sampling.make_settings(temperature=temperature, seed=seed)
    settings = dataclasses.replace(subject.settings, sampling=draws)
    scheduler = runs.make_scheduler(lm, settings)
    recorded = []
    for prompt in subject.ids:
        state = scheduler.begin(runs.make_request(lm, settings, prompt))
        rounds = calibration.record_rounds(
            scheduler.speculator, state, max_rounds=settings.gen_tokens
        )
        recorded.append(rounds)
    row = {"kind": profiles.CALIBRATION, "temperature": temperature}
    return row | {"gamma": lm.gamma_max} | judge(recorded)


def judge(recorded: Sequence[calibration.Rounds]) -> dict[str, Any]:
    """Returns the numbers of a row, of the rounds of each prompt: of two, the first is
    fitted, and the second reported."""
    fitted, reported = (
        calibration.Rounds(
            logits=np.concatenate([each.logits for each in recorded[half::2]]),
            num_accepted=np.concatenate([x.num_accepted for x in recorded[half::2]]),
        )
        for half in range(2)
    )
    found = calibration.fit_platt(fitted.logits, fitted.num_accepted)
    none = calibration.unscaled(fitted.logits.shape[1])
    before = calibration.report(reported, none)
    row = {name: values.tolist() for name, values in vars(found).items()}
    row |= {"fitted_rounds": len(fitted.logits), "rounds": len(reported.logits)}
    row |= {f"{name}_before": values for name, values in before.items()}
    of_paper = calibration.fit_sts(fitted.logits, fitted.num_accepted)
    row["temperatures_sts"] = of_paper.temperatures.tolist()
    row["ece_sts"] = calibration.report(reported, of_paper)["ece"]
    return row | calibration.report(reported, found)


def by_draft(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of confidences as a line for each draft."""
    names = [column[0] for column in COLUMNS.values() if isinstance(column, tuple)]
    return [
        {"temperature": row["temperature"], "draft": draft + 1}
        | {name: row[name][draft] for name in names}
        for draft in range(row["gamma"])
    ]
