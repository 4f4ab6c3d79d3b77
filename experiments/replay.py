"""Which drafter and which gamma pay, judged without running the target?

A lossless round keeps the drafts that plain decoding would have written, and so what
plain decoding wrote decides which. `--record` writes that down once; every drafter is
then judged on these traces, in the very loop that runs live and in the time of its
drafts alone. `--check` runs the target as well, and compares every counter.

    python experiments/replay.py --record traces.jsonl --prompts 50
    python experiments/replay.py traces.jsonl --drafter ngram,suffix --gamma 2,4

Exit status: 0 judged, and equal where checked; 2 a live run differs from its replay;
1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.lib import (
    flags,
    judge as judge_lib,
    policies,
    recordings,
    records,
    terminal,
    traces,
)
from spec_jax.drafters import registry
from spec_jax.ops import dispatch


JUDGED, DIFFERS = 0, 2

RECORDED = (
    *("dtype", "impl", "prompts", "raw", "gen_tokens", "page_size"),
    *traces.SAMPLING,
)
"""Flags that decide what is recorded. Judging takes them from the traces: they may be
given again, and must then agree."""

JUDGING = (
    *("draft", "drafter", "gamma_policy", "confidence"),
    *("costs", "ignore_stop", "check", "out"),
)
"""Flags that recording has no use for."""

COLUMNS = (
    ("drafter", "drafter", ""),
    ("policy", "gamma_policy", ""),
    ("gamma", "gamma", "d"),
    ("acceptance", "acceptance_rate", ".3f"),
    ("repetition", "repetition", ".3f"),
    ("tokens a round", "mean_accepted_length", ".2f"),
    ("rounds", "rounds", ",d"),
    ("tokens a step", "tokens_per_target_step", ".2f"),
    ("expected tokens/s", "expected_tok_s", ",.1f"),
    ("expected speed-up", "expected_speedup", ".2f"),
)
"""Heading, name in the row, and format."""

DULL = {"gamma_policy": "fixed", "expected_tok_s": None, "expected_speedup": None}
"""Columns that are left out where every row has this."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns all flags, and `given`: the names of those of `RECORDED` in `argv`.

    `argparse` itself exits with status 1 on unusable ones.
    """
    parser = _parser()
    # Values that are there already are no defaults: None marks what was not given.
    absent = argparse.Namespace(**dict.fromkeys((*RECORDED, *JUDGING)))
    args = parser.parse_args(argv, namespace=absent)
    flags.check_isa(parser, args)
    given = [name for name in (*RECORDED, *JUDGING) if getattr(args, name) is not None]
    for name in {*RECORDED, *JUDGING} - set(given):
        setattr(args, name, parser.get_default(name))
    args.given = [name for name in given if name in RECORDED]
    if (args.traces is None) == (args.record is None):
        parser.error("name one file: FILE to judge drafters on, or --record FILE")
    if args.record is not None:
        for name in given:
            if name in JUDGING:
                parser.error(
                    f"{cli.flag_of(name)} judges traces: leave it out of --record"
                )
        flags.check_sampling(parser, args)
    elif not args.check and args.target is not None:
        parser.error("--target is run by --record and --check alone: leave it out")
    elif args.check:
        flags.check_models(parser, args)
    return args


def _parser() -> cli.Parser:
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "traces",
        nargs="?",
        type=cli.source,
        metavar="FILE",
        help="traces to judge drafters on, written by --record",
    )
    flags.add_models(parser.add_argument_group("models"))
    group = parser.add_argument_group("recording")
    group.add_argument(
        "--record",
        type=cli.output,
        metavar="FILE",
        help="decode the prompts, once, and write their traces; the largest --gamma is "
        "the largest that they can be checked with. An interrupted recording is taken "
        "up",
    )
    flags.add_prompts(group, default="10")
    flags.add_gen_tokens(group, default=64)
    group.add_argument(
        "--page-size",
        type=cli.positive,
        default=16,
        metavar="TOKENS",
        help="positions per page of the cache (default: %(default)s)",
    )
    group.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )
    flags.add_sampling(parser.add_argument_group("sampling of what is recorded"))
    _add_judging(parser.add_argument_group("judging"))
    return parser


def _add_judging(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drafter",
        type=_names("drafter", registry.names()),
        default=registry.names(),
        metavar="NAMES",
        help=f"drafters to judge, of {', '.join(registry.names())}, or "
        "package.module:Name (default: all)",
    )
    group.add_argument(
        "--gamma",
        type=cli.positives,
        default=(1, 2, 4, 7),
        metavar="LIST",
        help="tokens drafted per round, at most: a row for each (default: 1,2,4,7)",
    )
    group.add_argument(
        "--gamma-policy",
        "--policy",
        type=_names("gamma policy", policies.POLICIES),
        default=("fixed",),
        metavar="NAMES",
        help=f"what chooses each round's gamma, up to --gamma, of "
        f"{', '.join(policies.POLICIES)}: a row for each (default: fixed)",
    )
    group.add_argument(
        "--confidence",
        type=float,
        default=0.0,
        metavar="P",
        help="a draft model ends its draft before a token that it gives less than "
        "this probability (default: %(default)s, never)",
    )
    group.add_argument(
        "--costs",
        type=cli.source,
        metavar="FILE",
        help="expect speeds from these step costs: rows of latency.py --out, or a "
        "JSON object with plain_s, verify_s by rows, and draft_s",
    )
    group.add_argument(
        "--ignore-stop",
        action="store_true",
        help="judge all that was recorded: rounds do not end at stop tokens",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="run the target live, too, and compare every counter",
    )
    flags.add_out(group, rows="one per drafter and gamma, as the table shows them")


def _names(what: str, known: Sequence[str]):
    """Returns the type of a flag that lists names: in order, each of them once."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known and not (what == "drafter" and ":" in name):
                raise argparse.ArgumentTypeError(
                    f"{name!r} is no {what}: name some of {','.join(known)}"
                )
        return names

    return parse


