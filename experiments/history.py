"""Which design of verification keeps the target's tokens, and at what speed?

Runs the ladder of designs that led to the row contract, on the same prompts, in turn
in one process: what decides is whether the verified rows have the bits of decoding,
and how many target forwards a round takes. Each design is judged by the plain
decoding that belongs to it, and timed against the fastest plain decoding there is.

Exit status: 0 the story holds (the last rung matches, and is the fastest of those
that match); 2 it does not; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console

from experiments.ablations import designs, verify_paths
from experiments.lib import (
    flags,
    models,
    records,
    results as results_lib,
    tables,
    terminal,
)


HOLDS, DOES_NOT_HOLD = 0, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """A design of verification, and what was published of it.

    Attributes:
      published: speed-up and losslessness of the system that was built this way, with
        Qwen3-8B and a draft of 0.6B on an RTX 5090.
    """

    name: str
    verify_path: str
    acceptance: str
    published: str


LADDER = (
    Rung(
        name="decoding decides",
        verify_path="flash",
        acceptance="decode",
        published="0.29x, matched",
    ),
    Rung(
        name="flash decides",
        verify_path="flash",
        acceptance="verify",
        published="unmatched",
    ),
    Rung(
        name="row loop",
        verify_path="row-loop",
        acceptance="verify",
        published="0.44x, matched",
    ),
    Rung(
        name="library rows",
        verify_path="library-rows",
        acceptance="verify",
        published="0.68x, unmatched",
    ),
    Rung(
        name="row contract",
        verify_path="paged-decode",
        acceptance="verify",
        published="-",
    ),
)
"""In the order of history: a verification by the batched path of prefill, which at
first only proposed what decoding then decided; rows that decode one after the other;
rows together, through the library's products and under the row contract. The last is
what `spec_round.py` runs."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    runs = parser.add_argument_group("runs")
    flags.add_rounds(runs)
    flags.add_prompts(runs, default="10")
    flags.add_gen_tokens(runs, default=256)
    flags.add_repeats(runs)
    flags.add_out(
        parser, rows="one per prompt and rung as it finishes, then one per rung"
    )
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    return args


def design_of(rung: Rung, subject: models.Subject) -> results_lib.Design:
    """The design of a rung; its model decodes what the design is compared with."""
    lm = subject.lm
    verifier = designs.verifier(lm, path=rung.verify_path, acceptance=rung.acceptance)
    if rung.verify_path == "library-rows":
        # Without the contract, decoding is a window of one row through the same
        # products.
        target = verify_paths.make(rung.verify_path, lm.target)
        lm = dataclasses.replace(lm, target=target)
    settings = dataclasses.replace(subject.settings, verifier=verifier)
    return results_lib.Design(lm=lm, settings=settings)


def measure(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> list[dict[str, Any]]:
    """Runs every rung on every prompt; returns the rows of the rungs.

    Writes a row for each prompt and rung as it finishes, and those of the rungs.
    """
    lm = models.load(args, drafter="draft-model", gamma_max=args.gamma)
    subject = models.prepare(args, lm, args.prompts)
    description = models.describe(args, lm) | {
        "gamma": args.gamma,
        "prompt_source": args.prompts,
    }
    console.print(
        f"{len(LADDER)} designs, {len(subject.prompts)} prompts x {args.gen_tokens} "
        f"tokens, gamma {args.gamma}, {description['dtype']}, impl "
        f"{description['impl']}"
    )
    ladder = {rung.name: design_of(rung, subject) for rung in LADDER}
    results_lib.warm_up(list(ladder.values()), subject.ids)
    found = {name: [] for name in ladder}
    with terminal.counted("prompts", total=len(subject.prompts)) as advance:
        for prompt, ids in zip(subject.prompts, subject.ids, strict=True):
            done = results_lib.run_designs(ladder, prompt, ids, repeats=args.repeats)
            for name, result in done.items():
                found[name].append(result)
                row = result.row() | {"kind": "history_prompt", "rung": name}
                out.write(row | description)
            advance()
    rows = [row_of(rung, found[rung.name]) | description for rung in LADDER]
    for row in rows:
        out.write(row | records.provenance())
    return rows


def row_of(rung: Rung, results: Sequence[results_lib.PromptResult]) -> dict[str, Any]:
    """The JSON row of a rung: what it is, and its metrics."""
    return {
        "kind": "history",
        "rung": rung.name,
        "verify_path": rung.verify_path,
        "acceptance": rung.acceptance,
        "published": rung.published,
        "matched_prompts": sum(result.matched for result in results),
        **tables.to_row(results_lib.summarise(results)),
    }


COLUMNS = {
    "design": ("rung", ""),
    "matched": lambda row: tables.wrong(
        f"{row['matched_prompts']}/{row['prompts']}", not row["matched"]
    ),
    "mismatches": ("verify_decode_mismatches", ",d"),
    "tokens/step": ("tokens_per_target_step", ".2f"),
    "speed-up": lambda row: f"{row['speedup_e2e']:.2f}x",
    "published": ("published", ""),
}
"""Of the table, for `tables.print_rows`."""


def print_ladder(rows: Sequence[dict], console: rich_console.Console) -> None:
    """One line a rung."""
    tables.print_rows(rows, COLUMNS, console)
    console.print(
        "matched: prompts with all tokens of plain decoding; tokens/step: per "
        "forward of the target, of any kind; speed-up: over "
        "our plain decoding, prefill included; published: Qwen3-8B and 0.6B on an "
        "RTX 5090",
        style="dim",
    )


def story_holds(rows: Sequence[dict]) -> bool:
    """Whether the last rung matches, and is the fastest of those that match."""
    matched = [row for row in rows if row["matched"]]
    last = rows[-1]
    return last in matched and last["speedup_e2e"] == max(
        row["speedup_e2e"] for row in matched
    )


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with records.JsonLines(args.out) as out:
        rows = measure(args, out, console)
    print_ladder(rows, console)
    return HOLDS if story_holds(rows) else DOES_NOT_HOLD


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ladder; returns the exit status."""
    return cli.run("history.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
