"""Theory: acceptance and costs -> expected tokens, speed-up, the best gamma.

Functions here know numbers and arrays: no rounds, models or clocks. The first half is
the analysis of Leviathan et al. (2023), https://arxiv.org/abs/2211.17192v2, whose
numbering the docstrings quote. The paper's `p` is the target and its `q` the draft; its
alpha is `acceptance` here, its c is `cost`, its c-hat is `operations`.

The paper takes one acceptance for all positions, and supposes that verifying gamma + 1
rows takes as long as one plain step. The second half drops both: `conditional[i]` is
the chance that draft `i` is kept, given that those before it were
(`metrics` calls it `conditional_acceptance`), and times are measured.
"""

import bisect
import math
import operator
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from spec_jax.typing import typed


AnyArray = jax.Array | np.ndarray | np.floating
"""Arrays of the device or of the host: the formulas are the same for both."""


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
    if acceptance <= cost:  # Corollary 3.9: then no gamma beats gamma 0.
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
    adapts gamma inside a compiled loop calls this function.

    Args:
      conditional: in `0 .. 1`; not looked at, so it may be traced.
      round_s: seconds of a round.
    """
    return tokens_by_gamma(conditional) / round_s


def _check_share(name: str, value: float) -> float:
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
