"""Which drafter, gamma and policy is fastest on which prompts, at which temperature?

Runs a grid of cells, each prompt by autoregressive decoding and speculatively in turn,
compares all tokens, and replays the committed text. A cell that the file of results
holds already is not run again: the same command goes on where it was interrupted, and a
larger grid adds to it. Ends with tables of the requested cells, by category where
prompts have one, and by the position of a draft; `plot.py` draws them. Drafters are
evaluated so: --prompts names a folder of data sets, and --temperature is 0,1. Exit
status: 0 all matched, 2 not all matched, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    fan_out,
    flags,
    models,
    policies,
    prompt_files,
    prompts as prompts_lib,
    records,
    results as results_lib,
    sweep_cells as cells_lib,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.drafters import tree_shapes
from spec_jax.model import fingerprint


MATCHED, NOT_MATCHED = 0, 2

Cell = cells_lib.Cell
Sets = dict[str, models.Subject]
"""Prompts and the settings of every cell, by what names them."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unusable ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add(parser.add_argument_group("models"), "models mesh")
    _add_grid(parser.add_argument_group("grid: a cell for each combination"))
    shared = parser.add_argument_group("the same in all cells")
    flags.add(shared, "rule gen-tokens repeats ignore-stop raw")
    noise = parser.add_argument_group("sampling, where the temperature is above 0")
    flags.add(noise, "noise")
    fan_out.add_flags(parser.add_argument_group("cells on a cluster"))
    rows = "one per finished cell; cells that are there already are not run again"
    flags.add(parser, "out", out=rows)
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("--out is required: cells that it holds are not run again")
    flags.check_models(parser, args)
    args.prompts = [source for each in args.prompts for source in _sets_of(each)]
    args.gamma_max, args.schedule = max(args.gamma), None
    flags.check_sampling(parser, args)
    flags.check_tree(parser, args, "gamma_policy")
    return args


def _add_grid(group: argparse._ActionsContainer) -> None:
    flags.add(group, "drafters gammas page-size trees", gammas="1,2,4")
    group.set_defaults(tree=(flags.NO_TREE,))
    group.add_argument(
        "--prompts",
        type=cli.text_source,
        nargs="+",
        default=["10"],
        metavar="N|FILE[:N]",
        help="prompt sets: the first N bundled prompts, or files as spec_round.py "
        "takes them, or a folder, for all its files *.jsonl and those of its folders; "
        "where prompts have a category, each is a cell (default: 10)",
    )
    cli.add(
        group,
        f"""
        --context TOKENS,...  bring at most {prompts_lib.PER_CONTEXT} prompts to so many
            tokens, by those before them in the file: each number is a cell, in the
            place of the categories
        --temperature T,...=0  divides the logits; 0 is greedy
        --gamma-policy NAME,...={cells_lib.FIXED}  of {", ".join(policies.MEASURED)};
            for those that adapt, --gamma is the most that they may choose
        """,
        **{
            "T,...": flags.temperatures,
            "NAME,...": cli.names(cli.one_of(policies.MEASURED)),
        },
    )


