"""Which drafter, gamma and policy is fastest on which prompts, at which temperature?

Runs a grid of cells, each prompt plain and speculatively in turn, compares all tokens,
and replays the committed text. A cell that the file of results holds already is not run
again: the same command goes on where it was interrupted, and a larger grid adds to it.
Ends with tables of the cells that were asked for, by category where prompts have one,
and with figures. Exit status: 0 all matched, 2 not all matched, 1 the input was
unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import datetime
import hashlib
import importlib.util
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich import console as rich_console, progress as rich_progress

from experiments import plot
from experiments.lib import files, flags, records, terminal
from experiments.support import (
    model_pair,
    paired_runs,
    policies,
    prompt_files,
    prompt_runs,
    sweep_file,
    sweep_flags,
    sweep_report,
    sweep_rows,
)
from spec_jax.model import fingerprint
from spec_jax.ops import dispatch


MATCHED, NOT_MATCHED = 0, 2

FIGURES = ("sweep_speedup", "sweep_categories")
"""Those of `plot.py` that are drawn at the end."""

Cell = sweep_rows.Cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one file, and the settings that fit all of them."""

    prompts: list[prompt_files.Prompt]
    ids: list[list[int]]
    settings: paired_runs.Settings

    def of(self, category: str | None) -> list[tuple[prompt_files.Prompt, list[int]]]:
        """The prompts of a category, with their ids."""
        both = zip(self.prompts, self.ids, strict=True)
        return [(prompt, ids) for prompt, ids in both if prompt.category == category]

    def sha256(self, category: str | None) -> str:
        """A hash of the category's texts and of their order."""
        texts = [
            [*(message["content"] for message in prompt.history), prompt.text]
            if prompt.history
            else prompt.text
            for prompt, _ in self.of(category)
        ]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def load_pair(
    args: argparse.Namespace, drafter: str, temperature: float
) -> model_pair.ModelPair:
    """The pair of some cells; raises as `model_pair.load_pair`."""
    return model_pair.load_pair(
        args.target or model_pair.EMBEDDED_TARGET,
        args.draft or model_pair.EMBEDDED_DRAFT,
        gamma_max=args.gamma_max,
        slab=args.gamma_max + 1,
        dtype=args.dtype,
        impl=args.impl,
        drafter=drafter,
        sampling_settings=flags.sampling_settings(args, temperature),
    )


def load_sets(
    args: argparse.Namespace, pair: model_pair.ModelPair
) -> dict[str, PromptSet]:
    """The prompt sets, by what names them; their settings are those of every cell.

    Raises:
      ValueError: prompts that cannot be used.
    """
    sets = {}
    for source in dict.fromkeys(args.prompts):
        prompts = prompt_files.parse(source, default_file=prompt_files.BUNDLED)
        # Greedy answers at every temperature: all cells have the same prompts.
        prepared = prompt_runs.prepare(
            pair,
            prompts,
            raw=args.raw,
            gen_tokens=args.gen_tokens,
            page_size=args.page_size,
        )
        settings = paired_runs.Settings(
            gamma=args.gamma_max,
            gen_tokens=args.gen_tokens,
            capacity=prepared.capacity,
            page_size=args.page_size,
            stop_ids=() if args.ignore_stop else pair.tokenizer.stop_ids,
            prefill_by_rows=pair.target.prefills_by_rows,
        )
        sets[source] = PromptSet(
            prompts=prepared.prompts, ids=prepared.ids, settings=settings
        )
    return sets


def describe(args: argparse.Namespace, pair: model_pair.ModelPair) -> dict[str, Any]:
    """Which models the cells are of, and how long their texts, for each line."""
    return {
        "target": str(args.target or "embedded"),
        "draft": str(args.draft or "embedded"),
        "dtype": pair.target.config.dtype,
        "impl": pair.target.impl,
        "native_isa": dispatch.instruction_set(pair.target.impl),
        "gen_tokens": args.gen_tokens,
    }


