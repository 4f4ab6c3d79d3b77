"""Which drafter and which gamma pay here, as predicted, and is that so?

Measures what rounds of each gamma cost on this machine, as the default policy does, and
how often drafts are kept, predicts the speed-up of every drafter and gamma from that,
says which pairs cannot win and why, then runs them all, in turn with autoregressive
decoding, and shows how far the predictions were off. Greedy without --temperature; stop
tokens are ignored, so that every text has the same length. Exit status: 0 measured and
matched, 2 not matched, 1 the input was unusable.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lib import (
    cli,
    flags,
    models,
    planning,
    policies,
    records,
    results as results_lib,
    runs,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import tree_shapes
from spec_jax.engine import protocols


MATCHED, NOT_MATCHED = 0, 2

Pair = tuple[str, str | None]
"""A drafter, and its tree if it drafts trees."""

Drafted = tuple[str, int | str]
"""A drafter, and its gamma or the text of its tree."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add(parser.add_argument_group("models"), "models mesh")
    group = parser.add_argument_group("runs")
    flags.add(group, "drafters gammas page-size", gammas="1,2,4")
    cli.add(
        group,
        """
        --tree A,B,..  trees to be planned next to the chains, by each drafter that has
            trees: 4x12:15, 4x12:15@0.3, 4-2-1 or NAME.json
        """,
        **{"A,B,..": cli.names(flags.tree_text)},
    )
    flags.add(group, "prompts raw gen-tokens repeats", prompts=5, repeats=3)
    flags.add(parser.add_argument_group("sampling"), "temperature noise")
    rows = "costs, predictions and recommendations, then one per run"
    flags.add(parser, "out", out=rows)
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    return args


def load(args: argparse.Namespace) -> dict[Pair, loading.LanguageModel]:
    """Returns the pairs of target and drafter: those of chains, then those of trees.

    Raises:
      ValueError: trees for drafters of chains alone.
    """
    lms = models.load_drafters(args, args.drafter, gamma_max=max(args.gamma))
    has_trees = [
        n for n, lm in lms.items() if protocols.has_own(lm.drafter, "for_tree")
    ]
    if args.tree and not has_trees:
        raise ValueError(
            f"--tree: {', '.join(lms)} drafts chains alone; add a drafter that has "
            "trees, such as draft-model"
        )
    pairs: dict[Pair, loading.LanguageModel] = {(n, None): lm for n, lm in lms.items()}
    for name in has_trees:
        pairs |= {(name, tree): lms[name].with_tree(tree) for tree in args.tree or ()}
    return pairs


def predict(
    args: argparse.Namespace,
    pair: Pair,
    lm: loading.LanguageModel,
    subject: models.Subject,
    out: records.JsonLines,
    console: terminal.Console,
) -> list[dict[str, Any]]:
    """Measures costs and kept drafts of a pair; says what they lead one to expect."""
    drafter, tree = pair
    name = drafter if tree is None else f"{drafter}, tree {tree}"
    about = {"drafter": drafter, "tree": tree}
    settings = dataclasses.replace(subject.settings, gamma=lm.gamma_max)
    _, costs = policies.adapted(lm, settings, models.typical(subject.ids))
    out.write(about | {"kind": "plan_costs"} | dataclasses.asdict(costs))
    counters = metrics.total(
        runs.run_speculative(lm, settings, ids).counters for ids in subject.ids
    )
    drafts = range(1, lm.gamma_max + 1)
    if tree is not None:  # So many that the numbers between are of no interest.
        drafts = sorted({2**n - 1 for n in range(1, 9)} & {*drafts} | {lm.gamma_max})
    rows = planning.predict(counters, costs, drafts)
    out.write_all(about | {"kind": "prediction"} | row for row in rows)
    tables.print_rows(rows, PREDICTIONS, console, title=name)
    row = planning.recommend(name, counters, costs, rows)
    out.write(about | row)
    console.print(row["words"], "\n")
    return rows


def plan_rows(
    results: dict[Drafted, list[results_lib.PromptResult]],
    predictions: Mapping[Drafted, dict[str, Any]],
) -> list[dict[str, Any]]:
    """A row of each drafter and gamma or tree: predicted, measured, and the error."""
    rows = []
    for (drafter, drafted), prompts in results.items():
        summary = tables.to_row(results_lib.summarise(prompts))
        predicted = predictions[drafter, drafted]
        measured = summary["speedup_decode"]
        about: dict[str, Any] = {"gamma": drafted}
        if isinstance(drafted, str):
            about = {"gamma": tree_shapes.parse(drafted).nodes, "tree": drafted}
        row = {
            "kind": "plan",
            "drafter": drafter,
            **about,
            "predicted_speedup": predicted["speedup"],
            "measured_speedup": measured,
            "measured_speedup_p10": summary["speedup_decode_p10"],
            "measured_speedup_p90": summary["speedup_decode_p90"],
            "relative_error": measured and predicted["speedup"] / measured - 1,
            "predicted_tokens_per_round": predicted["tokens_per_round"],
        }
        rows.append(row | summary)
    return rows


PREDICTIONS = {
    "drafts": "d",
    "rows": ("rows_per_round", ".1f"),
    "round, plain steps": ("plain_steps", ".2f"),
    "tokens": ("tokens_per_round", ".2f"),
    "predicted": lambda row: f"{row['speedup']:.2f}x",
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


def run(
    args: argparse.Namespace, out: records.JsonLines, console: terminal.Console
) -> int:
    """Predicts, runs every drafter and gamma, and compares; returns the exit status."""
    pairs = load(args)
    first = pairs[args.drafter[0], None]
    sampling = flags.sampling_settings(args)
    subject = models.prepare(args, first, args.prompts, sampling=sampling)
    out.common = (
        models.describe(args, first)
        | {"prompt_source": args.prompts}
        | records.provenance()
    )
    gammas = ", ".join(map(str, args.gamma))
    words = ", ".join(args.drafter), f"gamma {gammas}"
    models.announce(args, subject, console, *words)
    design = lambda gamma: dataclasses.replace(subject.settings, gamma=gamma)
    most = [(lm, design(lm.gamma_max)) for lm in pairs.values()]
    results_lib.warm_up(most, subject.ids)
    grid: dict[Drafted, tuple[loading.LanguageModel, runs.Settings]] = {}
    predictions: dict[Drafted, dict[str, Any]] = {}
    for pair, lm in pairs.items():
        rows, (name, tree) = predict(args, pair, lm, subject, out, console), pair
        for gamma in args.gamma if tree is None else (lm.gamma_max,):
            drafted = tree or gamma
            grid[name, drafted] = lm, design(gamma)
            (found,) = (row for row in rows if row["drafts"] == gamma)
            predictions[name, drafted] = found
    results: dict[Drafted, list[results_lib.PromptResult]] = {}
    prompts, how = (subject.prompts, subject.ids), {"repeats": args.repeats}
    with terminal.counted("runs", total=len(grid)) as advance:
        for drafted, (lm, settings) in grid.items():
            done = results_lib.run_prompts(lm, settings, *prompts, **how)
            results[drafted] = list(done)
            advance()
    rows = plan_rows(results, predictions)
    out.write_all(rows)
    tables.print_rows(rows, PLAN, console)
    tables.print_disturbed(rows, console)
    tables.print_note(NOTE, console)
    return MATCHED if all(row["matched"] for row in rows) else NOT_MATCHED


main = records.script("plan.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
