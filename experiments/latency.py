"""What does a step cost, and how fast is decoding beside Hugging Face's?

Steps are timed inside compiled calls, whole runs with their prefill; all of it in
turns, in one process, on the same weights. Stop tokens are ignored, so that every
run yields the same number of tokens. Exit status: 0 measured, 1 the input was
unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    flags,
    records,
    subjects,
    terminal,
    timing,
)
from experiments.support import (
    bandwidth,
    hf_baseline,
    latency_report,
    paired_runs,
    prompt_runs,
    report,
    step_costs,
    whole_runs,
)
from spec_jax.ops import dispatch
from spec_jax.paging import index


MEASURED = 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_model_flags(parser.add_argument_group("models"))
    _add_run_flags(parser.add_argument_group("runs"))
    flags.add_out(parser, rows="one per step, prompt and kind of run, then one summary")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    if args.preset and (args.target or args.prompts):
        parser.error(
            "--preset brings its own weights and prompt: leave out --target, --draft "
            "and --prompts"
        )
    # Steps of a large model are slow, and few of them are enough.
    args.steps = args.steps or (4 if args.preset else 20)
    args.gen_tokens = args.gen_tokens or (16 if args.preset else 64)
    args.prompts = args.prompts or "5"
    args.slab = args.slab or args.gamma + 1
    return args


def _add_model_flags(models: argparse._ArgumentGroup) -> None:
    flags.add_models(models)
    models.add_argument(
        "--preset",
        choices=sorted(subjects.PRESETS),
        help="random weights in the shape of a released model, in the place of a "
        "pair; plain decoding only",
    )
    models.add_argument(
        "--slab",
        type=cli.positive,
        metavar="ROWS",
        help="rows of every call of the target (default: gamma + 1)",
    )
    models.add_argument(
        "--no-hf", action="store_true", help="leave Hugging Face's runs out"
    )


def _add_run_flags(runs: argparse._ArgumentGroup) -> None:
    flags.add_rounds(runs)
    runs.add_argument(
        "--contexts",
        type=cli.positive,
        nargs="+",
        default=[64, 256, 1024],
        metavar="TOKENS",
        help="context lengths of a plain step; everything else is measured at the "
        "first of them (default: 64 256 1024)",
    )
    runs.add_argument(
        "--steps",
        type=cli.positive,
        metavar="N",
        help="steps of one timed call (default: 20; with --preset 4)",
    )
    runs.add_argument(
        "--repeats",
        type=cli.positive,
        default=20,
        metavar="N",
        help="timed calls of each step (default: %(default)s)",
    )
    runs.add_argument(
        "--prompts",
        type=cli.text_source,
        metavar="N|FILE[:N]",
        help="prompts of the whole runs: the first N bundled ones, or a file "
        "(default: 5)",
    )
    runs.add_argument(
        "--gen-tokens",
        type=cli.positive,
        metavar="TOKENS",
        help="tokens to generate per prompt (default: 64; with --preset 16)",
    )
    runs.add_argument(
        "--run-repeats",
        type=cli.positive,
        default=5,
        metavar="N",
        help="timed whole runs of each prompt (default: %(default)s)",
    )


def load_subject(args: argparse.Namespace, folder: pathlib.Path) -> subjects.Subject:
    """The models and prompts that the flags name.

    Args:
      folder: for files that are needed while the measurement lasts.
    """
    missing = hf_baseline.missing()
    if missing and not args.no_hf:
        print(
            f"latency.py: runs of Hugging Face are left out: {' and '.join(missing)} "
            f"not installed; {hf_baseline.INSTALL} brings them",
            file=sys.stderr,
        )
    models = {
        "slab": args.slab,
        "dtype": args.dtype,
        "impl": args.impl,
        "use_hf": not (missing or args.no_hf),
    }
    if args.preset:
        return subjects.from_preset(args.preset, folder, **models)
    return subjects.from_folders(
        args.target,
        args.draft,
        prompt_source=args.prompts,
        gamma_max=args.gamma,
        **models,
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


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> None:
    """Loads, measures, writes each row when it is known, and prints the tables."""
    with tempfile.TemporaryDirectory() as folder:
        subject = load_subject(args, pathlib.Path(folder))
        # What cannot be run is found before anything has been.
        settings = make_settings(args, subject)
        costs = step_costs.all_costs(
            subject.pair,
            contexts=args.contexts,
            page_size=args.page_size,
            steps=args.steps,
        )
        description = describe(args, subject)

        def write(rows: Sequence[dict[str, Any]]) -> None:
            for row in rows:
                out.write(row | description)

        timings = measure_steps(args, costs)
        step_rows = step_costs.rows(costs, timings)
        write(step_rows)
        columns = latency_report.STEP_COLUMNS
        latency_report.print_rows(step_rows, console, columns=columns)
        measured = []
        for runs in measure_prompts(args, subject, settings):
            measured.append(runs)
            write([runs.row()])
    run_rows = whole_runs.rows(measured, gen_tokens=args.gen_tokens)
    write(run_rows)
    console.print()
    columns = latency_report.RUN_COLUMNS
    latency_report.print_rows(run_rows, console, columns=columns)
    seconds = timings.seconds
    summary = {
        "steps_warm_up_s": sum(timings.warm_up.values()),
        "runs_warm_up_s": sum(row["warm_up_s"] or 0.0 for row in run_rows),
        **bandwidth.summarise(
            subject.pair.params[0],
            step_s=seconds[step_costs.PLAIN],
            read_s=seconds[step_costs.READ],
            # Weights that are large enough themselves are not read a second time.
            large_read_s=seconds.get(step_costs.LARGE_READ, seconds[step_costs.READ]),
        ),
        **whole_runs.summarise(measured, gen_tokens=args.gen_tokens),
    }
    fields = latency_report.SUMMARY_FIELDS
    write([{"kind": "summary"} | report.to_row(summary, fields=fields)])
    console.print()
    report.print_table(summary, console, fields=fields)


def measure_steps(
    args: argparse.Namespace, costs: Sequence[step_costs.Cost]
) -> timing.Timings:
    """All step costs, in turns.

    Backwards: reading a lot of memory empties the caches, and the steps that follow
    should not be the plain ones, which all others are compared with.
    """
    with terminal.progress() as progress:
        task = progress.add_task("steps", total=args.repeats + 1)
        return timing.interleave(
            {cost.name: cost.thunk for cost in reversed(costs)},
            repeats=args.repeats,
            after_turn=lambda: progress.advance(task),
        )


def measure_prompts(
    args: argparse.Namespace,
    subject: subjects.Subject,
    settings: paired_runs.Settings,
) -> Iterator[whole_runs.PromptRuns]:
    """Whole runs, prompt by prompt."""
    total = len(subject.prompts) * (args.run_repeats + 1)
    with terminal.progress() as progress:
        task = progress.add_task("whole runs", total=total)
        for prompt_id, prompt in subject.prompts.items():
            yield whole_runs.run_prompt(
                subject.pair,
                settings,
                prompt_id,
                prompt,
                hf=subject.hf,
                repeats=args.run_repeats,
                after_turn=lambda: progress.advance(task),
            )


def describe(args: argparse.Namespace, subject: subjects.Subject) -> dict[str, Any]:
    """What is measured and where, for every row."""
    is_pair = args.preset is None
    return {
        "target": args.preset or str(args.target or "embedded"),
        "draft": str(args.draft or "embedded") if is_pair else None,
        "dtype": subject.pair.target.config.dtype,
        "impl": subject.pair.target.impl,
        "native_isa": dispatch.instruction_set(subject.pair.target.impl),
        "slab": subject.pair.target.slab,
        "page_size": args.page_size,
        "gamma_max": args.gamma if is_pair else None,
        "steps_per_call": args.steps,
        "repeats": args.repeats,
        "run_repeats": args.run_repeats,
        "prompt_source": args.prompts if is_pair else "random",
        "hf": None if subject.hf is None else subject.hf.description,
        **records.provenance(),
    }


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.JsonLines(args.out) as out:
        run_all(args, out, terminal.console())
    return MEASURED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run("latency.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
