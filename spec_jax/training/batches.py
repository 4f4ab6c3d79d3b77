"""Batches: which sequences an optimiser step has, a function of its number."""

from collections.abc import Callable
from typing import Any

import numpy as np


Batch = Any
"""A pytree of arrays `[B, ..]`; where it is one array, tokens `[B, T + 1]`."""

Data = Any
"""Data with a length, indexed by an array to give a `Batch`: an array, say."""

Draw = Callable[[Batch, np.ndarray, int | None], Batch]
"""`(batch, rows, step) -> batch`, with what is drawn anew in each step: a pure function
of the indices of its sequences and of the step, None where they are held out."""


def of_step(
    data: Data,
    *,
    size: int,
    step: int,
    seed: int,
    unit: int = 1,
    draw: Draw | None = None,
) -> Batch:
    """Returns the sequences of optimiser step `step`, in an order of its epoch's own.

    An epoch has each sequence at most once; those at its end that fill no batch are
    left out. Data with `columns`, of which not all are the same, comes in batches of
    one number of columns: of the longest `size`, and of shorter ones so many more that
    a batch holds about as much. A pure function of its arguments, so that a resumed
    run sees the same batches.

    Args:
      unit: divides the sequences of a batch.
      draw: where it is given, `size` sequences are a batch whatever their columns:
        what it draws of each decides how much that is.
    """
    columns = columns_of(data)
    counts = {}
    for width, there in zip(*np.unique(columns, return_counts=True), strict=True):
        count = size if draw else int(size * columns.max() // width)
        if width < columns.max():
            count = max(min(count, there) // unit * unit, unit)
        counts[width] = count, there // count
    per_epoch = sum(number for _, number in counts.values())
    if per_epoch == 0:
        raise ValueError(f"batch size {size} exceeds the {len(data)} windows of data")
    epoch, index = divmod(step, per_epoch)
    random = np.random.default_rng((seed, epoch))
    batches = []
    for width, (count, number) in counts.items():
        rows = random.permutation(np.flatnonzero(columns == width))
        batches += [*rows[: number * count].reshape(number, count)]
    order = random.permutation(per_epoch) if len(counts) > 1 else range(per_epoch)
    rows = batches[order[index]]
    return data[rows] if draw is None else draw(data[rows], rows, step)


def columns_of(data: Data) -> np.ndarray:
    """Returns the columns of each sequence, where they have several numbers."""
    return np.asarray(getattr(data, "columns", np.ones(len(data), int)))
