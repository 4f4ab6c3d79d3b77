"""What does a step cost, and how fast is decoding beside Hugging Face's?

Steps are timed inside compiled calls, whole runs with their prefill; all of it in
turns, in one process, on the same weights. Stop tokens are ignored, so that every
run yields the same number of tokens. Exit status: 0 measured, 2 something failed or
tokens differ at forced acceptance, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    compare,
    flags,
    forced_rounds,
    hf,
    latency_flags,
    lowering,
    records,
    steps,
    subjects,
    terminal,
    timing,
    trace,
    whole_runs,
)
from experiments.support import paired_runs, prompt_runs, report
from spec_jax.ops import dispatch
from spec_jax.paging import index


MEASURED, FAILED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    return latency_flags.parse(__doc__, argv)


def load_subject(args: argparse.Namespace, platform: str) -> subjects.Subject:
    """The models and prompts that the flags name."""
    missing = hf.missing()
    use_hf = not (args.no_hf or args.no_runs or args.dry_run)
    if missing and use_hf:
        print(
            f"latency.py: runs of Hugging Face are left out: {' and '.join(missing)} "
            f"not installed; {hf.INSTALL} brings them",
            file=sys.stderr,
        )
    models = {
        "gamma_max": args.gamma,
        "slab": args.slab,
        "dtype": args.dtype,
        "impl": args.impl,
        "use_hf": use_hf and not missing,
    }
    if args.preset:
        if args.dry_run and platform == "gpu" and args.impl == "auto":
            models["impl"] = "triton"
        return subjects.from_presets(
            args.preset, args.draft_preset, as_shapes=args.dry_run, **models
        )
    return subjects.from_folders(
        args.target, args.draft, prompt_source=args.prompts, **models
    )


def make_settings(
    args: argparse.Namespace, subject: subjects.Subject
) -> paired_runs.Settings:
    """Settings of the whole runs, with a cache that fits the longest prompt.

    Raises:
      ValueError: a prompt that is empty, or too long for the model's positions.
    """
    names = [f"prompt {prompt_id!r}" for prompt_id in subject.prompts]
    prompt_runs.check_lengths(
        subject.pair.target.config,
        zip(names, subject.prompts.values(), strict=True),
        gen_tokens=args.gen_tokens,
        page_size=args.page_size,
    )
    longest = max(len(prompt) for prompt in subject.prompts.values())
    pages = index.pages_for(longest + args.gen_tokens, args.page_size)
    return paired_runs.Settings(
        gamma=args.gamma,
        gen_tokens=args.gen_tokens,
        capacity=pages * args.page_size,
        page_size=args.page_size,
    )


class Report:
    """Rows as they are known, their tables, and whether anything failed."""

    def __init__(self, out: records.JsonLines, console: rich_console.Console):
        self._out, self._console = out, console
        self.description: dict[str, Any] = {}
        self.failed = False

    def write(
        self, rows: Sequence[dict[str, Any]], columns: dict[str, str] | None = None
    ) -> None:
        """Writes rows, and prints those that have all the columns."""
        for row in rows:
            self._out.write(row | self.description)
            self.failed |= records.is_failure(row)
        if columns is None:
            return
        shown = [row for row in rows if set(columns) <= set(row)]
        if shown:
            terminal.print_rows(shown, columns, self._console)
        for row in rows:
            if row not in shown:
                line = records.line(row)
                self._console.print(line, highlight=False, soft_wrap=True)
        self._console.print()

    def summarise(self, summary: dict[str, Any]) -> None:
        """Writes and prints what follows from all rows."""
        fields = SUMMARY_FIELDS
        self.write([{"kind": "summary"} | report.to_row(summary, fields=fields)])
        report.print_table(summary, self._console, fields=fields)


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> int:
    """Loads, measures, writes each row when it is known, and prints the tables."""
    shown = Report(out, console)
    platform = subjects.check_device("auto" if args.dry_run else args.device)
    if args.dry_run and args.device == "gpu":
        platform = "gpu"
    subject = load_subject(args, platform)
    # What cannot be run is found before anything has been.
    settings = make_settings(args, subject)
    plan = steps.Plan(
        contexts=args.contexts,
        page_size=args.page_size,
        steps=args.steps,
        rows=args.rows,
        prefills=args.prefill,
        sampling=flags.sampling_settings(args),
        as_shapes=args.dry_run,
    )
    groups = [] if args.no_steps else steps.all_costs(subject.pair, plan)
    shown.description = describe(args, subject)
    if args.dry_run:
        for cost in {cost.name: cost for group in groups for cost in group}.values():
            row = {"kind": "compile", "program": cost.name}
            work = lambda c=cost, r=row: [r | lowering.lower(c.work.trace)]
            shown.write(records.guarded(cost.name, work), COMPILE_COLUMNS)
        return FAILED if shown.failed else MEASURED
    summary: dict[str, Any] = {}
    for group in groups:
        summary |= measure_steps(args, subject, group, shown)
    if args.trace:
        for cost in groups[0]:
            if cost.work is not None and cost.name in (steps.PLAIN, *args.trace_also):
                call = lambda c=cost: trace.record(args.trace, c.name, c.thunk())
                shown.write(records.guarded(cost.name, call), TRACE_COLUMNS)
    for gamma in args.gammas if args.forced else ():
        work = lambda g=gamma: measure_forced(args, subject, g)
        shown.write(records.guarded(f"gamma {gamma}", work), ROUND_COLUMNS)
    if not args.no_runs:
        summary |= measure_runs(args, subject, settings, shown)
    if summary:
        shown.summarise(summary)
    return FAILED if shown.failed else MEASURED


def measure_steps(
    args: argparse.Namespace,
    subject: subjects.Subject,
    group: Sequence[steps.Cost],
    shown: Report,
) -> dict[str, Any]:
    """Costs in turns; of the first group what the summary says of them.

    Backwards: reading a lot of memory empties the caches, and the steps that follow
    should not be the plain ones, which all others are compared with.
    """
    with terminal.progress() as progress:
        task = progress.add_task("steps", total=args.repeats + 1)
        timings = timing.interleave(
            {cost.name: cost.thunk() for cost in reversed(group)},
            repeats=args.repeats,
            after_turn=lambda: progress.advance(task),
        )
    rows, is_first = steps.rows(group, timings), steps.READ in timings.seconds
    # Of other groups, the plain step is there to be compared with.
    shown.write(rows if is_first else rows[1:], STEP_COLUMNS)
    if not is_first:
        return {}
    found = steps.bandwidth(subject.pair.params[0], timings.seconds)
    return {"steps_warm_up_s": sum(timings.warm_up.values()), **found}


def measure_forced(
    args: argparse.Namespace, subject: subjects.Subject, gamma: int
) -> list[dict[str, Any]]:
    """Rounds at each forced acceptance, beside plain decoding."""
    runs = forced_rounds.make_runs(
        subject.pair,
        start=args.contexts[0],
        generated=args.gen_tokens,
        page_size=args.page_size,
    )
    return forced_rounds.measure(runs, gamma, args.forced, repeats=args.run_repeats)


def measure_runs(
    args: argparse.Namespace,
    subject: subjects.Subject,
    settings: paired_runs.Settings,
    shown: Report,
) -> dict[str, Any]:
    """Whole runs, prompt by prompt; returns what the summary says of them."""
    sides = compare.Sides(pair=subject.pair, hf=subject.hf, settings=settings)
    runs = whole_runs.WholeRuns(sides)
    total = len(subject.prompts) * (args.run_repeats + 1)
    with terminal.progress() as progress:
        task = progress.add_task("whole runs", total=total)
        for prompt_id, tokens in subject.prompts.items():
            row = runs.run(
                compare.Prompt(prompt_id, tokens),
                repeats=args.run_repeats,
                after_turn=lambda: progress.advance(task),
            )
            shown.write([row])
    rows = runs.rows()
    shown.write(rows, RUN_COLUMNS)
    warm_up_s = sum(row["warm_up_s"] or 0.0 for row in rows)
    return {"runs_warm_up_s": warm_up_s, **runs.summary()}


def describe(args: argparse.Namespace, subject: subjects.Subject) -> dict[str, Any]:
    """What is measured and where, for every row."""
    pair = subject.pair
    draft = args.draft_preset if args.preset else str(args.draft or subjects.EMBEDDED)
    return {
        "target": args.preset or str(args.target or subjects.EMBEDDED),
        "draft": draft,
        "dtype": pair.target.config.dtype,
        "impl": pair.target.impl,
        "native_isa": dispatch.instruction_set(pair.target.impl),
        "slab": pair.target.slab,
        "page_size": args.page_size,
        "gamma_max": None if pair.drafter is None else args.gamma,
        "temperature": args.temperature,
        "steps_per_call": args.steps,
        "repeats": args.repeats,
        "run_repeats": args.run_repeats,
        "prompt_source": "random" if args.preset else args.prompts,
        "hf": None if subject.hf is None else subject.hf.description,
        **records.provenance(),
    }


STEP_COLUMNS = {
    "step": "",
    "context": ",d",
    "ms": ".3f",
    "ms_p10": ".3f",
    "ms_p90": ".3f",
    "ratio": ".2f",
    "ratio_to": "",
}
RUN_COLUMNS = {
    "run": "",
    "tok_s": ",.1f",
    "tok_s_p10": ",.1f",
    "tok_s_p90": ",.1f",
    "tpot_ms": ".3f",
    "warm_up_s": ".1f",
}
ROUND_COLUMNS = {
    "gamma": "d",
    "forced_rate": ".2f",
    "acceptance_rate": ".3f",
    "tokens_per_target_step": ".2f",
    "plain_ms": ".3f",
    "spec_ms": ".3f",
    "round_ms": ".3f",
    "speedup": ".2f",
    "matched": "",
    "differing_kv": ",d",
}
COMPILE_COLUMNS = {
    "program": "",
    "trace_s": ".2f",
    "lower_s": ".2f",
    "compile_s": ".1f",
    "kernels": ",d",
    "launches": ",d",
    "temp_bytes": ",d",
}
TRACE_COLUMNS = {"event": "", "calls": ",d", "us": ",.1f", "share": ".3f"}


def _group(group: str, *rows: tuple[str, str, str, str]) -> tuple[report.Field, ...]:
    return tuple(
        report.Field(group=group, name=name, form=form, unit=unit, meaning=meaning)
        for name, form, unit, meaning in rows
    )


def _speedup(name: str, meaning: str) -> tuple[tuple[str, str, str, str], ...]:
    return (
        (name, ".2f", "x", meaning),
        (f"{name}_p10", ".2f", "x", "10th percentile"),
        (f"{name}_p90", ".2f", "x", "90th percentile"),
    )


SUMMARY_FIELDS = (
    *_group(
        "compilation",
        ("steps_warm_up_s", ".1f", "s", "first call of every step, compiled there"),
        ("runs_warm_up_s", ".1f", "s", "first whole runs of every prompt"),
    ),
    *_group(
        "bandwidth",
        ("step_bytes", ",d", "bytes", "of weights that a step reads"),
        ("last_level_cache_bytes", ",d", "bytes", "of the last-level cache"),
        ("fits_in_cache", "", "", "whether the weights fit into it"),
        ("read_gb_s", ".1f", "GB/s", "plain read of as many bytes, median"),
        ("read_best_gb_s", ".1f", "GB/s", "plain read of as many bytes, fastest"),
        ("memory_gb_s", ".1f", "GB/s", "plain read of memory, median"),
        ("achieved_gb_s", ".1f", "GB/s", "weights read by a plain step"),
        ("bandwidth_share", ".2f", "", "achieved / read"),
    ),
    *_group(
        "whole runs",
        ("prompts", ",d", "", "prompts run"),
        ("gen_tokens", ",d", "tokens", "generated per prompt"),
        ("matched", "", "", "speculative tokens equal plain ones"),
        ("acceptance_rate", ".3f", "", "accepted / proposed"),
        ("hf_equal_tokens", "d", "tokens", "leading, equal to HF's, by prompt"),
    ),
    *_group(
        "speed-up",
        *_speedup("plain_vs_hf", "plain / HF generate"),
        *_speedup("spec_vs_hf", "speculative / HF generate"),
        *_speedup("spec_vs_hf_assisted", "speculative / HF assisted"),
        *_speedup("spec_vs_plain", "speculative / plain"),
        *_speedup("hf_assisted_vs_hf", "HF assisted / HF generate"),
    ),
)
"""The summary, in the order in which it is shown."""


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.open_rows(args.out, allow_dirty=args.allow_dirty) as out:
        return run_all(args, out, terminal.console())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run("latency.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