def shared_settings(
    args: argparse.Namespace, pair: model_pair.ModelPair
) -> dict[str, Any]:
    """What must be the same for cells to stand in one file."""
    here = records.provenance()
    machine = ("jax_version", "jaxlib_version", "platform", "device_kind", "cpu")
    return {
        **describe(args, pair),
        "target_sha256": fingerprint.of_params(pair.params[0]),
        "slab": pair.target.slab,
        "gamma_max": args.gamma_max,
        "page_size": args.page_size,
        "repeats": args.repeats,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
        "ignore_stop": args.ignore_stop,
        "raw": args.raw,
        **{name: here[name] for name in machine},
    }


def grid(args: argparse.Namespace, sets: dict[str, PromptSet]) -> list[Cell]:
    """Every cell that was asked for; those that share models follow each other."""
    cells = []
    axes = (args.drafter, args.temperature, sets, args.gamma_policy, args.gamma)
    for drafter, temperature, source, policy, gamma in itertools.product(*axes):
        prompts = sets[source].prompts
        for category in dict.fromkeys(prompt.category for prompt in prompts):
            cells.append(
                Cell(
                    drafter=drafter,
                    temperature=temperature,
                    prompt_source=source,
                    gamma_policy=policy,
                    gamma=gamma,
                    category=category,
                )
            )
    return cells


def unfinished(
    cells: Sequence[Cell], sets: dict[str, PromptSet], rows: Sequence[dict]
) -> list[Cell]:
    """The cells that no row is of.

    Raises:
      ValueError: a row whose prompts have changed since.
    """
    finished = {sweep_rows.cell_of(row): row for row in rows}
    for cell in cells:
        row = finished.get(cell)
        now = sets[cell.prompt_source].sha256(cell.category)
        if row is not None and row["prompts_sha256"] != now:
            raise ValueError(
                f"the prompts of {cell.prompt_source!r} (category {cell.category}) are "
                "others than those of the cells in the file: put them back, or name "
                "another file"
            )
    return [cell for cell in cells if cell not in finished]


class Sweep:
    """What the cells need that are still to be run."""

    def __init__(
        self,
        args: argparse.Namespace,
        sets: dict[str, PromptSet],
        console: rich_console.Console,
    ):
        self._args, self._sets, self._console = args, sets, console

    def run(
        self,
        cells: Sequence[Cell],
        file: sweep_file.SweepFile,
        pair: model_pair.ModelPair,
    ) -> None:
        """Runs the cells in turn, and writes each when it is finished.

        Args:
          pair: any pair of the target, whose weights all cells share.
        """
        target_params = pair.params[0]
        total = sum(len(self._prompts(cell)) for cell in cells)
        pace = _Pace(total)
        with terminal.progress() as progress:
            progress.columns += (rich_progress.TimeRemainingColumn(),)
            task = progress.add_task("prompts", total=total)
            by_models = itertools.groupby(cells, lambda c: (c.drafter, c.temperature))
            for (drafter, temperature), of_models in by_models:
                pair = load_pair(self._args, drafter, temperature)
                pair = dataclasses.replace(pair, params=(target_params, pair.params[1]))
                for cell in of_models:
                    results = self._run_cell(
                        cell, pair, after_prompt=lambda: progress.advance(task)
                    )
                    row = sweep_rows.row_of(cell, results)
                    file.write(row | self._about(cell, pair))
                    # A line of another console would run into the bar.
                    console = self._console if progress.disable else progress.console
                    console.print(
                        f"{describe_cell(cell)}: {row['speedup_e2e']:.2f}x, "
                        f"{'matched' if row['matched'] else 'NOT MATCHED'}; "
                        f"{pace.after(len(results))}",
                        soft_wrap=True,
                    )

    def _prompts(self, cell: Cell) -> list[tuple[prompt_files.Prompt, list[int]]]:
        return self._sets[cell.prompt_source].of(cell.category)

    def _run_cell(
        self,
        cell: Cell,
        pair: model_pair.ModelPair,
        *,
        after_prompt: Callable[[], None],
    ) -> list[prompt_runs.PromptResult]:
        """Every prompt of the cell, after what compiles."""
        prompts = self._prompts(cell)
        ids = [prompt_ids for _, prompt_ids in prompts]
        settings = dataclasses.replace(
            self._sets[cell.prompt_source].settings,
            gamma=cell.gamma,
            sampling=flags.sampling_settings(self._args, cell.temperature),
        )
        settings = policies.with_policy(cell.gamma_policy, pair, settings, ids[0])
        # What an earlier cell has compiled is not compiled again.
        paired_runs.warm_up(pair, settings, ids)
        results = []
        for prompt, prompt_ids in prompts:
            results.append(
                prompt_runs.run_prompt(
                    pair, settings, prompt, prompt_ids, repeats=self._args.repeats
                )
            )
            after_prompt()
        return results

    def _about(self, cell: Cell, pair: model_pair.ModelPair) -> dict[str, Any]:
        """What the line of a cell says beside its results."""
        of_set = self._sets[cell.prompt_source]
        return {
            "prompts_sha256": of_set.sha256(cell.category),
            "capacity": of_set.settings.capacity,
            **describe(self._args, pair),
            **records.provenance(),
        }


