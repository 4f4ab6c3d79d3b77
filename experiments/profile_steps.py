"""How long does a step of so many rows take, by batch and context?

What spec_round.py --schedule FILE weighs drafts against: for each --batch and context
the measured seconds of a step of 1 to batch x (gamma + 1) rows, of all slots together,
and what drafting adds to a round. Steps are timed inside compiled calls, in turns, in
one process. Exit status: 0 measured, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
from collections.abc import Sequence

from experiments.lib import flags, models, profiles, records, tables, terminal


MEASURED = 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_models(parser.add_argument_group("models"))
    group = parser.add_argument_group("steps")
    cli.add(
        group,
        """
        --batch N,N,...=1,4,16  slots
        --contexts TOKENS,...=64,256  tokens in each slot
        --steps N=20  steps of one timed call
        """,
    )
    flags.add_rounds(group)
    flags.add_drafter(group)
    flags.add_repeats(group, default=20)
    flags.add_out(parser, rows="one profile a batch and context")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    return args


def run(args: argparse.Namespace) -> int:
    """Measures, writes and shows each profile; returns the exit status."""
    console = terminal.console()
    lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma)
    with records.open_out(args) as out:
        about = models.describe(args, lm) | {"drafter": args.drafter}
        out.common = about | records.provenance()
        for num_slots in args.batch:
            for context in args.contexts:
                with terminal.counted("turns", total=args.repeats + 1) as advance:
                    row = profiles.measure(
                        lm,
                        num_slots=num_slots,
                        context=context,
                        longest=max(args.contexts),
                        page_size=args.page_size,
                        steps=args.steps,
                        repeats=args.repeats,
                        after_turn=advance,
                    )
                out.write(row)
                show(row, console)
    return MEASURED


def show(row: dict, console) -> None:
    """Prints the seconds of 1, 2, 4 .. rows of a profile."""
    most = len(row["rows"])
    shown = sorted({2**n for n in range(most.bit_length())} | {most})
    names = ("median_s", "p10_s", "p90_s", "step_s")
    lines = [
        {"rows": rows} | {name[:-2]: 1e3 * row[name][rows - 1] for name in names}
        for rows in shown
    ]
    console.print(
        f"{row['num_slots']} slots, context {row['context']}, ms a step; drafting adds "
        f"{1e3 * row['draft_s']:.3f}"
    )
    columns = {"rows": "d"} | {name[:-2]: ".3f" for name in names}
    tables.print_rows(lines, columns, console)


main = cli.script("profile_steps.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
