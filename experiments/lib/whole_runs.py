"""Whole runs of a pair, plain and speculative, beside Hugging Face's two.

Stop tokens are ignored, so that every run yields the same number of tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.lib import compare, hf, timing


SPEEDUPS = {
    "plain_vs_hf": ("plain", "hf_generate"),
    "spec_vs_hf": ("speculative", "hf_generate"),
    "spec_vs_hf_assisted": ("speculative", "hf_assisted"),
    "spec_vs_plain": ("speculative", "plain"),
    "hf_assisted_vs_hf": ("hf_assisted", "hf_generate"),
}
"""What is compared: how many times faster the first run is than the second."""

_SPEED_NAMES = ("tok_s", "tok_s_p10", "tok_s_p90", "tpot_ms", "warm_up_s")


def names(gamma: int) -> dict[str, compare.Run]:
    """Every kind of run that there can be, by its name."""
    ours, theirs = (
        compare.Run(side=side, method=hf.DRAFT_MODEL, gamma=gamma)
        for side in (compare.OURS, compare.THEIRS)
    )
    return {
        "plain": compare.OUR_PLAIN,
        "speculative": ours,
        "hf_generate": compare.THEIR_PLAIN,
        "hf_assisted": theirs,
    }


class WholeRuns:
    """The prompts that have been run, and what follows from them."""

    def __init__(self, sides: compare.Sides):
        """Chooses the kinds of run: those that the two sides have models for."""
        pair, baseline = sides.pair, sides.hf
        missing = {
            "speculative": pair.drafter is None,
            "hf_generate": baseline is None,
            "hf_assisted": baseline is None or baseline.draft is None,
        }
        self._sides, self._all = sides, names(sides.settings.gamma)
        self.runs = {n: run for n, run in self._all.items() if not missing.get(n)}
        self._done: list[compare.PromptRuns] = []

    def run(
        self,
        prompt: compare.Prompt,
        *,
        repeats: int,
        after_turn: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Runs a prompt in all kinds, in turns; returns its row.

        Raises:
          RuntimeError: a run that yields another number of tokens than was asked for.
        """
        done = compare.run_prompt(
            self._sides,
            prompt,
            runs=list(self.runs.values()),
            repeats=repeats,
            after_turn=after_turn,
        )
        wanted = self._sides.settings.gen_tokens
        for name, run in self.runs.items():
            got = len(done.generated[run].tokens)
            if got != wanted:
                raise RuntimeError(
                    f"prompt {prompt.id!r}: {name} yielded {got} tokens in the place "
                    f"of {wanted}; its speed cannot be compared"
                )
        self._done.append(done)
        seconds = done.timings.seconds
        return {
            "kind": "prompt",
            "id": prompt.id,
            "prompt_tokens": len(prompt.tokens),
            "matched": self._matched(done),
            "hf_equal_tokens": self._equal_tokens(done),
            "seconds": {name: seconds.get(run) for name, run in self._all.items()},
        }

    def _matched(self, done: compare.PromptRuns) -> bool | None:
        return done.matched if "speculative" in self.runs else None

    def _equal_tokens(self, done: compare.PromptRuns) -> int | None:
        """How many leading tokens of plain decoding equal Hugging Face's greedy ones.

        In float32 all should; in bfloat16 the two libraries round differently.
        """
        if "hf_generate" not in self.runs:
            return None
        place = done.first_difference(compare.OUR_PLAIN)
        return self._sides.settings.gen_tokens if place is None else place

    def rows(self) -> list[dict[str, Any]]:
        """Speed by kind of run over all prompts; None where there is no such run."""
        made = []
        for name in self._all:
            row = {"kind": "run", "run": name, **dict.fromkeys(_SPEED_NAMES)}
            if name in self.runs:
                run = self.runs[name]
                speed = timing.spread(compare.speeds(self._done, run))
                warm_up_s = compare.warm_up_s(self._done, run)
                values = (*speed, 1e3 / speed.median, warm_up_s)
                row |= dict(zip(_SPEED_NAMES, values, strict=True))
            made.append(row)
        return made

    def summary(self) -> Mapping[str, Any]:
        """What was generated, and the `SPEEDUPS`; None for what was not run.

        Speed-ups are medians over the repeats of the ratio of the totals over the
        prompts, with percentiles.
        """
        equal = [self._equal_tokens(done) for done in self._done]
        matched = [self._matched(done) for done in self._done]
        rate = None
        if "speculative" in self.runs:
            counts = compare.counted(self._done, self.runs["speculative"])
            rate = counts["accepted"] / max(counts["proposed"], 1)
        found = {
            "prompts": len(self._done),
            "gen_tokens": self._sides.settings.gen_tokens,
            "matched": None if None in matched else all(matched),
            "acceptance_rate": rate,
            "hf_equal_tokens": None if None in equal else equal,
        }
        for name, (fast, slow) in SPEEDUPS.items():
            fields = dict.fromkeys((name, f"{name}_p10", f"{name}_p90"))
            if {fast, slow} <= set(self.runs):
                one, other = self._speeds(fast), self._speeds(slow)
                fields = timing.spread_fields(name, timing.ratios(one, other))
            found |= fields
        return found

    def _speeds(self, name: str) -> Sequence[float]:
        return compare.speeds(self._done, self.runs[name])
