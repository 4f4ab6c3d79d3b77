"""The exactness suite: every cell, every prompt, one row each, and what they say."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lib import cell_runs, exact_cells as cells_lib
from spec_jax import loading
from spec_jax.debug import evidence
from spec_jax.model import fingerprint


Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be run.

    Attributes:
      target, draft: folders; the draft is None where no cell has one.
      head: folder of the head of cells that have one.
    """

    target: Any
    draft: Any
    # As `exact_cells.star` and `exact_cells.product` put them in order
    cells: Sequence[cells_lib.Cell]
    prompts: Sequence[tuple[str, list[int]]]  # `(id, token ids)`
    # Fingerprints of "target", "draft" and, where there is one, "head" of each dtype
    weights: Mapping[str, Mapping[str, str]]
    settings: cell_runs.Settings
    head: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Some of a plan's cells, with what is there of them already."""

    cells: tuple[cells_lib.Cell, ...]
    done: frozenset[tuple[str, int]]  # `key` of rows

    @classmethod
    def of(
        cls,
        plan: Plan,
        cells: Sequence[cells_lib.Cell],
        done: Collection[tuple[str, int]],
    ) -> "Task | None":
        """Returns the task, or none where all of its rows are there."""
        names = {cell.name for cell in cells}
        own = frozenset(key for key in done if key[0] in names)
        if len(own) == len(cells) * len(plan.prompts):
            return None
        return cls(cells=tuple(cells), done=own)

    def __str__(self) -> str:
        """The names of its cells."""
        return "; ".join(cell.name for cell in self.cells)


class Suite:
    """Runs cells of a plan, task after task, and keeps the weights between them.

    Args:
      is_away: in another process than the plan was made in, whose folders may hold
        other weights.
    """

    def __init__(self, plan: Plan, is_away: bool = False):
        self._plan, self._is_away = plan, is_away
        self._weights: dict[str, cell_runs.Weights] = {}

    def __call__(self, task: Task) -> Iterator[dict[str, Any]]:
        """Returns the rows of a task; raises `ValueError` for other weights."""
        if self._is_away:
            for cell in task.cells:
                self._check_weights(cell)
        plan = dataclasses.replace(self._plan, cells=task.cells)
        return run(plan, done=task.done, weights=self._weights)

    def _check_weights(self, cell: cells_lib.Cell) -> None:
        if cell.dtype in self._weights:
            return
        lm = cell_runs.load_models(
            cell, target=self._plan.target, draft=self._plan.draft
        )
        both = lm.params, lm.drafter_params
        wanted = self._plan.weights[cell.dtype]
        for name, params in zip(("target", "draft"), both, strict=True):
            if name in wanted and fingerprint.of_params(params) != wanted[name]:
                raise ValueError(
                    f"{getattr(self._plan, name)}: a worker has other weights of the "
                    f"{name}; have all machines read the same files"
                )
        self._weights.clear()  # Of one dtype at a time.
        self._weights[cell.dtype] = both


