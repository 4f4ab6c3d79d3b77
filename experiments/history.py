"""Which design of verification keeps the target's tokens, and at what speed?

Runs the designs that led to the row contract, on the same prompts, in turn in one
process: what decides is whether the verified rows have the bits of decoding, and how
many target forwards a round takes. Each design is compared with the autoregressive
decoding that belongs to it, and timed against the fastest one there is.
The designs are in `lib/superseded.py`, and nothing else runs them.

Exit status: 0 the story holds (the last design matches, and is the fastest of those
that match); 2 it does not; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lib import (
    flags,
    mismatches,
    models,
    records,
    results as results_lib,
    superseded,
    tables,
    terminal,
)


HOLDS, DOES_NOT_HOLD = 0, 2


@dataclasses.dataclass(frozen=True)
class Rung:
    """A design of verification, and what was published of it."""

    name: str
    verify_path: str
    acceptance: str
    # Speed-up and losslessness of the system that was built this way, with Qwen3-8B and
    # a draft of 0.6B on an RTX 5090
    published: str


FLASH = "flash decides"
LADDER = (
    Rung("decoding decides", "flash", "decode", "0.29x, matched"),
    Rung(FLASH, "flash", "verify", "unmatched"),
    Rung("row loop", "row-loop", "verify", "0.44x, matched"),
    Rung("library rows", "library-rows", "verify", "0.68x, unmatched"),
    Rung("row contract", "paged-decode", "verify", "-"),
)
"""In the order of history: a verification by the batched path of prefill, which at
first only proposed what decoding then decided; rows that decode one after the other;
rows together, through the library's products and under the row contract. The last is
what `spec_round.py` runs."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_models(parser.add_argument_group("models"))
    runs = parser.add_argument_group("runs")
    flags.add_rounds(runs)
    flags.add_prompts(runs, default="10")
    flags.add_gen_tokens(runs, default=256)
    flags.add_repeats(runs)
    rows = "one per prompt and design as it finishes, then one per design"
    flags.add_out(parser, rows=rows)
    cli.add(
        parser,
        """
        --dump-verify-mismatches FILE  JSON lines: every position that the batched path
            verified and at which decoding chooses another token; parity.py takes one
        """,
    )
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    return args


def design_of(rung: Rung, subject: models.Subject) -> results_lib.Design:
    """Returns the models and the settings of a design."""
    lm = subject.lm
    decodes = lm.gamma_max + 1 if rung.acceptance == "decode" else None
    verifier = superseded.target(rung.verify_path, lm.target, decodes=decodes)
    if rung.verify_path == "library-rows":
        # Without the contract, decoding is a window of one row through the same
        # products.
        lm = dataclasses.replace(lm, target=verifier)
    settings = dataclasses.replace(subject.settings, verifier=verifier)
    return results_lib.Design(lm=lm, settings=settings)


def row_of(rung: Rung, results: Sequence[results_lib.PromptResult]) -> dict[str, Any]:
    """Returns the JSON row of a design: its names, its metrics and its forwards.

    Rows one by one are forwards too, and so is decoding that decided tokens, on a cache
    of its own and again on that of the verify path.
    """
    summary = tables.to_row(results_lib.summarise(results))
    rounds, decoded = summary["rounds"], 0
    one_by_one = summary["proposed"] if rung.verify_path == "row-loop" else 0
    if rung.acceptance == "decode":
        decoded = rounds + summary["accepted"]
    forwards = rounds + one_by_one + 2 * decoded
    return {
        "kind": "history",
        "rung": rung.name,
        "verify_path": rung.verify_path,
        "acceptance": rung.acceptance,
        "published": rung.published,
        "matched_prompts": sum(bool(result.matched) for result in results),
        **summary,
        "verify_steps": rounds + one_by_one,
        "decode_steps": 2 * decoded,
        "target_steps": forwards,
        "tokens_per_target_step": summary["tokens"] / forwards,
    }


COLUMNS: Mapping[str, tables.Column] = {
    "design": ("rung", ""),
    "matched": lambda row: tables.wrong(
        f"{row['matched_prompts']}/{row['prompts']}", not row["matched"]
    ),
    "mismatches": ("verify_decode_mismatches", ",d"),
    "tokens/step": ("tokens_per_target_step", ".2f"),
    "speed-up": lambda row: f"{row['speedup_e2e']:.2f}x",
    "published": "",
}
NOTE = (
    "matched: prompts with all tokens of the design's own autoregressive decoding; "
    "tokens/step: per forward of the target, of any kind; speed-up: over our "
    "autoregressive decoding, prefill included; published: Qwen3-8B and 0.6B on an RTX "
    "5090"
)
"""The columns of the table, and the line under it."""


def story_holds(rows: Sequence[dict]) -> bool:
    """Returns whether the last design matches, and is the fastest that matches."""
    matched = [row for row in rows if row["matched"]]
    last = rows[-1]
    return last in matched and last["speedup_e2e"] == max(
        row["speedup_e2e"] for row in matched
    )


def run(args: argparse.Namespace) -> int:
    """Runs every design on every prompt and shows it; returns the exit status."""
    console = terminal.console()
    with records.open_out(args) as out:
        lm = models.load(args, drafter="draft-model", gamma_max=args.gamma)
        subject = models.prepare(args, lm, args.prompts)
        out.common = models.describe(args, lm) | {
            "gamma": args.gamma,
            "prompt_source": args.prompts,
            **records.provenance(),
        }
        models.announce(args, subject, console, f"{len(LADDER)} designs")
        ladder = {rung.name: design_of(rung, subject) for rung in LADDER}
        results_lib.warm_up(list(ladder.values()), subject.ids)
        found = results_lib.run_grid(
            ladder,
            subject.prompts,
            subject.ids,
            repeats=args.repeats,
            after_prompt=lambda done: out.write_all(
                result.row() | {"kind": "history_prompt", "rung": name}
                for name, result in done.items()
            ),
        )
        rows = [row_of(rung, found[rung.name]) for rung in LADDER]
        out.write_all(rows)
        if args.dump_verify_mismatches:
            _dump_mismatches(args, ladder[FLASH], found[FLASH])
    tables.print_rows(rows, COLUMNS, console)
    tables.print_disturbed(rows, console)
    tables.print_note(NOTE, console)
    return HOLDS if story_holds(rows) else DOES_NOT_HOLD


def _dump_mismatches(
    args: argparse.Namespace,
    design: results_lib.Design,
    results: Sequence[results_lib.PromptResult],
) -> None:
    """Writes a line for each mismatch of the prompts of a design that had any."""
    path, lm, settings = args.dump_verify_mismatches, design.lm, design.settings
    with records.open_rows(path, allow_dirty=args.allow_dirty) as lines:
        lines.common = records.provenance() | {"verify_path": "flash"}
        for one in (result for result in results if result.mismatches):
            found = mismatches.find(lm, settings, one.prompt_ids, name=one.prompt.id)
            lines.write_all(found)


main = cli.script("history.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
