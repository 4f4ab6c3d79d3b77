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
      gamma: tokens drafted a round, or the most where a policy chooses; data to an
        executable, and so the cheapest axis.
      sampling: of `exactness_values.SAMPLINGS`.
      gamma_policy: of `policies.POLICIES`.
      batch: slots that share a forward: prompts at once, each compared with plain
        decoding alone; 1 is no batch.

    Certificates of before an axis was there lack it: it has a default.
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
    sampling: str = "greedy"
    gamma_policy: str = "fixed"
    batch: int = 1

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
            f"{self.cache} prefill {self.prefill} {self.sampling} | "
            f"{self.verify_path} {self.drafter} {self.draft_cache} "
            f"gamma {self.gamma} {self.gamma_policy} batch {self.batch}"
        )


AXES = tuple(field.name for field in dataclasses.fields(Cell))
PLAIN_AXES = ("dtype", "impl", "slab", "page_size", "cache", "prefill", "sampling")
BIT_AXES = ("dtype", "impl", "slab", "prefill", "sampling")

ALONE_ONLY = {
    "verify_path": ("row-loop", "flash", "library-rows"),
    "draft_cache": ("round",),
    "drafter": ("always-right", "always-wrong"),
}
"""What has no form for batches."""


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
      ValueError: a window that does not fit its slab, or a batch of what has none.
    """
    together: dict[str, dict[tuple, dict[Cell, None]]] = {}
    for choice in choices:
        if choice["gamma"] + 1 > choice["slab"]:
            raise ValueError(
                f"gamma={choice['gamma']} needs a slab of {choice['gamma'] + 1} rows, "
                f"and one of {choice['slab']} is among those to run; leave one of "
                "them out"
            )
        _check_batch(choice)
        slab = row_model.slab_for(choice["impl"], choice["slab"])
        cell = Cell(**{**choice, "slab": slab})
        of_weights = together.setdefault(cell.dtype, {})
        of_weights.setdefault(tuple(cell.plain.values()), {})[cell] = None
    groups = [group for groups in together.values() for group in groups.values()]
    return [cell for group in groups for cell in group]


def _check_batch(choice: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a batch of something that only runs alone."""
    for axis, values in ALONE_ONLY.items():
        if choice["batch"] > 1 and choice[axis] in values:
            raise ValueError(
                f"batch={choice['batch']} and {axis}={choice[axis]} do not go "
                "together, and both are among those to run; leave one of them out, or "
                "run them apart"
            )


def by_plain(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups that share plain decoding, in their order."""
    return [list(group) for _, group in itertools.groupby(cells, lambda c: c.plain)]
