"""How much slower is a policy of gamma than the best constant gamma in hindsight?

Records the outcome of every draft along the texts of autoregressive decoding, measures
what rounds cost on this machine, and simulates every policy and every constant gamma on
easy, hard and mixed texts, and on adversarial ones, where no draft is ever right. With
--live all of them run in real rounds too, in turn with autoregressive decoding. Greedy;
stop tokens are ignored. Exit status: 0 measured and matched, 2 not matched or logits
that are not finite, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    costs as costs_lib,
    flags,
    models,
    outcomes,
    records,
    regret,
    results as results_lib,
    tables,
    terminal,
)


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_models(parser.add_argument_group("models"))
    group = parser.add_argument_group("runs")
    flags.add_drafter(group)
    flags.add_rounds(group)
    flags.add_prompts(group, default="12")
    flags.add_raw(group)
    flags.add_gen_tokens(group, default=128)
    cli.add(
        group,
        """
        --live  run every policy in real rounds as well
        --confidence P  with --live, also the largest gamma with a draft model that ends
            its draft before a token that it gives less than this probability
        """,
    )
    flags.add_repeats(group, default=3)
    flags.add_cost_repeats(group)
    flags.add_out(parser, rows="costs, then one per policy and set")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    if args.drafter == "oracle":
        parser.error(
            "--drafter oracle is never wrong, and costs nothing: name one that drafts"
        )
    if args.confidence is not None and not args.live:
        parser.error("--confidence cannot be simulated: give --live, or leave it out")
    return args


Sets = dict[str, list[outcomes.Text]]
"""The sets of texts by name."""


def record_texts(subject: models.Subject) -> list[outcomes.Text]:
    """The prompts' texts, with the outcome of every draft."""
    texts = []
    with terminal.counted("texts", total=len(subject.prompts)) as advance:
        for prompt, ids in zip(subject.prompts, subject.ids, strict=True):
            texts.append(outcomes.record(subject.lm, subject.settings, prompt, ids))
            advance()
    return texts


def run_live(
    args: argparse.Namespace,
    subject: models.Subject,
    sets: Sets,
    candidates: Sequence[regret.Candidate],
) -> list[dict[str, Any]]:
    """The rows of real rounds, after a short run of everything that compiles."""
    lm, settings = subject.lm, subject.settings
    mixed, brief = sets["mixed"], dataclasses.replace(settings, gen_tokens=1)
    one_each = results_lib.one_a_bucket([text.prompt_ids for text in mixed])
    some = [text for text in mixed if text.prompt_ids in one_each]
    for texts in (some, sets["adversarial"][:1]):
        regret.run_set(lm, brief, texts, candidates, repeats=1, hand_on=False)
    rows = []
    total = args.repeats * sum(len(texts) for texts in sets.values())
    with terminal.counted("live", total=total) as advance:
        for name, texts in sets.items():
            live = regret.run_set(
                lm,
                settings,
                texts,
                candidates,
                repeats=args.repeats,
                hand_on=True,
                after_text=advance,
            )
            rows += regret.live_rows(name, live, candidates, num_texts=len(texts))
    return rows


def describe_sets(sets: Sets, gamma: int) -> str:
    """How many drafts the windows of each set keep, in a line."""
    words = [
        f"{name} {len(texts)} texts, "
        f"{sum(outcomes.mean_kept(text.is_kept) for text in texts) / len(texts):.2f}"
        for name, texts in sets.items()
    ]
    return f"drafts that windows of gamma {gamma} keep: {'; '.join(words)}"


def describe(args: argparse.Namespace, subject: models.Subject) -> dict[str, Any]:
    """What is measured and where, for every row."""
    return {
        **models.describe(args, subject.lm),
        "drafter": args.drafter,
        "gamma_max": args.gamma,
        "prompt_source": args.prompts,
        "repeats": args.repeats if args.live else None,
        "cost_repeats": args.cost_repeats,
        **records.provenance(),
    }


NOTE = (
    "how much slower than the best constant gamma in hindsight, which is that of the "
    "smallest regret; and the speed-up over autoregressive decoding, above 1 is faster"
)


def print_regret(
    rows: Sequence[tables.Row], console: rich_console.Console, *, title: str
) -> None:
    """Regret against the best constant gamma, and speed-up, a line for each policy.

    Args:
      rows: of one kind, one for each policy and set.
    """
    lines: dict[str, dict] = {}
    for row in rows:
        line = lines.setdefault(row["policy"], {"policy": row["policy"]})
        line[row["set"]] = f"{_percent(row['regret'])} {row['speedup']:.2f}x"
    present = {row["set"] for row in rows}
    columns = {"policy": "", **{name: "s" for name in outcomes.SETS if name in present}}
    tables.print_rows([*lines.values()], columns, console, title=title)
    tables.print_note(NOTE, console)


def _percent(share: float) -> str:
    """Tenths where they fit: a terminal has eighty columns."""
    return f"{100 * share:+.1f}%" if share < 10 else f"{100 * share:+.0f}%"


def run(args: argparse.Namespace) -> int:
    """Records, measures, simulates and runs; returns the exit status."""
    console = terminal.console()
    with records.open_out(args) as out:
        costs_lib.check_gen_tokens(args.gen_tokens, args.gamma)
        lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma)
        confident = models.with_confidence(lm, args.confidence or 0.0)
        subject = models.prepare(args, lm, args.prompts)
        sets = outcomes.make_sets(record_texts(subject))
        settings, typical = subject.settings, models.typical(subject.ids)
        out.common = describe(args, subject)
        with terminal.counted("costs", total=args.cost_repeats + 1) as advance:
            costs, cost_rows = costs_lib.measure(
                {args.drafter: lm},
                settings,
                typical,
                repeats=args.cost_repeats,
                catch_up=True,
                after_turn=advance,
            )
        out.write_all(cost_rows)
        candidates = regret.candidates(regret.ADAPTIVE, lm, settings, typical)
        own = costs[args.drafter]
        rows = regret.simulated_rows(candidates, sets, own, hand_on=True)
        out.write_all(rows)
        console.print(describe_sets(sets, args.gamma))
        print_regret(rows, console, title="simulated")
        live = []
        if args.live:
            if args.confidence is not None:
                candidates.append(
                    regret.confident(args.confidence, confident, settings)
                )
            live = run_live(args, subject, sets, candidates)
            out.write_all(live)
            print_regret(live, console, title="in real rounds")
    return MATCHED if all(row["matched"] for row in live) else NOT_MATCHED


main = cli.script("regret.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
