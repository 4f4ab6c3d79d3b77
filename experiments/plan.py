"""Which drafter and which gamma pay here, predicted from parts, and is that so?

Measures what the parts of a round cost on this machine and how often drafts are kept,
predicts the speed-up of every drafter and gamma by `spec_jax.theory`, says which pairs
cannot win and why, then runs them all, in turn with plain decoding, and shows how far
the predictions were off. Greedy; stop tokens are ignored, so that every text has the
same length. Exit status: 0 measured and matched, 2 not matched, 1 the input was
unusable.
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
    records,
    results as results_lib,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.analysis import metrics


MATCHED, NOT_MATCHED = 0, 2

Models = dict[str, loading.LanguageModel]
"""One target with several drafters, by their names."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    group = parser.add_argument_group("runs")
    flags.add_drafters(group, default="draft-model,ngram,suffix,hybrid")
    flags.add_rounds(group, gammas="1,2,4")
    flags.add_prompts(group, default="5")
    flags.add_gen_tokens(group, default=64)
    flags.add_repeats(group, default=3)
    flags.add_cost_repeats(group)
    flags.add_out(
        parser, rows="costs, acceptance and recommendations, then one per run"
    )
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    return args


def measure_acceptance(
    lms: Models, subject: models.Subject
) -> dict[str, planning.Acceptance]:
    """How often each drafter's tokens are kept, over all prompts."""
    measured = {}
    total = len(lms) * len(subject.ids)
    with terminal.counted("acceptance", total=total) as advance:
        for name, lm in lms.items():
            windows, texts = [], []
            for prompt_ids in subject.ids:
                rounds, text = planning.record(lm, subject.settings, prompt_ids)
                windows += rounds
                texts.append(text)
                advance()
            measured[name] = planning.measure(
                windows,
                gamma_max=subject.settings.gamma,
                repetition=metrics.mean_repetition(texts),
            )
    return measured


def run_designs(
    gammas: Sequence[int], lms: Models, subject: models.Subject, *, repeats: int
) -> dict[tuple[str, int], list[results_lib.PromptResult]]:
    """Every drafter and gamma on every prompt, by `(drafter, gamma)`."""
    designs = {
        (name, gamma): results_lib.Design(
            lm=lm, settings=dataclasses.replace(subject.settings, gamma=gamma)
        )
        for name, lm in lms.items()
        for gamma in gammas
    }
    found = {name: [] for name in designs}
    with terminal.counted("runs", total=len(subject.prompts)) as advance:
        for prompt, ids in zip(subject.prompts, subject.ids, strict=True):
            done = results_lib.run_designs(designs, prompt, ids, repeats=repeats)
            for name, result in done.items():
                found[name].append(result)
            advance()
    return found


def plan_rows(
    results: dict[tuple[str, int], list[results_lib.PromptResult]],
    predictions: dict[tuple[str, int], planning.Prediction],
) -> list[dict[str, Any]]:
    """A row of each drafter and gamma: predicted, measured, and the error."""
    rows = []
    for (drafter, gamma), prompts in results.items():
        summary = tables.to_row(results_lib.summarise(prompts))
        predicted = predictions.get((drafter, gamma))
        speedup = None if predicted is None else predicted.speedup
        tokens = None if predicted is None else predicted.tokens_per_round
        measured = summary["speedup_decode"]
        row = {
            "kind": "plan",
            "drafter": drafter,
            "gamma": gamma,
            "predicted_speedup": speedup,
            "measured_speedup": measured,
            "measured_speedup_p10": summary["speedup_decode_p10"],
            "measured_speedup_p90": summary["speedup_decode_p90"],
            "relative_error": relative_error(speedup, measured),
            "predicted_tokens_per_round": tokens,
        }
        rows.append(row | summary)
    return mark_best(rows)


