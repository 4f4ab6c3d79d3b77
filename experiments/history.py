"""Which design of verification keeps the target's tokens, and at what speed?

Runs the ladder of designs that led to the row contract, on the same prompts, in turn
in one process: what decides is whether the verified rows have the bits of decoding,
and how many target forwards a round takes. Each design is judged by the plain
decoding that belongs to it, and timed against the fastest plain decoding there is.

Exit status: 0 the story holds (the last rung matches, and is the fastest of those
that match); 2 it does not; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
from collections.abc import Sequence

from rich import console as rich_console, table as rich_table, text as rich_text

from experiments.ablations import verify_paths
from experiments.lib import flags, records, terminal
from experiments.support import (
    model_pair,
    paired_runs,
    prompt_files,
    prompt_runs,
    report,
)
from spec_jax.analysis import metrics
from spec_jax.ops import dispatch


HOLDS, DOES_NOT_HOLD = 0, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """A design of verification, and what was published of it.

    Attributes:
      published: speed-up and losslessness of the system that was built this way, with
        Qwen3-8B and a draft of 0.6B on an RTX 5090.
    """

    name: str
    verify_path: str
    acceptance: str
    published: str


LADDER = (
    Rung(
        name="decoding decides",
        verify_path="flash",
        acceptance="decode",
        published="0.29x, matched",
    ),
    Rung(
        name="flash decides",
        verify_path="flash",
        acceptance="verify",
        published="unmatched",
    ),
    Rung(
        name="row loop",
        verify_path="row-loop",
        acceptance="verify",
        published="0.44x, matched",
    ),
    Rung(
        name="library rows",
        verify_path="library-rows",
        acceptance="verify",
        published="0.68x, unmatched",
    ),
    Rung(
        name="row contract",
        verify_path="paged-decode",
        acceptance="verify",
        published="-",
    ),
)
"""In the order of history: a verification by the batched path of prefill, which at
first only proposed what decoding then decided; rows that decode one after the other;
rows together, through the library's products and under the row contract. The last is
what `spec_round.py` runs."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    runs = parser.add_argument_group("runs")
    flags.add_rounds(runs)
    flags.add_prompts(runs, default="10")
    flags.add_gen_tokens(runs, default=256)
    flags.add_repeats(runs)
    flags.add_out(
        parser, rows="one per prompt and rung as it finishes, then one per rung"
    )
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    return args