def run(
    plan: Plan,
    *,
    done: Collection[tuple[str, int]],
    weights: dict[str, cell_runs.Weights] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the row of every cell and prompt that is not among `done`.

    Cells that share decoding go through prompts together, so many at once that each is
    decoded once and batches refill their slots. Weights are held of one dtype at a
    time. After a prompt's row with differences comes one of the window in which they
    begin.

    Args:
      done: `key` of rows that are there.
      weights: by dtype, which are not loaded again; left as they are needed last.
    """
    weights = {} if weights is None else weights
    for cells in cells_lib.by_plain(plan.cells):
        for dtype in {*weights} - {cells[0].dtype}:
            del weights[dtype]
        group = _Group(plan, weights)
        largest = max(cell.batch for cell in cells)
        size = 2 * largest if largest > 1 else 1
        for first in range(0, len(plan.prompts), size):
            part = range(first, min(first + size, len(plan.prompts)))
            for cell in cells:
                missing = [n for n in part if (cell.name, n) not in done]
                yield from group.run(cell, missing)
            group.forget_texts()


class _Group:
    """Cells that share decoding: their models, their slots, and what was decoded.

    Attributes:
      weights: by dtype; those that are loaded are added.
    """

    def __init__(self, plan: Plan, weights: dict[str, cell_runs.Weights]):
        self.weights = weights
        self._plan = plan
        self._models: loading.LanguageModel | None = None
        self._slots: dict[cells_lib.Cell, cell_runs.Slots] = {}
        self._plain: dict[int, cell_runs.Plain] = {}

    def forget_texts(self) -> None:
        """Drops what was decoded, with its keys and values."""
        self._plain.clear()

    def run(
        self, cell: cells_lib.Cell, numbers: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """Yields the rows of some prompts.

        Slots that they leave empty take others, so that none has fewer neighbours.
        """
        if not numbers:
            return
        total = len(self._plan.prompts)
        following = [(numbers[-1] + 1 + step) % total for step in range(total)]
        others = [number for number in following if number not in numbers]
        seated = [*numbers, *others[: max(cell.batch - len(numbers), 0)]]
        plain = [self._plain_of(cell, number) for number in seated]
        found = self._slots_of(cell).run(
            [self._plan.prompts[number][1] for number in seated], plain
        )
        for at, number in enumerate(numbers):
            yield from _rows(self._plan, cell, number, plain[at], found[at])

    def _models_of(self, cell: cells_lib.Cell) -> loading.LanguageModel:
        """Returns the target and the draft model, which all cells of a group share."""
        if self._models is None:
            plan = self._plan
            self._models = cell_runs.load_models(
                cell,
                target=plan.target,
                draft=plan.draft,
                weights=self.weights.get(cell.dtype),
            )
            lm = self._models
            self.weights[cell.dtype] = lm.params, lm.drafter_params
        return self._models

    def _slots_of(self, cell: cells_lib.Cell) -> cell_runs.Slots:
        if cell not in self._slots:
            lm = cell_runs.with_drafter(
                self._models_of(cell), cell, head=self._plan.head
            )
            self._slots[cell] = cell_runs.Slots(lm, cell, self._plan.settings)
        return self._slots[cell]

    def _plain_of(self, cell: cells_lib.Cell, number: int) -> cell_runs.Plain:
        if number not in self._plain:
            self._plain[number] = cell_runs.run_plain(
                self._models_of(cell),
                cell,
                self._plan.settings,
                self._plan.prompts[number][1],
            )
        return self._plain[number]


def _rows(
    plan: Plan,
    cell: cells_lib.Cell,
    number: int,
    plain: cell_runs.Plain,
    spec: cell_runs.Rounds,
) -> Iterator[dict[str, Any]]:
    """Yields one prompt in one cell as a row, and the window in which it differs."""
    name, prompt = plan.prompts[number]
    differences = evidence.compare(plain.evidence, spec.evidence)
    yield {
        "kind": "prompt",
        "cell": cell.name,
        "index": number,
        "id": name,
        "prompt_tokens": len(prompt),
        "tokens": len(spec.evidence.tokens),
        "rounds": spec.rounds,
        "proposed": spec.proposed,
        "accepted": spec.accepted,
        "nonfinite_logits": max(plain.evidence.nonfinite, spec.evidence.nonfinite),
        "constant_logits": int(plain.evidence.decisions.constant.sum()),
        "differences": [difference.to_row() for difference in differences],
        "plain_sha256": plain.evidence.hashes(),
        "spec_sha256": spec.evidence.hashes(),
    }
    # The microscope runs windows of chains.
    if not differences or cell.tree != cells_lib.NO_TREE:
        return
    window = evidence.window_row(plain.evidence, spec.evidence, differences)
    if window is not None:
        sides = ("dtype", "impl", "slab", "page_size", "prefill")
        yield {
            **window,
            "id": name,
            "prompt_ids": prompt,
            "verify_path": "paged-decode",
            **{axis: getattr(cell, axis) for axis in sides},
            "weights_sha256": plan.weights[cell.dtype]["target"],
        }


def key(row: Row) -> tuple[str, int]:
    """Returns what a prompt's row is the row of."""
    return row["cell"], row["index"]


def of_prompts(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of prompts alone."""
    return [row for row in rows if row["kind"] == "prompt"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellSummary:
    """One cell, over all its prompts."""

    cell: cells_lib.Cell
    prompts: int
    # How many different ones were generated: prompts that a model continues in the same
    # way are one witness
    texts: int
    tokens: int
    rounds: int
    proposed: int
    accepted: int
    nonfinite_logits: int  # tokens that were chosen from logits that are not finite
    constant_logits: int  # tokens that were chosen from logits that are all equal
    # Prompts in which each of `evidence.WHATS` is that of decoding
    equal: Mapping[str, int]

    @property
    def is_exact(self) -> bool:
        """Whether everything is equal for every prompt, and means something.

        What was chosen from NaN or infinity does not.
        """
        return not self.nonfinite_logits and set(self.equal.values()) == {self.prompts}

    def to_row(self) -> dict[str, Any]:
        """Returns the JSON form."""
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        return values | {"cell": self.cell.to_row(), "exact": self.is_exact}


def summarise(cell: cells_lib.Cell, rows: Sequence[Row]) -> CellSummary:
    """Returns the summary of a cell, from rows of prompts of any cells."""
    own = [row for row in rows if row["cell"] == cell.name]
    counts = ("tokens", "rounds", "proposed", "accepted")
    counts += ("nonfinite_logits", "constant_logits")
    return CellSummary(
        cell=cell,
        prompts=len(own),
        texts=len({row["spec_sha256"]["tokens"] for row in own}),
        equal={
            what: sum(all(d["what"] != what for d in row["differences"]) for row in own)
            for what in evidence.WHATS
        },
        **{name: sum(row[name] for row in own) for name in counts},
    )


def warnings(summaries: Sequence[CellSummary]) -> list[str]:
    """Returns what makes equality say less than it seems to, in sentences."""
    found = []
    for name, what in (
        ("nonfinite_logits", "hold NaN or infinity: equality means nothing there"),
        ("constant_logits", "are all equal: they prove nothing"),
    ):
        count = sum(getattr(summary, name) for summary in summaries)
        if count:
            total = sum(summary.tokens for summary in summaries)
            found.append(f"{count:,} of {total:,} tokens are of logits that {what}")
    return found


def across_pages(
    cells: Sequence[cells_lib.Cell], rows: Sequence[Row]
) -> list[tuple[dict[str, Any], int]]:
    """Returns prompts whose decoded bits depend on what may not decide them: pages.

    For each choice of `exact_cells.BIT_AXES` with such prompts, their number.
    """
    bits_of = {cell.name: tuple(cell.bits.items()) for cell in cells}
    seen: dict[tuple, dict[int, set]] = {}
    for row in rows:
        by_prompt = seen.setdefault(bits_of[row["cell"]], {})
        hashes = tuple(row["plain_sha256"][what] for what in evidence.WHATS)
        by_prompt.setdefault(row["index"], set()).add(hashes)
    counts = {
        bits: int(np.sum([len(hashes) > 1 for hashes in by_prompt.values()]))
        for bits, by_prompt in seen.items()
    }
    return [(dict(bits), count) for bits, count in counts.items() if count]


def beginnings(
    prompts: Sequence[tuple[str, list[int]]], count: int
) -> list[tuple[str, list[int]]]:
    """Returns the prompts, then their first seven eighths, and so on; each text once.

    Raises:
      ValueError: fewer than `count` different ones.
    """
    found: dict[tuple[int, ...], str] = {}
    for eighths in range(8, 0, -1):
        for name, ids in prompts:
            length = -(-len(ids) * eighths // 8)
            label = name if length == len(ids) else f"{name}[:{length}]"
            found.setdefault(tuple(ids[:length]), label)
    if len(found) < count:
        raise ValueError(
            f"{count} prompts asked for, but the {len(prompts)} bundled ones have "
            f"{len(found)} different beginnings; ask for at most {len(found)}"
        )
    return [(name, list(ids)) for ids, name in list(found.items())[:count]]
