"""How much does each drafter and gamma pay here, as predicted and as measured?

Measures what rounds of each gamma cost on this machine, as the default policy does, and
how often drafts are kept, predicts the speed-up of every drafter and gamma from that,
says which pairs cannot win and why, then runs them all, in turn with autoregressive
decoding, and shows how far the predictions were off. Greedy without --temperature; stop
tokens are ignored, so that every text has the same length. Exit status: 0 measured and
matched, 2 not matched, 1 the input was unusable.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lib import (
    cli,
    flags,
    models,
    policies,
    prompt_files,
    records,
    results as results_lib,
    runs,
    tables,
    terminal,
)
from spec_jax.analysis import metrics
from spec_jax.engine import protocols
from spec_jax.gamma import costs as costs_lib


MATCHED, NOT_MATCHED = 0, 2

Design = tuple[str, str | None, runs.Settings]
"""A drafter, its tree if it drafts trees, and settings by which it drafts its most."""


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
    return flags.parsed(parser, argv)


def load(args: argparse.Namespace) -> tuple[models.Subject, list[Design]]:
    """Returns the prompts, and the designs: those of chains, then those of trees.

    Raises:
      ValueError: `--tree` with drafters of chains alone.
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
    pairs = [(name, None, lm) for name, lm in lms.items()]
    for name in has_trees:
        pairs += [(name, tree, lms[name].with_tree(tree)) for tree in args.tree or ()]
    sampling, first = flags.sampling_settings(args), lms[args.drafter[0]]
    subject = models.prepare(args, first, args.prompts, sampling=sampling)
    design = functools.partial(dataclasses.replace, subject.settings)
    return subject, [
        (name, tree, design(lm=lm, gamma=lm.gamma_max)) for name, tree, lm in pairs
    ]


def expect(
    counters: metrics.Counters, costs: costs_lib.RoundCosts, drafts: Iterable[int]
) -> list[dict[str, Any]]:
    """Returns a prediction for each number of first drafts, or of best nodes of a tree.

    A path that leaves the `n` best nodes does not come back to them: a round of `n`
    nodes keeps what a round of all nodes keeps among these.

    Args:
      counters: of rounds that asked for all drafts.

    Returns:
      Fields of rows: drafts, rows and tokens of a round; `plain_steps`, the tokens that
      it must commit to be as fast as decoding; and the speed-up.
    """
    share = counters.proposed / counters.rounds / costs.gamma_max
    round_s, made = costs.rising_s(), []
    for n in drafts:
        tokens = 1 + sum(counters.kept_by_rank[:n]) / counters.rounds
        # Lookups often find nothing: a round has fewer rows than it asks for.
        steps = np.interp(share * n, np.arange(len(round_s)), round_s) / round_s[0]
        made.append(
            {
                "drafts": n,
                "rows_per_round": 1 + share * n,
                "tokens_per_round": tokens,
                "plain_steps": float(steps),
                "speedup": float(tokens / steps),
            }
        )
    return made


