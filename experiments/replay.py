"""Which drafter and which gamma pay, evaluated without running the target?

A lossless round keeps the drafts that autoregressive decoding would have written, so
its text decides which. `--record` writes that text down once; every drafter is then
evaluated on these traces, in the very loop that runs live and in the time of its drafts
alone. `--check` runs the target as well, and compares every counter. For a head that
reads the target's features, the target runs once over each text.

    python experiments/replay.py --record traces.jsonl --prompts 50
    python experiments/replay.py traces.jsonl --drafter ngram,suffix --gamma 2,4

Exit status: 0 evaluated, and equal where checked; 2 a live run differs from its replay,
or a text to be recorded is of logits that are not finite; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console, text as rich_text

from experiments.lib import (
    fan_out,
    files,
    flags,
    models,
    policies,
    records,
    replays,
    tables,
    terminal,
    traces,
)
from spec_jax.drafters import registry
from spec_jax.model import fingerprint
from spec_jax.ops import dispatch


DONE, DIFFERS = 0, 2

RECORDED = (
    *("dtype", "impl", "prompts", "raw", "chat_option", "gen_tokens", "page_size"),
    *traces.SAMPLING,
)
"""Flags that decide what is recorded. Evaluation takes them from the traces: they may
be given again, and must then agree."""

EVALUATING = (
    *("draft", "drafter", "gamma_policy", "schedule", "confidence"),
    *("costs", "ignore_stop", "check", "out", "resume"),
)
"""Flags that recording has no use for."""

COLUMNS = {
    "drafter": "",
    "policy": ("gamma_policy", ""),
    "gamma": "d",
    "acceptance": ("acceptance_rate", ".3f"),
    "repetition": ".3f",
    "tokens a round": ("mean_accepted_length", ".2f"),
    "rounds": ",d",
    "tokens a step": ("tokens_per_target_step", ".2f"),
    "expected tokens/s": ("expected_tok_s", ",.1f"),
    "expected speed-up": ("expected_speedup", ".2f"),
    "equal live": lambda row: tables.wrong(
        f"{row['checked'] - len(row['differing'])}/{row['checked']}",
        bool(row["differing"]),
    ),
}
"""Of the table, for `tables.print_rows`."""

DULL = {
    "policy": ("gamma_policy", "fixed"),
    "expected tokens/s": ("expected_tok_s", None),
    "expected speed-up": ("expected_speedup", None),
    "equal live": ("checked", None),
}
"""Columns that are left out where every row has this."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns all flags, and `given`: the names of those of `RECORDED` in `argv`."""
    parser = _parser()
    # Values that are there already are no defaults: None marks what was not given.
    absent = argparse.Namespace(**dict.fromkeys((*RECORDED, *EVALUATING)))
    args = parser.parse_args(argv, namespace=absent)
    flags.check_isa(parser, args)
    both = (*RECORDED, *EVALUATING)
    given = [name for name in both if getattr(args, name) is not None]
    for name in {*both} - {*given}:
        setattr(args, name, parser.get_default(name))
    args.given = [name for name in given if name in RECORDED]
    if (args.traces is None) == (args.record is None):
        parser.error("name one file: FILE to evaluate drafters on, or --record FILE")
    if args.record is not None:
        for name in given:
            if name in EVALUATING:
                parser.error(
                    f"{cli.flag_of(name)} is of evaluation: leave it out of --record"
                )
        flags.check_sampling(parser, args)
    elif not args.check and args.target is not None:
        if not any(registry.reads_target(n, args.draft) for n in args.drafter):
            parser.error(
                "--target is run by --record, --check and drafters that read its "
                "features alone: leave it out"
            )
    elif args.check:
        flags.check_models(parser, args)
    if args.schedule and args.costs:
        parser.error(
            "--costs charges for drafts that are verified, and with --schedule there "
            "are more than that: leave one out"
        )
    if args.resume and args.out is None:
        parser.error("--resume goes on with --out: give both, or neither")
    return args


def _parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "traces",
        nargs="?",
        type=cli.source,
        metavar="FILE",
        help="traces to evaluate drafters on, written by --record",
    )
    flags.add_models(parser.add_argument_group("models"), has_mesh=False)
    group = parser.add_argument_group("recording")
    cli.add(
        group,
        """
        --record FILE  decode the prompts, once, and write their traces; the largest
            --gamma is the largest that they can be checked with. An interrupted
            recording is taken up
        """,
    )
    flags.add_prompts(group, default="10")
    flags.add_gen_tokens(group, default=64)
    flags.add_page_size(group)
    flags.add_raw(group)
    flags.add_sampling(parser.add_argument_group("sampling of what is recorded"))
    group = parser.add_argument_group("evaluation")
    replayed = [n for n in registry.names() if n not in registry.NEED_TARGET]
    flags.add_drafters(group, default=",".join(replayed))
    cli.add(
        group,
        f"""
        --gamma TOKENS,...=1,2,4,7  tokens drafted per round, at most: a row for each
        --gamma-policy/--policy NAME,...=fixed  what chooses each round's gamma, up to
            --gamma, of {", ".join(policies.POLICIES)}: a row for each
        --costs FILE  step costs to expect speeds from: rows of latency.py
            --out, or a JSON object with plain_s, verify_s by rows, and draft_s
        --ignore-stop  all that was recorded: rounds do not end at stop tokens
        --check  run the target live, too, and compare every counter
        --resume  go on with --out where an earlier run with these flags ended
        """,
        **{"NAME,...": cli.names(cli.one_of(policies.POLICIES)), "FILE": cli.source},
    )
    policies.add_schedule(group)
    policies.add_confidence(group)
    flags.add_out(group, rows="one per drafter and gamma, as the table shows them")
    fan_out.add_flags(parser.add_argument_group("prompts or rows on a cluster"))
    return parser


