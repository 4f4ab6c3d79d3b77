"""Planning: what a number of drafts is expected to bring.

Predictions come from the drafts that rounds kept, by their rank, and from what rounds
cost. Speed-ups are of decoding, prefill excluded, over long texts: no round is cut at
its end.
"""

import typing
from typing import Any

from experiments.lib import costs as costs_lib
from spec_jax.analysis import metrics


def predict(
    counters: metrics.Counters, costs: costs_lib.RoundCosts, *, is_tree: bool = False
) -> list[dict[str, Any]]:
    """Returns what the first drafts of a chain bring, or the best nodes of a tree.

    A path that leaves the best `n` does not come back to them, so that rounds of `n`
    keep what rounds of all keep among these.

    Args:
      counters: of rounds that asked for all drafts.
      is_tree: whether only numbers are of interest that were timed; of a chain, all.

    Returns:
      Fields of rows: the drafts, rows and tokens of a round; `plain_steps`, the tokens
      that it must commit to be as fast as decoding; and speed-ups, also where rows cost
      nothing (`RoundCosts.without`).
    """
    share = counters.proposed / counters.rounds / costs.gamma_max
    free, made = costs.without("verification"), []
    for n in costs.drafts[1:] if is_tree else range(1, costs.gamma_max + 1):
        tokens = 1 + sum(counters.kept_by_rank[:n]) / counters.rounds
        # Lookups often find nothing: there are fewer rows than are asked for.
        steps, free_steps = (
            own.seconds(n, drafted=share * n) / costs.plain_s for own in (costs, free)
        )
        made.append(
            {
                "drafts": n,
                "rows_per_round": 1 + share * n,
                "tokens_per_round": tokens,
                "plain_steps": steps,
                "speedup": tokens / steps,
                "free_rows_speedup": tokens / free_steps,
            }
        )
    return made


def recommend(
    name: str, counters: metrics.Counters, costs: costs_lib.RoundCosts
) -> dict[str, Any]:
    """Returns the row that says whether a drafter can win, and what is in its way.

    `best` is the prediction of the best number of drafts, `ceilings` its speed-up if
    something cost nothing, `acceptance` the chance that a first draft is kept, `cost`
    what a draft adds and `break_even` what a whole round with one draft adds, in plain
    steps.
    """

    def best_of(costs: costs_lib.RoundCosts) -> dict[str, Any]:
        return max(predict(counters, costs), key=lambda row: row["speedup"])

    best = best_of(costs)
    ceilings = {
        free: best_of(costs.without(free))["speedup"]
        for free in typing.get_args(costs_lib.Free)
    }
    kept = sum(counters.kept_by_rank[:1]) / counters.rounds
    cost = costs.draft_s / costs.plain_s
    break_even = costs.seconds(1, drafted=1) / costs.plain_s - 1
    expected = f"{best['speedup']:.2f}x with {best['drafts']} drafts expected"
    words = f"{name}: can win, {expected}"
    if best["speedup"] <= 1:
        limits = ", ".join(f"{x:.2f}x with free {name}" for name, x in ceilings.items())
        words = (
            f"{name}: cannot win, {expected} at best; {limits}. A first draft is kept "
            f"with a = {kept:.3f} and costs c = {cost:.3f} plain steps: were "
            "verification free, it would pay where a > c (Leviathan et al., Corollary "
            f"3.9); here a must exceed {break_even:.3f}, by which a round with one "
            "draft is longer than a step"
        )
    return {
        "kind": "plan_recommendation",
        "can_win": best["speedup"] > 1,
        "words": words,
        "best": best,
        "ceilings": ceilings,
        "acceptance": kept,
        "cost": cost,
        "break_even": break_even,
    }
