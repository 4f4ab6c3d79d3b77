"""Results of prompts run plain and by a design, in turn: compared and summed up."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments.lib import prompt_files, runs as runs_lib, tables
from spec_jax.analysis import metrics
from spec_jax.model import decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt, with its plain and its speculative runs, one of each per repeat."""

    prompt: prompt_files.Prompt
    plain: Sequence[runs_lib.Run]
    spec: Sequence[runs_lib.Run]
    # Verified positions with another token than decoding's; None where a rule keeps
    # decoding's distribution alone
    mismatches: int | None

    @property
    def matched(self) -> bool | None:
        """Whether every run of either kind produced the same tokens.

        It is None where a rule keeps decoding's distribution alone. Tokens that were
        chosen from logits that are not finite match nothing.
        """
        if self.nonfinite:
            return False
        if self.mismatches is None:
            return None
        reference = self.plain[0].tokens
        return all(run.tokens == reference for run in (*self.plain, *self.spec))

    @property
    def nonfinite(self) -> int:
        """Most tokens that a run has chosen from logits that are not finite."""
        return max(run.nonfinite for run in (*self.plain, *self.spec))

    def row(self) -> dict:
        """Returns the row of the prompt."""
        counters = self.spec[0].counters
        names = ("tokens", "rounds", "proposed", "accepted", "accepted_hist")
        return {
            "kind": "prompt",
            "id": self.prompt.id,
            "category": self.prompt.category,
            "prompt_ids": self.prompt.ids,
            "prompt_tokens": len(self.prompt.ids),
            **{name: getattr(counters, name) for name in names},
            "matched": self.matched,
            "verify_decode_mismatches": self.mismatches,
            "nonfinite_logits": self.nonfinite,
            "acceptance_rate": metrics.ratio(counters.accepted, counters.proposed),
            "repetition": metrics.repetition(self.spec[0].tokens),
            "baseline_e2e_s": [run.e2e_s for run in self.plain],
            "spec_e2e_s": [run.e2e_s for run in self.spec],
            "plain_ids": self.plain[0].tokens,
            "spec_ids": self.spec[0].tokens,
        }


def run_prompts(
    settings: runs_lib.Settings,
    prompts: Sequence[prompt_files.Prompt],
    *,
    repeats: int,
    hands_on: bool = True,
    after_prompt: Callable[[], None] = lambda: None,
) -> Iterator[PromptResult]:
    """Runs every prompt plain and speculatively in turn, `repeats` times, and replays
    its text through decoding.

    With several slots every prompt runs plain and alone, then all in a batch, in turn.

    Args:
      hands_on: whether the gamma policy's state is handed on from prompt to prompt;
        otherwise, and in batches, each prompt begins with the first state.

    Yields:
      The result of each prompt, as soon as it is known.
    """
    is_batch = settings.num_slots > 1
    for part in [prompts] if is_batch else [[prompt] for prompt in prompts]:
        own, turns = [prompt.ids for prompt in part], []
        for _ in range(repeats):
            plain = [runs_lib.run_plain(settings, one) for one in own]
            if is_batch:
                spec = runs_lib.run_batch(settings, own, after_prompt=after_prompt)
            else:
                spec = [runs_lib.run_speculative(settings, own[0])]
            turns.append(zip(plain, spec, strict=True))
        for prompt, *runs in zip(part, *turns, strict=True):
            plain, spec = zip(*runs, strict=True)
            wrong = runs_lib.mismatches(settings, prompt.ids, spec[0].tokens)
            found = PromptResult(
                prompt=prompt, plain=plain, spec=spec, mismatches=wrong
            )
            if not is_batch:
                after_prompt()
            yield found
        if hands_on and not is_batch:
            last = found.spec[-1].policy_state
            settings = dataclasses.replace(settings, policy_state=last)


def warm_up(
    designs: Sequence[runs_lib.Settings], prompts: Sequence[prompt_files.Prompt]
) -> float:
    """Compiles everything that runs of these designs need; returns the seconds."""
    started = time.perf_counter()
    # Prompts of all buckets of prefill: they need every executable.
    one_a_bucket = {decoder.bucket(max(1, len(one.ids) - 1)): one for one in prompts}
    for prompt in one_a_bucket.values():
        for settings in designs:
            # Generating one token compiles the same programs.
            brief = dataclasses.replace(settings, gen_tokens=1)
            list(run_prompts(brief, [prompt], repeats=1))
    return time.perf_counter() - started


def summarise(results: Sequence[PromptResult]) -> metrics.Metrics:
    """Returns the metric dictionary of finished prompts.

    Counts are of the first speculative run of each.

    Raises:
      IdentityError: counters that contradict each other.
    """
    counted = [result.spec[0].counters for result in results]
    mismatches = [result.mismatches for result in results]
    by_repeat = lambda of: [*zip(*of, strict=True)]
    return mark_disturbed(
        {
            "prompts": len(results),
            **metrics.summarise(metrics.total(counted)),
            **by_repetition([one.spec[0].tokens for one in results], counted),
            "matched": all_matched([result.matched for result in results]),
            "verify_decode_mismatches": (
                None if None in mismatches else sum(mismatches)
            ),
            **speeds(
                by_repeat(one.plain for one in results),
                by_repeat(one.spec for one in results),
            ),
        }
    )


def mark_disturbed(summary: metrics.Metrics) -> metrics.Metrics:
    """Returns the metrics, with `disturbed`: whether a speed-up is above the tokens per
    step. No step of a window is faster than one of autoregressive decoding, so that the
    machine was not equally fast for both."""
    found = [summary[name] for name in tables.SPEEDUPS if summary[name] is not None]
    is_disturbed = max(found, default=0.0) > (summary["tokens_per_target_step"] or 0.0)
    return summary | {"disturbed": is_disturbed}


def all_matched(matched: Sequence[bool | None]) -> bool | None:
    """Returns whether all matched; None where nothing differed and some are unknown."""
    if False in matched:
        return False
    return None if None in matched else True


def rows_of(
    results: Sequence[PromptResult], *, is_batch: bool = False
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the metrics of all prompts as a row, and those of each category, if there
    are several.

    Prompts without one count as "none". A batch has no metrics that leave prefill out,
    since its steps serve many prompts.
    """
    missing = ("spec_decode_", "speedup_decode", "disturbed") if is_batch else ()
    grouped: dict[str, list[PromptResult]] = {}
    for result in results:
        grouped.setdefault(result.prompt.category or "none", []).append(result)

    def row_of(part: Sequence[PromptResult]) -> dict[str, Any]:
        row = tables.to_row(summarise(part))
        return {k: v for k, v in row.items() if not k.startswith(missing)}

    parts = sorted(grouped.items()) if len(grouped) > 1 else []
    return row_of(results), {name: row_of(part) for name, part in parts}


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
