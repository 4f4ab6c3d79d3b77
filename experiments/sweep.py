"""How fast is each drafter, gamma and policy on which prompts, at which temperature?

Runs a grid of cells, each as spec_round.py runs prompts: by autoregressive decoding and
speculatively in turn, with all tokens compared, and the committed text replayed. A cell
that the file of results holds already is not run again: the same command goes on where
it was interrupted, and a larger grid adds to it. Ends with tables of the requested
cells, by category where prompts have one; `plot.py` draws what is kept of drafts by
their position. Drafters are evaluated so: --prompts names a folder of data sets, and
--temperature is 0,1. Exit status: 0 all matched, 2 not all matched, 1 the input was
unusable.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.lib import (
    cli,
    fan_out,
    flags,
    models,
    policies,
    prompts as prompts_lib,
    records,
    results as results_lib,
    tables,
    terminal,
)
from spec_jax.drafters import tree_shapes
from spec_jax.model import fingerprint


ALL = "all"
"""The category of a cell that has the prompts of all categories."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A place in the grid."""

    drafter: str
    temperature: float
    prompt_source: str
    category: str  # `ALL`, or the tokens of each prompt, of `--context`
    gamma_policy: str
    gamma: int  # tokens drafted a round; the most, with an adaptive policy
    # `flags.NO_TREE`, or the tree of `gamma` nodes that is drafted in place of chains
    tree: str = flags.NO_TREE

    def to_row(self) -> dict[str, Any]:
        """Returns the fields of a JSON row; chains have no `tree` there."""
        row = dataclasses.asdict(self)
        if self.tree == flags.NO_TREE:
            del row["tree"]
        return row


def cell_of(row: Mapping[str, Any]) -> Cell:
    """Returns the cell that a row belongs to."""
    names = [field.name for field in dataclasses.fields(Cell)]
    return Cell(**{name: row[name] for name in names if name in row})


FLAGS = f"""
    [models] models mesh
    [grid: a cell for each combination] drafters gammas=1,2,4 page-size trees
        --prompts N|FILE[:N]+=10  prompt sets: the first N bundled prompts, or files as
            spec_round.py takes them, or a folder, for all its files *.jsonl and those
            of its folders
        --context TOKENS,...  bring at most {prompts_lib.PER_CONTEXT} prompts to so many
            tokens, by those before them in the file: each number is a cell
        --temperature T,...=0  divides the logits; 0 is greedy
        --gamma-policy POLICY,...=fixed  of {", ".join(policies.MEASURED)};
            where they adapt, --gamma is the most that they may choose
    [the same in all cells] rule gen-tokens repeats ignore-stop raw
    [sampling, where the temperature is above 0] noise
    [cells on a cluster] cluster
    [out] one per finished cell; cells that are there already are not run again
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses flags of chains beside trees, and finds the prompt sets of folders."""
    if args.out is None:
        parser.error("--out is required: cells that it holds are not run again")
    args.prompts = [source for each in args.prompts for source in _sets_of(each)]
    args.gamma_max = max(args.gamma)
    flags.check_tree(parser, args, "gamma_policy")


parse_args = flags.parser(
    __doc__,
    FLAGS,
    kinds={"POLICY,...": cli.names(cli.one_of(policies.MEASURED))},
    defaults={"tree": (flags.NO_TREE,)},
    check=check,
)