class Ladder:
    """The rungs on one pair of models, and what each has produced so far."""

    def __init__(self, pair: model_pair.ModelPair, settings: paired_runs.Settings):
        self._pair, self._settings = pair, settings
        self._results: dict[str, list[prompt_runs.PromptResult]] = {
            rung.name: [] for rung in LADDER
        }

    def run(self, rung: Rung, prompt_ids: list[int]) -> paired_runs.Speculative:
        """One prompt through one design."""
        return paired_runs.run_speculative(*self._design(rung), prompt_ids)

    def plain(self, prompt_ids: list[int]) -> paired_runs.Plain:
        """One prompt through the fastest plain decoding."""
        return paired_runs.run_plain(self._pair, self._settings, prompt_ids)

    def run_prompt(
        self, prompt: prompt_files.Prompt, prompt_ids: list[int], *, repeats: int
    ) -> list[dict]:
        """Plain decoding and every design in turn, `repeats` times; their JSON rows."""
        plain: list[paired_runs.Plain] = []
        runs: dict[str, list[paired_runs.Speculative]] = {r.name: [] for r in LADDER}
        for _ in range(repeats):
            plain.append(self.plain(prompt_ids))
            for rung in LADDER:
                runs[rung.name].append(self.run(rung, prompt_ids))
        rows = []
        for rung in LADDER:
            pair, settings = self._design(rung)
            first = runs[rung.name][0]
            result = prompt_runs.PromptResult(
                prompt=prompt,
                prompt_ids=prompt_ids,
                plain=plain,
                spec=runs[rung.name],
                mismatches=prompt_runs.mismatches_of(pair, settings, prompt_ids, first),
                reference=paired_runs.run_plain(pair, settings, prompt_ids).tokens,
            )
            self._results[rung.name].append(result)
            rows.append(result.row() | {"kind": "history_prompt", "rung": rung.name})
        return rows

    def row(self, rung: Rung) -> tuple[dict, metrics.Metrics]:
        """The JSON row of a rung: what it is, and its metrics."""
        results = self._results[rung.name]
        summary = prompt_runs.summarise(results)
        about = {
            "kind": "history",
            "rung": rung.name,
            "verify_path": rung.verify_path,
            "acceptance": rung.acceptance,
            "published": rung.published,
            "matched_prompts": sum(result.matched for result in results),
        }
        return about, summary

    def _design(self, rung: Rung) -> tuple[model_pair.ModelPair, paired_runs.Settings]:
        """The pair whose `target` is the decoding that the design is judged by."""
        verifier = verify_paths.make(rung.verify_path, self._pair.target)
        # Without the contract, decoding is a window of one row through the same
        # products.
        is_library = isinstance(verifier, verify_paths.LibraryRows)
        target = verifier if is_library else self._pair.target
        return (
            dataclasses.replace(self._pair, target=target, verifier=verifier),
            dataclasses.replace(self._settings, acceptance=rung.acceptance),
        )


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> list[dict]:
    """Runs every rung on every prompt; returns the rows of the rungs.

    Writes a row for each prompt and rung as it finishes, and those of the rungs.
    """
    prompts = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    pair = model_pair.load_pair(
        args.target or model_pair.EMBEDDED_TARGET,
        args.draft or model_pair.EMBEDDED_DRAFT,
        gamma_max=args.gamma,
        slab=args.gamma + 1,
        dtype=args.dtype,
        impl=args.impl,
    )
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
    description = {
        "dtype": pair.target.config.dtype,
        "impl": pair.target.impl,
        "native_isa": dispatch.instruction_set(pair.target.impl),
        "gamma": args.gamma,
        "gen_tokens": args.gen_tokens,
        "page_size": args.page_size,
        "prompt_source": args.prompts,
        "repeats": args.repeats,
    }
    console.print(
        f"{len(LADDER)} designs, {len(prompts)} prompts x {args.gen_tokens} tokens, "
        f"gamma {args.gamma}, {description['dtype']}, impl {description['impl']}"
    )
    _warm_up(pair, settings, ids)
    ladder = Ladder(pair, settings)
    with terminal.progress() as progress:
        task = progress.add_task("prompts", total=len(prompts))
        for prompt, prompt_ids in zip(prompts, ids, strict=True):
            for row in ladder.run_prompt(prompt, prompt_ids, repeats=args.repeats):
                out.write(row | description)
            progress.advance(task)
    rows = []
    for rung in LADDER:
        about, summary = ladder.row(rung)
        rows.append(about | report.to_row(summary) | description)
        out.write(rows[-1] | records.provenance())
    return rows


def _warm_up(
    pair: model_pair.ModelPair, settings: paired_runs.Settings, ids: list[list[int]]
) -> None:
    """Compiles everything: one token of one prompt a bucket, through every rung."""
    brief = Ladder(pair, dataclasses.replace(settings, gen_tokens=1))
    prompt = prompt_files.Prompt(id="warm-up", text="", category=None)
    for prompt_ids in paired_runs.one_a_bucket(ids):
        brief.run_prompt(prompt, prompt_ids, repeats=1)


def print_ladder(rows: Sequence[dict], console: rich_console.Console) -> None:
    """One line a rung."""
    table = rich_table.Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("design")
    for name in ("matched", "mismatches", "tokens/step", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("published")
    for row in rows:
        table.add_row(
            row["rung"],
            rich_text.Text(
                f"{row['matched_prompts']}/{row['prompts']}",
                style="" if row["matched"] else "bold red",
            ),
            f"{row['verify_decode_mismatches']:,d}",
            f"{row['tokens_per_target_step']:.2f}",
            f"{row['speedup_e2e']:.2f}x",
            row["published"],
        )
    terminal.print_whole(table, console)
    console.print(
        "matched: prompts with all tokens of plain decoding; tokens/step: per "
        "forward of the target, of any kind; speed-up: over "
        "our plain decoding, prefill included; published: Qwen3-8B and 0.6B on an "
        "RTX 5090",
        style="dim",
    )


def story_holds(rows: Sequence[dict]) -> bool:
    """Whether the last rung matches, and is the fastest of those that match."""
    matched = [row for row in rows if row["matched"]]
    last = rows[-1]
    return last in matched and last["speedup_e2e"] == max(
        row["speedup_e2e"] for row in matched
    )


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with records.JsonLines(args.out) as out:
        rows = run_all(args, out, console)
    print_ladder(rows, console)
    return HOLDS if story_holds(rows) else DOES_NOT_HOLD


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ladder; returns the exit status."""
    return cli.run("history.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