def measure(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> list[dict[str, Any]]:
    """Measures, predicts, says who can win, runs; returns the rows of the runs."""
    gamma_max = max(args.gamma)
    costs_lib.check_gen_tokens(args.gen_tokens, gamma_max)
    lms = models.load_drafters(args, args.drafter, gamma_max=gamma_max)
    first = lms[args.drafter[0]]
    subject = models.prepare(args, first, args.prompts)
    description = (
        models.describe(args, first)
        | {"prompt_source": args.prompts, "cost_repeats": args.cost_repeats}
        | records.provenance()
    )

    def write(rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            out.write(row | description)

    console.print(
        f"{', '.join(lms)}; gamma {', '.join(map(str, args.gamma))}; "
        f"{len(subject.prompts)} prompts x {args.gen_tokens} tokens, "
        f"{description['dtype']}, impl {description['impl']}; compiling ..."
    )
    results_lib.warm_up(
        [results_lib.Design(lm=lm, settings=subject.settings) for lm in lms.values()],
        subject.ids,
    )
    with terminal.counted("costs", total=args.cost_repeats + 1) as advance:
        costs, cost_rows = costs_lib.measure(
            lms,
            subject.settings,
            models.typical(subject.ids),
            repeats=args.cost_repeats,
            after_turn=advance,
        )
    write(cost_rows)
    tables.print_rows(cost_rows, COSTS, console)
    acceptance = measure_acceptance(lms, subject)
    shares = [
        {"kind": "plan_acceptance", "drafter": name, **dataclasses.asdict(measured)}
        for name, measured in acceptance.items()
    ]
    write(shares)
    console.print()
    tables.print_rows(shares, ACCEPTANCE, console)
    console.print()
    predictions = {}
    for name, measured in acceptance.items():
        curve = costs[name].curve()
        for prediction in planning.predict(measured, curve):
            predictions[name, prediction.gamma] = prediction
        recommendation = planning.judge(measured, curve)
        write([recommendation_row(name, recommendation)])
        console.print(recommendation.words(name))
    done = run_designs(args.gamma, lms, subject, repeats=args.repeats)
    rows = plan_rows(done, predictions)
    write(rows)
    console.print()
    print_plan(rows, console)
    return rows


def recommendation_row(
    drafter: str, recommendation: planning.Recommendation
) -> dict[str, Any]:
    """The row of a recommendation."""
    return {
        "kind": "plan_recommendation",
        "drafter": drafter,
        "can_win": recommendation.can_win,
        "words": recommendation.words(drafter),
        **dataclasses.asdict(recommendation),
    }


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


COSTS = {
    "cost": ("cost", ""),
    "ms": ("ms", ".3f"),
    "p10": ("ms_p10", ".3f"),
    "p90": ("ms_p90", ".3f"),
    "plain steps": ("ratio", ".2f"),
}
ACCEPTANCE = {
    "drafter": ("drafter", ""),
    "windows": ("windows", ",d"),
    "repetition": ("repetition", ".3f"),
    "drafted": ("drafted", ".2f"),
    "kept, if all before were": ("kept", ".2f"),
}
PLAN = {
    "drafter": ("drafter", ""),
    "gamma": ("gamma", "d"),
    "predicted": lambda row: _speedup(row, "predicted"),
    "measured": lambda row: _speedup(row, "measured"),
    "p10-p90": lambda row: _both(
        row["measured_speedup_p10"], row["measured_speedup_p90"], "-"
    ),
    "error": lambda row: (
        "-" if row["relative_error"] is None else f"{100 * row['relative_error']:+.0f}%"
    ),
    "tokens": lambda row: _both(
        row["predicted_tokens_per_round"], row["mean_accepted_length"], "/"
    ),
    "matched": lambda row: tables.wrong(
        str(row["matched"]).lower(), not row["matched"]
    ),
}
"""Columns of the tables that are shown, for `tables.print_rows`."""


def _speedup(row: tables.Row, kind: str) -> str:
    value = terminal.format_value(row[f"{kind}_speedup"], ".2f")
    return f"{value}x{'*' if row[f'is_best_{kind}'] else ' '}"


def _both(one: float | None, other: float | None, between: str) -> str:
    return between.join(terminal.format_value(value, ".2f") for value in (one, other))


def print_plan(rows: Sequence[tables.Row], console: rich_console.Console) -> None:
    """Predicted next to measured; the best gamma of a drafter has an asterisk."""
    tables.print_rows(rows, PLAN, console)
    console.print(
        "speed-up of decoding over plain decoding, prefill excluded; * the best gamma "
        "of its drafter; error: predicted / measured - 1; tokens: per round, predicted/"
        "measured",
        style="dim",
    )


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.JsonLines(args.out) as out:
        rows = measure(args, out, terminal.console())
    return MATCHED if all(row["matched"] for row in rows) else NOT_MATCHED


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, runs and compares; returns the exit status."""
    return cli.run("plan.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
