"""Two records of one scene, operation by operation: where they part, and by how much.

Knows arrays and the names of operations. Distances are in units in the last place
(ULPs): how many numbers of the dtype lie between two values. Values of
two dtypes are compared in the wider one, at their distance in the narrower one.
"""

import dataclasses
import math

import numpy as np

from experiments.lib.microscope import record as record_lib, scene as scene_lib
from spec_jax import testing


TOP = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """How far one operation of one layer is the same in both records.

    Attributes:
      differing: elements that differ; the sign of a zero is a difference.
      max_ulp: the largest distance; 0 between zeros.
      relative: norm of the difference over the norm of the first array; None where
        that is not finite, as with NaN or where the first is all zeros.
      rows: rows of the window in which an element differs.
    """

    differing: int
    elements: int
    max_ulp: int
    relative: float | None
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class First:
    """The first operation that differs, in order of computation, and its first row.

    Everything that it was computed from is the same in both records. In prefixes it is
    "k" or "v" at the first position, and there in the first layer, that differs.
    """

    layer: int | None
    operation: str
    row: int
    cell: Cell  # of that row alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of one row.

    Attributes:
      top: tokens and logits in descending order, the lower token first of equal ones.
      margin_ulp: of the two highest logits, in ULPs of the model's dtype at the
        highest one; None where they are not finite.
    """

    top: tuple[tuple[int, float], ...]
    margin_ulp: float | None

    @property
    def token(self) -> int:
        """The argmax."""
        return self.top[0][0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that two records differ in.

    Attributes:
      cells: by `observe.key`, all operations in order.
      choices: of each row of the window, the first record's and the second's.
    """

    cells: dict[str, Cell]
    first: First | None
    choices: tuple[tuple[Choice, Choice], ...]

    @property
    def num_values(self) -> int:
        """Elements that were compared."""
        return sum(cell.elements for cell in self.cells.values())

    @property
    def flips(self) -> tuple[int, ...]:
        """Rows of which the argmax differs."""
        return tuple(
            row
            for row, (one, other) in enumerate(self.choices)
            if one.token != other.token
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """How far the keys and values of two prefixes are the same, over all layers."""

    differing: int
    elements: int
    first: First | None  # its row is a position


def compare_prefixes(one: scene_lib.Scene, other: scene_lib.Scene) -> Prefix:
    """Compares the keys and values of the prefixes of two scenes.

    Raises:
      ValueError: scenes of other lengths or models.
    """
    pairs = {
        (layer, part): tuple(x.reshape(len(x), math.prod(x.shape[1:])) for x in pair)
        for part in "kv"
        for layer, pair in enumerate(
            zip(getattr(one, part), getattr(other, part), strict=True)
        )
    }
    cells = {at: cell_of(*pair) for at, pair in pairs.items()}
    parted = [(cell.rows[0], *at) for at, cell in cells.items() if cell.rows]
    first = None
    if parted:
        position, layer, part = min(parted)
        alone = (x[position : position + 1] for x in pairs[layer, part])
        first = First(layer=layer, operation=part, row=position, cell=cell_of(*alone))
    return Prefix(
        differing=sum(cell.differing for cell in cells.values()),
        elements=sum(cell.elements for cell in cells.values()),
        first=first,
    )


def compare(one: record_lib.Record, other: record_lib.Record) -> Comparison:
    """Compares two records of the same scene."""
    cells, first = {}, None
    for key in one.values:  # In order of computation.
        values = one.values[key], other.values[key]
        cells[key] = cell_of(*values)
        if first is None and cells[key].differing:
            row = cells[key].rows[0]
            alone = cell_of(*(value[row : row + 1] for value in values))
            layer, _, name = key.rpartition(":")
            number = int(layer) if layer else None
            first = First(layer=number, operation=name, row=row, cell=alone)
    return Comparison(
        cells=cells,
        first=first,
        choices=tuple(
            (choice_of(a, one.dtype), choice_of(b, other.dtype))
            for a, b in zip(one.logits, other.logits, strict=True)
        ),
    )


def cell_of(one: np.ndarray, other: np.ndarray) -> Cell:
    """Compares two arrays `[rows, width]` of one shape.

    Raises:
      ValueError: other shapes.
    """
    if one.shape != other.shape:
        raise ValueError(f"values of shape {one.shape} and {other.shape}")
    wide = np.promote_types(one.dtype, other.dtype)
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    differs = testing.bits(one.astype(wide)) != testing.bits(other.astype(wide))
    # A value beyond the narrower dtype is infinite there, and that is its distance.
    with np.errstate(over="ignore"):
        apart = ulps(one.astype(narrow), other.astype(narrow))
    return Cell(
        differing=int(differs.sum()),
        elements=differs.size,
        max_ulp=int(apart.max(initial=0)),
        relative=_relative(one, other),
        rows=tuple(np.flatnonzero(differs.any(axis=1)).tolist()),
    )


def ulps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Counts the floats between elements of one dtype, int64; both zeros are equal."""
    return np.abs(_ordinal(one) - _ordinal(other))


def _ordinal(x: np.ndarray) -> np.ndarray:
    """Maps floats to whole numbers in the same order, neighbours one apart."""
    raw = testing.bits(x).astype(np.int64)
    sign = np.int64(1) << (8 * x.dtype.itemsize - 1)
    return np.where(raw & sign, sign - raw, raw)


def _relative(one: np.ndarray, other: np.ndarray) -> float | None:
    """Returns the distance of `other` from `one` over the size of `one`, in float64."""
    ours, theirs = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Infinity less infinity.
        gap, size = np.linalg.norm(ours - theirs), np.linalg.norm(ours)
    is_number = np.isfinite(gap) and np.isfinite(size) and size > 0
    return float(gap / size) if is_number else None


def choice_of(logits: np.ndarray, dtype: str) -> Choice:
    """Describes the choice by a row's logits `[V]`. NaN counts as the highest."""
    keyed = np.where(np.isnan(logits), np.inf, logits)
    highest = np.argsort(-keyed, kind="stable")[:TOP]
    values = logits[highest].astype(np.float64)
    margin = None
    if len(values) > 1 and np.isfinite(values[:2]).all():
        # `np.dtype` knows bfloat16 by name, since jax registers it.
        unit = np.spacing(np.abs(logits[highest[0]]).astype(np.dtype(dtype)))
        margin = float((values[0] - values[1]) / np.float64(unit))
    return Choice(
        top=tuple(
            (int(token), float(value))
            for token, value in zip(highest, values, strict=True)
        ),
        margin_ulp=margin,
    )