def record(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Writes the traces of all prompts; returns the exit status."""
    flags.sampling_settings(args)  # Wrong values, by the names of their flags.
    header, num_known = traces.record(args)
    taken_up = f", {num_known} of them taken up" if num_known else ""
    console.print(
        f"{header.num_prompts} prompts x {header.gen_tokens} tokens of decoding"
        f"{taken_up}, {header.dtype}, impl {header.impl}, for gamma up to "
        f"{header.slab - 1}: {args.record}",
        soft_wrap=True,
    )
    return DONE


def evaluate(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Evaluates the drafters, and shows it; returns the exit status."""
    with records.open_out(args) as out:
        evaluation = replays.prepare(args, _asked(args))
        header = evaluation.header
        out.common = header.to_row() | {
            "draft": models.draft_of(args),
            "confidence": args.confidence,
            "schedule": args.schedule and args.schedule.name,
            "ignore_stop": args.ignore_stop,
            "costs": None if args.costs is None else str(args.costs),
            "costs_sha256": args.costs and files.sha256(args.costs),
            "schedule_sha256": args.schedule and files.sha256(args.schedule),
            "traces_sha256": files.sha256(args.traces),
            **records.provenance(),
        }
        for name in ("kind", "format", "num_prompts"):
            del out.common[name]
        console.print(
            f"{header.num_prompts} traces of {header.target}, {header.gen_tokens} "
            f"tokens each, {header.dtype}, impl {header.impl}, temperature "
            f"{header.temperature}"
        )
        fan = fan_out.of(args, replays.prepare, args, _asked(args))
        tasks = evaluation.tasks()
        rows = _taken_up(args, evaluation, out) if args.resume else []
        left = [task for task in tasks if task not in {*map(_task_of, rows)}]
        total = len(left) * header.num_prompts
        with terminal.counted("replays", total=total) as advance:
            here = dataclasses.replace(evaluation, after_prompt=advance)
            for _, found in fan(here, left):
                for row in found:
                    rows.append(row)
                    out.write(row)
                    for _ in range(header.num_prompts if args.ray else 0):
                        advance()
    # On a cluster they come in another order; and the file may have more.
    placed = {_task_of(row): row for row in rows}
    rows = [placed[task] for task in tasks]
    console.print()
    print_rows(rows, console)
    return DIFFERS if any(row["differing"] for row in rows) else DONE


def _taken_up(
    args: argparse.Namespace, evaluation: replays.Evaluation, out: records.JsonLines
) -> list[dict[str, Any]]:
    """Returns the rows that `--out` has; raises where they are of something else."""
    checked = evaluation.header.num_prompts if args.check else None
    rows = records.resume(out, {**out.common, "checked": checked})
    for name in args.drafter:
        ours = fingerprint.of_params(evaluation.built[name][1])
        if {row["drafter_sha256"] for row in rows if row["drafter"] == name} - {ours}:
            raise ValueError(
                f"{args.out}: the weights of {name} are others than those of its rows: "
                "name another file"
            )
    return rows


def _task_of(row: Mapping[str, Any]) -> replays.Task:
    return row["drafter"], row["gamma"], row["gamma_policy"]


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the command line says of the traces, by names of their header."""
    wanted = {name: getattr(args, name) for name in args.given}
    if "impl" in wanted:
        wanted["impl"] = dispatch.resolve(args.impl)
    if "chat_option" in wanted:
        wanted["chat_option"] = json.dumps(args.chat_option, sort_keys=True)
    if "prompts" in wanted:
        wanted["prompt_source"] = wanted.pop("prompts")
    return wanted


def print_rows(
    rows: Sequence[Mapping[str, Any]], console: rich_console.Console
) -> None:
    """Prints one line a row, and after them what differs live."""
    dull = {
        heading
        for heading, (name, value) in DULL.items()
        if all(row[name] == value for row in rows)
    }
    shown = {h: column for h, column in COLUMNS.items() if h not in dull}
    tables.print_rows(rows, shown, console)
    for row in rows:
        for prompt in row["differing"]:
            line = (
                f"{row['drafter']}, {row['gamma_policy']} gamma {row['gamma']}, prompt "
                f"{prompt['id']} differs: {'; '.join(prompt['differs'])}"
            )
            # `Text`: ids are no markup.
            console.print(rich_text.Text(line, style="bold red"), soft_wrap=True)


def run(args: argparse.Namespace) -> int:
    """Records or evaluates; returns the exit status."""
    return (evaluate if args.record is None else record)(args, terminal.console())


def kept(args: argparse.Namespace) -> str:
    """Returns what an interrupt leaves behind."""
    if args.record:
        return f"the same command takes up {args.record}"
    return cli.rows_in_out(args)


main = cli.script("replay.py", parse_args, run, kept=kept)

if __name__ == "__main__":
    cli.end(main)
