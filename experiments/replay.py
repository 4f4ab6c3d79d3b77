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
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import flags, records, terminal
from experiments.support import (
    replay_flags,
    replay_judge,
    replay_record,
    replay_report,
    traces,
)
from spec_jax.ops import dispatch


JUDGED, DIFFERS = 0, 2


def record(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Writes the traces of all prompts; returns the exit status."""
    flags.sampling_settings(args)  # Wrong values, by the names of their flags.
    request = replay_record.Request(
        target=args.target,
        dtype=args.dtype,
        impl=args.impl,
        gamma_max=max(args.gamma),
        prompts=args.prompts,
        raw=args.raw,
        gen_tokens=args.gen_tokens,
        page_size=args.page_size,
        settings={name: getattr(args, name) for name in traces.SAMPLING},
    )
    header, num_known = replay_record.record(request, args.record)
    taken_up = f", {num_known} of them taken up" if num_known else ""
    console.print(
        f"{header.num_prompts} prompts x {header.gen_tokens} tokens of plain decoding"
        f"{taken_up}, {header.dtype}, impl {header.impl}, for gamma up to "
        f"{header.slab - 1}: {args.record}",
        soft_wrap=True,
    )
    return JUDGED


def judge(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Judges the drafters, and shows it; returns the exit status."""
    request = replay_judge.Request(
        path=args.traces,
        drafters=args.drafter,
        gammas=args.gamma,
        policies=args.gamma_policy,
        min_confidence=args.confidence,
        target=args.target,
        draft=args.draft,
        costs=args.costs,
        ignore_stop=args.ignore_stop,
        check=args.check,
    )
    rows = []
    with records.JsonLines(args.out) as out:
        judged = replay_judge.Judge(request, asked(args))
        description = judged.description()
        console.print(
            f"{judged.header.num_prompts} traces of {judged.header.target}, "
            f"{judged.header.gen_tokens} tokens each, {judged.header.dtype}, impl "
            f"{judged.header.impl}, temperature {judged.header.temperature}"
        )
        with terminal.progress() as progress:
            task = progress.add_task("replays", total=judged.num_replays)
            for row in judged.rows(lambda: progress.advance(task)):
                rows.append(row)
                out.write(row | description)
    console.print()
    replay_report.print_rows(rows, console)
    return DIFFERS if any(row["differing"] for row in rows) else JUDGED


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the traces, by the names of their header."""
    wanted = {name: getattr(args, name) for name in args.given}
    if "impl" in wanted:
        wanted["impl"] = dispatch.resolve(args.impl)
    if "prompts" in wanted:
        wanted["prompt_source"] = wanted.pop("prompts")
    return wanted


def run(args: argparse.Namespace) -> int:
    """Records or judges; returns the exit status."""
    console = terminal.console()
    return (judge if args.record is None else record)(args, console)


def kept(args: argparse.Namespace) -> str:
    """What an interrupt leaves behind."""
    if args.record:
        return f"the same command takes up {args.record}"
    return cli.rows_in_out(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run(
        "replay.py",
        lambda: replay_flags.parse(argv, description=__doc__),
        run,
        kept=kept,
    )


if __name__ == "__main__":
    cli.end(main)
