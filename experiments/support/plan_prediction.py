"""Predictions: acceptance and costs -> the speed-up of each gamma, and why not.

Knows numbers, and what `spec_jax.theory` makes of them; runs nothing. Speed-ups are of
decoding, prefill excluded, over long texts: no round is cut at its end.
"""

import dataclasses

import numpy as np

from experiments.support import plan_acceptance
from spec_jax.gamma import theory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one gamma is expected to bring.

    Attributes:
      tokens_per_round: the target's own token counted.
      round_s: seconds of a round, on average.
      speedup: over plain decoding.
    """

    gamma: int
    tokens_per_round: float
    round_s: float
    speedup: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a drafter can win, and what stands in its way.

    Attributes:
      best: the prediction of the best gamma.
      ceilings: the best speed-up if something cost nothing, by `theory.Free`; what a
        round has beside drafts and rows stays.
      acceptance: the chance that a first draft is kept.
      cost: seconds that a draft adds, over those of a plain step: the paper's c.
      break_even: seconds that the whole of a round with gamma 1 takes longer than a
        plain step, over those of a plain step: what acceptance must exceed there.
    """

    best: Prediction
    ceilings: dict[theory.Free, float]
    acceptance: float
    cost: float
    break_even: float

    @property
    def can_win(self) -> bool:
        """Whether any gamma is expected to be faster than plain decoding."""
        return self.best.speedup > 1

    def words(self, drafter: str) -> str:
        """The verdict in words."""
        best = f"{self.best.speedup:.2f}x with gamma {self.best.gamma}"
        if self.can_win:
            return f"{drafter}: can win, {best} expected to be the best"
        free = self.ceilings
        a, c = f"a = {self.acceptance:.3f}", f"c = {self.cost:.3f}"
        if not theory.improves(self.acceptance, self.cost):
            why = (
                f"A first draft is kept with {a}, which is not above the cost of a "
                f"draft, {c} plain steps: no gamma pays, even if verification were "
                "free (Leviathan et al., Corollary 3.9)"
            )
        else:
            why = (
                f"A first draft is kept with {a}, which is above the cost of a draft, "
                f"{c} plain steps, as Corollary 3.9 of Leviathan et al. asks. But that "
                "takes verification to be free: here a whole round with one draft is "
                f"{self.break_even:.3f} plain steps longer than a plain step, and a "
                "would have to exceed that"
            )
        return (
            f"{drafter}: cannot win, {best} expected at best. Even with free "
            f"verification at most {free['verification']:.2f}x, with free drafting "
            f"{free['drafting']:.2f}x, with both {free['both']:.2f}x. {why}."
        )


def predict(
    acceptance: plan_acceptance.Acceptance, costs: theory.CostCurve
) -> list[Prediction]:
    """A prediction for each gamma from 1 that acceptance is known for."""
    chances = np.array(acceptance.known, np.float64)
    tokens = theory.tokens_by_gamma(chances)
    round_s = _round_s(acceptance, costs)
    speedup = theory.goodput(chances, round_s) * costs.plain_s
    return [
        Prediction(
            gamma=gamma,
            tokens_per_round=float(tokens[gamma]),
            round_s=float(round_s[gamma]),
            speedup=float(speedup[gamma]),
        )
        for gamma in range(1, len(chances) + 1)
    ]


def judge(acceptance: plan_acceptance.Acceptance, costs: theory.CostCurve) -> Verdict:
    """The verdict, over the gammas that acceptance is known for."""
    best = _best(predict(acceptance, costs))
    free = {
        name: _best(predict(acceptance, costs.without(name))).speedup
        for name in ("drafting", "verification", "both")
    }
    one = costs.round_s(1)[1]
    return Verdict(
        best=best,
        ceilings=free,
        acceptance=acceptance.known[0],
        cost=costs.draft_s / costs.plain_s,
        break_even=float(one / costs.plain_s - 1),
    )


def _best(predictions: list[Prediction]) -> Prediction:
    return max(predictions, key=lambda prediction: prediction.speedup)


def _round_s(
    acceptance: plan_acceptance.Acceptance, costs: theory.CostCurve
) -> np.ndarray:
    """Seconds of a round by gamma, on average; windows that end early cost less."""
    full_s = costs.round_s(len(acceptance.known))
    added_s = np.diff(full_s) * acceptance.drafted[: len(acceptance.known)]
    return np.concatenate([full_s[:1], full_s[0] + np.cumsum(added_s)])
