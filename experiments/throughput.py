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

from rich import console as rich_console, table as rich_table

from experiments.lib import flags, records, terminal, timing
from experiments.support import (
    batched_runs,
    drafters,
    model_pair,
    paired_runs,
    policies,
    prompt_files,
    prompt_runs,
)
from spec_jax.ops import dispatch


MATCHED, NOT_MATCHED = 0, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way of running all prompts.

    Attributes:
      batch: sequences at once; None for one by one, without rounds.
      gamma: 0 is plain decoding.
    """

    batch: int | None
    gamma: int

    @property
    def name(self) -> str:
        """As the table shows it."""
        if self.batch is None:
            return "plain, one by one"
        kind = "plain" if self.gamma == 0 else f"gamma {self.gamma}"
        return f"{kind}, batch {self.batch}"

    def row(self) -> dict[str, Any]:
        """The way, in a JSON row."""
        return {"way": self.name, "batch": self.batch, "gamma": self.gamma}


ALONE = Way(batch=None, gamma=0)


@dataclasses.dataclass(kw_only=True)
class Result:
    """What a way did.

    Attributes:
      texts: generated tokens of each prompt.
      seconds: of each repeat.
    """

    texts: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def num_equal(self, other: "Result") -> int:
        """How many texts are those of the other."""
        return sum(a == b for a, b in zip(self.texts, other.texts, strict=True))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--batch",
        type=cli.positives,
        default=(1, 2, 4, 8, 16),
        metavar="B,..",
        help="sequences at once (default: 1,2,4,8,16)",
    )
    flags.add_rounds(runs)
    runs.add_argument(
        "--drafter",
        choices=tuple(drafters.DRAFTERS),
        default="draft-model",
        help="what proposes tokens (default: %(default)s)",
    )
    flags.add_prompts(runs, default="32")
    flags.add_gen_tokens(runs, default=64)
    flags.add_repeats(runs, default=3)
    policies.add_policy(parser.add_argument_group("adaptive gamma"), confidence=False)
    flags.add_sampling(parser.add_argument_group("sampling"))
    flags.add_out(parser, rows="one per run as it finishes, then one per way")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    return args


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> tuple[list[dict[str, Any]], bool]:
    """Loads, compiles, runs; a row for each way, and whether all texts are equal.

    Writes a row for each run as it finishes, and those of the ways.
    """
    settings_of = flags.sampling_settings(args)
    prompts = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    pair = model_pair.load_pair(
        args.target or model_pair.EMBEDDED_TARGET,
        args.draft or model_pair.EMBEDDED_DRAFT,
        gamma_max=args.gamma,
        slab=args.gamma + 1,
        dtype=args.dtype,
        impl=args.impl,
        drafter=args.drafter,
        sampling_settings=settings_of,
    )
    prepared = prompt_runs.prepare(
        pair,
        prompts,
        raw=False,
        gen_tokens=args.gen_tokens,
        page_size=args.page_size,
        sampling=settings_of,
    )
    prompts, ids = prepared.prompts, prepared.ids
    settings = paired_runs.Settings(
        gamma=args.gamma,
        gen_tokens=args.gen_tokens,
        capacity=prepared.capacity,
        page_size=args.page_size,
        prefill_by_rows=pair.target.prefills_by_rows,
        sampling=settings_of,
    )
    settings = policies.with_policy(args.gamma_policy, pair, settings, ids[0])
    ways = [ALONE]
    if max(args.batch) > len(prompts):
        console.print(f"--batch: at most {len(prompts)} slots, as there are prompts")
    for batch in dict.fromkeys(min(each, len(prompts)) for each in args.batch):
        ways += [Way(batch=batch, gamma=0), Way(batch=batch, gamma=args.gamma)]
    console.print(f"{len(ids)} prompts x {args.gen_tokens} tokens; compiling ...")
    description = {
        **{"drafter": args.drafter, "prompts": len(ids)},
        **{"gamma_policy": args.gamma_policy, "seed": args.seed},
        **{"temperature": args.temperature, "impl": pair.target.impl},
        "native_isa": dispatch.instruction_set(pair.target.impl),
        "dtype": pair.target.config.dtype,
        **records.provenance(),
    }
    results = {way: Result() for way in ways}
    for row in _run(pair, settings, ids, results, repeats=args.repeats):
        out.write(row | description)
    rows = []
    for way, result in results.items():
        num_tokens = sum(map(len, result.texts))
        speed = timing.spread([num_tokens / s for s in result.seconds])
        ratio = timing.spread(timing.ratios(results[ALONE].seconds, result.seconds))
        rows.append(
            {
                **{"kind": "throughput", **way.row()},
                "prompts_equal": result.num_equal(results[ALONE]),
                "tokens": num_tokens,
                **{"tok_s": speed.median, "tok_s_p10": speed.p10},
                "tok_s_p90": speed.p90,
                **{"ratio": ratio.median, "ratio_p10": ratio.p10},
                **{"ratio_p90": ratio.p90, "n": len(result.seconds)},
            }
            | description
        )
        out.write(rows[-1])
    return rows, all(row["prompts_equal"] == len(ids) for row in rows)


def _run(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    ids: Sequence[list[int]],
    results: dict[Way, Result],
    *,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Every way in turn, `repeats` times, after one brief run that compiles.

    Yields:
      A row of each run.
    """
    with terminal.progress() as progress:
        task = progress.add_task("runs", total=(repeats + 1) * len(results))
        for way in results:
            _once(pair, dataclasses.replace(settings, gen_tokens=1), ids, way)
            progress.advance(task)
        for repeat in range(repeats):
            for way, result in results.items():
                result.texts, seconds = _once(pair, settings, ids, way)
                result.seconds.append(seconds)
                yield {
                    **{"kind": "throughput_run", **way.row(), "repeat": repeat},
                    "prompts_equal": result.num_equal(results[ALONE]),
                    "seconds": seconds,
                }
                progress.advance(task)


def _once(pair, settings, ids, way) -> tuple[list[list[int]], float]:
    """One way over all prompts: their texts, and the seconds of it."""
    if way.batch is None:
        runs = [paired_runs.run_plain(pair, settings, prompt) for prompt in ids]
        return [run.tokens for run in runs], sum(run.timing.e2e_s for run in runs)
    settings = dataclasses.replace(settings, gamma=way.gamma)
    runs = batched_runs.run_batch(pair, settings, ids, num_slots=way.batch)
    return [run.tokens for run in runs], sum(run.timing.e2e_s for run in runs)


def print_table(rows: Sequence[dict[str, Any]], console: rich_console.Console) -> None:
    """One line a way."""
    table = rich_table.Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way", no_wrap=True)
    for name in ("tokens/s", "x plain alone", "p10-p90", "equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['tok_s']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_p10']:.2f}-{row['ratio_p90']:.2f}",
            f"{row['prompts_equal']}/{row['prompts']}",
        )
    terminal.print_whole(table, console)


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with records.JsonLines(args.out) as out:
        rows, is_equal = run_all(args, out, console)
    print_table(rows, console)
    return MATCHED if is_equal else NOT_MATCHED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run("throughput.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
