"""Theory: one acceptance for all drafts and costs -> expected tokens and speed-up.

The analysis of Leviathan et al. (2023), https://arxiv.org/abs/2211.17192v2, whose
numbering the docstrings quote. The paper's alpha is `acceptance` here, its c is `cost`,
time of one draft step over that of one target step, and its c-hat is `operations`.
"""

import math
from collections.abc import Sequence


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Predicts the tokens a round commits: `(1 - a^(gamma+1)) / (1 - a)`, equation (1).

    The target's own token counted; `gamma + 1` in the limit of `a = 1`. Supposes that
    drafts are kept independently, with one chance in `0 .. 1` for all.
    """
    if gamma == 0 or acceptance == 0:
        return 1.0
    if acceptance == 1:
        return gamma + 1.0
    # `1 - a**(gamma + 1)` would lose its digits where the acceptance is close to one.
    return -math.expm1((gamma + 1) * math.log(acceptance)) / (1 - acceptance)


def walltime_improvement(acceptance: float, cost: float, gamma: int) -> float:
    """Predicts the speed-up by Theorem 3.8.

    `(1 - a^(gamma+1)) / ((1 - a) (gamma c + 1))`.

    With gamma 0, plain decoding, it is 1.
    """
    return expected_tokens(acceptance, gamma) / (gamma * cost + 1)


def operations_factor(acceptance: float, operations: float, gamma: int) -> float:
    """Predicts the arithmetic of a token, over that of autoregressive decoding.

    Theorem 3.11: `(1 - a) (gamma c-hat + gamma + 1) / (1 - a^(gamma+1))`.
    """
    tokens = expected_tokens(acceptance, gamma)
    return (gamma * operations + gamma + 1) / tokens


def improvement_rows(
    pairs: Sequence[tuple[float, float]], *, gamma_max: int
) -> list[dict[str, str | float | int]]:
    """Returns a figure's rows: improvement over gamma, for each (acceptance, cost).

    Returns:
      For each pair, in order, one row for each gamma in `0 .. gamma_max`: `kind`
      ("theory"), `acceptance`, `cost`, `gamma`, `expected_tokens`, `improvement`,
      `operations` (with c-hat = c) and `best_gamma`, of the largest improvement (the
      same in all rows of a pair).
    """
    rows = []
    for pair in pairs:
        gammas = range(gamma_max + 1)
        improvements = [walltime_improvement(*pair, gamma) for gamma in gammas]
        for gamma, improvement in zip(gammas, improvements, strict=True):
            rows.append(
                {
                    "kind": "theory",
                    "acceptance": pair[0],
                    "cost": pair[1],
                    "gamma": gamma,
                    "expected_tokens": expected_tokens(pair[0], gamma),
                    "improvement": improvement,
                    "operations": operations_factor(*pair, gamma),
                    "best_gamma": improvements.index(max(improvements)),
                }
            )
    return rows
