"""Batches: which sequences an optimiser step has, a function of its number."""

from collections.abc import Callable
from typing import Any

import numpy as np


Batch = dict[str, Any]
"""Arrays `[B, ..]` by name; `mask` marks the tokens that count."""

Data = Any
"""Data with a length, indexed by an array to give a `Batch`, such as `targets.Outputs`;
`columns` are how many each sequence has."""

Draw = Callable[[Batch, np.ndarray, int | None], Batch]
"""`(batch, rows, step) -> batch`, with what is drawn anew in each step: a pure function
of the indices of its sequences and of the step, None where they are held out."""


def rows_of_step(
    columns: np.ndarray,
    *,
    size: int,
    step: int,
    seed: int,
    unit: int = 1,
    is_counted: bool = False,
) -> np.ndarray:
    """Returns the numbers of a step's sequences, in an order of its epoch's own.

    An epoch has each sequence at most once; those at its end that fill no batch are
    left out. Where not all `columns` are the same, batches have one number of them: of
    the longest `size`, and of shorter ones so many more that a batch holds about as
    much, unless sequences are counted. A pure function of its arguments, so that a
    resumed run sees the same batches.

    Args:
      unit: divides the sequences of a batch.
      is_counted: for a `Draw`: what it draws of each sequence decides how much that is.
    """
    counts = {}
    for width, there in zip(*np.unique(columns, return_counts=True), strict=True):
        count = size if is_counted else int(size * columns.max() // width)
        if width < columns.max():
            count = max(min(count, there) // unit * unit, unit)
        counts[width] = count, there // count
    per_epoch = sum(number for _, number in counts.values())
    if per_epoch == 0:
        raise ValueError(
            f"batch size {size} exceeds the {len(columns)} windows of data"
        )
    epoch, index = divmod(step, per_epoch)
    random = np.random.default_rng((seed, epoch))
    batches = []
    for width, (count, number) in counts.items():
        rows = random.permutation(np.flatnonzero(columns == width))
        batches += [*rows[: number * count].reshape(number, count)]
    order = random.permutation(per_epoch) if len(counts) > 1 else range(per_epoch)
    return batches[order[index]]