def recommend(
    name: str,
    counters: metrics.Counters,
    costs: costs_lib.RoundCosts,
    rows: Iterable[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the row that says whether a drafter can be faster than decoding, and why.

    `acceptance` is the chance that a first draft is kept, and `break_even` the time
    that one draft adds to a round, in plain steps.

    Args:
      rows: as `expect` returns them.
    """
    best = max(rows, key=lambda row: row["speedup"])
    kept = sum(counters.kept_by_rank[:1]) / counters.rounds
    round_s = costs.rising_s()
    break_even = float(round_s[1] / round_s[0] - 1)
    expected = f"{best['speedup']:.2f}x with {best['drafts']} drafts expected"
    words = f"{name}: can win, {expected}"
    if best["speedup"] <= 1:
        words = (
            f"{name}: cannot win, {expected} at best; a first draft is kept with a = "
            f"{kept:.3f}, and would have to be with {break_even:.3f}, by which a round "
            "with one draft is longer than a step"
        )
    return {
        "kind": "plan_recommendation",
        "can_win": best["speedup"] > 1,
        "words": words,
        "best": best,
        "acceptance": kept,
        "break_even": break_even,
    }


def predict(
    design: Design,
    prompts: Sequence[prompt_files.Prompt],
    out: records.JsonLines,
    console: terminal.Console,
) -> list[dict[str, Any]]:
    """Measures costs and kept drafts of a design; returns and shows its predictions."""
    drafter, tree, settings = design
    name = drafter if tree is None else f"{drafter}, tree {tree}"
    about = {"drafter": drafter, "tree": tree}
    _, costs = policies.adapted(settings, prompts)
    out.write(about | {"kind": "plan_costs"} | dataclasses.asdict(costs))
    counters = metrics.total(
        runs.run_speculative(settings, prompt.ids).counters for prompt in prompts
    )
    drafts, most = range(1, settings.gamma + 1), settings.gamma
    if tree is not None:  # A tree has many nodes: a few numbers are enough.
        drafts = sorted({2**n - 1 for n in range(1, 9)} & {*drafts} | {most})
    rows = expect(counters, costs, drafts)
    out.write_all(about | {"kind": "prediction"} | row for row in rows)
    tables.print_rows(rows, PREDICTIONS, console, title=name)
    row = recommend(name, counters, costs, rows)
    out.write(about | row)
    console.print(row["words"], "\n")
    return rows


def plan_row(
    design: Design,
    predicted: Mapping[str, Any],
    results: Sequence[results_lib.PromptResult],
) -> dict[str, Any]:
    """Returns the row of a drafter and a gamma or tree: predicted, measured, error."""
    drafter, tree, _ = design
    summary = tables.to_row(results_lib.summarise(results))
    measured = summary["speedup_decode"]
    row = {
        "kind": "plan",
        "drafter": drafter,
        "gamma": predicted["drafts"],
        **({"tree": tree} if tree else {}),
        "predicted_speedup": predicted["speedup"],
        "measured_speedup": measured,
        "measured_speedup_p10": summary["speedup_decode_p10"],
        "measured_speedup_p90": summary["speedup_decode_p90"],
        "relative_error": measured and predicted["speedup"] / measured - 1,
        "predicted_tokens_per_round": predicted["tokens_per_round"],
    }
    return row | summary


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
"""Columns of both tables, for `tables.print_rows`, and the note under the second."""


def run(
    args: argparse.Namespace, out: records.JsonLines, console: terminal.Console
) -> int:
    """Predicts, runs every drafter and gamma, and compares; returns the exit status."""
    subject, designs = load(args)
    out.common = models.common(args, subject.settings.lm)
    gammas = ", ".join(map(str, args.gamma))
    words = ", ".join(args.drafter), f"gamma {gammas}"
    models.announce(args, subject, console, *words)
    results_lib.warm_up([settings for *_, settings in designs], subject.prompts)
    grid: list[tuple[Design, dict[str, Any]]] = []
    for design in designs:
        _, tree, settings = design
        gammas = args.gamma if tree is None else (settings.gamma,)
        rows = predict(design, subject.prompts, out, console)
        grid += [(design, row) for row in rows if row["drafts"] in gammas]
    rows, how = [], {"repeats": args.repeats}
    with terminal.counted("runs", total=len(grid)) as advance:
        for design, predicted in grid:
            settings = dataclasses.replace(design[-1], gamma=predicted["drafts"])
            done = results_lib.run_prompts(settings, subject.prompts, **how)
            rows.append(plan_row(design, predicted, list(done)))
            advance()
    out.write_all(rows)
    tables.print_rows(rows, PLAN, console)
    tables.print_disturbed(rows, console)
    tables.print_note(NOTE, console)
    return MATCHED if all(row["matched"] for row in rows) else NOT_MATCHED


main = records.script("plan.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
