"""The exactness suite: every cell, every prompt, one row each, and what they say."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lib import cell_runs, exact_cells as cells_lib
from spec_jax import loading
from spec_jax.debug import evidence


Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be run.

    Attributes:
      target, draft: folders; the draft is None where no cell has one.
      head: folder of the head of cells that have one.
      header: what rows and a certificate say of it, JSON values only: settings,
        environment, weights, prompts.
    """

    target: Any
    draft: Any
    # As `exact_cells.star` and `exact_cells.product` put them in order
    cells: Sequence[cells_lib.Cell]
    prompts: Sequence[tuple[str, list[int]]]  # `(id, token ids)`
    settings: cell_runs.Settings
    header: Mapping[str, Any]
    head: Any = None
    done: frozenset[tuple[str, int]] = frozenset()  # `key` of rows that are there


class Suite:
    """Runs cells of a plan, and keeps the weights of a dtype between them.

    Cells that share decoding go through prompts together, so many at once that each is
    decoded once and batches refill their slots.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._weights: dict[str, cell_runs.Weights] = {}
        self._forget()

    def _forget(self) -> None:
        self._models: loading.LanguageModel | None = None
        self._slots: dict[cells_lib.Cell, cell_runs.Slots] = {}
        self._plain: dict[int, cell_runs.Plain] = {}

    def __call__(self, cells: Sequence[cells_lib.Cell]) -> Iterator[dict[str, Any]]:
        """Yields the row of every cell and prompt that is not there."""
        prompts, done = self._plan.prompts, self._plan.done
        for group in cells_lib.by_plain(cells):
            self._forget()
            largest = max(cell.batch for cell in group)
            size = 2 * largest if largest > 1 else 1
            for first in range(0, len(prompts), size):
                part = range(first, min(first + size, len(prompts)))
                for cell in group:
                    missing = [n for n in part if (cell.name, n) not in done]
                    yield from self._rows(cell, missing)
                self._plain.clear()  # With its keys and values.

    def _rows(
        self, cell: cells_lib.Cell, numbers: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """Yields the rows of some prompts.

        Slots that they leave empty take others, so that none has fewer neighbours.
        """
        if not numbers:
            return
        prompts = self._plan.prompts
        following = [(numbers[-1] + 1 + n) % len(prompts) for n in range(len(prompts))]
        others = [number for number in following if number not in numbers]
        seated = [*numbers, *others[: max(cell.batch - len(numbers), 0)]]
        plain = [self._plain_of(cell, number) for number in seated]
        found = self._slots_of(cell).run(
            [prompts[number][1] for number in seated], plain
        )
        for at, number in enumerate(numbers):
            yield _row(cell, number, *prompts[number], plain[at], found[at])

    def _models_of(self, cell: cells_lib.Cell) -> loading.LanguageModel:
        """Returns the target and the draft model, which all cells of a group share."""
        if self._models is None:
            known = self._weights.get(cell.kind_of_weights)
            self._weights = {}  # Of one dtype at a time.
            folders = {"target": self._plan.target, "draft": self._plan.draft}
            lm = cell_runs.load_models(cell, **folders, weights=known)
            both = lm.params, lm.drafter_params
            self._models, self._weights = lm, {cell.kind_of_weights: both}
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
            settings, (_, prompt) = self._plan.settings, self._plan.prompts[number]
            lm = self._models_of(cell)
            self._plain[number] = cell_runs.run_plain(lm, cell, settings, prompt)
        return self._plain[number]


def _row(
    cell: cells_lib.Cell,
    number: int,
    name: str,
    prompt: list[int],
    plain: cell_runs.Plain,
    spec: cell_runs.Rounds,
) -> dict[str, Any]:
    """Returns one prompt in one cell as a row."""
    differences = evidence.compare(plain.evidence, spec.evidence)
    return {
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


def key(row: Row) -> tuple[str, int]:
    """Returns what a prompt's row is the row of."""
    return row["cell"], row["index"]


def summarise(cell: cells_lib.Cell, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the row of a cell, from rows of prompts of any cells.

    `texts` counts those that are different: prompts that a model continues in the same
    way are one witness. `equal` counts prompts in which each of `evidence.WHATS` is
    that of decoding; `exact` says whether all are, and mean something: what was chosen
    from NaN or infinity does not.
    """
    own = [row for row in rows if row["cell"] == cell.name]
    counts = ("tokens", "rounds", "proposed", "accepted")
    counts += ("nonfinite_logits", "constant_logits")
    equal = {
        what: sum(all(d["what"] != what for d in row["differences"]) for row in own)
        for what in evidence.WHATS
    }
    found = {
        "cell": cell.to_row(),
        "prompts": len(own),
        "texts": len({row["spec_sha256"]["tokens"] for row in own}),
        **{name: sum(row[name] for row in own) for name in counts},
        "equal": equal,
    }
    is_exact = not found["nonfinite_logits"] and set(equal.values()) == {len(own)}
    return found | {"exact": is_exact}


def warnings(summaries: Sequence[Row]) -> list[str]:
    """Returns what makes equality say less than it seems to, in sentences."""
    found = []
    for name, what in (
        ("nonfinite_logits", "hold NaN or infinity: equality means nothing there"),
        ("constant_logits", "are all equal: they prove nothing"),
    ):
        count = sum(summary[name] for summary in summaries)
        if count:
            total = sum(summary["tokens"] for summary in summaries)
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