def record(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Writes the traces of all prompts; returns the exit status."""
    flags.sampling_settings(args)  # Wrong values, by the names of their flags.
    shared = ("target", "dtype", "impl", "prompts", "raw", "gen_tokens", "page_size")
    header, num_known = recordings.record(
        args.record,
        gamma_max=max(args.gamma),
        settings={name: getattr(args, name) for name in traces.SAMPLING},
        **{name: getattr(args, name) for name in shared},
    )
    taken_up = f", {num_known} of them taken up" if num_known else ""
    console.print(
        f"{header.num_prompts} prompts x {header.gen_tokens} tokens of decoding"
        f"{taken_up}, {header.dtype}, impl {header.impl}, for gamma up to "
        f"{header.slab - 1}: {args.record}",
        soft_wrap=True,
    )
    return JUDGED


def judge(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Judges the drafters, and shows it; returns the exit status."""
    rows = []
    shared = ("target", "draft", "costs", "ignore_stop", "check")
    with records.JsonLines(args.out) as out:
        judged = judge_lib.make_judge(
            args.traces,
            asked=_asked(args),
            drafters=args.drafter,
            gammas=args.gamma,
            policies=args.gamma_policy,
            min_confidence=args.confidence,
            **{name: getattr(args, name) for name in shared},
        )
        header = judged.header
        description = header.to_row() | {
            "draft": str(args.draft or recordings.EMBEDDED),
            "confidence": args.confidence,
            "ignore_stop": args.ignore_stop,
            "costs": None if args.costs is None else str(args.costs),
            **records.provenance(),
        }
        for name in ("kind", "format", "num_prompts"):
            del description[name]
        console.print(
            f"{header.num_prompts} traces of {header.target}, {header.gen_tokens} "
            f"tokens each, {header.dtype}, impl {header.impl}, temperature "
            f"{header.temperature}"
        )
        with terminal.progress() as progress:
            task = progress.add_task("replays", total=judged.num_replays)
            for row in judged.rows(lambda: progress.advance(task)):
                rows.append(row)
                out.write(row | description)
    console.print()
    print_rows(rows, console)
    return DIFFERS if any(row["differing"] for row in rows) else JUDGED


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the command line says of the traces, by names of their header."""
    wanted = {name: getattr(args, name) for name in args.given}
    if "impl" in wanted:
        wanted["impl"] = dispatch.resolve(args.impl)
    if "prompts" in wanted:
        wanted["prompt_source"] = wanted.pop("prompts")
    return wanted


def print_rows(
    rows: Sequence[Mapping[str, Any]], console: rich_console.Console
) -> None:
    """Prints one line a row, and after them what differs live."""
    columns = [
        (heading, name, form)
        for heading, name, form in COLUMNS
        if name not in DULL or any(row[name] != DULL[name] for row in rows)
    ]
    is_checked = any(row["checked"] is not None for row in rows)
    table = rich_table.Table(box=None, pad_edge=False, header_style="bold")
    for heading, _, form in columns:
        table.add_column(heading, justify="right" if form else "left")
    if is_checked:
        table.add_column("equal live", justify="right")
    for row in rows:
        cells = [terminal.format_value(row[name], form) for _, name, form in columns]
        if is_checked:
            equal = row["checked"] - len(row["differing"])
            style = "bold red" if row["differing"] else ""
            cells.append(rich_text.Text(f"{equal}/{row['checked']}", style=style))
        table.add_row(*cells)
    console.print(table)
    for row in rows:
        for prompt in row["differing"]:
            line = (
                f"{row['drafter']}, {row['gamma_policy']} gamma {row['gamma']}, prompt "
                f"{prompt['id']} differs: {'; '.join(prompt['differs'])}"
            )
            # `Text`: ids are no markup.
            console.print(rich_text.Text(line, style="bold red"), soft_wrap=True)


def run(args: argparse.Namespace) -> int:
    """Records or judges; returns the exit status."""
    console = terminal.console()
    return (judge if args.record is None else record)(args, console)


def kept(args: argparse.Namespace) -> str:
    """Returns what an interrupt leaves behind."""
    if args.record:
        return f"the same command takes up {args.record}"
    return cli.rows_in_out(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run("replay.py", lambda: parse_args(argv), run, kept=kept)


if __name__ == "__main__":
    cli.end(main)
