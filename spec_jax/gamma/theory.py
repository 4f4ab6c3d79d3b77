"""Theory: acceptance and costs -> expected tokens, speed-up, the best gamma.

Functions here know numbers and arrays: no rounds, models or clocks. The first half is
the analysis of Leviathan et al. (2023), https://arxiv.org/abs/2211.17192v2, whose
numbering the docstrings quote. The paper's `p` is the target and its `q` the draft; its
alpha is `acceptance` here, its c is `cost`, its c-hat is `operations`.

The paper takes one acceptance for all positions, and supposes that verifying gamma + 1
rows takes as long as one plain step. The second half drops both: `conditional[i]` is
the chance that draft `i` is kept, given that those before it were
(`metrics` calls it `conditional_acceptance`), and `CostCurve` holds measured times.
"""

import bisect
import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float

from spec_jax.typing import typed


AnyArray = jax.Array | np.ndarray | np.floating
"""Arrays of the device or of the host: the formulas are the same for both."""

Free = Literal["drafting", "verification", "both"]
"""The part that is free in a ceiling."""


@typed
def kept_probability(
    target_probs: Float[AnyArray, "*rows V"], draft_probs: Float[AnyArray, "*rows V"]
) -> Float[AnyArray, "*rows"]:
    """Returns the chance that a drafted token is kept: `sum min(target, draft)`.

    The paper's beta (Definition 3.1), by Theorem 3.5. Its alpha is the mean over
    prefixes (Corollary 3.6). Values are not looked at, so it may be traced; rows are
    taken to sum to one, after the same filters on both sides.
    """
    xp = target_probs.__array_namespace__()
    return xp.minimum(target_probs, draft_probs).sum(axis=-1)


