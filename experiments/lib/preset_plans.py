"""Plans of presets: what a draft would bring at an acceptance that is given.

Random weights accept nothing, but their steps cost what those of trained ones do. A
plain step, windows and draft steps are timed, the speed-up is predicted from them for
each gamma and acceptance, and then measured in rounds whose acceptance is forced
(`forced_rounds`), which must yield the tokens and bits of decoding.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    bench,
    cli,
    costs as costs_lib,
    forced_drafter,
    forced_rounds,
    models,
    records,
    steps,
    subjects,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.gamma import theory


CONTEXT = 64
"""Tokens of noise before what is generated, and at which steps are timed."""

_STEPS = 4  # of one timed call: those of a large model are slow
_OF_TEXTS = ("drafter", "prompts", "tree", "row_costs", "temperature", "devices")
DRAFT_STEP = "draft step"


def add_flags(group: argparse._ActionsContainer) -> None:
    """`--preset`, `--draft-preset` and `--acceptance`, for `check`."""
    subjects.add_presets(group)
    cli.add(
        group,
        """
        --acceptance RATE,RATE,...=0.39,0.6,0.8  of presets, whose weights are random:
            the share of drafted tokens that is forced to be kept
        """,
        **{"RATE,RATE,...": forced_rounds.rates},
    )


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error where flags of presets and of texts are mixed."""
    subjects.check_presets(parser, args)
    rates = parser.get_default("acceptance")
    if args.preset is None:
        if args.acceptance != rates:
            parser.error("--acceptance is forced with --preset; folders have their own")
        return
    if args.draft_preset is None:
        parser.error("--preset needs a draft: name one with --draft-preset")
    for name in _OF_TEXTS:
        if getattr(args, name) != parser.get_default(name):
            parser.error(
                f"--preset does not go together with {cli.flag_of(name)}: random "
                "weights know no text, and draft greedily with a draft model"
            )


def measure_costs(
    lm: loading.LanguageModel,
    gammas: Sequence[int],
    *,
    page_size: int,
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
) -> tuple[theory.CostCurve, list[dict[str, Any]]]:
    """Times a plain step, the windows of the gammas, and a draft step, in turns."""
    num_rows = sorted({1, *(gamma + 1 for gamma in gammas)})
    plan = steps.Plan(
        contexts=(CONTEXT,), page_size=page_size, steps=_STEPS, rows=num_rows
    )
    costs = {cost.name: cost for cost in steps.all_costs(lm, plan)[0]}
    windows = [steps.ONE_ROW, *(f"{n} active rows" for n in num_rows[1:])]
    names = (steps.PLAIN, *windows, DRAFT_STEP)
    timings = bench.run(
        {name: costs[name].case for name in names},
        repeats=repeats,
        after_turn=after_turn,
    )
    rows = costs_lib.rows(timings)
    plain_s = statistics.median(timings.seconds[steps.PLAIN])
    seconds_of = {row["cost"]: plain_s * row["ratio"] for row in rows}
    curve = theory.CostCurve(
        plain_s=plain_s,
        rows=tuple(num_rows),
        verify_s=tuple(seconds_of[name] for name in windows),
        draft_s=seconds_of[DRAFT_STEP],
    )
    return curve, rows


def plan_row(costs: theory.CostCurve, measured: dict[str, Any]) -> dict[str, Any]:
    """Adds to a row of `forced_rounds` what was predicted: each draft is kept with one
    chance, whatever came before it, as the forced ones are."""
    gamma = measured["gamma"]
    chance = forced_drafter.conditional(measured["forced_rate"], gamma)
    tokens = theory.expected_tokens(chance, gamma)
    round_s = float(costs.round_s(gamma)[gamma])
    speedup = tokens * costs.plain_s / round_s
    return measured | {
        "kind": "plan_forced",
        "predicted_speedup": speedup,
        "predicted_tokens_per_round": tokens,
        "predicted_round_ms": 1e3 * round_s,
        "relative_error": speedup / measured["speedup"] - 1,
    }


def run(
    args: argparse.Namespace,
    out: records.JsonLines,
    console: rich_console.Console,
) -> bool:
    """Measures, predicts, runs and prints; returns whether tokens and bits agree."""
    gamma_max = max(args.gamma)
    lm = subjects.load(args, gamma_max=gamma_max, slab=gamma_max + 1, dtype=args.dtype)
    out.common = {
        **models.describe(args, lm),
        **subjects.names(args),
        "cost_repeats": args.cost_repeats,
        **records.provenance(),
    }
    with terminal.counted("costs", total=args.cost_repeats + 1) as advance:
        sizes = {"page_size": args.page_size, "repeats": args.cost_repeats}
        costs, rows = measure_costs(lm, args.gamma, **sizes, after_turn=advance)
    out.write_all(rows)
    tables.print_rows(rows, COSTS, console)
    console.print()
    sizes = {"generated": args.gen_tokens, "page_size": args.page_size}
    runs, found = forced_rounds.make_runs(lm, start=CONTEXT, **sizes), []
    for gamma in args.gamma:
        measured = forced_rounds.measure(
            runs, gamma, args.acceptance, repeats=args.repeats
        )
        made = [plan_row(costs, row) for row in measured]
        out.write_all(made)
        found += made
    tables.print_rows(found, PLAN, console)
    console.print(NOTE, highlight=False, soft_wrap=True)
    return all(row["equal"] for row in found)


COSTS = {
    "cost": "",
    "ms": ".3f",
    "p10": ("ms_p10", ".3f"),
    "p90": ("ms_p90", ".3f"),
    "plain steps": ("ratio", ".2f"),
}
PLAN = {
    "gamma": "d",
    "forced": ("forced_rate", ".2f"),
    "kept": ("acceptance_rate", ".2f"),
    "tokens": ("predicted_tokens_per_round", ".2f"),
    "run": ("tokens_per_target_step", ".2f"),
    "predicted": ("predicted_speedup", ".2f"),
    "measured": ("speedup", ".2f"),
    "q1": ("speedup_q1", ".2f"),
    "q3": ("speedup_q3", ".2f"),
    "error": ("relative_error", "+.0%"),
    "equal": "",
}
"""Of the tables that are shown, for `tables.print_rows`."""

NOTE = (
    "FORCED acceptance: the weights are random, the real draft is run and its tokens "
    "are overwritten, so that the share `forced` of them is right. Speed-ups are of "
    "decoding over autoregressive decoding, prefill excluded; tokens: of a round, "
    "predicted and as run; equal: tokens and K/V are those of decoding, bit for bit"
)
