"""The exactness suite: every cell, every prompt, one row each, and what they say."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.support import (
    exactness_batch as batches,
    exactness_cells as cells_lib,
    exactness_evidence as evidence,
    exactness_runs as runs,
    model_pair,
    prompt_runs,
)


Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be run.

    Attributes:
      target, draft: folders.
      cells: as `exactness_cells` puts them in order.
      prompts: `(id, token ids)`.
      weights: fingerprints of "target" and "draft" of each dtype.
    """

    target: Any
    draft: Any
    cells: Sequence[cells_lib.Cell]
    prompts: Sequence[tuple[str, list[int]]]
    weights: Mapping[str, Mapping[str, str]]
    settings: runs.Settings


def run(plan: Plan, *, done: Collection[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """The row of every cell and prompt that is not among `done`, as it finishes.

    Cells that share plain decoding go through prompts together, as many at once as the
    largest batch has slots, so that each is decoded once. Weights are held of one dtype
    at a time. After a prompt's row with differences comes one of the window in which
    they begin, where windows were recorded.

    Args:
      done: `key` of rows that are there.
    """
    weights: dict[str, tuple] = {}
    for cells in cells_lib.by_plain(plan.cells):
        weights = {
            dtype: kept for dtype, kept in weights.items() if dtype == cells[0].dtype
        }
        group = _Group(plan, weights)
        for numbers in _parts(range(len(plan.prompts)), max(c.batch for c in cells)):
            for cell in cells:
                for part in _parts(numbers, cell.batch):
                    missing = [n for n in part if (cell.name, n) not in done]
                    yield from group.run(cell, missing)
            group.forget_texts()


def _parts(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


class _Group:
    """Cells that share plain decoding: their models, their slots, and plain texts.

    Attributes:
      weights: `runs.weights_of` by dtype; those that are loaded are added.
    """

    def __init__(self, plan: Plan, weights: dict[str, tuple]):
        self.weights = weights
        self._plan = plan
        self._pairs: dict[cells_lib.Cell, model_pair.ModelPair] = {}
        self._slots: dict[cells_lib.Cell, batches.Slots] = {}
        self._plain: dict[int, runs.Plain] = {}

    def forget_texts(self) -> None:
        """Drops plain texts, with their keys and values."""
        self._plain.clear()

    def run(
        self, cell: cells_lib.Cell, numbers: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """The rows of some prompts, at most as many as the cell has slots."""
        if not numbers:
            return
        if cell not in self._pairs:
            self._pairs[cell] = runs.load(
                cell,
                target=self._plan.target,
                draft=self._plan.draft,
                weights=self.weights.get(cell.dtype),
            )
            self.weights[cell.dtype] = runs.weights_of(self._pairs[cell])
        run = self._run_alone if cell.batch == 1 else self._run_together
        for number, spec in zip(numbers, run(cell, numbers), strict=True):
            yield from _rows(self._plan, cell, number, self._plain[number], spec)

    def _plain_of(self, cell: cells_lib.Cell, number: int) -> runs.Plain:
        if number not in self._plain:
            prompt = self._plan.prompts[number][1]
            self._plain[number] = runs.run_plain(
                self._pairs[cell], cell, self._plan.settings, prompt
            )
        return self._plain[number]

    def _run_alone(self, cell, numbers) -> list[runs.Rounds]:
        pair, settings = self._pairs[cell], self._plan.settings
        return [
            runs.run_rounds(
                pair,
                cell,
                settings,
                self._plan.prompts[number][1],
                self._plain_of(cell, number),
            )
            for number in numbers
        ]

    def _run_together(self, cell, numbers) -> list[runs.Rounds]:
        """In slots that other prompts fill up, so that none has fewer neighbours."""
        pair, settings = self._pairs[cell], self._plan.settings
        if cell not in self._slots:
            self._slots[cell] = batches.open_slots(pair, cell, settings)
        total = len(self._plan.prompts)
        following = [(numbers[-1] + 1 + step) % total for step in range(total)]
        others = [number for number in following if number not in numbers]
        seated = [*numbers, *others][: cell.batch]
        self._slots[cell], found = batches.run(
            self._slots[cell],
            pair,
            cell,
            settings,
            [self._plan.prompts[number][1] for number in seated],
            [self._plain_of(cell, number) for number in seated],
        )
        return found[: len(numbers)]


def _rows(
    plan: Plan, cell: cells_lib.Cell, number: int, plain: runs.Plain, spec: runs.Rounds
) -> Iterator[dict[str, Any]]:
    """One prompt in one cell as a JSON row, and the window in which it differs."""
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
    if not differences:
        return
    window = evidence.window_row(plain.evidence, spec.evidence, differences)
    if window is not None:
        sides = ("dtype", "impl", "slab", "page_size", "verify_path", "prefill")
        yield {
            **window,
            "id": name,
            "prompt_ids": prompt,
            "acceptance": "verify",
            **{axis: getattr(cell, axis) for axis in sides},
            "weights_sha256": plan.weights[cell.dtype]["target"],
        }


def key(row: Row) -> tuple[str, int]:
    """What a prompt's row is the row of."""
    return row["cell"], row["index"]


def of_prompts(rows: Sequence[Row]) -> list[Row]:
    """The rows of prompts alone."""
    return [row for row in rows if row["kind"] == "prompt"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellSummary:
    """One cell, over all its prompts.

    Attributes:
      texts: how many different ones were generated: prompts that a model continues
        in the same way are one witness.
      nonfinite_logits: tokens that were chosen from logits that are not finite.
      constant_logits: tokens that were chosen from logits that are all equal.
      equal: prompts in which each of `evidence.WHATS` is that of plain decoding, or
        `evidence.NOT_COMPARED`.
    """

    cell: cells_lib.Cell
    prompts: int
    texts: int
    tokens: int
    rounds: int
    proposed: int
    accepted: int
    nonfinite_logits: int
    constant_logits: int
    equal: Mapping[str, int | str]

    @property
    def is_exact(self) -> bool:
        """Whether all that was compared is equal for every prompt, and means something.

        What was chosen from NaN or infinity does not.
        """
        return not self.nonfinite_logits and all(
            count in (self.prompts, evidence.NOT_COMPARED)
            for count in self.equal.values()
        )

    def to_row(self) -> dict[str, Any]:
        """The JSON form."""
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        return values | {"cell": dataclasses.asdict(self.cell), "exact": self.is_exact}


def summarise(cell: cells_lib.Cell, rows: Sequence[Row]) -> CellSummary:
    """The summary of a cell, from rows of prompts of any cells."""
    own = [row for row in rows if row["cell"] == cell.name]
    equal = {
        what: evidence.NOT_COMPARED
        if any(row["spec_sha256"][what] == evidence.NOT_COMPARED for row in own)
        else sum(all(d["what"] != what for d in row["differences"]) for row in own)
        for what in evidence.WHATS
    }
    counts = ("tokens", "rounds", "proposed", "accepted")
    counts += ("nonfinite_logits", "constant_logits")
    return CellSummary(
        cell=cell,
        prompts=len(own),
        texts=len({row["spec_sha256"]["tokens"] for row in own}),
        equal=equal,
        **{name: sum(row[name] for row in own) for name in counts},
    )


def warnings(summaries: Sequence[CellSummary]) -> list[str]:
    """What makes equality say less than it seems to, or nothing, in sentences."""
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
    """Prompts whose plain bits depend on what may not decide them: pages.

    Returns:
      For each choice of `exactness_cells.BIT_AXES` with such prompts, their number.
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


def encode(
    pair: model_pair.ModelPair, prompts: Sequence, *, raw: bool, count: int | None
) -> list[tuple[str, list[int]]]:
    """Ids and token ids of prompts; beginnings of them too, up to `count`.

    Raises:
      ValueError: fewer than `count` different beginnings.
    """
    encoded = prompt_runs.encode(pair, prompts, raw=raw)
    named = [(p.id, ids) for p, ids in zip(prompts, encoded, strict=True)]
    return named if count is None else beginnings(named, count)


def beginnings(
    prompts: Sequence[tuple[str, list[int]]], count: int
) -> list[tuple[str, list[int]]]:
    """The prompts, then their first seven eighths, and so on; each text once."""
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