@typed
def divergence(
    target_probs: Float[AnyArray, "*rows V"], draft_probs: Float[AnyArray, "*rows V"]
) -> Float[AnyArray, "*rows"]:
    """Measures how far apart target and draft are, in `0 .. 1`; symmetric.

    The paper's D_LK (Definition 3.2): the sum over the vocabulary of the distance
    between the target and the mean of both. `kept_probability` is one minus it.
    """
    xp = target_probs.__array_namespace__()
    return xp.abs(target_probs - (target_probs + draft_probs) / 2).sum(axis=-1)


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Predicts the tokens a round commits: `(1 - a^(gamma+1)) / (1 - a)`.

    Equation (1) of the paper, the target's own token counted; `gamma + 1` in the limit
    of `a = 1`. Supposes that drafts are kept independently, with one chance for all.

    Raises:
      ValueError: acceptance outside `0 .. 1`, or gamma that is negative or no integer.
    """
    acceptance, gamma = _check_share("acceptance", acceptance), _check_gamma(gamma)
    if gamma == 0 or acceptance == 0:
        return 1.0
    if acceptance == 1:
        return gamma + 1.0
    # `1 - a**(gamma + 1)` would lose its digits where the acceptance is close to one.
    return -math.expm1((gamma + 1) * math.log(acceptance)) / (1 - acceptance)


def walltime_improvement(acceptance: float, cost: float, gamma: int) -> float:
    """Predicts the speed-up, `(1 - a^(gamma+1)) / ((1 - a) (gamma c + 1))`.

    Theorem 3.8 of the paper.

    Args:
      acceptance: the chance that a draft is kept.
      cost: time of one draft step over time of one target step (Definition 3.7).
      gamma: tokens drafted per round; 0 is plain decoding, and gives 1.

    Raises:
      ValueError: as `expected_tokens`, or cost that is negative or not finite.
    """
    tokens = expected_tokens(acceptance, gamma)
    return tokens / (gamma * _check_cost("cost", cost) + 1)


def operations_factor(acceptance: float, operations: float, gamma: int) -> float:
    """Predicts the arithmetic of a token, over that of autoregressive decoding.

    Theorem 3.11 of the paper: `(1 - a) (gamma c-hat + gamma + 1) / (1 - a^(gamma+1))`.

    Args:
      operations: operations per token of the draft over those of the target
        (Definition 3.10).

    Raises:
      ValueError: as `walltime_improvement`.
    """
    tokens = expected_tokens(acceptance, gamma)
    return (gamma * _check_cost("operations", operations) + gamma + 1) / tokens


def improves(acceptance: float, cost: float) -> bool:
    """Returns whether any gamma beats autoregressive decoding: `acceptance > cost`.

    Corollary 3.9 of the paper, which proves that the condition suffices. It is also
    necessary: a round gains `sum_{i=1..gamma} a^i <= gamma a` tokens for `gamma c`.

    Raises:
      ValueError: as `walltime_improvement`.
    """
    return _check_share("acceptance", acceptance) > _check_cost("cost", cost)


def guaranteed_improvement(acceptance: float, cost: float) -> float:
    """Returns a lower bound of the best gamma: `(1 + a) / (1 + c)`, that of gamma 1.

    Corollary 3.9 of the paper.

    Raises:
      ValueError: as `walltime_improvement`, or where no gamma improves.
    """
    if not improves(acceptance, cost):
        raise ValueError(
            f"{acceptance=} is not above {cost=}: no gamma is faster than plain "
            "decoding, which gamma 0 is"
        )
    return (1 + acceptance) / (1 + cost)


def best_gamma(acceptance: float, cost: float, *, gamma_max: int | None = None) -> int:
    """Returns the gamma with the largest `walltime_improvement`.

    Section 3.5 of the paper, where it is found numerically. Here no candidate is left
    out: gamma + 1 beats gamma exactly where `a^(gamma+1) (1 + gamma c)` exceeds
    `c sum_{i=0..gamma} a^i`, and the difference of the two never grows with gamma (it
    changes by `-a^(gamma+1) (1 - a) (1 + (gamma+1) c)`). So the improvement rises up to
    one gamma and not after it, and halving finds that gamma.

    Args:
      gamma_max: the largest gamma that may be chosen; `None` for no limit.

    Returns:
      The gamma; 0 where none improves. Either, if two are equal up to rounding.

    Raises:
      ValueError: as `walltime_improvement`; or no limit where every further draft
        helps: with drafts that cost nothing, or that are always kept.
    """
    acceptance = _check_share("acceptance", acceptance)
    cost = _check_cost("cost", cost)
    if gamma_max is not None:
        gamma_max = _check_gamma(gamma_max, "gamma_max")
    if not improves(acceptance, cost):
        return 0
    if gamma_max is None and (cost == 0 or acceptance == 1):
        raise ValueError(
            f"with {acceptance=} and {cost=} every further draft helps, so that no "
            "gamma is the best: give gamma_max"
        )

    def is_enough(gamma: int) -> bool:
        following = acceptance ** (gamma + 1) * (1 + gamma * cost)
        return following <= cost * expected_tokens(acceptance, gamma)

    low = 0
    if gamma_max is None:
        gamma_max = 1
        while not is_enough(gamma_max):
            low, gamma_max = gamma_max, 2 * gamma_max
    return low + bisect.bisect_left(range(low, gamma_max), True, key=is_enough)


def improvement_rows(
    pairs: Sequence[tuple[float, float]], *, gamma_max: int
) -> list[dict[str, str | float | int]]:
    """Returns a figure's rows: improvement over gamma, for each (acceptance, cost).

    Returns:
      For each pair, in order, one row for each gamma in `0 .. gamma_max`: `kind`
      ("theory"), `acceptance`, `cost`, `gamma`, `expected_tokens` (equation 1),
      `improvement` (Theorem 3.8), `operations` (Theorem 3.11, with c-hat = c) and
      `best_gamma` (within `gamma_max`, the same in all rows of a pair).

    Raises:
      ValueError: as `walltime_improvement`.
    """
    return [
        {
            "kind": "theory",
            "acceptance": acceptance,
            "cost": cost,
            "gamma": gamma,
            "expected_tokens": expected_tokens(acceptance, gamma),
            "improvement": walltime_improvement(acceptance, cost, gamma),
            "operations": operations_factor(acceptance, cost, gamma),
            "best_gamma": best_gamma(acceptance, cost, gamma_max=gamma_max),
        }
        for acceptance, cost in pairs
        for gamma in range(_check_gamma(gamma_max, "gamma_max") + 1)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Measured times of one target, one drafter and one machine.

    Attributes:
      plain_s: seconds of one step of plain decoding: the baseline, as fast as it goes.
      rows: heights of windows that were timed, rising, the first one 1.
      verify_s: seconds of the target's forward over so many active rows; between two
        entries the time is linear, past the last one unknown.
      draft_s: seconds that each drafted token adds. It is 0 for a drafter of whole
        blocks: a block's time is part of `overhead_s`.
      overhead_s: seconds of a round that depend on neither: acceptance, commit.

    Raises:
      ValueError: times that are negative or not finite, a plain step or a forward that
        takes none, or rows that do not rise from 1, one for each time.
    """

    plain_s: float
    rows: tuple[int, ...]
    verify_s: tuple[float, ...]
    draft_s: float
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("plain_s", "draft_s", "overhead_s"):
            _check_cost(name, getattr(self, name))
        for seconds in self.verify_s:
            _check_cost("verify_s", seconds)
        if not self.plain_s or not all(self.verify_s):
            raise ValueError(
                f"plain_s={self.plain_s} and verify_s={self.verify_s} must be above 0: "
                "a forward takes time"
            )
        rises = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if len(self.rows) != len(self.verify_s) or self.rows[:1] != (1,) or not rises:
            raise ValueError(
                f"rows={self.rows} must rise from 1, one for each of the "
                f"{len(self.verify_s)} times in verify_s"
            )

    @property
    def gamma_max(self) -> int:
        """The largest gamma whose window lies within the table."""
        return self.rows[-1] - 1

    def round_s(self, gamma_max: int) -> np.ndarray:
        """Predicts a round's seconds, `[gamma_max + 1]` float64, by tokens drafted.

        Raises:
          ValueError: a window that is higher than the table, or a bad `gamma_max`.
        """
        if _check_gamma(gamma_max, "gamma_max") > self.gamma_max:
            raise ValueError(
                f"{gamma_max=} needs the time of {gamma_max + 1} rows, and the table "
                f"ends at {self.rows[-1]}: time higher windows, or lower gamma_max"
            )
        gammas = np.arange(gamma_max + 1)
        verify_s = np.interp(gammas + 1, self.rows, self.verify_s)
        return self.overhead_s + gammas * self.draft_s + verify_s

    def without(self, free: Free) -> "CostCurve":
        """Returns the curve if drafts, or all rows of a window but one, were free."""
        draft_s, verify_s = self.draft_s, self.verify_s
        if free not in ("drafting", "verification", "both"):
            raise ValueError(f'{free=} is not "drafting", "verification" or "both"')
        if free in ("drafting", "both"):
            draft_s = 0.0
        if free in ("verification", "both"):
            verify_s = self.verify_s[:1] * len(self.verify_s)
        return dataclasses.replace(self, draft_s=draft_s, verify_s=verify_s)


