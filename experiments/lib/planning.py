"""Planning: what a number of drafts is expected to bring.

Predictions come from the drafts that rounds kept, by their rank, and from what rounds
cost, as the default policy measures it. Speed-ups are of decoding, prefill excluded,
over long texts: no round is cut at its end.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from spec_jax.analysis import metrics
from spec_jax.gamma import costs as costs_lib


def predict(
    counters: metrics.Counters, costs: costs_lib.RoundCosts, drafts: Iterable[int]
) -> list[dict[str, Any]]:
    """Returns what the first so many drafts of a chain bring, or best nodes of a tree.

    A path that leaves the best `n` does not come back to them, so that rounds of `n`
    keep what rounds of all keep among these.

    Args:
      counters: of rounds that asked for all drafts.

    Returns:
      Fields of rows: the drafts, rows and tokens of a round; `plain_steps`, the tokens
      that it must commit to be as fast as decoding; and the speed-up.
    """
    share = counters.proposed / counters.rounds / costs.gamma_max
    round_s, made = costs.rising_s(), []
    for n in drafts:
        tokens = 1 + sum(counters.kept_by_rank[:n]) / counters.rounds
        # Lookups often find nothing: there are fewer rows than are asked for.
        steps = np.interp(share * n, np.arange(len(round_s)), round_s) / round_s[0]
        made.append(
            {
                "drafts": n,
                "rows_per_round": 1 + share * n,
                "tokens_per_round": tokens,
                "plain_steps": float(steps),
                "speedup": float(tokens / steps),
            }
        )
    return made


def recommend(
    name: str,
    counters: metrics.Counters,
    costs: costs_lib.RoundCosts,
    rows: Iterable[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the row that says whether a drafter can win, and what is in its way.

    `acceptance` is the chance that a first draft is kept, and `break_even` what a round
    with one draft adds, in plain steps.

    Args:
      rows: of `predict`.
    """
    best = max(rows, key=lambda row: row["speedup"])
    kept = sum(counters.kept_by_rank[:1]) / counters.rounds
    round_s = costs.rising_s()
    break_even = float(round_s[1] / round_s[0] - 1)
    expected = f"{best['speedup']:.2f}x with {best['drafts']} drafts expected"
    words = f"{name}: can win, {expected}"
    if best["speedup"] <= 1:
        words = (
            f"{name}: cannot win, {expected} at best; a first draft is kept with a = "
            f"{kept:.3f}, and would have to be with {break_even:.3f}, by which a round "
            "with one draft is longer than a step"
        )
    return {
        "kind": "plan_recommendation",
        "can_win": best["speedup"] > 1,
        "words": words,
        "best": best,
        "acceptance": kept,
        "break_even": break_even,
    }
