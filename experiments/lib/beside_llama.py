"""Prompts and steps on both sides, ours and llama.cpp's, in turns: rows and tables.

Both get the same weights, prompts, limit and number of threads, and end at the same
stop token. Our clock is that of `lib.runs`; llama.cpp's is its own, without loading,
warming up and printing. It tells texts and no tokens: texts are compared.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    bench,
    compare,
    hf,
    llama_cpp,
    models,
    prompt_files,
    results,
    runs as runs_lib,
    steps,
    tables,
)
from spec_jax import loading
from spec_jax.engine import checks


OURS, THEIRS = compare.OURS, "llama.cpp"
PLAIN = hf.PLAIN
FASTEST = "the fastest that drafts, and the fastest of theirs: end to end"

CONTEXT = 32
"""Of our steps: the middle of the contexts that `TOKENS` steps after nothing have."""
TOKENS = 64
ROWS, PREFILLS = (5, 8), (64, 512)
BENCH_REPEATS = 3
"""Repetitions of each test in one turn of llama-bench, which starts a process."""

TESTS = {
    "plain step": (steps.PLAIN, f"tg{TOKENS}"),
    **{f"{n} rows": (f"{n} active rows", f"pp{n}") for n in ROWS},
    **{f"prompt of {n}": (f"prefill of {n}", f"pp{n}") for n in PREFILLS},
}
"""Our name of a step, and llama-bench's, by what the table calls it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """The same models on both sides, and what both are asked for."""

    lms: models.Drafters  # by a name of `llama_cpp.SPEC_TYPES`
    settings: runs_lib.Settings
    gammas: Sequence[int]
    build: llama_cpp.Build
    target: pathlib.Path  # GGUF files
    drafts: Mapping[str, pathlib.Path]
    others: Mapping[str, pathlib.Path]  # the target, quantised otherwise, by its name

    @property
    def lm(self) -> loading.LanguageModel:
        """The target, with any of the drafters."""
        return next(iter(self.lms.values()))

    def runs(self) -> list[compare.Run]:
        """Plain on either side, speculative by each drafter and gamma, and llama.cpp's
        of its other files."""
        drafted = [(name, gamma) for name in self.lms for gamma in self.gammas]
        both = [
            compare.Run(side=side, method=method, gamma=gamma)
            for method, gamma in [(PLAIN, None), *drafted]
            for side in (OURS, THEIRS)
        ]
        of_others = [compare.Run(side=THEIRS, method=name) for name in self.others]
        return [*both, *of_others]

    def designs(self) -> list[results.Design]:
        """All that our side runs, to be warmed up."""
        return [
            results.Design(lm=self.lms[run.method], settings=self._settings(run))
            for run in self.runs()
            if run.side == OURS and run.gamma
        ]

    def _settings(self, run: compare.Run) -> runs_lib.Settings:
        return dataclasses.replace(self.settings, gamma=run.gamma)

    def generate(self, run: compare.Run, prompt: list[int]) -> llama_cpp.Generated:
        """One run of a prompt.

        Raises:
          ValueError: of llama.cpp, or it has other tokens of the prompt.
        """
        if run.side == OURS:
            return self._ours(run, prompt)
        text, settings = self._bytes(prompt), self.settings
        sizes = {"max_tokens": settings.gen_tokens, "capacity": settings.capacity}
        if run.gamma is None:
            model = self.others.get(run.method, self.target)
            done = llama_cpp.complete(self.build, model, text, **sizes)
        else:
            done = llama_cpp.speculate(
                self.build,
                self.target,
                self.drafts.get(run.method),
                text,
                drafter=run.method,
                gamma=run.gamma,
                **sizes,
            )
        if done.prompt_tokens != len(prompt):
            raise ValueError(
                f"llama.cpp reads a prompt of {len(prompt)} tokens as "
                f"{done.prompt_tokens}: its tokenizer is another"
            )
        return done

    def _ours(self, run: compare.Run, prompt: list[int]) -> llama_cpp.Generated:
        """In the same words."""
        counts = {}
        if run.gamma is None:
            done = runs_lib.run_plain(self.lm, self.settings, prompt)
        else:
            lm = self.lms[run.method]
            done = runs_lib.run_speculative(lm, self._settings(run), prompt)
            names = ("rounds", "proposed", "accepted")
            counts = {name: getattr(done.counters, name) for name in names}
        checks.check_finite(done.nonfinite)
        shown = [token for token in done.tokens if token not in self.settings.stop_ids]
        return llama_cpp.Generated(
            text=self._bytes(shown),
            ids=done.tokens,
            prompt_tokens=len(prompt),
            tokens=len(done.tokens),
            prefill_s=done.timing.prefill_s,
            decode_s=done.timing.decode_s,
            steps=len(done.tokens),
            **counts,
        )

    def _bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of tokens, whether they are characters or not."""
        words = self.lm.tokenizer
        return b"".join(words.bytes_of(int(token_id)) for token_id in ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRuns:
    """One prompt: what each run generated in each turn."""

    prompt: prompt_files.Prompt
    generated: Mapping[compare.Run, Sequence[llama_cpp.Generated]]

    def first_difference(self, run: compare.Run) -> int | None:
        """The byte at which a text of any turn first differs from that of our plain
        decoding; its end where only our tokens differ.

        llama.cpp's last round may have more drafts than are asked for: what is beyond
        our text is not looked at.
        """
        ours = next(iter(self.generated.values()))[0]
        found = [_difference(run, done, ours) for done in self.generated[run]]
        return min((place for place in found if place is not None), default=None)

    def row(self) -> dict[str, Any]:
        """The JSON row."""
        names = ("prefill_s", "decode_s")
        counts = ("tokens", "steps", "rounds", "proposed", "accepted")
        first = next(iter(self.generated.values()))[0]
        return {
            "kind": "prompt",
            "id": self.prompt.id,
            "prompt_tokens": first.prompt_tokens,
            "runs": [
                {
                    **dataclasses.asdict(run),
                    **{name: getattr(done[0], name) for name in counts},
                    **{name: [getattr(one, name) for one in done] for name in names},
                    "first_difference": self.first_difference(run),
                    "ids": done[0].ids,
                    "text": done[0].text.decode(errors="replace"),
                }
                for run, done in self.generated.items()
            ],
        }


def _difference(
    run: compare.Run, done: llama_cpp.Generated, ours: llama_cpp.Generated
) -> int | None:
    is_ours = run.side == OURS
    goes_beyond = not is_ours and done.tokens > ours.tokens
    end = len(ours.text) if goes_beyond else None
    place = compare.first_difference(done.text[:end], ours.text)
    if place is None and is_ours and done.ids != ours.ids:
        return len(ours.text)
    return place


def run_prompt(
    sides: Sides, prompt: prompt_files.Prompt, ids: list[int], *, repeats: int
) -> PromptRuns:
    """Every run of a prompt in turns, `repeats` times."""
    every = sides.runs()
    turns = [[sides.generate(run, ids) for run in every] for _ in range(repeats)]
    columns = zip(*turns, strict=True)
    return PromptRuns(prompt=prompt, generated=dict(zip(every, columns, strict=True)))


def measure_steps(
    lm: loading.LanguageModel,
    build: llama_cpp.Build,
    *,
    target: pathlib.Path,
    page_size: int,
    repeats: int,
    after_turn: Callable[[], None],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of steps, our time and llama.cpp's in turns; and what its build says."""
    plan = steps.Plan(
        contexts=(CONTEXT,), page_size=page_size, steps=20, rows=ROWS, prefills=PREFILLS
    )
    alone = dataclasses.replace(lm, drafter=None)
    costs = {cost.name: cost for cost in steps.all_costs(alone, plan)[0]}
    turns, described = [], {}

    def of_theirs() -> float:
        sizes = {"prompts": (*ROWS, *PREFILLS), "tokens": TOKENS}
        found, told = llama_cpp.bench(build, target, repeats=BENCH_REPEATS, **sizes)
        turns.append(found)
        described.update(told)
        return 0.0

    cases = {name: costs[cost].case for name, (cost, _) in TESTS.items()}
    ours = bench.run(
        {**cases, THEIRS: lambda: of_theirs}, repeats=repeats, after_turn=after_turn
    )
    # What came first warmed up, as ours did.
    return [
        compared(name, "ms", ours.seconds[name], [turn[test] for turn in turns[1:]])
        for name, (_, test) in TESTS.items()
    ], described