def _sets_of(source: str) -> list[str]:
    """Returns the prompt sets of a folder, each with its `:N`; or the source itself."""
    path, colon, limit = source.rpartition(":")
    folder = pathlib.Path(path if colon else source)
    if not folder.is_dir():
        return [source]
    found = sorted([*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")])
    return [f"{file}{colon}{limit if colon else ''}" for file in found] or [source]


class Bench:
    """Runs cells: one target with all drafters, and the prompts of all cells.

    Attributes:
      shared: the fields that must be equal in all cells of one file.
    """

    def __init__(self, args: argparse.Namespace, shared: Mapping | None = None):
        """Loads the models and prompts that the flags name.

        Args:
          shared: `shared` of the process that asks for the cells, if it is another.

        Raises:
          ValueError: unusable flags, or another `shared` here; before any cell is run.
        """
        self._args = args
        lms = models.load_drafters(args, args.drafter, gamma_max=args.gamma_max)
        self._lms = {
            (name, tree): (
                lm if tree == flags.NO_TREE else models.with_tree(args, lm, tree)
            )
            for name, lm in lms.items()
            for tree in args.tree
        }
        lm = lms[args.drafter[0]]
        self._hashes = {name: models.drafter_sha256(one) for name, one in lms.items()}
        self._sets: dict[tuple[str, str], models.Subject] = {}
        for source in dict.fromkeys(args.prompts):
            # Answers to earlier turns are greedy: all cells have the same prompts.
            lengths = {str(context): context for context in args.context or ()}
            subject = models.prepare(args, lm, source, lengths=lengths)
            prompts = subject.prompts
            for category in lengths or (ALL,):
                own = [one for one in prompts if category in (ALL, one.category)]
                self._sets[source, category] = dataclasses.replace(subject, prompts=own)
        here, about = records.provenance(), models.describe(args, lm)
        del about["temperature"]  # It is an axis of the grid.
        # One file may get cells of other drafters later.
        about["draft"] = models.draft_of(args, "draft-model")
        machine = ("jax_version", "jaxlib_version", "platform", "device_kind", "cpu")
        self.shared = {
            "kind": "sweep",
            **about,
            "target_sha256": fingerprint.of_params(lm.params),
            "gamma_max": args.gamma_max,
            **{name: here[name] for name in machine},
        }
        other = [n for n in shared or () if self.shared.get(n) != shared[n]]
        if other:
            raise ValueError(
                f"a worker has another {', '.join(other)}: have all files alike"
            )

    def cells(self) -> list[Cell]:
        """Returns every cell that was asked for."""
        args, nodes = self._args, lambda tree: (tree_shapes.parse(tree).nodes,)
        axes = args.drafter, args.temperature, self._sets, args.gamma_policy, args.tree
        return [
            Cell(drafter, temperature, source, category, policy, gamma, tree)
            for drafter, temperature, (source, category), policy, tree in (
                itertools.product(*axes)
            )
            for gamma in (args.gamma if tree == flags.NO_TREE else nodes(tree))
        ]

    def about(self, cell: Cell) -> dict[str, str]:
        """Returns hashes of a cell's prompts and of its drafter's weights."""
        prompts = self._sets[cell.prompt_source, cell.category].prompts
        texts = [[message["content"] for message in one.messages] for one in prompts]
        return {
            "prompts_sha256": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
            "drafter_sha256": self._hashes[cell.drafter],
        }

    def __call__(self, cell: Cell) -> Iterator[dict[str, Any]]:
        """Yields the row of a cell, after a brief run that compiles."""
        lm = self._lms[cell.drafter, cell.tree]
        subject = self._sets[cell.prompt_source, cell.category]
        prompts = subject.prompts
        sampling = flags.sampling_settings(self._args, cell.temperature)
        change = {"lm": lm, "gamma": cell.gamma, "sampling": sampling}
        settings = dataclasses.replace(subject.settings, **change)
        how = {"name": cell.gamma_policy, "drafter": cell.drafter}
        settings = policies.of_run(self._args, settings, prompts, **how)
        # Programs that an earlier cell compiled are not compiled again.
        results_lib.warm_up([settings], prompts)
        with terminal.counted("prompts", total=len(prompts)) as advance:
            how = {"repeats": self._args.repeats, "after_prompt": advance}
            found = results_lib.run_prompts(settings, prompts, hands_on=False, **how)
            found = list(found)
        summary, by_category = results_lib.rows_of(found)
        about = {"capacity": settings.capacity, **self.about(cell)}
        yield cell.to_row() | summary | {"by_category": by_category} | about


def unfinished(bench: Bench, cells: Sequence[Cell], rows: Sequence[dict]) -> list[Cell]:
    """Returns the cells that have no row.

    Raises:
      ValueError: a row whose prompts or drafter have changed since.
    """
    finished = {cell_of(row): row for row in rows}
    for cell in cells:
        for name, now in bench.about(cell).items():
            if finished.get(cell, {name: now})[name] != now:
                raise ValueError(
                    f"{name} is another than that of the cell in the file "
                    f"({cell.drafter} on {cell.prompt_source}): name another file"
                )
    return [cell for cell in cells if cell not in finished]


def print_sets(rows: Sequence[dict]) -> None:
    """Prints a table of each prompt set, after one by category where it has several."""
    for source in dict.fromkeys(row["prompt_source"] for row in rows):
        of_set = [row for row in rows if row["prompt_source"] == source]
        by_category = [
            row | of_one | {"category": name}
            for row in of_set
            for name, of_one in row.get("by_category", {}).items()
        ]
        if by_category:
            by_category.sort(key=lambda row: row["category"])
            tables.print_cells(by_category, title=f"{source}, by category")
        tables.print_cells(of_set, title=source)
    tables.print_note(tables.CELLS_NOTE)


def run(args: argparse.Namespace) -> bool:
    """Runs the missing cells and shows all of them; returns whether all is well."""
    for temperature in args.temperature:
        flags.sampling_settings(args, temperature)  # Raises before any cell is run.
    bench = Bench(args)
    cells, shared = bench.cells(), bench.shared
    with records.JsonLines(args.out, allow_dirty=args.allow_dirty) as out:
        rows = records.resume(out, shared)
        missing = unfinished(bench, cells, rows)
        done = len(cells) - len(missing)
        terminal.show(f"{len(cells)} cells, {done} of them in {args.out}")
        out.common = shared | records.provenance() | fan_out.describe(args)
        for cell, found in fan_out.each(args, missing, bench, Bench, args, shared):
            for row in found:
                out.write(row)
                rows.append(records.to_json(row | out.common))
                told = " ".join(map(str, cell.to_row().values()))
                line = f"{told}: {row['speedup_e2e']:.2f}x, matched: {row['matched']}"
                terminal.show(line)
    # In the grid's order; a cluster returns cells in another order.
    by_cell = {cell_of(row): row for row in rows}
    rows = [by_cell[cell] for cell in cells]
    terminal.show()
    print_sets(rows)
    return all(row["matched"] is not False for row in rows)


KEPT = "finished cells are in {out}, and the same command goes on from there"
main = cli.script("sweep.py", parse_args, run, kept=KEPT)