class _Pace:
    """How far a sweep is, and how long the rest will take at that pace."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
        self._total, self._done = total, 0
        self._clock, self._started = clock, clock()

    def after(self, prompts: int) -> str:
        """Counts finished prompts, and says what is left."""
        self._done += prompts
        elapsed_s = self._clock() - self._started
        left_s = round(elapsed_s / self._done * (self._total - self._done))
        return (
            f"{self._done} of {self._total} prompts, "
            f"{datetime.timedelta(seconds=left_s)} left"
        )


def describe_cell(cell: Cell) -> str:
    """The cell in a few words."""
    words = [cell.prompt_source, cell.category, cell.drafter, f"gamma {cell.gamma}"]
    if cell.gamma_policy != sweep_rows.FIXED:
        words.append(cell.gamma_policy)
    if cell.temperature:
        words.append(f"T {cell.temperature:g}")
    return ", ".join(word for word in words if word is not None)


def check_figures(folder: pathlib.Path | None) -> None:
    """Raises `ValueError` where the figures at the end could not be drawn."""
    if folder is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"--figures {folder}: matplotlib is not installed; {plot.INSTALL} brings it"
        )
    files.check_folder(folder)


def draw_figures(
    rows: Sequence[dict[str, Any]], folder: pathlib.Path, console: rich_console.Console
) -> None:
    """The figures that there are rows for; one that cannot be drawn says why."""
    for name in FIGURES:
        of_figure = [row for row in rows if plot.FIGURES[name].takes(row)]
        if not of_figure:
            continue
        try:
            for path in plot.draw(name, of_figure, folder):
                console.print(str(path), soft_wrap=True)
        except ValueError as error:
            console.print(f"{name} is not drawn: {error}", soft_wrap=True)


def run(args: argparse.Namespace) -> int:
    """Runs what is missing and shows all; returns the exit status."""
    console = terminal.console()
    check_figures(args.figures)
    for temperature in args.temperature:
        flags.sampling_settings(args, temperature)  # Before any cell is run.
    pair = load_pair(args, args.drafter[0], args.temperature[0])
    sets = load_sets(args, pair)
    cells = grid(args, sets)
    with sweep_file.SweepFile(args.out, shared_settings(args, pair)) as file:
        missing = unfinished(cells, sets, file.rows)
        console.print(
            f"{len(cells)} cells, {len(cells) - len(missing)} of them in {args.out}",
            soft_wrap=True,
        )
        Sweep(args, sets, console).run(missing, file, pair)
        asked = set(cells)
        rows = [row for row in file.rows if sweep_rows.cell_of(row) in asked]
    console.print()
    sweep_report.print_sets(rows, console)
    if args.figures is not None:
        draw_figures(rows, args.figures, console)
    return MATCHED if all(row["matched"] for row in rows) else NOT_MATCHED


def kept(args: argparse.Namespace) -> str:
    """What an interrupt leaves behind."""
    return f"finished cells are in {args.out}, and the same command goes on from there"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sweep; returns the exit status."""
    return cli.run(
        "sweep.py", lambda: sweep_flags.parse(argv, description=__doc__), run, kept=kept
    )


if __name__ == "__main__":
    cli.end(main)