def compared(
    name: str, unit: str, ours: Sequence[float], theirs: Sequence[float], **more: Any
) -> dict[str, Any]:
    """The JSON row of one figure: both in `unit`, and how many times faster ours is.

    Args:
      ours, theirs: seconds of each turn.
    """
    return {
        "kind": "comparison",
        "figure": name,
        "unit": unit,
        **bench.spread_fields("ours", [1e3 * s for s in ours]),
        **bench.spread_fields("theirs", [1e3 * s for s in theirs]),
        **bench.spread_fields("ratio", bench.ratios(theirs, ours)),
        "n": len(ours),
        **more,
    }


def rows(prompts: Sequence[PromptRuns]) -> list[dict[str, Any]]:
    """Rows of plain and of speculative decoding, over all prompts of a turn.

    Decoding is what a token costs after the prompt; end to end is everything, over the
    tokens. The last row is of the fastest of ours that drafts, and of theirs at all.
    """
    made: list[dict[str, Any]] = []
    every = list(prompts[0].generated)
    drafted, their_e2e = [], []
    for theirs in (run for run in every if run.side == THEIRS):
        # A file of llama.cpp's alone is compared with our plain decoding.
        ours = dataclasses.replace(theirs, side=OURS)
        ours = ours if ours in every else every[0]
        kind = theirs.method
        if theirs.gamma is not None:
            kind += f", {theirs.gamma} drafted"
        elif theirs.method != PLAIN:
            kind = f"{PLAIN}, {kind} there"
        decode = [_per_token(prompts, run, whole=False) for run in (ours, theirs)]
        e2e = [_per_token(prompts, run, whole=True) for run in (ours, theirs)]
        their_e2e.append(e2e[1])
        both, more = {"ours": ours, "theirs": theirs}, {"prompts": len(prompts)}
        for name, run in both.items():
            same = [prompt.first_difference(run) is None for prompt in prompts]
            more[f"same_{name}"] = sum(same)
        if ours.gamma:
            drafted.append(e2e[0])
            more["drafts"] = {name: _drafts(prompts, run) for name, run in both.items()}
        made += [
            compared(f"{kind}: decode", "ms/token", *decode),
            compared(f"{kind}: end to end", "ms/token", *e2e, **more),
        ]
    fastest = min(drafted, key=sum), min(their_e2e, key=sum)
    return [*made, compared(FASTEST, "ms/token", *fastest)]


