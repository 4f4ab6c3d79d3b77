"""How much slower is a policy of gamma than the best constant gamma in hindsight?

Records the fate of every draft along the texts of plain decoding, measures what rounds
cost on this machine, and simulates every policy and every constant gamma on easy, hard
and mixed texts, and on hostile ones, on which no draft is ever right. With --live all
of them run in real rounds too, in turn with plain decoding. Greedy; stop tokens are
ignored. Exit status: 0 measured and matched, 2 not matched, 1 the input was unusable.
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
    drafters,
    model_pair,
    paired_runs,
    plan_costs,
    plan_flags,
    prompt_files,
    prompt_runs,
    regret_fates,
    regret_live,
    regret_policies,
    regret_report,
    regret_simulation,
)
from spec_jax.ops import dispatch


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--drafter",
        choices=[name for name in drafters.DRAFTERS if name != "oracle"],
        default="draft-model",
        help="what proposes tokens; one that mostly fills its windows: a simulated "
        "round costs what a full one does (default: %(default)s)",
    )
    runs.add_argument(
        "--policy",
        type=plan_flags.names(regret_policies.ADAPTIVE),
        default=",".join(regret_policies.ADAPTIVE),
        metavar="NAME,...",
        help=f"of {', '.join(regret_policies.ADAPTIVE)} (default: %(default)s)",
    )
    flags.add_rounds(runs)
    flags.add_prompts(runs, default="12")
    flags.add_gen_tokens(runs, default=128)
    runs.add_argument(
        "--fresh",
        action="store_true",
        help="begin every text anew (default: a policy's state is handed on from text "
        "to text)",
    )
    runs.add_argument(
        "--live", action="store_true", help="run every policy in real rounds as well"
    )
    runs.add_argument(
        "--confidence",
        type=float,
        metavar="P",
        help="with --live, also the largest gamma with a draft model that ends its "
        "draft before a token that it gives less than this probability",
    )
    flags.add_repeats(runs, default=3)
    runs.add_argument(
        "--cost-repeats",
        type=cli.positive,
        default=10,
        metavar="N",
        help="timed calls of each part of a round (default: %(default)s)",
    )
    flags.add_out(parser, rows="costs, then one per policy and set")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    if args.confidence is not None and not args.live:
        parser.error("--confidence cannot be simulated: give --live, or leave it out")
    if args.confidence is not None and args.drafter in ("ngram", "suffix"):
        parser.error(
            f"--confidence is a draft model's, and --drafter {args.drafter} has none: "
            "leave it out"
        )
    return args


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: a pair, and the sets of texts by name."""

    pair: model_pair.ModelPair
    settings: paired_runs.Settings
    texts: list[regret_fates.Text]
    sets: dict[str, list[regret_fates.Text]]


def load_pair(
    args: argparse.Namespace, *, min_confidence: float = 0.0
) -> model_pair.ModelPair:
    """The pair that the flags name; raises as `model_pair.load_pair`."""
    return model_pair.load_pair(
        args.target or model_pair.EMBEDDED_TARGET,
        args.draft or model_pair.EMBEDDED_DRAFT,
        gamma_max=args.gamma,
        slab=args.gamma + 1,
        dtype=args.dtype,
        impl=args.impl,
        drafter=args.drafter,
        min_confidence=min_confidence,
    )


def load_subject(args: argparse.Namespace) -> Subject:
    """The pair and its texts, with the fate of every draft.

    Raises:
      ValueError: models, prompts or sizes that cannot be used.
    """
    plan_costs.check_gen_tokens(args.gen_tokens, args.gamma)
    prompts = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    pair = load_pair(args)
    prepared = prompt_runs.prepare(
        pair,
        prompts,
        raw=False,
        gen_tokens=args.gen_tokens,
        page_size=args.page_size,
    )
    prompts, ids = prepared.prompts, prepared.ids
    settings = paired_runs.Settings(
        gamma=args.gamma,
        gen_tokens=args.gen_tokens,
        capacity=prepared.capacity,
        page_size=args.page_size,
    )
    texts = []
    with terminal.progress() as progress:
        task = progress.add_task("texts", total=len(prompts))
        for prompt, prompt_ids in zip(prompts, ids, strict=True):
            texts.append(regret_fates.record(pair, settings, prompt, prompt_ids))
            progress.advance(task)
    return Subject(
        pair=pair, settings=settings, texts=texts, sets=regret_fates.make_sets(texts)
    )


