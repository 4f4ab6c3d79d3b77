"""Cells of the exactness suite: one way of running rounds, and lists of such ways.

A cell says everything that may decide a bit, beside weights and prompts. Knows names
and numbers; runs nothing.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.model import row_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One way of running rounds.

    Attributes:
      dtype: of both models.
      impl: a resolved implementation.
      slab: rows of every call of the target.
      prefill: "rows" or "batched".
      drafter: a name of `exactness_runs.DRAFTERS`.
      gamma: tokens drafted a round; data to an executable, and so the cheapest axis.
    """

    dtype: str
    impl: str
    slab: int
    page_size: int
    cache: str
    prefill: str
    verify_path: str
    draft_cache: str
    drafter: str
    gamma: int

    @property
    def plain(self) -> dict[str, Any]:
        """What plain decoding depends on: cells that share it share its runs."""
        return {axis: getattr(self, axis) for axis in PLAIN_AXES}

    @property
    def bits(self) -> dict[str, Any]:
        """What decides bits: cells that share it may not differ in one."""
        return {axis: getattr(self, axis) for axis in BIT_AXES}

    @property
    def name(self) -> str:
        """All of it, on one line."""
        return (
            f"{self.dtype} {self.impl} slab {self.slab} pages of {self.page_size} "
            f"{self.cache} prefill {self.prefill} | {self.verify_path} {self.drafter} "
            f"{self.draft_cache} gamma {self.gamma}"
        )


AXES = tuple(field.name for field in dataclasses.fields(Cell))
PLAIN_AXES = ("dtype", "impl", "slab", "page_size", "cache", "prefill")
BIT_AXES = ("dtype", "impl", "slab", "prefill")


def star(axes: Mapping[str, Sequence]) -> list[Cell]:
    """The first value of every axis, and every other value with the rest as it is."""
    base = {axis: values[0] for axis, values in axes.items()}
    varied = [
        base | {axis: value} for axis, values in axes.items() for value in values[1:]
    ]
    return _in_order([base, *varied])


def product(axes: Mapping[str, Sequence]) -> list[Cell]:
    """Every combination of values."""
    combinations = itertools.product(*axes.values())
    return _in_order([dict(zip(axes, values, strict=True)) for values in combinations])


def _in_order(choices: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """The cells, each once; those that share weights, or plain runs, stand together.

    Raises:
      ValueError: a window that does not fit its slab.
    """
    together: dict[str, dict[tuple, dict[Cell, None]]] = {}
    for choice in choices:
        if choice["gamma"] + 1 > choice["slab"]:
            raise ValueError(
                f"gamma={choice['gamma']} needs a slab of {choice['gamma'] + 1} rows, "
                f"and one of {choice['slab']} is among those to run; leave one of "
                "them out"
            )
        slab = row_model.slab_for(choice["impl"], choice["slab"])
        cell = Cell(**{**choice, "slab": slab})
        of_weights = together.setdefault(cell.dtype, {})
        of_weights.setdefault(tuple(cell.plain.values()), {})[cell] = None
    groups = [group for groups in together.values() for group in groups.values()]
    return [cell for group in groups for cell in group]


def by_plain(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups that share plain decoding, in their order."""
    return [list(group) for _, group in itertools.groupby(cells, lambda c: c.plain)]
