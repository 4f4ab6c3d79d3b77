"""Prompts run by every method of generation, ours and another program's, in turns.

Both sides get the same weights, prompts, limit and stop tokens. Our times are those of
`lib.runs`: they include the prompt's prefill, but not the allocation of our caches.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.lib import models, prompt_files, records, runs, terminal
from spec_jax import loading
from spec_jax.analysis import metrics


OURS, PLAIN = "spec_jax", "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A method of generation, ours or another program's."""

    side: str  # `OURS`, or another program
    method: str  # `PLAIN`, or the source of drafts
    gamma: int | None = None  # tokens drafted a round; None for autoregressive decoding


OUR_PLAIN = Run(side=OURS, method=PLAIN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """The output of one generation, on either side."""

    count: int  # tokens, the stop token counted
    decode_s: float  # includes prefill, where that is not known apart
    prefill_s: float = 0.0
    # Generated tokens, without the prompt; a stop token, if any, is the last. None: the
    # program prints a text alone
    ids: list[int] | None = None
    text: bytes | None = None  # without a stop token
    steps: int | None = None  # tokens that `decode_s` was spent on; None: all
    counters: metrics.Counters | None = None  # of drafts, where they are counted
    nonfinite: int = 0  # tokens chosen from logits that are not finite, on our side

    def first_difference(self, other: "Generated") -> int | None:
        """Returns the index of the first token that differs or, if a side has no ids,
        of the first byte. If the other has more tokens, as its last round may exceed
        the limit, its text is compared up to the length of ours."""
        if self.ids is not None and other.ids is not None:
            return runs.first_difference(self.ids, other.ids)
        end = len(self.text) if other.count > self.count else None
        return runs.first_difference(self.text, other.text[:end])


def bytes_of(lm: loading.LanguageModel, tokens: Sequence[int]) -> bytes:
    """Returns the text of tokens, which need not be UTF-8."""
    return b"".join(lm.tokenizer.bytes_of(int(token)) for token in tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """The same models on both sides, and the settings of both."""

    lms: Mapping[str, loading.LanguageModel]  # ours, by the source of drafts
    settings: runs.Settings
    program: str  # the other one
    # Generates by the other program, with its own clock or ours
    theirs: Callable[[Run, list[int]], Generated]

    def ways(self, gammas: Sequence[int]) -> list[Run]:
        """Returns all runs, on both sides: plain, and by each source of drafts."""
        drafted = itertools.product(self.lms, gammas)
        return [
            Run(side=side, method=method, gamma=gamma)
            for method, gamma in [(PLAIN, None), *drafted]
            for side in (OURS, self.program)
        ]

    def generate(self, run: Run, prompt: list[int]) -> Generated:
        """Generates once from a prompt, in the way that `run` names."""
        if run.side != OURS:
            return self.theirs(run, prompt)
        lm, is_plain = self.lms.get(run.method, self.settings.lm), run.gamma is None
        change = {"lm": lm, "gamma": run.gamma or self.settings.gamma}
        settings = dataclasses.replace(self.settings, **change)
        done = (runs.run_plain if is_plain else runs.run_speculative)(settings, prompt)
        shown = [token for token in done.tokens if token not in settings.stop_ids]
        return Generated(
            count=len(done.tokens),
            ids=done.tokens,
            text=bytes_of(lm, shown),
            prefill_s=done.prefill_s,
            decode_s=done.decode_s,
            counters=None if is_plain else done.counters,
            nonfinite=done.nonfinite,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRuns:
    """One prompt, and what every run generated in the warm-up and in each turn."""

    prompt: prompt_files.Prompt
    every: Mapping[Run, Sequence[Generated]]
    reference: Run  # all others are compared with its first text

    def first_difference(self, run: Run) -> int | None:
        """Returns the first place where a text of `run` differs from the reference."""
        first = self.every[self.reference][0]
        found = [first.first_difference(done) for done in self.every[run]]
        return min((place for place in found if place is not None), default=None)

    @property
    def nonfinite(self) -> int:
        """Most tokens that one of our runs chose from logits with NaN or infinity."""
        return max(one.nonfinite for done in self.every.values() for one in done)

    @property
    def matched(self) -> bool:
        """Whether all our tokens equal our first plain ones, and all our logits were
        finite."""
        plain = self.every[OUR_PLAIN][0].ids
        own = [done for run, done in self.every.items() if run.side == OURS]
        return not self.nonfinite and all(one.ids == plain for of in own for one in of)

    def row(self) -> dict[str, Any]:
        """Returns the JSON row of the prompt, with its first text by every run."""
        runs = []
        for run, (first, *turns) in self.every.items():
            told = drafts(first.counters)
            for name in ("prefill_s", "decode_s"):
                told[name] = [getattr(turn, name) for turn in turns]
            told |= {"tokens": first.count, "ids": first.ids}
            told |= {"text": first.text and first.text.decode(errors="replace")}
            told |= {"first_difference": self.first_difference(run)}
            runs.append(dataclasses.asdict(run) | told)
        return {
            **{"kind": "prompt", "id": self.prompt.id, "length": self.prompt.category},
            **{"prompt_tokens": len(self.prompt.ids), "matched": self.matched},
            **{"nonfinite_logits": self.nonfinite, "runs": runs},
        }


def run_prompts(
    sides: Sides,
    ways: Sequence[Run],
    subject: models.Subject,
    out: records.JsonLines,
    *,
    reference: Run,
    repeats: int,
) -> list[PromptRuns]:
    """Runs each prompt in every way once to warm up, then in turns; writes its row."""
    made, total = [], len(subject.prompts) * (1 + repeats)
    with terminal.counted("runs", total=total) as advance:
        for prompt in subject.prompts:
            every: dict[Run, list[Generated]] = {run: [] for run in ways}
            for _ in range(1 + repeats):
                for run, done in every.items():
                    done.append(sides.generate(run, prompt.ids))
                advance()
            made.append(PromptRuns(prompt=prompt, every=every, reference=reference))
            out.write(made[-1].row())
    return made


def per_token(
    prompts: Sequence[PromptRuns], run: Run, *, whole: bool = True
) -> list[float]:
    """Returns the seconds per token in each turn, over all prompts.

    Args:
      whole: count prefill, too; otherwise decoding alone.
    """
    first = [prompt.every[run][0] for prompt in prompts]
    count = sum(one.count if whole else one.steps or one.count for one in first)
    turns = zip(*(prompt.every[run][1:] for prompt in prompts), strict=True)
    return [
        sum(one.decode_s + whole * one.prefill_s for one in turn) / count
        for turn in turns
    ]


def drafts(counters: metrics.Counters | None) -> dict[str, int | None]:
    """Returns the fields of rows that count drafts; None where they are not counted."""
    names = ("rounds", "proposed", "accepted")
    return {name: counters and getattr(counters, name) for name in names}


def counted(prompts: Sequence[PromptRuns], run: Run) -> metrics.Counters | None:
    """Returns the sum of the counters of a run's warm-ups; None if one has none."""
    counters = [prompt.every[run][0].counters for prompt in prompts]
    return None if None in counters else metrics.total(counters)
