"""Calibration, which turns the confidences of drafts into chances.

The chance of a chain's draft is `sigmoid(logit / temperature + shift)`; `fit_platt`
finds both numbers for each draft. Products of these chances are the chances that a
prefix is kept. A temperature alone, as in DSpark's sequential temperature scaling
(https://arxiv.org/abs/2607.05147), leaves a logit of 0 as it is, and so keeps a bias.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from experiments.lib import models, profiles, runs
from spec_jax.engine import protocols, round as round_lib, state as states
from spec_jax.gamma import confidence
from spec_jax.rules import sampling


class Rounds(NamedTuple):
    """Confidences of rounds that verified all drafts, with how many were kept."""

    logits: np.ndarray  # [n, W] float32, see `confidence.logits_of`
    num_accepted: np.ndarray  # [n] int32


def record_rounds(
    speculator: round_lib.Speculator, state: states.State, *, max_rounds: int
) -> Rounds:
    """Runs rounds, and returns them slot after slot; `state` is not changed.

    Rounds that verified fewer drafts than possible are left out, since they tell less:
    rounds near the end of a text, or whose drafter ended its proposal early.

    Raises:
      ValueError: a drafter that gives no survival.
    """
    survival, accepted, is_whole = jax.device_get(
        _run_rounds(speculator, state, max_rounds=max_rounds)
    )
    # [rounds, B, ..] -> [B, rounds, ..], so that a slot's rounds are neighbours.
    survival, accepted, is_whole = (
        np.swapaxes(each, 0, 1) for each in (survival, accepted, is_whole)
    )
    logits = confidence.logits_of(jnp.asarray(survival[is_whole]))
    return Rounds(logits=np.asarray(logits), num_accepted=accepted[is_whole])


@functools.partial(jax.jit, static_argnames=("max_rounds",))
def _run_rounds(speculator, state, *, max_rounds):
    """Returns survival, drafts accepted and whether all were verified, by round."""

    def step(state, _):
        running = state.slots.running
        state, info = round_lib.run_round(speculator, state)
        survival = protocols.survival_of(speculator.drafter, info.proposal)
        num_drafted = info.proposal.num_drafted
        is_whole = running & ~info.out_of_pages & (num_drafted == survival.shape[1])
        return state, (survival, info.outcome.num_accepted, is_whole)

    return jax.lax.scan(step, state, length=max_rounds)[1]


COLDEST, HOTTEST = 0.25, 4.0
"""Bounds of temperatures."""

BINS = 20
"""Number of bins of equal width over chances, for errors of calibration."""


class Scaling(NamedTuple):
    """Maps confidences to chances: `sigmoid(logit / temperature + shift)`."""

    temperatures: np.ndarray  # [W] float32, above 0
    shifts: np.ndarray  # [W] float32


def fit_platt(logits: np.ndarray, num_accepted: np.ndarray) -> Scaling:
    """Returns the temperature and the shift of the confidence of each draft.

    Both maximise the likelihood over the rounds that kept all drafts before, and so the
    likelihood of all counts together (Platt, Probabilistic Outputs for Support Vector
    Machines, 1999; his targets count one more round of each kind, so that no chance
    becomes 0 or 1). Temperatures are above 0, so that no ranking within a draft
    changes. A draft that no round reached keeps its confidence.

    Args:
      logits: `[n, W]`, of each draft's chance, given that all before it are kept.
      num_accepted: `[n]`, drafts kept in rounds that verified all `W`.
    """
    logits, found = np.asarray(logits, np.float64), []
    for draft in range(logits.shape[1]):
        reached = num_accepted >= draft
        found.append(_platt(logits[reached, draft], num_accepted[reached] > draft))
    temperatures, shifts = np.array(found, np.float32).T
    return Scaling(temperatures=temperatures, shifts=shifts)


def _platt(logits: np.ndarray, is_kept: np.ndarray) -> tuple[float, float]:
    """Fits temperature and shift of one draft to the rounds that reached it."""
    num_kept, count = int(is_kept.sum()), len(logits)
    if not count:
        return 1.0, 0.0
    kept, lost = (num_kept + 1) / (num_kept + 2), 1 / (count - num_kept + 2)
    targets = np.where(is_kept, kept, lost)

    def loss(slope_and_shift: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns minus the mean log-likelihood, which is convex, and its gradient."""
        slope, shift = slope_and_shift
        scaled = slope * logits + shift
        errors = 1 / (1 + np.exp(-scaled)) - targets
        gradient = np.array([np.mean(errors * logits), np.mean(errors)])
        return np.mean(np.logaddexp(0, scaled) - targets * scaled), gradient

    bounds = ((1 / HOTTEST, 1 / COLDEST), (None, None))
    found = optimize.minimize(loss, (1.0, 0.0), jac=True, bounds=bounds)
    return 1 / found.x[0], found.x[1]