@typed
def tokens_by_gamma(
    conditional: Float[AnyArray, " gamma_max"],
) -> Float[AnyArray, " gamma_max+1"]:
    """Predicts the tokens a round commits; entry `gamma` drafts `gamma` tokens.

    `1 + sum_{i=1..gamma} prod_{j=1..i} conditional[j-1]`: equation (1) of the paper
    where each position has its own chance. Values are not looked at, so it may be
    traced.
    """
    xp = conditional.__array_namespace__()
    kept = xp.cumsum(xp.cumprod(conditional))
    return xp.concat([xp.ones_like(conditional, shape=(1,)), 1 + kept])


@typed
def goodput(
    conditional: Float[AnyArray, " gamma_max"],
    round_s: Float[AnyArray, " gamma_max+1"],
) -> Float[AnyArray, " gamma_max+1"]:
    """Predicts tokens per second, by gamma; its argmax is the gamma to draft next.

    The goodput of Liu et al. (2024), https://arxiv.org/abs/2406.14066, for one
    sequence. Pure arithmetic on arrays of the host or of the device: a policy that
    adapts gamma inside a compiled loop calls this function, and so does `plan`.

    Args:
      conditional: in `0 .. 1`; not looked at, so it may be traced.
      round_s: seconds of a round, as `CostCurve.round_s` gives them.
    """
    return tokens_by_gamma(conditional) / round_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The best gamma, and its expected speed-up.

    Attributes:
      gamma: the best of `0 .. len(conditional)`; of equals the smallest.
      tokens_per_round: expected, the target's own token counted.
      tokens_per_s: expected goodput.
      speedup: over plain decoding; below 1 where speculation does not pay at all.
    """

    gamma: int
    tokens_per_round: float
    tokens_per_s: float
    speedup: float


def plan(conditional: Sequence[float], costs: CostCurve) -> Plan:
    """Chooses the gamma of most expected goodput, by measured acceptance and costs.

    Long generations are supposed, as in Theorem 3.8: no round is cut at its end.

    Args:
      conditional: chance that draft `i` is kept, given those before it were; empty
        leaves gamma 0. A position that was never reached has none: leave it out, and
        all after it.

    Raises:
      ValueError: a chance that is missing or outside `0 .. 1`, or more positions than
        the table of costs has rows for.
    """
    chances = np.array(
        [_check_share(f"conditional[{i}]", a) for i, a in enumerate(conditional)],
        np.float64,
    )
    tokens_per_s = np.asarray(goodput(chances, costs.round_s(len(chances))))
    gamma = int(np.argmax(tokens_per_s))
    return Plan(
        gamma=gamma,
        tokens_per_round=float(np.asarray(tokens_by_gamma(chances))[gamma]),
        tokens_per_s=float(tokens_per_s[gamma]),
        speedup=float(tokens_per_s[gamma] * costs.plain_s),
    )


def ceiling(conditional: Sequence[float], costs: CostCurve, *, free: Free) -> float:
    """Returns the speed-up that no improvement of `free` alone can pass.

    The best over gamma in `0 .. len(conditional)`, where drafting, or the further rows
    of a window, cost nothing: "even with free verification at most 1.02x".

    Raises:
      ValueError: as `plan`, or another word in `free`.
    """
    return plan(conditional, costs.without(free)).speedup


def _check_share(name: str, value: float | None) -> float:
    if value is None:
        raise ValueError(f"{name} is missing: it was never measured")
    if not 0 <= value <= 1:  # Also NaN, which no comparison holds for.
        raise ValueError(f"{name}={value} is no probability: it must lie in 0 .. 1")
    return float(value)


def _check_cost(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value} must be finite and not negative")
    return float(value)


def _check_gamma(gamma: int, name: str = "gamma") -> int:
    try:
        number = operator.index(gamma)
    except TypeError:
        raise ValueError(f"{name}={gamma!r} must be an integer") from None
    if number < 0:
        raise ValueError(f"{name}={number} must not be negative")
    return number
