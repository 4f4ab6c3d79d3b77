"""Whole runs: prompts through every way of generating, in turns, prefill included.

Our clock starts when empty caches stand ready, as `paired_runs` has it; Hugging
Face's caches grow while it generates.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.lib import timing
from experiments.support import hf_baseline, model_pair, paired_runs
from spec_jax import metrics


RUNS = ("plain", "speculative", "hf_generate", "hf_assisted")

SPEEDUPS = {
    "plain_vs_hf": ("plain", "hf_generate"),
    "spec_vs_hf": ("speculative", "hf_generate"),
    "spec_vs_hf_assisted": ("speculative", "hf_assisted"),
    "spec_vs_plain": ("speculative", "plain"),
    "hf_assisted_vs_hf": ("hf_assisted", "hf_generate"),
}
"""What is compared: how many times faster the first run is than the second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRuns:
    """One prompt: times and tokens of each kind of run that there is.

    Attributes:
      tokens: of the last repeat.
      counters: of the last speculative run, where there is one.
    """

    id: str
    prompt_tokens: int
    timings: timing.Timings
    tokens: Mapping[str, list[int]]
    counters: metrics.Counters | None

    @property
    def matched(self) -> bool | None:
        """Whether speculative tokens equal plain ones, of finite logits.

        None without such a run.
        """
        if "speculative" not in self.tokens:
            return None
        is_finite = not self.counters.nonfinite
        return is_finite and self.tokens["speculative"] == self.tokens["plain"]

    @property
    def hf_equal_tokens(self) -> int | None:
        """How many leading tokens of plain decoding equal Hugging Face's greedy ones.

        In float32 all should; in bfloat16 the two libraries round differently.
        """
        if "hf_generate" not in self.tokens:
            return None
        pairs = list(zip(self.tokens["plain"], self.tokens["hf_generate"], strict=True))
        different = [i for i, (ours, theirs) in enumerate(pairs) if ours != theirs]
        return min(different, default=len(pairs))

    def row(self) -> dict[str, Any]:
        """The JSON row."""
        return {
            "kind": "prompt",
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "matched": self.matched,
            "hf_equal_tokens": self.hf_equal_tokens,
            "seconds": {name: self.timings.seconds.get(name) for name in RUNS},
        }


def run_prompt(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompt_id: str,
    prompt: list[int],
    *,
    hf: hf_baseline.Baseline | None,
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
) -> PromptRuns:
    """All kinds of run in turn; without a drafter the speculative ones are left out.

    Raises:
      RuntimeError: a run that yields another number of tokens than was asked for.
    """
    results: dict[str, Any] = {}
    tokens: dict[str, list[int]] = {}

    def ours(name: str, run: Callable) -> timing.Thunk:
        def thunk() -> float:
            results[name] = run(pair, settings, prompt)
            tokens[name] = results[name].tokens
            return results[name].timing.e2e_s

        return thunk

    def theirs(name: str, *, assisted: bool) -> timing.Thunk:
        def run(_) -> None:
            tokens[name] = hf.generate(prompt, settings.gen_tokens, assisted=assisted)

        return timing.stopwatch(run)

    thunks = {"plain": ours("plain", paired_runs.run_plain)}
    if pair.drafter is not None:
        thunks["speculative"] = ours("speculative", paired_runs.run_speculative)
    if hf is not None:
        thunks["hf_generate"] = theirs("hf_generate", assisted=False)
        if hf.draft is not None:
            thunks["hf_assisted"] = theirs("hf_assisted", assisted=True)
    timings = timing.interleave(thunks, repeats=repeats, after_turn=after_turn)
    for name, generated in tokens.items():
        if len(generated) != settings.gen_tokens:
            raise RuntimeError(
                f"prompt {prompt_id!r}: {name} yielded {len(generated)} tokens in the "
                f"place of {settings.gen_tokens}; its speed cannot be compared"
            )
    spec = results.get("speculative")
    return PromptRuns(
        id=prompt_id,
        prompt_tokens=len(prompt),
        timings=timings,
        tokens=tokens,
        counters=None if spec is None else spec.counters,
    )


def rows(prompts: Sequence[PromptRuns], *, gen_tokens: int) -> list[dict[str, Any]]:
    """Speed by kind of run over all prompts; None where there is no such run."""
    made = []
    for name in RUNS:
        seconds = _totals(prompts, name)
        row = {"kind": "run", "run": name, **dict.fromkeys(_SPEED_NAMES)}
        if seconds:
            num_tokens = len(prompts) * gen_tokens
            speed = timing.spread([num_tokens / s for s in seconds])
            warm_up_s = sum(prompt.timings.warm_up[name] for prompt in prompts)
            values = (*speed, 1e3 / speed.median, warm_up_s)
            row |= dict(zip(_SPEED_NAMES, values, strict=True))
        made.append(row)
    return made


_SPEED_NAMES = ("tok_s", "tok_s_p10", "tok_s_p90", "tpot_ms", "warm_up_s")


def summarise(prompts: Sequence[PromptRuns], *, gen_tokens: int) -> dict[str, Any]:
    """What was generated, and the `SPEEDUPS`; None for what was not run.

    Speed-ups are medians over the repeats of the ratio of the totals over the
    prompts, with percentiles.
    """
    matched = [prompt.matched for prompt in prompts]
    counters = [prompt.counters for prompt in prompts]
    acceptance_rate = None
    if None not in counters:
        counters = metrics.total(counters)
        acceptance_rate = counters.accepted / max(counters.proposed, 1)
    equal = [prompt.hf_equal_tokens for prompt in prompts]
    return {
        "prompts": len(prompts),
        "gen_tokens": gen_tokens,
        "matched": None if None in matched else all(matched),
        "acceptance_rate": acceptance_rate,
        "hf_equal_tokens": None if None in equal else equal,
        **_speedups(prompts),
    }


def _speedups(prompts: Sequence[PromptRuns]) -> dict[str, float | None]:
    values = {}
    for name, (fast, slow) in SPEEDUPS.items():
        names = (name, f"{name}_p10", f"{name}_p90")
        pair = _totals(prompts, slow), _totals(prompts, fast)
        spread = timing.spread(timing.ratios(*pair)) if all(pair) else (None,) * 3
        values |= dict(zip(names, spread, strict=True))
    return values


def _totals(prompts: Sequence[PromptRuns], name: str) -> list[float]:
    """Seconds of each repeat, all prompts together; empty if there is no such run."""
    by_prompt = [prompt.timings.seconds.get(name, ()) for prompt in prompts]
    return [sum(repeat) for repeat in zip(*by_prompt, strict=True)]
