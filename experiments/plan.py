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
    predictions: dict[Drafted, Any],
) -> list[dict[str, Any]]:
    """A row of each drafter and gamma or tree: predicted, measured, and the error."""
    rows = []
    for (drafter, drafted), prompts in results.items():
        summary = tables.to_row(results_lib.summarise(prompts))
        predicted = predictions.get((drafter, drafted))
        speedup = None if predicted is None else predicted.speedup
        tokens = None if predicted is None else predicted.tokens_per_round
        measured = summary["speedup_decode"]
        row = {
            "kind": "plan",
            "drafter": drafter,
            **_drafted_of(drafted),
            "predicted_speedup": speedup,
            "measured_speedup": measured,
            "measured_speedup_p10": summary["speedup_decode_p10"],
            "measured_speedup_p90": summary["speedup_decode_p90"],
            "relative_error": relative_error(speedup, measured),
            "predicted_tokens_per_round": tokens,
        }
        rows.append(row | summary)
    return mark_best(rows)


def _drafted_of(drafted: int | str) -> dict[str, Any]:
    if isinstance(drafted, int):
        return {"gamma": drafted}
    return {"gamma": tree_shapes.parse(drafted).nodes, "tree": drafted}


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
) -> dict[Drafted, planning.TreePrediction]:
    """Measures costs and kept nodes; says from how many nodes on rows cost too much."""
    typical, found = models.typical(subject.ids), {}
    rows_of = read_row_costs(args, trees)
    for (drafter, tree), lm in trees.items():
        name = f"{drafter}, tree {tree}"
        settings = dataclasses.replace(subject.settings, gamma=lm.gamma_max)
        with terminal.counted("costs", total=args.cost_repeats + 1) as advance:
            costs, rows = costs_lib.measure(
                {name: lm},
                settings,
                typical,
                repeats=args.cost_repeats,
                after_turn=advance,
            )
        out.write_all(rows)
        done = [runs.run_speculative(lm, settings, ids) for ids in subject.ids]
        counters = metrics.total(run.counters for run in done)
        predictions = planning.predict_tree(counters, costs[name], rows_of=rows_of)
        rows = [
            {"kind": "plan_tree", "drafter": drafter, "tree": tree}
            | dataclasses.asdict(prediction)
            for prediction in predictions
        ]
        out.write_all(rows)
        tables.print_rows(rows, CURVE, console, title=name)
        console.print(planning.words_of_tree(name, predictions))
        console.print()
        found[drafter, tree] = predictions[-1]
    return found


def predict(
    args: argparse.Namespace,
    lms: models.Drafters,
    subject: models.Subject,
    out: records.JsonLines,
    console: rich_console.Console,
) -> dict[Drafted, Any]:
    """Measures costs and acceptance; says what they lead one to expect, and who wins.

    Returns the predictions by `(drafter, gamma)`.
    """
    typical = models.typical(subject.ids)
    with terminal.counted("costs", total=args.cost_repeats + 1) as advance:
        costs, rows = costs_lib.measure(
            lms,
            subject.settings,
            typical,
            repeats=args.cost_repeats,
            after_turn=advance,
        )
    out.write_all(rows)
    tables.print_rows(rows, preset_plans.COSTS, console)
    acceptance = {}
    total = len(lms) * len(subject.ids)
    with terminal.counted("acceptance", total=total) as advance:
        for name, lm in lms.items():
            acceptance[name] = planning.measure_drafter(
                lm, subject.settings, subject.ids, after_prompt=advance
            )
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
        for prediction in planning.predict(measured, costs[name]):
            predictions[name, prediction.gamma] = prediction
        recommendation = planning.recommend(measured, costs[name])
        out.write(recommendation.row(name))
        console.print(recommendation.words(name))
    console.print()
    return predictions


def mark_best(rows: Sequence[tables.Row]) -> list[dict[str, Any]]:
    """The rows, with the best gamma of each drafter marked, predicted and measured.

    Of equals the smallest gamma is the best.
    """
    marked = [dict(row) for row in rows]
    for kind in ("predicted", "measured"):
        name = f"{kind}_speedup"
        for drafter in {row["drafter"] for row in marked}:
            of_one = [row for row in marked if row["drafter"] == drafter]
            known = [row for row in of_one if row[name] is not None]
            best = min(known, key=lambda r: (-r[name], r["gamma"]), default=None)
            for row in of_one:
                row[f"is_best_{kind}"] = row is best
    return marked


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """How far the prediction lies above what was measured, as a share of that."""
    if predicted is None or not measured:
        return None
    return predicted / measured - 1


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
    "predicted": lambda row: _speedup(row, "predicted"),
    "measured": lambda row: _speedup(row, "measured"),
    "p10-p90": lambda row: _both(
        row["measured_speedup_p10"], row["measured_speedup_p90"], "-"
    ),
    "error": lambda row: terminal.format_value(row["relative_error"], "+.0%"),
    "tokens": lambda row: _both(
        row["predicted_tokens_per_round"], row["mean_accepted_length"], "/"
    ),
    "matched": lambda row: tables.wrong(
        str(row["matched"]).lower(), not row["matched"]
    ),
}
NOTE = (
    "speed-up of decoding over autoregressive decoding, prefill excluded; * the best "
    "gamma or tree of its drafter; error: predicted / measured - 1; tokens: per round, "
    "predicted/measured"
)
"""Of the tables that are shown, for `tables.print_rows`."""


def _speedup(row: tables.Row, kind: str) -> str:
    value = terminal.format_value(row[f"{kind}_speedup"], ".2f")
    return f"{value}x{'*' if row[f'is_best_{kind}'] else ' '}"


def _both(one: float | None, other: float | None, between: str) -> str:
    return between.join(terminal.format_value(value, ".2f") for value in (one, other))


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
        of_tree = {
            at: results_lib.Design(
                lm=lm,
                settings=dataclasses.replace(subject.settings, gamma=lm.gamma_max),
            )
            for at, lm in trees.items()
        }
        of_chain = [
            results_lib.Design(lm=lm, settings=subject.settings) for lm in lms.values()
        ]
        results_lib.warm_up([*of_chain, *of_tree.values()], subject.ids)
        predictions = predict(args, lms, subject, out, console)
        predictions |= predict_trees(args, trees, subject, out, console)
        grid: dict[Drafted, results_lib.Design] = {
            (name, gamma): results_lib.Design(
                lm=lm, settings=dataclasses.replace(subject.settings, gamma=gamma)
            )
            for name, lm in lms.items()
            for gamma in args.gamma
        }
        grid |= {at: of_tree[at] for at in trees}
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
