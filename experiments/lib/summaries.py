"""Summaries of timed runs: speeds, and how far texts repeat themselves.

This module handles counters, seconds and whole numbers alone.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_jax.analysis import metrics


def mean_repetition(texts: Sequence[Sequence[int]]) -> float | None:
    """Averages `metrics.repetition` over generated texts, weighted by their tokens."""
    weighted = sum(len(text) * metrics.repetition(text) for text in texts)
    return metrics.ratio(weighted, sum(map(len, texts)))


def by_repetition(
    texts: Sequence[Sequence[int]], counted: Sequence[metrics.Counters]
) -> metrics.Metrics:
    """Measures how far texts repeat themselves, and acceptance by repetition.

    `tercile_*` have an entry for each third of the texts, in order of their repetition
    (one for each text if they are fewer than three).
    """
    both = list(zip(texts, counted, strict=True))
    both.sort(key=lambda pair: metrics.repetition(pair[0]))
    ends = [third * len(both) // 3 for third in range(4)]
    thirds = [both[start:end] for start, end in itertools.pairwise(ends) if start < end]
    sums = [metrics.total(counters for _, counters in third) for third in thirds]
    return {
        "repetition": mean_repetition(texts),
        "tercile_prompts": list(map(len, thirds)),
        "tercile_repetition": [
            mean_repetition([text for text, _ in third]) for third in thirds
        ],
        "tercile_acceptance_rate": [
            metrics.ratio(of.accepted, of.proposed) for of in sums
        ],
    }


def speeds(
    baseline: Sequence[Sequence[Any]], spec: Sequence[Sequence[Any]]
) -> metrics.Metrics:
    """Computes times per token, tokens per second and speed-ups.

    Speeds are medians over the repeats of totals over the prompts. A speed-up is the
    median over the repeats of the ratio of the two totals, seconds per token; its
    `_p10` and `_p90` are quantiles of that ratio over the repeats or, with a single
    repeat, of the ratio of each prompt over the prompts. None where nothing was
    measured.

    Args:
      baseline: `baseline[r][i]` is a `runs.Run` of prompt `i` in repeat `r`.
      spec: the speculative run that was interleaved with each.
    """
    found: metrics.Metrics = {}
    for kind in ("e2e", "decode"):
        per_token = lambda of, kind=kind: [_seconds_per_token(one, kind) for one in of]
        sides = per_token(baseline), per_token(spec)
        for name, seconds in zip(("baseline", "spec"), sides, strict=True):
            typical = _quantile(seconds, 0.5, least=1)
            found[f"{name}_{kind}_tpot_ms"] = typical and 1e3 * typical
            found[f"{name}_{kind}_tok_s"] = metrics.ratio(1.0, typical)
        ratios = spread = list(map(metrics.ratio, *sides))
        if len(baseline) == 1:
            # One repeat has no spread: takes that over the prompts instead.
            singles = ([[run] for run in of[0]] for of in (baseline, spec))
            spread = list(map(metrics.ratio, *map(per_token, singles)))
        found[f"speedup_{kind}"] = _quantile(ratios, 0.5, least=1)
        found[f"speedup_{kind}_p10"] = _quantile(spread, 0.1)
        found[f"speedup_{kind}_p90"] = _quantile(spread, 0.9)
    return found


def _seconds_per_token(runs: Sequence[Any], kind: str) -> float | None:
    """Divides the seconds of all runs by the tokens of all."""
    spent = sum(getattr(run, f"{kind}_s") for run in runs)
    return metrics.ratio(spent, sum(len(run.tokens) for run in runs))


def _quantile(
    values: Sequence[float | None], fraction: float, *, least: int = 2
) -> float | None:
    """Interpolates between values that are not None; None if fewer than `least` are."""
    present = [value for value in values if value is not None]
    return float(np.quantile(present, fraction)) if len(present) >= least else None
