"""Which drafter and which gamma pay here, as predicted, and is that so?

Measures what rounds of each gamma cost on this machine and how often drafts are kept,
predicts the speed-up of every drafter and gamma by `spec_jax.gamma.theory`, says which
pairs cannot win and why, then runs them all, in turn with autoregressive decoding, and
shows how far the predictions were off. Greedy without --temperature; stop tokens are
ignored, so that every text has the same length. With --preset, random weights in the
shape of released models: what a draft would bring at each --acceptance, forced. Exit
status: 0 measured and matched, 2 not matched, 1 the input was unusable.
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
    planning,
    preset_plans,
    records,
    results as results_lib,
    runs,
    step_costs,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import tree_shapes
from spec_jax.engine import protocols
from spec_jax.gamma import theory


MATCHED, NOT_MATCHED = 0, 2

Drafted = tuple[str, int | str]
"""A drafter, and its gamma or the text of its tree."""

Trees = dict[tuple[str, str], loading.LanguageModel]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    group = parser.add_argument_group("models")
    flags.add_models(group)
    preset_plans.add_flags(group)
    group = parser.add_argument_group("runs")
    flags.add_drafters(group, default="draft-model,ngram,suffix,hybrid")
    flags.add_rounds(group, gammas="1,2,4")
    cli.add(
        group,
        """
        --tree A,B,..  trees to be planned next to the chains, by each drafter that has
            trees: 4x12:15, 4x12:15@0.3, 4-2-1 or NAME.json
        --row-costs FILE  predict trees also where rows cost what they do on another
            machine, such as a GPU: as replay.py's --costs
        """,
        **{"A,B,..": cli.names(flags.tree_text), "FILE": cli.source},
    )
    flags.add_prompts(group, default="5")
    flags.add_raw(group)
    flags.add_gen_tokens(group, default=64)
    flags.add_repeats(group, default=3)
    flags.add_cost_repeats(group)
    flags.add_sampling(parser.add_argument_group("sampling"))
    rows = "costs, acceptance and recommendations, then one per run"
    flags.add_out(parser, rows=rows)
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    preset_plans.check(parser, args)
    if args.row_costs and not args.tree:
        parser.error("--row-costs is of trees: give --tree, or leave it out")
    return args


def plan_rows(
    results: dict[Drafted, list[results_lib.PromptResult]],
    predictions: dict[Drafted, tuple[float, float]],
) -> list[dict[str, Any]]:
    """A row of each drafter and gamma or tree: predicted, measured, and the error.

    Args:
      predictions: the speed-up and the tokens of a round.
    """
    rows = []
    for (drafter, drafted), prompts in results.items():
        summary = tables.to_row(results_lib.summarise(prompts))
        speedup, tokens = predictions.get((drafter, drafted), (None, None))
        measured = summary["speedup_decode"]
        about: dict[str, Any] = {"gamma": drafted}
        if isinstance(drafted, str):
            about = {"gamma": tree_shapes.parse(drafted).nodes, "tree": drafted}
        row = {
            "kind": "plan",
            "drafter": drafter,
            **about,
            "predicted_speedup": speedup,
            "measured_speedup": measured,
            "measured_speedup_p10": summary["speedup_decode_p10"],
            "measured_speedup_p90": summary["speedup_decode_p90"],
            "relative_error": speedup and measured and speedup / measured - 1,
            "predicted_tokens_per_round": tokens,
        }
        rows.append(row | summary)
    return rows


def load_trees(args: argparse.Namespace, lms: models.Drafters) -> Trees:
    """Returns the pairs with each tree, of the drafters that have trees.

    Raises:
      ValueError: trees for drafters of chains alone, or of more nodes than a text has
        tokens.
    """
    trees = args.tree or ()
    has_trees = lambda lm: protocols.has_own(lm.drafter, "for_tree")
    drafters = {n: lm for n, lm in lms.items() if has_trees(lm)}
    if trees and not drafters:
        raise ValueError(
            f"--tree: {', '.join(lms)} drafts chains alone; add a drafter that has "
            "trees, such as draft-model"
        )
    made = {(n, t): lm.with_tree(t) for n, lm in drafters.items() for t in trees}
    for (_, tree), lm in made.items():
        if args.gen_tokens <= lm.gamma_max:
            raise ValueError(
                f"--gen-tokens {args.gen_tokens}: proposals of tree {tree} are timed "
                f"along the text; generate more tokens than its {lm.gamma_max} nodes"
            )
    return made


def read_row_costs(args: argparse.Namespace, trees: Trees) -> theory.CostCurve | None:
    """Returns what `--row-costs` says of rows; what drafts cost there is not used.

    Raises:
      ValueError: no table of costs, or one that ends before the rows of a tree.
    """
    if args.row_costs is None:
        return None
    curve = step_costs.read(args.row_costs, [""])[""]
    most = max(lm.gamma_max + 1 for lm in trees.values())
    if curve.rows[-1] < most:
        raise ValueError(
            f"--row-costs {args.row_costs}: rows are timed up to {curve.rows[-1]}, and "
            f"a tree has {most}"
        )
    return curve


def predict_trees(
    args: argparse.Namespace,
    trees: Trees,
    subject: models.Subject,
    out: records.JsonLines,
    console: rich_console.Console,
) -> dict[Drafted, tuple[float, float]]:
    """Measures costs and kept nodes; says from how many nodes on rows cost too much."""
    found, rows_of = {}, read_row_costs(args, trees)
    for (drafter, tree), lm in trees.items():
        name = f"{drafter}, tree {tree}"
        settings = dataclasses.replace(subject.settings, gamma=lm.gamma_max)
        costs = measure_costs(args, {name: lm}, settings, subject, out)[0][name]
        done = [runs.run_speculative(lm, settings, ids) for ids in subject.ids]
        counters = metrics.total(run.counters for run in done)
        about = {"kind": "plan_tree", "drafter": drafter, "tree": tree}
        rows = [
            about | row
            for row in planning.predict_tree(counters, costs, rows_of=rows_of)
        ]
        out.write_all(rows)
        tables.print_rows(rows, CURVE, console, title=name)
        console.print(planning.words_of_tree(name, rows))
        console.print()
        found[drafter, tree] = rows[-1]["speedup"], rows[-1]["tokens_per_round"]
    return found


def measure_costs(
    args: argparse.Namespace,
    lms: models.Drafters,
    settings: runs.Settings,
    subject: models.Subject,
    out: records.JsonLines,
) -> tuple[dict[str, costs_lib.RoundCosts], list[dict[str, Any]]]:
    """Measures, and writes, what rounds of these drafters cost."""
    with terminal.counted("costs", total=args.cost_repeats + 1) as advance:
        typical = models.typical(subject.ids)
        how = {"repeats": args.cost_repeats, "after_turn": advance}
        costs, rows = costs_lib.measure(lms, settings, typical, **how)
    out.write_all(rows)
    return costs, rows


def predict(
    args: argparse.Namespace,
    lms: models.Drafters,
    subject: models.Subject,
    out: records.JsonLines,
    console: rich_console.Console,
) -> dict[Drafted, tuple[float, float]]:
    """Measures costs and acceptance; says what they lead one to expect, and who wins.

    Returns the speed-up and the tokens of a round by `(drafter, gamma)`.
    """
    costs, rows = measure_costs(args, lms, subject.settings, subject, out)
    tables.print_rows(rows, preset_plans.COSTS, console)
    with terminal.counted("acceptance", total=len(lms) * len(subject.ids)) as advance:
        acceptance = {
            name: planning.measure_drafter(
                lm, subject.settings, subject.ids, after_prompt=advance
            )
            for name, lm in lms.items()
        }
    shares = [
        {"kind": "plan_acceptance", "drafter": name, **dataclasses.asdict(measured)}
        for name, measured in acceptance.items()
    ]
    out.write_all(shares)
    console.print()
    tables.print_rows(shares, ACCEPTANCE, console)
    console.print()
    predictions = {}
    for name, measured in acceptance.items():
        for one in planning.predict(measured, costs[name]):
            predictions[name, one.gamma] = one.speedup, one.tokens_per_round
        row = planning.recommend(name, measured, costs[name])
        out.write(row)
        console.print(row["words"])
    console.print()
    return predictions


CURVE = {
    "nodes": "d",
    "rows": ("rows_per_round", ".1f"),
    "round, plain steps": ("plain_steps", ".2f"),
    "tokens": ("tokens_per_round", ".2f"),
    "predicted": lambda row: f"{row['speedup']:.2f}x",
    "rows free": lambda row: f"{row['free_rows_speedup']:.2f}x",
}
ACCEPTANCE = {
    "drafter": "",
    "windows": ",d",
    "repetition": ".3f",
    "drafted": ".2f",
    "kept, if all before were": ("kept", ".2f"),
}
PLAN = {
    "drafter": "",
    "gamma": lambda row: row.get("tree", str(row["gamma"])),
    "predicted": ("predicted_speedup", ".2f"),
    "measured": ("measured_speedup", ".2f"),
    "p10": ("measured_speedup_p10", ".2f"),
    "p90": ("measured_speedup_p90", ".2f"),
    "error": ("relative_error", "+.0%"),
    "tokens": ("predicted_tokens_per_round", ".2f"),
    "run": ("mean_accepted_length", ".2f"),
    "matched": "",
}
NOTE = (
    "speed-up of decoding over autoregressive decoding, prefill excluded; error: "
    "predicted / measured - 1; tokens: of a round, predicted and as run"
)
"""Of the tables that are shown, for `tables.print_rows`."""


def run(args: argparse.Namespace) -> int:
    """Predicts, runs every drafter and gamma, and compares; returns the exit status."""
    console, gamma_max = terminal.console(), max(args.gamma)
    with records.open_out(args) as out:
        costs_lib.check_gen_tokens(args.gen_tokens, gamma_max)
        if args.preset:
            same = preset_plans.run(args, out, console)
            return MATCHED if same else NOT_MATCHED
        lms = models.load_drafters(args, args.drafter, gamma_max=gamma_max)
        trees = load_trees(args, lms)
        read_row_costs(args, trees)  # Before anything is run.
        first = lms[args.drafter[0]]
        sampling = flags.sampling_settings(args)
        subject = models.prepare(args, first, args.prompts, sampling=sampling)
        out.common = (
            models.describe(args, first)
            | {"prompt_source": args.prompts, "cost_repeats": args.cost_repeats}
            | records.provenance()
        )
        gammas = ", ".join(map(str, args.gamma))
        models.announce(args, subject, console, ", ".join(lms), f"gamma {gammas}")
        design = lambda lm, gamma: results_lib.Design(
            lm=lm, settings=dataclasses.replace(subject.settings, gamma=gamma)
        )
        of_tree = {at: design(lm, lm.gamma_max) for at, lm in trees.items()}
        of_chain = [design(lm, lm.gamma_max) for lm in lms.values()]
        results_lib.warm_up([*of_chain, *of_tree.values()], subject.ids)
        predictions = predict(args, lms, subject, out, console)
        predictions |= predict_trees(args, trees, subject, out, console)
        grid: dict[Drafted, results_lib.Design] = {
            (name, gamma): design(lm, gamma)
            for name, lm in lms.items()
            for gamma in args.gamma
        }
        grid |= of_tree
        found = results_lib.run_grid(
            grid, subject.prompts, subject.ids, repeats=args.repeats
        )
        rows = plan_rows(found, predictions)
        out.write_all(rows)
    tables.print_rows(rows, PLAN, console)
    tables.print_disturbed(rows, console)
    tables.print_note(NOTE, console)
    if words := planning.words_of_errors([row["relative_error"] for row in rows]):
        console.print(words, highlight=False)
    return MATCHED if all(row["matched"] for row in rows) else NOT_MATCHED


main = cli.script("plan.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