def typical(subject: Subject) -> list[int]:
    """The prompt of median length, on which costs are measured."""
    by_length = sorted((text.prompt_ids for text in subject.texts), key=len)
    return by_length[len(by_length) // 2]


def measure_costs(
    args: argparse.Namespace, subject: Subject
) -> tuple[plan_costs.RoundCosts, list[dict[str, Any]]]:
    """The costs of rounds, and their rows."""
    thunks = plan_costs.thunks(
        {args.drafter: subject.pair}, subject.settings, typical(subject), catch_up=True
    )
    with terminal.progress() as progress:
        task = progress.add_task("costs", total=args.cost_repeats + 1)
        timings = timing.interleave(
            thunks,
            repeats=args.cost_repeats,
            after_turn=lambda: progress.advance(task),
        )
    costs = plan_costs.costs_of(args.drafter, timings, gamma_max=args.gamma)
    return costs, plan_costs.rows(timings)


def run_live(
    args: argparse.Namespace,
    subject: Subject,
    candidates: Sequence[regret_policies.Candidate],
) -> list[dict[str, Any]]:
    """The rows of real rounds, after a short run of everything that compiles."""
    settings, hand_on = subject.settings, not args.fresh
    _warm_up(subject, candidates)
    rows = []
    total = args.repeats * sum(len(texts) for texts in subject.sets.values())
    with terminal.progress() as progress:
        task = progress.add_task("live", total=total)
        for name, texts in subject.sets.items():
            live = regret_live.run_set(
                subject.pair,
                settings,
                texts,
                candidates,
                repeats=args.repeats,
                hand_on=hand_on,
                after_text=lambda: progress.advance(task),
            )
            rows += regret_live.rows(name, live, candidates, num_texts=len(texts))
    return rows


def _warm_up(subject: Subject, candidates: Sequence[regret_policies.Candidate]) -> None:
    """Compiles everything: one token of one prompt a bucket, kept drafts and wrong."""
    brief = dataclasses.replace(subject.settings, gen_tokens=1)
    one_each = paired_runs.one_a_bucket([text.prompt_ids for text in subject.texts])
    texts = [text for text in subject.texts if text.prompt_ids in one_each]
    for some in (texts, subject.sets["hostile"][:1]):
        regret_live.run_set(
            subject.pair, brief, some, candidates, repeats=1, hand_on=False
        )


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> list[dict[str, Any]]:
    """Records, measures, simulates, runs; returns the rows of the policies."""
    subject = load_subject(args)
    description = describe(args, subject)

    def write(rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            out.write(row | description)

    costs, cost_rows = measure_costs(args, subject)
    write(cost_rows)
    candidates = regret_policies.candidates(
        args.policy, subject.pair, subject.settings, typical(subject)
    )
    rows = regret_simulation.rows(
        candidates, subject.sets, costs, hand_on=not args.fresh
    )
    write(rows)
    console.print(describe_sets(subject))
    regret_report.print_regret(rows, console, title="simulated")
    if args.live:
        if args.confidence is not None:
            pair = load_pair(args, min_confidence=args.confidence)
            stops = regret_policies.confident(args.confidence, pair, subject.settings)
            candidates.append(stops)
        live_rows = run_live(args, subject, candidates)
        write(live_rows)
        regret_report.print_regret(live_rows, console, title="in real rounds")
        rows += live_rows
    return rows


def describe_sets(subject: Subject) -> str:
    """How many drafts the windows of each set keep, in a line."""
    kept = {
        name: sum(regret_fates.mean_kept(text.is_kept) for text in texts) / len(texts)
        for name, texts in subject.sets.items()
    }
    words = [
        f"{name} {len(subject.sets[name])} texts, {mean:.2f}"
        for name, mean in kept.items()
    ]
    return (
        f"drafts kept by a window of gamma {subject.settings.gamma} behind every "
        f"token: {'; '.join(words)}"
    )


def describe(args: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """What is measured and where, for every row."""
    target = subject.pair.target
    return {
        "target": str(args.target or "embedded"),
        "draft": str(args.draft or "embedded"),
        "drafter": args.drafter,
        "dtype": target.config.dtype,
        "impl": target.impl,
        "native_isa": dispatch.instruction_set(target.impl),
        "gamma_max": args.gamma,
        "page_size": args.page_size,
        "prompt_source": args.prompts,
        "gen_tokens": args.gen_tokens,
        "fresh": args.fresh,
        "repeats": args.repeats if args.live else None,
        "cost_repeats": args.cost_repeats,
        **records.provenance(),
    }


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.JsonLines(args.out) as out:
        rows = run_all(args, out, terminal.console())
    matched = [row["matched"] for row in rows if row["kind"] == "regret_live"]
    return MATCHED if all(matched) else NOT_MATCHED


def main(argv: Sequence[str] | None = None) -> int:
    """Measures regret; returns the exit status."""
    return cli.run("regret.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
