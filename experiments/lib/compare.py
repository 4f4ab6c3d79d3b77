"""Prompts through every way to generate, ours and Hugging Face's, in turns.

Both sides get the same token ids, stop tokens, limit and weights. Either clock runs
over the prompt's prefill too; our caches stand ready when it starts, as `lib.runs` has
it, and Hugging Face's grow while it generates.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import bench, hf, runs as runs_lib, summaries, tables
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import ngram


OURS, THEIRS = "spec_jax", "transformers"
first_difference = runs_lib.first_difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A way to generate."""

    side: str  # `OURS`, or another program
    method: str  # `hf.PLAIN`, or where drafts come from
    gamma: int | None = None  # tokens drafted a round; None for autoregressive decoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What one generation produced, on either side."""

    # Generated, without the prompt; the stop token, if any, is the last
    tokens: list[int]
    counters: metrics.Counters | None = None  # of our drafts
    nonfinite: int = 0  # tokens chosen from logits that are not finite, on our side


OUR_PLAIN = Run(side=OURS, method=hf.PLAIN)
THEIR_PLAIN = Run(side=THEIRS, method=hf.PLAIN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """The same weights on both sides, and what both are asked for."""

    lm: loading.LanguageModel  # `drafter` is None where there is no draft model
    hf: hf.Baseline
    settings: runs_lib.Settings

    def runs(self, gammas: Sequence[int]) -> list[Run]:
        """Every run that the sides have models for, in the order in which it is
        shown."""
        methods = hf.METHODS if self.lm.drafter else (hf.PROMPT_LOOKUP,)
        return [
            Run(side=side, method=method, gamma=gamma)
            for side in (OURS, THEIRS)
            for method in (hf.PLAIN, *methods)
            for gamma in ((None,) if method == hf.PLAIN else gammas)
        ]

    def generate(self, run: Run, prompt: list[int]) -> tuple[float, Generated]:
        """Seconds, tokens and counters of one run; raises as `runs.run_plain`."""
        if run.side == THEIRS:
            started = time.perf_counter()
            tokens = hf.generate(
                self.hf,
                prompt,
                method=run.method,
                gamma=run.gamma,
                max_tokens=self.settings.gen_tokens,
                stop_ids=self.settings.stop_ids,
            )
            return time.perf_counter() - started, Generated(tokens=tokens)
        if run == OUR_PLAIN:
            plain = runs_lib.run_plain(self.lm, self.settings, prompt)
            generated = Generated(tokens=plain.tokens, nonfinite=plain.nonfinite)
            return plain.timing.e2e_s, generated
        lm = self.lm
        if run.method == hf.PROMPT_LOOKUP:
            # Its drafts are Hugging Face's, draft for draft.
            looked_up = ngram.hugging_face(
                gamma_max=self.settings.gamma,
                n_max=hf.MATCHED_NGRAM,
                stop_ids=self.settings.stop_ids,
            )
            lm = lm.with_drafter(looked_up)
        settings = dataclasses.replace(self.settings, gamma=run.gamma)
        done = runs_lib.run_speculative(lm, settings, prompt)
        return done.timing.e2e_s, Generated(
            tokens=done.tokens, counters=done.counters, nonfinite=done.nonfinite
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRuns:
    """One prompt: times, tokens and counters of every run."""

    prompt: Any  # has `length`, `id` and `tokens`
    timings: bench.Timings
    every: Mapping[Run, Sequence[Generated]]  # of the warm-up and of each repeat

    @property
    def generated(self) -> dict[Run, Generated]:
        """What each run generated first."""
        return {run: done[0] for run, done in self.every.items()}

    def first_difference(self, run: Run) -> int | None:
        """Where tokens of `run`, of any repeat, first differ from Hugging Face's greedy
        ones."""
        theirs = self.every[THEIR_PLAIN][0].tokens
        found = [first_difference(done.tokens, theirs) for done in self.every[run]]
        return min((place for place in found if place is not None), default=None)

    @property
    def nonfinite(self) -> int:
        """Tokens that one of our runs, the worst, chose from logits that hold NaN or
        infinity."""
        return max(one.nonfinite for done in self.every.values() for one in done)

    @property
    def matched(self) -> bool:
        """Whether all our tokens equal our first plain ones, and all our logits were
        finite."""
        plain = self.every[OUR_PLAIN][0].tokens
        return not self.nonfinite and all(
            one.tokens == plain
            for run, done in self.every.items()
            if run.side == OURS
            for one in done
        )

    def row(self) -> dict[str, Any]:
        """The JSON row."""
        return {
            "kind": "prompt",
            "length": self.prompt.length,
            "id": self.prompt.id,
            "prompt_tokens": len(self.prompt.tokens),
            "matched": self.matched,
            "nonfinite_logits": self.nonfinite,
            "hf_ids": self.generated[THEIR_PLAIN].tokens,
            "runs": [
                {
                    **dataclasses.asdict(run),
                    "tokens": len(done.tokens),
                    "first_difference": self.first_difference(run),
                    "seconds": self.timings.seconds[run],
                }
                for run, done in self.generated.items()
            ],
        }


def run_prompt(
    sides: Sides,
    prompt: Any,
    *,
    runs: Sequence[Run],
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
) -> PromptRuns:
    """Every run once to warm up, then all of them in turns, `repeats` times."""
    every: dict[Run, list[Generated]] = {run: [] for run in runs}

    def thunk(run: Run) -> bench.Thunk:
        def timed() -> float:
            seconds, done = sides.generate(run, prompt.tokens)
            every[run].append(done)
            return seconds

        return timed

    cases = {run: functools.partial(thunk, run) for run in runs}
    timings = bench.run(cases, repeats=repeats, after_turn=after_turn)
    return PromptRuns(prompt=prompt, timings=timings, every=every)


def rows(prompts: Sequence[PromptRuns]) -> list[dict[str, Any]]:
    """A row of each class of lengths and each run, over the prompts of the class.

    `tok_s` is tokens over seconds of all prompts of a repeat: the median over the
    repeats, with percentiles. `vs_hf` is how many times faster than Hugging Face's
    greedy decoding in the same turn, per token; `vs_plain` than that of the same side.
    """
    made = []
    for length in dict.fromkeys(prompt.prompt.length for prompt in prompts):
        of_length = [prompt for prompt in prompts if prompt.prompt.length == length]
        made += [_row(of_length, run) for run in of_length[0].generated]
    return made


def _row(prompts: Sequence[PromptRuns], run: Run) -> dict[str, Any]:
    own = _speeds(prompts, run)
    ratios = {}
    for name, side in (("vs_plain", run.side), ("vs_hf", THEIRS)):
        plain = _speeds(prompts, Run(side=side, method=hf.PLAIN))
        ratios |= bench.spread_fields(name, bench.ratios(own, plain))
    differences = [prompt.first_difference(run) for prompt in prompts]
    return {
        "kind": "comparison",
        "length": prompts[0].prompt.length,
        "prompt_tokens": [len(prompt.prompt.tokens) for prompt in prompts],
        **dataclasses.asdict(run),
        **bench.spread_fields("tok_s", own),
        **ratios,
        **_counted([prompt.generated[run] for prompt in prompts]),
        "identical": differences.count(None),
        "prompts": len(prompts),
        "n": len(own),
        "warm_up_s": sum(prompt.timings.warm_up[run] for prompt in prompts),
    }


def _speeds(prompts: Sequence[PromptRuns], run: Run) -> list[float]:
    """Tokens a second of each repeat, all prompts together."""
    num_tokens = sum(len(prompt.generated[run].tokens) for prompt in prompts)
    by_prompt = [prompt.timings.seconds[run] for prompt in prompts]
    return [num_tokens / sum(seconds) for seconds in zip(*by_prompt, strict=True)]


def _counted(done: Sequence[Generated]) -> dict[str, Any]:
    """Drafts of a run over its prompts, and how far its texts repeat themselves.

    Drafts are None where nothing was drafted, and of theirs, which are not counted.
    """
    names = ("rounds", "proposed", "accepted", "acceptance_rate", "accepted_hist")
    counters = [one.counters for one in done]
    texts = [
        summaries.text_counts(one.tokens, one.counters or metrics.Counters())
        for one in done
    ]
    repetition = {"repetition": summaries.mean_repetition(texts)}
    if None in counters:
        return dict.fromkeys(names) | repetition
    total = metrics.total(counters)
    rate = total.accepted / total.proposed if total.proposed else None
    values = (total.rounds, total.proposed, total.accepted, rate, total.accepted_hist)
    return dict(zip(names, values, strict=True)) | repetition


COLUMNS = {
    "run": lambda row: f"{row['side']} {row['method']}",
    "K": ("gamma", "d"),
    "tok/s": ("tok_s", ",.1f"),
    "p10": ("tok_s_p10", ",.1f"),
    "p90": ("tok_s_p90", ",.1f"),
    "vs plain": ("vs_plain", ".2f"),
    "vs HF": ("vs_hf", ".2f"),
    "accepted": ("acceptance_rate", ".3f"),
    "rep": ("repetition", ".3f"),
    "same": ("identical", "d"),
}
"""Of the table, for `tables.print_rows`."""


def print_all(
    console: rich_console.Console, compared: Sequence[tables.Row], summary: tables.Row
) -> None:
    """Prints how fast every run is, and whether its tokens are the same."""
    for length in dict.fromkeys(row["length"] for row in compared):
        of_length = [row for row in compared if row["length"] == length]
        tokens = " and ".join(map(str, sorted(set(of_length[0]["prompt_tokens"]))))
        heading = f"{length}: {of_length[0]['prompts']} x {tokens} tokens"
        console.print(heading, style="bold", highlight=False)
        tables.print_rows(of_length, COLUMNS, console)
        console.print()
    console.print(
        "tok/s: prefill included, median and percentiles over the turns; vs plain, HF: "
        "times autoregressive decoding of that side, and Hugging Face's; accepted: of "
        "the proposed; rep: share of repeated 4-grams in the texts; same: prompts of "
        "which every token is that of Hugging Face's greedy decoding in this dtype.\n"
        f"{summary['compared_dtype']}: {summary['greedy_identical']} of "
        f"{summary['prompts']} prompts as Hugging Face's greedy decoding; drafted as "
        f"without drafts: {str(summary['matched']).lower()}.",
        highlight=False,
    )
