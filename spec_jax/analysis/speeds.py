"""Speeds of timed runs: seconds per token, tokens per second, speed-ups.

Knows seconds and whole numbers alone.
"""

import dataclasses
import statistics
from collections.abc import Sequence


Metrics = dict[str, int | float | bool | list[int] | list[float | None] | None]
"""Names and values; every value is plain JSON, and `None` where nothing was measured.

Division by zero (nothing proposed, no tokens) gives `None`, never NaN.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One timed generation of one prompt; compilation is no part of it.

    Attributes:
      prefill_s: seconds until the prompt is in the cache.
      decode_s: seconds for everything after that, the first token included.
      tokens: tokens generated, cut as `Counters.tokens` are.
    """

    prefill_s: float
    decode_s: float
    tokens: int

    @property
    def e2e_s(self) -> float:
        """Seconds for prefill and decoding together."""
        return self.prefill_s + self.decode_s


def of_runs(name: str, runs: Sequence[Sequence[Timing]]) -> Metrics:
    """Computes time per token and tokens per second, with prefill and without it."""
    metrics: Metrics = {}
    for kind, seconds in (("e2e", "e2e_s"), ("decode", "decode_s")):
        per_token = [_seconds_per_token(timings, seconds) for timings in runs]
        typical = _median(per_token)
        metrics[f"{name}_{kind}_tpot_ms"] = None if typical is None else 1e3 * typical
        metrics[f"{name}_{kind}_tok_s"] = ratio(1.0, typical)
    return metrics


def speedup(
    name: str,
    seconds: str,
    baseline: Sequence[Sequence[Timing]],
    spec: Sequence[Sequence[Timing]],
) -> Metrics:
    """Returns baseline over spec: the median of repeats, and their 10-90 %."""
    repeats = _ratios(seconds, baseline, spec)
    spread = repeats
    if len(baseline) == 1:
        # No repeats to compare: say how far the prompts lie apart instead.
        singles = [[[timing] for timing in runs[0]] for runs in (baseline, spec)]
        spread = _ratios(seconds, *singles)
    return {
        name: _median(repeats),
        f"{name}_p10": _quantile(spread, 0.1),
        f"{name}_p90": _quantile(spread, 0.9),
    }


def _ratios(
    seconds: str,
    baseline: Sequence[Sequence[Timing]],
    spec: Sequence[Sequence[Timing]],
) -> list[float | None]:
    """Divides baseline by spec in seconds per token, one ratio per run."""
    return [
        ratio(_seconds_per_token(plain, seconds), _seconds_per_token(fast, seconds))
        for plain, fast in zip(baseline, spec, strict=True)
    ]


def _seconds_per_token(timings: Sequence[Timing], seconds: str) -> float | None:
    """Divides the seconds of all prompts by the tokens of all prompts."""
    spent = sum(getattr(timing, seconds) for timing in timings)
    return ratio(spent, sum(timing.tokens for timing in timings))


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Divides; returns `None` where no quotient exists."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def _median(values: Sequence[float | None]) -> float | None:
    """Returns the median of the values that exist."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _quantile(values: Sequence[float | None], fraction: float) -> float | None:
    """Interpolates the quantile linearly; fewer than two values give `None`."""
    present = sorted(value for value in values if value is not None)
    if len(present) < 2:
        return None
    place = fraction * (len(present) - 1)
    below = int(place)
    lower, upper = present[below], present[min(below + 1, len(present) - 1)]
    return lower + (place - below) * (upper - lower)