def calibration_error(chances: np.ndarray, is_kept: np.ndarray) -> float:
    """Returns the expected calibration error: the mean gap, over `BINS` of chances,
    between the mean chance and the share that is kept."""
    at = np.minimum((np.asarray(chances) * BINS).astype(int), BINS - 1)
    gaps = np.bincount(at, weights=chances) - np.bincount(at, weights=is_kept)
    return float(np.sum(np.abs(gaps)) / len(at))


def roc_auc(scores: np.ndarray, is_kept: np.ndarray) -> float | None:
    """Returns the chance that a kept draft scores above a rejected one; a tie is half.

    The result is None where all drafts are kept, or all rejected.
    """
    kept, lost = scores[is_kept], scores[~is_kept]
    if not (kept.size and lost.size):
        return None
    found = stats.mannwhitneyu(kept, lost, method="asymptotic")
    return float(found.statistic / (kept.size * lost.size))


def report(rounds: Rounds, scaling: Scaling) -> dict[str, Any]:
    """Returns how well confidences are calibrated after `scaling`.

    `ece` has for each draft the error, over all rounds, of the chance that the prefix
    is kept; `roc_auc`, over the rounds that kept all before it, how well its own
    confidence separates kept from rejected drafts, which no scaling changes.

    Raises:
      ValueError: no round.
    """
    if not len(rounds.logits):
        raise ValueError("no round verified all drafts: record longer texts")
    logits = rounds.logits.astype(np.float64)
    logits = logits / scaling.temperatures + scaling.shifts
    own = 1 / (1 + np.exp(-logits))
    chances, drafts = np.cumprod(own, axis=1), np.arange(own.shape[1])
    is_kept = rounds.num_accepted[:, None] > drafts
    reached = rounds.num_accepted[:, None] >= drafts
    return {
        "ece": [calibration_error(chances[:, i], is_kept[:, i]) for i in drafts],
        "roc_auc": [
            roc_auc(own[reached[:, i], i], is_kept[reached[:, i], i]) for i in drafts
        ],
    }


def fit(subject: models.Subject, temperature: float, *, seed: int) -> dict[str, Any]:
    """Returns the row of calibration for one temperature of the target's draws.

    The scaling is fitted to half of the prompts; errors and rankings are those of the
    other half.

    Raises:
      ValueError: a drafter without confidences, or texts too short for a whole round.
    """
    lm, draws = subject.settings.lm, None
    drafter = protocols.complete(lm.drafter).for_schedule()
    lm = dataclasses.replace(lm, drafter=drafter)
    if temperature:
        draws = sampling.make_settings(temperature=temperature, seed=seed)
    settings = dataclasses.replace(subject.settings, lm=lm, sampling=draws)
    scheduler = runs.make_scheduler(settings)
    recorded = []
    for prompt in subject.prompts:
        state = scheduler.begin(runs.make_request(settings, prompt.ids))
        rounds = record_rounds(
            scheduler.speculator, state, max_rounds=settings.gen_tokens
        )
        recorded.append(rounds)
    row = {"kind": profiles.CALIBRATION, "temperature": temperature}
    return row | {"gamma": lm.gamma_max} | judge(recorded)


def judge(recorded: Sequence[Rounds]) -> dict[str, Any]:
    """Returns the numbers of a row from the rounds of each prompt: the scaling is
    fitted to every other prompt, from the first on, and judged on the rest."""
    fitted, reported = (
        Rounds(*map(np.concatenate, zip(*recorded[half::2], strict=True)))
        for half in range(2)
    )
    found = fit_platt(*fitted)
    row = {name: values.tolist() for name, values in found._asdict().items()}
    row |= {"fitted_rounds": len(fitted.logits), "rounds": len(reported.logits)}
    unscaled = Scaling(np.ones_like(found.temperatures), np.zeros_like(found.shifts))
    before = report(reported, unscaled)
    return row | {"ece_before": before["ece"]} | report(reported, found)
