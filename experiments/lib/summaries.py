"""Summaries of timed runs: counters, texts and seconds as one dictionary of numbers.

Speeds are seconds per token, tokens per second and speed-ups. Knows counters, seconds
and whole numbers alone.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from spec_jax.analysis import metrics


_THIRDS = 3  # groups of prompts by repetition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One timed generation of one prompt; compilation is no part of it.

    Attributes:
      prefill_s: seconds until the prompt is in the cache.
      decode_s: seconds for everything after that, the first token included.
      tokens: tokens generated, cut as `metrics.Counters.tokens` are.
    """

    prefill_s: float
    decode_s: float
    tokens: int

    @property
    def e2e_s(self) -> float:
        """Seconds for prefill and decoding together."""
        return self.prefill_s + self.decode_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextCounts:
    """Counts of one prompt's generated text.

    Attributes:
      tokens: of the text, cut as `metrics.Counters.tokens` are.
      repetition: of these tokens, see `metrics.repetition`.
      proposed: as in `metrics.Counters`.
      accepted: as in `metrics.Counters`.
    """

    tokens: int
    repetition: float
    proposed: int
    accepted: int


def text_counts(tokens: Sequence[int], counters: metrics.Counters) -> TextCounts:
    """Combines one prompt's generated tokens and its counters."""
    return TextCounts(
        tokens=len(tokens),
        repetition=metrics.repetition(tokens),
        proposed=counters.proposed,
        accepted=counters.accepted,
    )


def mean_repetition(texts: Sequence[TextCounts]) -> float | None:
    """Averages `repetition` over texts, weighted by their tokens."""
    weighted = sum(text.tokens * text.repetition for text in texts)
    return metrics.ratio(weighted, sum(text.tokens for text in texts))


def summarise(
    counters: metrics.Counters,
    *,
    prompts: int,
    texts: Sequence[TextCounts] = (),
    baseline: Sequence[Sequence[Timing]] = (),
    spec: Sequence[Sequence[Timing]] = (),
    matched: bool | None,
    verify_decode_mismatches: int | None,
) -> metrics.Metrics:
    """Returns the metric dictionary, after checking every identity.

    Args:
      counters: of the speculative run, summed over the prompts; of one repeat only.
      prompts: how many prompts were run.
      texts: the speculative run's text of each prompt; empty where they are not known.
      baseline: `baseline[r][i]` times plain decoding of prompt `i` in repeat `r`.
      spec: the same of the speculative runs, each interleaved with its baseline.
      matched: whether every token of every prompt equals plain decoding, and none
        was chosen from logits that are not finite; `None` where that was not looked
        at.
      verify_decode_mismatches: verified positions whose argmax differs from plain
        decoding of the same prefix; `None` where they were not replayed.

    Returns:
      The names of the design's table of numbers, in its order. Speeds are medians
      over the repeats of totals over the prompts. A speed-up is the median over the
      repeats of the ratio of the two totals, seconds per token; its `_p10` and `_p90`
      are quantiles of that ratio over the repeats or, with a single repeat, of the
      ratio of each prompt over the prompts. `repetition` is the mean over the texts,
      weighted by tokens; `tercile_*` have an entry for each third of the prompts, in
      order of their repetition (fewer than three prompts: one each).

    Raises:
      IdentityError: counters, texts or timings that contradict each other.
      ValueError: timings that are not one per repeat and prompt in both runs, or
        texts that are not one per prompt.
    """
    _check(counters, prompts, texts, baseline, spec, matched)
    return {
        "prompts": prompts,
        **metrics.summarise(counters),
        **by_repetition(texts),
        "matched": matched,
        "verify_decode_mismatches": verify_decode_mismatches,
        **_of_runs("baseline", baseline),
        **_of_runs("spec", spec),
        **_speedup("speedup_e2e", "e2e_s", baseline, spec),
        **_speedup("speedup_decode", "decode_s", baseline, spec),
    }


def by_repetition(texts: Sequence[TextCounts]) -> metrics.Metrics:
    """Measures how far texts repeat themselves, and how acceptance follows."""
    ordered = sorted(texts, key=lambda text: text.repetition)
    ends = [third * len(ordered) // _THIRDS for third in range(_THIRDS + 1)]
    thirds = [ordered[start:end] for start, end in itertools.pairwise(ends)]
    thirds = [third for third in thirds if third]
    return {
        "repetition": mean_repetition(texts),
        "tercile_prompts": [len(third) for third in thirds],
        "tercile_repetition": [mean_repetition(third) for third in thirds],
        "tercile_acceptance_rate": [
            metrics.ratio(
                sum(t.accepted for t in third), sum(t.proposed for t in third)
            )
            for third in thirds
        ],
    }


def _check(counters, prompts, texts, baseline, spec, matched) -> None:
    """Checks that texts and timings are those of the runs that were counted."""
    require, sizes = metrics.require, {len(runs) for runs in (*baseline, *spec)}
    if texts:
        sizes.add(len(texts))
        for name in ("tokens", "proposed", "accepted"):
            numbers = [sum(getattr(x, name) for x in texts), getattr(counters, name)]
            require(f"sum of the texts' {name} == {name}", numbers)
    if len(baseline) != len(spec) or not sizes <= {prompts}:
        raise ValueError(
            f"{len(baseline)} baseline and {len(spec)} speculative repeats, with texts "
            f"and timings of {sorted(sizes)} prompts: give pairs, of {prompts} prompts"
        )
    for repeat, (plain, fast) in enumerate(zip(baseline, spec, strict=True)):
        at = f" in repeat {repeat}"
        timed = sum(timing.tokens for timing in fast)
        require("timed spec tokens == tokens", [timed, counters.tokens], at)
        if matched:
            for i, (a, b) in enumerate(zip(plain, fast, strict=True)):
                where = f"{at}, prompt {i}"
                require("matched: equal token counts", [a.tokens, b.tokens], where)


def _of_runs(name: str, runs: Sequence[Sequence[Timing]]) -> metrics.Metrics:
    """Computes time per token and tokens per second, with prefill and without it."""
    found: metrics.Metrics = {}
    for kind, seconds in (("e2e", "e2e_s"), ("decode", "decode_s")):
        per_token = [_seconds_per_token(timings, seconds) for timings in runs]
        typical = _median(per_token)
        found[f"{name}_{kind}_tpot_ms"] = None if typical is None else 1e3 * typical
        found[f"{name}_{kind}_tok_s"] = metrics.ratio(1.0, typical)
    return found


def _speedup(
    name: str,
    seconds: str,
    baseline: Sequence[Sequence[Timing]],
    spec: Sequence[Sequence[Timing]],
) -> metrics.Metrics:
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
        metrics.ratio(
            _seconds_per_token(plain, seconds), _seconds_per_token(fast, seconds)
        )
        for plain, fast in zip(baseline, spec, strict=True)
    ]


def _seconds_per_token(timings: Sequence[Timing], seconds: str) -> float | None:
    """Divides the seconds of all prompts by the tokens of all prompts."""
    spent = sum(getattr(timing, seconds) for timing in timings)
    return metrics.ratio(spent, sum(timing.tokens for timing in timings))


def _median(values: Sequence[float | None]) -> float | None:
    """Returns the median of the values that exist."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _quantile(values: Sequence[float | None], fraction: float) -> float | None:
    """Interpolates the quantile linearly; fewer than two values give `None`."""
    present = [value for value in values if value is not None]
    return float(np.quantile(present, fraction)) if len(present) > 1 else None