def _sets_of(source: str) -> list[str]:
    """The prompt sets of a folder, each with the folder's `:N`; or the one given."""
    path, colon, limit = source.rpartition(":")
    folder = pathlib.Path(path if colon else source)
    if not folder.is_dir():
        return [source]
    found = sorted([*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")])
    return [f"{file}{colon}{limit if colon else ''}" for file in found] or [source]


def load_sets(args: argparse.Namespace, lm: loading.LanguageModel) -> Sets:
    """The prompt sets; their answers are greedy, so that all cells have the same."""
    stop_ids = () if args.ignore_stop else lm.stop_ids
    return {
        source: models.prepare(
            args,
            lm,
            source,
            stop_ids=stop_ids,
            contexts=args.context or (),
            rule=args.rule,
        )
        for source in dict.fromkeys(args.prompts)
    }


def of_category(
    subject: models.Subject, category: str | None
) -> list[tuple[prompt_files.Prompt, list[int]]]:
    """The prompts of a category, with their ids."""
    both = zip(subject.prompts, subject.ids, strict=True)
    return [(prompt, ids) for prompt, ids in both if prompt.category == category]


def prompts_sha256(subject: models.Subject, category: str | None) -> str:
    """A hash of the category's texts and of their order."""
    texts = [
        [*(message["content"] for message in prompt.history), prompt.text]
        if prompt.history
        else prompt.text
        for prompt, _ in of_category(subject, category)
    ]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def shared_settings(
    args: argparse.Namespace, lm: loading.LanguageModel
) -> dict[str, Any]:
    """What must be the same for cells to stand in one file."""
    here, shared = records.provenance(), models.describe(args, lm)
    del shared["temperature"]  # An axis of the grid.
    # One file may get cells of other drafters later.
    shared["draft"] = models.draft_of(args, "draft-model")
    machine = ("jax_version", "jaxlib_version", "platform", "device_kind", "cpu")
    return {
        "kind": "sweep",
        **shared,
        "target_sha256": fingerprint.of_params(lm.params),
        "gamma_max": args.gamma_max,
        **{name: here[name] for name in machine},
    }


def grid(args: argparse.Namespace, sets: Sets) -> list[Cell]:
    """Every cell that was asked for; those that share models follow each other."""
    axes = (args.drafter, args.temperature, sets, args.gamma_policy, _drafts(args))
    return [
        Cell(
            drafter=drafter,
            temperature=temperature,
            prompt_source=source,
            gamma_policy=policy,
            gamma=gamma,
            category=category,
            tree=tree,
        )
        for drafter, temperature, source, policy, (tree, gamma) in itertools.product(
            *axes
        )
        for category in dict.fromkeys(p.category for p in sets[source].prompts)
    ]


def _drafts(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Trees and gammas: chains of each gamma, and each tree with all its nodes."""
    of_tree = {tree: (tree_shapes.parse(tree).nodes,) for tree in _trees(args)}
    of_tree[flags.NO_TREE] = args.gamma
    return [(tree, gamma) for tree in args.tree for gamma in of_tree[tree]]


def _trees(args: argparse.Namespace) -> list[str]:
    return [tree for tree in args.tree if tree != flags.NO_TREE]


def _with_drafter(args: argparse.Namespace, lm: loading.LanguageModel, name: str):
    return models.with_drafter(args, lm, name, gamma_max=args.gamma_max)


def check_drafts(args: argparse.Namespace, lm: loading.LanguageModel) -> None:
    """Raises, before any cell is run, where a drafter or the rule has no trees, or a
    drafter fewer drafts than are asked for."""
    for name in args.drafter:
        lm = _with_drafter(args, lm, name)
        if flags.NO_TREE in args.tree:
            models.check_gamma(name, lm.drafter, max(args.gamma))
        for tree in _trees(args):
            models.with_tree(args, lm, tree)


def check_weights(
    args: argparse.Namespace, lm: loading.LanguageModel, rows: Sequence[dict]
) -> None:
    """Raises `ValueError` where a drafter has other weights than in its rows."""
    for name in args.drafter:
        found = {row.get("drafter_sha256") for row in rows if row["drafter"] == name}
        found -= {None}
        if found and found != {models.drafter_sha256(_with_drafter(args, lm, name))}:
            raise ValueError(
                f"the weights of {name} are others than those of the cells in the "
                "file: name another file"
            )


def unfinished(cells: Sequence[Cell], sets: Sets, rows: Sequence[dict]) -> list[Cell]:
    """The cells that no row is of.

    Raises:
      ValueError: a row whose prompts have changed since.
    """
    finished = {cells_lib.cell_of(row): row for row in rows}
    for cell in cells:
        row = finished.get(cell)
        now = prompts_sha256(sets[cell.prompt_source], cell.category)
        if row is not None and row["prompts_sha256"] != now:
            raise ValueError(
                f"the prompts of {cell.prompt_source!r} (category {cell.category}) are "
                "others than those of the cells in the file: put them back, or name "
                "another file"
            )
    return [cell for cell in cells if cell not in finished]


def run_cell(
    args: argparse.Namespace,
    cell: Cell,
    subject: models.Subject,
    lm: loading.LanguageModel,
) -> list[results_lib.PromptResult]:
    """Runs every prompt of the cell, after a brief run that compiles."""
    prompts, ids = zip(*of_category(subject, cell.category), strict=True)
    settings = dataclasses.replace(
        subject.settings,
        gamma=cell.gamma,
        sampling=flags.sampling_settings(args, cell.temperature),
    )
    if cell.tree != flags.NO_TREE:
        lm = models.with_tree(args, lm, cell.tree)
    subject = dataclasses.replace(subject, lm=lm, ids=list(ids))
    settings = policies.of_run(
        args, subject, settings, name=cell.gamma_policy, drafter=cell.drafter
    )
    design = results_lib.Design(lm=lm, settings=settings)
    # What an earlier cell has compiled is not compiled again.
    results_lib.warm_up([design], ids)
    found = []
    with terminal.counted("prompts", total=len(prompts)) as advance:
        for prompt, one in zip(prompts, ids, strict=True):
            # Each begins with the policy's first state, whatever ran before it.
            found.append(
                results_lib.run_prompt(design, prompt, one, repeats=args.repeats)
            )
            advance()
    return found


class Bench:
    """Runs cells: the models, and the prompts of all cells.

    Attributes:
      lm: the target, with the drafter of the cell that was run last.
      sets: see `load_sets`.
      shared: what the row of every cell says.
    """

    def __init__(self, args: argparse.Namespace):
        """Loads what the flags name.

        Raises:
          ValueError: what cannot be used, before any cell is run.
        """
        self._args, self._drafter = args, args.drafter[0]
        self.lm = models.load(args, drafter=self._drafter, gamma_max=args.gamma_max)
        self._drafter_sha256 = models.drafter_sha256(self.lm)
        check_drafts(args, self.lm)
        self.sets = load_sets(args, self.lm)
        self.shared = shared_settings(args, self.lm)

    def __call__(self, cell: Cell) -> Iterator[dict[str, Any]]:
        """Yields the row of a cell."""
        if cell.drafter != self._drafter:
            self.lm = _with_drafter(self._args, self.lm, cell.drafter)
            self._drafter, self._drafter_sha256 = (
                cell.drafter,
                models.drafter_sha256(self.lm),
            )
        subject = self.sets[cell.prompt_source]
        row = cells_lib.row_of(cell, run_cell(self._args, cell, subject, self.lm))
        row["prompts_sha256"] = prompts_sha256(subject, cell.category)
        row["capacity"] = subject.settings.capacity
        row["drafter_sha256"] = self._drafter_sha256
        yield row


def bench_like(args: argparse.Namespace, shared: Mapping[str, Any]) -> Bench:
    """Returns a `Bench` of another process; raises where its rows had other facts."""
    bench = Bench(args)
    other = [name for name in shared if bench.shared.get(name) != shared[name]]
    if other:
        raise ValueError(
            f"a worker has another {', '.join(other)}: have all files alike"
        )
    return bench


def print_sets(rows: Sequence[dict], console: rich_console.Console) -> None:
    """A table of each prompt set, and before it one by category, where it has several.

    Args:
      rows: of single categories.
    """
    for source in dict.fromkeys(row["prompt_source"] for row in rows):
        of_set = [row for row in rows if row["prompt_source"] == source]
        if len({row["category"] for row in of_set}) > 1:
            by_category = sorted(of_set, key=lambda row: row["category"] or "")
            tables.print_cells(by_category, console, title=f"{source}, by category")
        totals = cells_lib.totals(of_set)
        tables.print_cells(totals, console, title=source)
        tables.print_positions(totals, console, title=f"{source}: {POSITIONS}")
    tables.print_note(tables.CELLS_NOTE, console)


def run(args: argparse.Namespace) -> int:
    """Runs what is missing and shows all; returns the exit status."""
    console = terminal.console()
    for temperature in args.temperature:
        flags.sampling_settings(args, temperature)  # Before any cell is run.
    bench = Bench(args)
    cells, shared = grid(args, bench.sets), bench.shared
    fan = fan_out.of(args, bench_like, args, shared)
    with records.open_out(args) as out:
        rows = records.resume(out, shared)
        check_weights(args, bench.lm, rows)
        missing = unfinished(cells, bench.sets, rows)
        console.print(
            f"{len(cells)} cells, {len(cells) - len(missing)} of them in {args.out}",
            soft_wrap=True,
        )
        out.common = shared | records.provenance() | fan_out.describe(args)
        for cell, found in fan(bench, missing):
            for row in found:
                out.write(row)
                rows.append(records.to_json(row | out.common, "row"))
                matched = MATCHED_WORDS[row["matched"]]
                line = f"{cell}: {row['speedup_e2e']:.2f}x, {matched}"
                console.print(line, soft_wrap=True)
    # In the grid's order: on a cluster they come in another.
    place = {cell: number for number, cell in enumerate(cells)}
    rows = [row for row in rows if cells_lib.cell_of(row) in place]
    rows.sort(key=lambda row: place[cells_lib.cell_of(row)])
    console.print()
    print_sets(rows, console)
    return NOT_MATCHED if any(row["matched"] is False for row in rows) else MATCHED


POSITIONS = "share of drafts kept, of those whose predecessors were, by position"

MATCHED_WORDS = {True: "matched", False: "NOT MATCHED", None: "not compared"}

main = cli.script(
    "sweep.py",
    parse_args,
    run,
    kept=lambda args: (
        f"finished cells are in {args.out}, and the same command goes on from there"
    ),
)

if __name__ == "__main__":
    cli.end(main)
