"""How long does a step of so many rows take, and are confidences right?

spec_round.py --schedule FILE weighs drafts against these: for each --batch and context
the measured seconds of a step of 1 to batch x (gamma + 1) rows, of all slots together,
and what drafting adds to a round. Steps are timed inside compiled calls, in turns, in
one process. With --calibrate rounds are run, too, and a temperature and a shift are
fitted for the confidence of each draft, so that their products are the chances that a
prefix is kept: half of the prompts fit, and errors are of the other half. Exit status:
0 measured, 2 logits are not finite, 1 the input was unusable.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import optimize

from experiments.lib import (
    bench,
    calibration,
    flags,
    models,
    noise,
    profiles,
    prompt_files,
    records,
    tables,
    terminal,
    works,
)
from spec_jax import algorithms, loading
from spec_jax.engine import protocols


_ROUND = "round"


FLAGS = """
    [models] models mesh
    [steps] gamma page-size drafter repeats=20
        --batch N,N,...=1,4,16  slots
        --contexts TOKENS,...=64,256  tokens in each slot
        --steps N=20  steps of one timed call
    [confidences] prompts=50 gen-tokens raw
        --calibrate T,...  temperatures of the target's draws, 0 is greedy, for each of
            which confidences are calibrated (default: none)
        --seed I=0  of the draws
    [out] calibrations, then one profile a batch and context
    """
parse_args = flags.parser(__doc__, FLAGS)


def run(args: argparse.Namespace, out: records.JsonLines) -> None:
    """Measures, writes and shows each profile."""
    lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma)
    subject = models.prepare(args, lm, args.prompts) if args.calibrate else None
    if subject is not None and len(subject.prompts) < 2:
        raise ValueError("one prompt fits and none is left to report: give --prompts 2")
    about = models.describe(args, lm) | {"drafter": args.drafter}
    out.common = about | records.provenance()
    if subject is not None:  # First: it fails for drafters without survival.
        calibrate(args, subject, out)
    for num_slots in args.batch:
        for context in args.contexts:
            row = profile(args, lm, num_slots=num_slots, context=context)
            out.write(row)
            show(row)


def profile(
    args: argparse.Namespace, lm: loading.LanguageModel, *, num_slots: int, context: int
) -> dict[str, Any]:
    """Times steps of 1 to `num_slots * (gamma_max + 1)` rows, and a whole round.

    Returns:
      The row of `num_slots` slots of `context` tokens: seconds by number of rows, as
      measured (medians, 10th and 90th percentile), and `step_s`, the medians without
      falls, which are noise; `draft_s`, the time that a round of all rows takes beside
      its step.
    """
    gamma, drafter = lm.gamma_max, protocols.complete(lm.drafter).for_schedule()
    rows, new = range(1, num_slots * (gamma + 1) + 1), (args.steps + 1) * (gamma + 1)
    algo = algorithms.speculative(lm.target, drafter)
    params, size = (lm.params, lm.drafter_params), lm.target.config.vocab_size
    longest = max(args.contexts) + new  # Caches of one size share programs.
    state = algo.init(
        params,
        [noise.tokens(context, size, seed=slot).tolist() for slot in range(num_slots)],
        max_tokens=new,
        capacity=works.capacity_for(lm.target, longest, args.page_size),
        page_size=args.page_size,
    )
    cases: dict[Any, bench.Case] = {}
    number, how = np.arange(num_slots), {"steps": args.steps, "num_columns": gamma + 1}
    window = functools.partial(works.repeat_forward, lm.target, lm.params, **how)
    on_copies = functools.partial(bench.on_copies, calls=args.steps)
    for num_rows in rows:
        # The rows are spread over the slots as evenly as possible.
        num_active = num_rows // num_slots + (number < num_rows % num_slots)
        live = jnp.asarray(num_active, jnp.int32)
        run = functools.partial(window, num_active=live)
        cases[num_rows] = functools.partial(on_copies, run, state.cache)
    run = functools.partial(algo.run, params, max_rounds=args.steps)
    cases[_ROUND] = functools.partial(on_copies, run, state)
    seconds = bench.run(cases, repeats=args.repeats).seconds
    quantiles = np.quantile([seconds[n] for n in rows], (0.5, 0.1, 0.9), axis=1)
    medians, p10, p90 = quantiles.tolist()
    step_s = never_falling(medians).tolist()
    round_s = statistics.median(seconds[_ROUND])
    return {
        "kind": profiles.KIND,
        "num_slots": num_slots,
        "context": context,
        "gamma": gamma,
        "rows": list(rows),
        "step_s": step_s,
        "median_s": medians,
        "p10_s": p10,
        "p90_s": p90,
        "round_s": round_s,
        "draft_s": max(0.0, round_s - step_s[-1]),
        "n": args.repeats,
        "steps": args.steps,
    }


def never_falling(seconds: Sequence[float]) -> np.ndarray:
    """Returns the times nearest to the measured ones that never fall with more rows.

    A running maximum would not do: after a disturbed time more rows would seem free.
    """
    return optimize.isotonic_regression(seconds).x


COLUMNS = {
    "temperature": "g",
    "draft": "d",
    "of its confidence": ("temperatures", ".2f"),
    "shift": ("shifts", ".2f"),
    "ECE before": ("ece_before", ".3f"),
    "ECE": ("ece", ".3f"),
    "ROC-AUC": ("roc_auc", ".3f"),
}
"""Columns of the table of calibrations, which has a line for each draft."""


def calibrate(
    args: argparse.Namespace, subject: models.Subject, out: records.JsonLines
) -> None:
    """Fits, writes and shows the confidences at each temperature."""
    about = {
        "prompts": len(subject.prompts),
        "prompt_source": prompt_files.without_folders(args.prompts),
        "drafter_sha256": models.drafter_sha256(subject.settings.lm),
    }
    for temperature in args.calibrate:
        row = calibration.fit(subject, temperature, seed=args.seed)
        out.write(about | row)
        names = [column[0] for column in COLUMNS.values() if isinstance(column, tuple)]
        lines = [
            {"temperature": temperature, "draft": draft + 1}
            | {name: row[name][draft] for name in names}
            for draft in range(row["gamma"])
        ]
        tables.print_rows(lines, COLUMNS)


def show(row: dict) -> None:
    """Prints the milliseconds of steps of 1, 2, 4 .. rows of a profile."""
    most = len(row["rows"])
    shown = sorted({2**n for n in range(most.bit_length())} | {most})
    names = ("median_s", "p10_s", "p90_s", "step_s")
    lines = [
        {"rows": rows} | {name[:-2]: 1e3 * row[name][rows - 1] for name in names}
        for rows in shown
    ]
    terminal.show(
        f"{row['num_slots']} slots, context {row['context']}, ms a step; drafting adds "
        f"{1e3 * row['draft_s']:.3f}"
    )
    columns = {"rows": "d"} | {name[:-2]: ".3f" for name in names}
    tables.print_rows(lines, columns)


main = records.script("profile_steps.py", parse_args, run)
