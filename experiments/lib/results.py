"""Results: prompts run plain and by a design in turn, compared, and summed up."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.lib import prompt_files, runs as runs_lib, summaries, tables
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.model import qwen3


Settings, Run = runs_lib.Settings, runs_lib.Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt: what both runs produced, and `repeats` times of each."""

    prompt: prompt_files.Prompt
    prompt_ids: list[int]
    plain: list[Run]
    spec: list[Run]
    # Verified positions with another token than decoding's; None where only the
    # distribution is decoding's
    mismatches: int | None

    @property
    def matched(self) -> bool | None:
        """Whether every run of either kind produced the same tokens.

        None where only the distribution is decoding's. Tokens that were chosen from
        logits that are not finite match nothing.
        """
        if self.nonfinite:
            return False
        if self.mismatches is None:
            return None
        reference = self.plain[0].tokens
        return all(run.tokens == reference for run in (*self.plain, *self.spec))

    @property
    def text(self) -> summaries.TextCounts:
        """What was counted of the first speculative run's text."""
        return summaries.text_counts(self.spec[0].tokens, self.spec[0].counters)

    @property
    def nonfinite(self) -> int:
        """The most tokens of a run that were chosen from logits that are not finite."""
        return max(run.nonfinite for run in (*self.plain, *self.spec))

    def row(self) -> dict:
        """Returns the JSON line."""
        counters = self.spec[0].counters
        return {
            "kind": "prompt",
            "id": self.prompt.id,
            "category": self.prompt.category,
            "prompt_ids": self.prompt_ids,
            "prompt_tokens": len(self.prompt_ids),
            "tokens": counters.tokens,
            "matched": self.matched,
            "verify_decode_mismatches": self.mismatches,
            "nonfinite_logits": self.nonfinite,
            "rounds": counters.rounds,
            "proposed": counters.proposed,
            "accepted": counters.accepted,
            "acceptance_rate": metrics.ratio(counters.accepted, counters.proposed),
            "repetition": summaries.mean_repetition([self.text]),
            "accepted_hist": counters.accepted_hist,
            "baseline_e2e_s": [run.timing.e2e_s for run in self.plain],
            "spec_e2e_s": [run.timing.e2e_s for run in self.spec],
            "plain_ids": self.plain[0].tokens,
            "spec_ids": self.spec[0].tokens,
        }


def run_prompts(
    lm: loading.LanguageModel,
    settings: Settings,
    prompts: Sequence[prompt_files.Prompt],
    ids: Sequence[list[int]],
    *,
    repeats: int,
    hands_on: bool = True,
    after_prompt: Callable[[], None] = lambda: None,
) -> Iterator[PromptResult]:
    """Runs every prompt plain and speculatively in turn, `repeats` times, and replays
    its text through decoding.

    With several slots: every prompt plain and alone, then all in a batch, in turn.

    Args:
      hands_on: whether the gamma policy's state is handed on from prompt to prompt;
        otherwise, and in batches, each begins with the first.

    Yields:
      The result of each prompt, as soon as it is known.
    """
    is_batch, places = settings.num_slots > 1, range(len(ids))
    for part in [places] if is_batch else [[place] for place in places]:
        own = [ids[place] for place in part]
        turns = []
        for _ in range(repeats):
            plain = [runs_lib.run_plain(lm, settings, one) for one in own]
            if is_batch:
                how = {"after_prompt": after_prompt}
                spec = runs_lib.run_batch(lm, settings, own, **how)
            else:
                spec = [runs_lib.run_speculative(lm, settings, own[0])]
            turns.append((plain, spec))
        for at, place in enumerate(part):
            first = turns[0][1][at].tokens
            found = PromptResult(
                prompt=prompts[place],
                prompt_ids=list(ids[place]),
                plain=[plain[at] for plain, _ in turns],
                spec=[spec[at] for _, spec in turns],
                mismatches=runs_lib.mismatches(lm, settings, ids[place], first),
            )
            if not is_batch:
                after_prompt()
            yield found
        if hands_on and not is_batch:
            last = found.spec[-1].policy_state
            settings = dataclasses.replace(settings, policy_state=last)


def warm_up(
    designs: Sequence[tuple[loading.LanguageModel, Settings]],
    prompts: Sequence[list[int]],
) -> float:
    """Compiles everything that runs of these need; returns the seconds."""
    started = time.perf_counter()
    prompt = prompt_files.Prompt(id="warm-up", text="", category=None)
    for ids in one_a_bucket(prompts):
        for lm, settings in designs:
            # What generating one token compiles is the same.
            brief = dataclasses.replace(settings, gen_tokens=1)
            list(run_prompts(lm, brief, [prompt], [ids], repeats=1))
    return time.perf_counter() - started


def one_a_bucket(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Returns prompts that between them need every executable that all of them need."""
    by_bucket = {qwen3.bucket(max(1, len(prompt) - 1)): prompt for prompt in prompts}
    return list(by_bucket.values())


def summarise(results: Sequence[PromptResult]) -> metrics.Metrics:
    """Returns the metric dictionary of finished prompts."""
    mismatches = [result.mismatches for result in results]
    found = summaries.summarise(
        metrics.total(result.spec[0].counters for result in results),
        prompts=len(results),
        texts=[result.text for result in results],
        baseline=_by_repeat([result.plain for result in results]),
        spec=_by_repeat([result.spec for result in results]),
        matched=all_matched([result.matched for result in results]),
        verify_decode_mismatches=None if None in mismatches else sum(mismatches),
    )
    return mark_disturbed(found)


def mark_disturbed(summary: metrics.Metrics) -> metrics.Metrics:
    """Returns the metrics, with `disturbed`: whether a speed-up is above the tokens per
    step. No step of a window is faster than one of autoregressive decoding, so that the
    machine was not the same for both."""
    found = [summary[name] for name in tables.SPEEDUPS if summary[name] is not None]
    is_disturbed = max(found, default=0.0) > (summary["tokens_per_target_step"] or 0.0)
    return summary | {"disturbed": is_disturbed}


def all_matched(matched: Sequence[bool | None]) -> bool | None:
    """Returns whether all matched; None where none differed and some were not known."""
    if False in matched:
        return False
    return None if None in matched else True


def without_decode_times(summary: metrics.Metrics) -> metrics.Metrics:
    """Returns the metrics that a batch has: none that leaves prefill out, and any
    speed-up: its steps are of many prompts."""
    missing = ("spec_decode_", "speedup_decode", "disturbed")
    return {k: v for k, v in summary.items() if not k.startswith(missing)}


NO_CATEGORY = "none"
"""What the prompts are called that have no category, where others have one."""


def by_category(results: Sequence[PromptResult]) -> dict[str, metrics.Metrics]:
    """Summarises each category apart; empty unless there are several."""
    name_of = lambda result: result.prompt.category or NO_CATEGORY
    grouped = itertools.groupby(sorted(results, key=name_of), name_of)
    found = {name: summarise([*of_one]) for name, of_one in grouped}
    return found if len(found) > 1 else {}


def rows_of(
    results: Sequence[PromptResult], *, is_batch: bool = False
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the metrics of all prompts, and of each category, as rows."""
    strip = without_decode_times if is_batch else dict
    found = {name: strip(of_one) for name, of_one in by_category(results).items()}
    rows = {name: tables.to_row(of_one) for name, of_one in found.items()}
    return tables.to_row(strip(summarise(results))), rows


def _by_repeat(runs: list[list]) -> list[list[summaries.Timing]]:
    """Returns the timings of each repeat, prompt by prompt."""
    return [[run.timing for run in repeat] for repeat in zip(*runs, strict=True)]
