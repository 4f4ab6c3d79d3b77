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

from experiments.lib import flags, records, terminal, timing
from experiments.support import (
    model_pair,
    paired_runs,
    plan_acceptance,
    plan_costs,
    plan_flags,
    plan_prediction,
    plan_report,
    plan_runs,
    prompt_files,
    prompt_runs,
    report,
)
from spec_jax.analysis import metrics
from spec_jax.ops import dispatch


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    runs = parser.add_argument_group("runs")
    plan_flags.add_drafters(runs, default="draft-model,ngram,suffix,hybrid")
    plan_flags.add_gammas(runs, default="1,2,4")
    flags.add_prompts(runs, default="5")
    flags.add_gen_tokens(runs, default=64)
    flags.add_repeats(runs, default=3)
    runs.add_argument(
        "--cost-repeats",
        type=cli.positive,
        default=10,
        metavar="N",
        help="timed calls of each part of a round (default: %(default)s)",
    )
    flags.add_out(parser, rows="costs, acceptance and verdicts, then one per run")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    return args


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned for.

    Attributes:
      pairs: by the names of their drafters.
      settings: with the largest gamma.
    """

    pairs: dict[str, model_pair.ModelPair]
    prompts: list[prompt_files.Prompt]
    ids: list[list[int]]
    settings: paired_runs.Settings


def load_subject(args: argparse.Namespace) -> Subject:
    """Models and prompts, checked against the flags.

    Raises:
      ValueError: models, prompts or sizes that cannot be used.
    """
    gamma_max = max(args.gamma)
    plan_costs.check_gen_tokens(args.gen_tokens, gamma_max)
    prompts = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    pairs = plan_runs.load_pairs(
        args.drafter,
        lambda name: model_pair.load_pair(
            args.target or model_pair.EMBEDDED_TARGET,
            args.draft or model_pair.EMBEDDED_DRAFT,
            gamma_max=gamma_max,
            slab=gamma_max + 1,
            dtype=args.dtype,
            impl=args.impl,
            drafter=name,
        ),
    )
    first = next(iter(pairs.values()))
    prepared = prompt_runs.prepare(
        first,
        prompts,
        raw=False,
        gen_tokens=args.gen_tokens,
        page_size=args.page_size,
    )
    settings = paired_runs.Settings(
        gamma=gamma_max,
        gen_tokens=args.gen_tokens,
        capacity=prepared.capacity,
        page_size=args.page_size,
    )
    return Subject(
        pairs=pairs, prompts=prepared.prompts, ids=prepared.ids, settings=settings
    )


def measure_costs(
    args: argparse.Namespace, subject: Subject
) -> tuple[dict[str, plan_costs.RoundCosts], timing.Timings]:
    """The costs of each drafter's rounds, on the prompt of median length."""
    by_length = sorted(subject.ids, key=len)
    thunks = plan_costs.thunks(
        subject.pairs, subject.settings, by_length[len(by_length) // 2]
    )
    with terminal.progress() as progress:
        task = progress.add_task("costs", total=args.cost_repeats + 1)
        timings = timing.interleave(
            thunks,
            repeats=args.cost_repeats,
            after_turn=lambda: progress.advance(task),
        )
    gamma_max = subject.settings.gamma
    costs = {
        name: plan_costs.costs_of(name, timings, gamma_max=gamma_max)
        for name in subject.pairs
    }
    return costs, timings


def measure_acceptance(subject: Subject) -> dict[str, plan_acceptance.Acceptance]:
    """How often each drafter's tokens are kept, over all prompts."""
    measured = {}
    with terminal.progress() as progress:
        total = len(subject.pairs) * len(subject.ids)
        task = progress.add_task("acceptance", total=total)
        for name, pair in subject.pairs.items():
            windows, texts = [], []
            for prompt_ids in subject.ids:
                rounds, text = plan_acceptance.record(
                    pair, subject.settings, prompt_ids
                )
                windows += rounds
                texts.append(text)
                progress.advance(task)
            measured[name] = plan_acceptance.measure(
                windows,
                gamma_max=subject.settings.gamma,
                repetition=metrics.mean_repetition(texts),
            )
    return measured


def run_designs(args: argparse.Namespace, subject: Subject) -> plan_runs.Results:
    """Every drafter and gamma on every prompt, by `(drafter, gamma)`."""
    designs = {
        (name, gamma): plan_runs.Design(
            pair=pair, settings=dataclasses.replace(subject.settings, gamma=gamma)
        )
        for name, pair in subject.pairs.items()
        for gamma in args.gamma
    }
    with terminal.progress() as progress:
        task = progress.add_task("runs", total=len(subject.prompts))
        return plan_runs.run(
            designs,
            subject.prompts,
            subject.ids,
            repeats=args.repeats,
            after_prompt=lambda: progress.advance(task),
        )


def plan_rows(
    results: plan_runs.Results,
    predictions: dict[tuple[str, int], plan_prediction.Prediction],
) -> list[dict[str, Any]]:
    """A row of each drafter and gamma: predicted, measured, and the error."""
    rows = []
    for (drafter, gamma), prompts in results.items():
        summary = report.to_row(prompt_runs.summarise(prompts))
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
            "relative_error": plan_report.relative_error(speedup, measured),
            "predicted_tokens_per_round": tokens,
        }
        rows.append(row | summary)
    return plan_report.mark_best(rows)


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> list[dict[str, Any]]:
    """Measures, predicts, judges, runs; returns the rows of the runs."""
    subject = load_subject(args)
    description = describe(args, subject)
    console.print(
        f"{', '.join(subject.pairs)}; gamma {', '.join(map(str, args.gamma))}; "
        f"{len(subject.prompts)} prompts x {args.gen_tokens} tokens, "
        f"{description['dtype']}, impl {description['impl']}; compiling ..."
    )
    for pair in subject.pairs.values():
        paired_runs.warm_up(pair, subject.settings, subject.ids)

    def write(rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            out.write(row | description)

    costs, timings = measure_costs(args, subject)
    cost_rows = plan_costs.rows(timings)
    write(cost_rows)
    plan_report.print_costs(cost_rows, console)
    acceptance = measure_acceptance(subject)
    shares = [
        {"kind": "plan_acceptance", "drafter": name, **dataclasses.asdict(measured)}
        for name, measured in acceptance.items()
    ]
    write(shares)
    console.print()
    plan_report.print_acceptance(shares, console)
    console.print()
    predictions, verdicts = {}, []
    for name, measured in acceptance.items():
        curve = costs[name].curve()
        for prediction in plan_prediction.predict(measured, curve):
            predictions[name, prediction.gamma] = prediction
        verdict = plan_prediction.judge(measured, curve)
        verdicts.append(_verdict_row(name, verdict))
        console.print(verdict.words(name))
    write(verdicts)
    rows = plan_rows(run_designs(args, subject), predictions)
    write(rows)
    console.print()
    plan_report.print_plan(rows, console)
    return rows


def _verdict_row(drafter: str, verdict: plan_prediction.Verdict) -> dict[str, Any]:
    return {
        "kind": "plan_verdict",
        "drafter": drafter,
        "can_win": verdict.can_win,
        "words": verdict.words(drafter),
        **dataclasses.asdict(verdict),
    }


def describe(args: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """What is planned for and where, for every row."""
    target = next(iter(subject.pairs.values())).target
    return {
        "target": str(args.target or "embedded"),
        "draft": str(args.draft or "embedded"),
        "dtype": target.config.dtype,
        "impl": target.impl,
        "native_isa": dispatch.instruction_set(target.impl),
        "slab": target.slab,
        "page_size": args.page_size,
        "prompt_source": args.prompts,
        "gen_tokens": args.gen_tokens,
        "repeats": args.repeats,
        "cost_repeats": args.cost_repeats,
        **records.provenance(),
    }


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.JsonLines(args.out) as out:
        rows = run_all(args, out, terminal.console())
    return MATCHED if all(row["matched"] for row in rows) else NOT_MATCHED


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, runs and compares; returns the exit status."""
    return cli.run("plan.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