def _per_token(
    prompts: Sequence[PromptRuns], run: compare.Run, *, whole: bool
) -> list[float]:
    """Seconds of a token in each turn."""
    found = []
    for turn in zip(*(prompt.generated[run] for prompt in prompts), strict=True):
        seconds = sum(one.decode_s + one.prefill_s * whole for one in turn)
        found.append(seconds / sum(one.tokens if whole else one.steps for one in turn))
    return found


def _drafts(prompts: Sequence[PromptRuns], run: compare.Run) -> dict[str, Any]:
    """What was drafted and kept in the first turn."""
    done = [prompt.generated[run][0] for prompt in prompts]
    rounds, proposed, accepted = (
        sum(getattr(one, name) for one in done)
        for name in ("rounds", "proposed", "accepted")
    )
    return {
        "rounds": rounds,
        "proposed": proposed,
        "accepted": accepted,
        "accepted_per_round": accepted / rounds if rounds else None,
    }


COLUMNS = {
    "figure": "",
    "unit": "",
    "llama.cpp": ("theirs", ".3f"),
    "ours": ".3f",
    "times faster": ("ratio", ".2f"),
    "p10": ("ratio_p10", ".2f"),
    "p90": ("ratio_p90", ".2f"),
}
"""Of the table, for `tables.print_rows`."""

NOTE = (
    "Texts are compared with that of our plain decoding, which our drafted ones must "
    "be; llama.cpp keeps K/V in float16 and adds in another order, and need not."
)


def print_all(console: rich_console.Console, rows: Sequence[tables.Row]) -> None:
    """Prints the table, what was kept of drafts, and how far the texts agree."""
    tables.print_rows(rows, COLUMNS, console)
    for row in (row for row in rows if "prompts" in row):
        words = (
            f"{row['figure'].partition(':')[0]}: our text in {row['same_ours']} of "
            f"{row['prompts']} prompts, llama.cpp's in {row['same_theirs']}"
        )
        if "drafts" in row:
            kept = [row["drafts"][side] for side in ("ours", "theirs")]
            here, there = (one["accepted"] / max(one["rounds"], 1) for one in kept)
            words += f"; drafts kept a round {here:.3f} here and {there:.3f} there"
        console.print(words, highlight=False, soft_wrap=True)
    console.print(NOTE, highlight=False, soft_wrap=True)
