"""How many tokens a second do batches give, plain and speculative, and are they equal?

Runs the same prompts one by one, plain, and then in batches of several sizes, plain
(gamma 0) and speculatively, in turn in one process. Every text is compared with that of
its prompt alone. Times begin with the first prefill and end with the last token.

Exit status: 0 all texts equal; 2 some differ; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    flags,
    models,
    policies,
    records,
    runs,
    tables,
    terminal,
    timing,
)


MATCHED, NOT_MATCHED = 0, 2


Way = tuple[int | None, int]
"""Sequences at once, None for one by one without rounds; and gamma, 0 for plain."""

ALONE: Way = (None, 0)


@dataclasses.dataclass(kw_only=True)
class Result:
    """What a way did: the texts, and the seconds of each repeat."""

    texts: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def num_equal(self, other: "Result") -> int:
        """How many texts are those of the other."""
        return sum(a == b for a, b in zip(self.texts, other.texts, strict=True))


def describe(way: Way) -> dict[str, Any]:
    """The way, in a JSON row."""
    batch, gamma = way
    where = "one by one" if batch is None else f"batch {batch}"
    kind = f"gamma {gamma}" if gamma else "plain"
    return {"way": f"{kind}, {where}", "batch": batch, "gamma": gamma}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--batch",
        type=cli.positives,
        default=(1, 2, 4, 8, 16),
        metavar="B,..",
        help="sequences at once (default: 1,2,4,8,16)",
    )
    flags.add_rounds(group)
    flags.add_drafter(group)
    flags.add_rule(group)
    flags.add_prompts(group, default="32")
    flags.add_gen_tokens(group, default=64)
    flags.add_repeats(group, default=3)
    policies.add_policy(parser.add_argument_group("adaptive gamma"))
    flags.add_sampling(parser.add_argument_group("sampling"))
    flags.add_out(parser, rows="one per run as it finishes, then one per way")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    return args


def measure(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> tuple[list[dict[str, Any]], bool]:
    """Loads, compiles, runs; a row for each way, and whether all texts are equal.

    Writes a row for each run as it finishes, and those of the ways.
    """
    lm = models.load(
        args, drafter=args.drafter, gamma_max=args.gamma, confidence=args.confidence
    )
    subject = models.prepare(
        args,
        lm,
        args.prompts,
        rule=args.rule,
        sampling=flags.sampling_settings(args),
    )
    ids = subject.ids
    settings = policies.with_policy(args.gamma_policy, lm, subject.settings, ids[0])
    ways = [ALONE]
    if max(args.batch) > len(ids):
        console.print(f"--batch: at most {len(ids)} slots, as there are prompts")
    for batch in dict.fromkeys(min(each, len(ids)) for each in args.batch):
        ways += [(batch, 0), (batch, args.gamma)]
    console.print(f"{len(ids)} prompts x {args.gen_tokens} tokens; compiling ...")
    description = (
        {"drafter": args.drafter, "prompts": len(ids)}
        | {"gamma_policy": args.gamma_policy}
        | models.describe(args, lm)
        | records.provenance()
    )
    results = {way: Result() for way in ways}
    for row in run_ways(lm, settings, ids, results, repeats=args.repeats):
        out.write(row | description)
    rows = [
        row_of(way, result, results[ALONE]) | description
        for way, result in results.items()
    ]
    for row in rows:
        out.write(row)
    equal = [row["prompts_equal"] == len(ids) for row in rows]
    # A rule that keeps the distribution alone has texts of its own.
    return rows, all(equal) or not settings.is_exact


def row_of(way: Way, result: Result, alone: Result) -> dict[str, Any]:
    """The row of a way, after all repeats."""
    num_tokens = sum(map(len, result.texts))
    return {
        "kind": "throughput",
        **describe(way),
        "prompts_equal": result.num_equal(alone),
        "tokens": num_tokens,
        **timing.spread_fields("tok_s", [num_tokens / s for s in result.seconds]),
        **timing.spread_fields("ratio", timing.ratios(alone.seconds, result.seconds)),
        "n": len(result.seconds),
    }


def run_ways(
    lm, settings, ids, results: dict[Way, Result], *, repeats: int
) -> Iterator[dict[str, Any]]:
    """Every way in turn, `repeats` times, after one brief run that compiles.

    Yields:
      A row of each run.
    """
    total = (repeats + 1) * len(results)
    with terminal.counted("runs", total=total) as advance:
        for way in results:
            _once(lm, dataclasses.replace(settings, gen_tokens=1), ids, way)
            advance()
        for repeat in range(repeats):
            for way, result in results.items():
                result.texts, seconds = _once(lm, settings, ids, way)
                result.seconds.append(seconds)
                yield {
                    **{"kind": "throughput_run", **describe(way), "repeat": repeat},
                    "prompts_equal": result.num_equal(results[ALONE]),
                    "seconds": seconds,
                }
                advance()


def _once(lm, settings, ids, way: Way) -> tuple[list[list[int]], float]:
    """One way over all prompts: their texts, and the seconds of it."""
    batch, gamma = way
    if batch is None:
        done = [runs.run_plain(lm, settings, prompt) for prompt in ids]
    else:
        settings = dataclasses.replace(settings, gamma=gamma, num_slots=batch)
        done = runs.run_batch(lm, settings, ids)
    return [run.tokens for run in done], sum(run.timing.e2e_s for run in done)


COLUMNS = {
    "way": ("way", ""),
    "tokens/s": ("tok_s", ",.0f"),
    "x plain alone": ("ratio", ".2f"),
    "p10-p90": lambda row: f"{row['ratio_p10']:.2f}-{row['ratio_p90']:.2f}",
    "equal": lambda row: f"{row['prompts_equal']}/{row['prompts']}",
}
"""Of the table, for `tables.print_rows`."""


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with records.JsonLines(args.out) as out:
        rows, is_equal = measure(args, out, console)
    tables.print_rows(rows, COLUMNS, console)
    return MATCHED if is_equal else NOT_MATCHED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run("throughput.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
