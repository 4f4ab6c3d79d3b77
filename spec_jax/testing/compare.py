"""Comparisons for tests: as bits, and against an oracle within stated error."""

import math

import jax
import numpy as np


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """Views the bytes as unsigned integers of the item's size: NaNs compare too."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(actual, expected, *, what: str = "") -> None:
    """Raises `AssertionError` unless two pytrees are equal as integers.

    The message counts the differing elements and gives the largest difference.
    """
    structures = [jax.tree.structure(tree) for tree in (actual, expected)]
    if len(set(structures)) > 1:
        raise AssertionError(f"{what}: different structures: {structures}")
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    )
    for (path, left), right in pairs:
        left, right = np.asarray(left), np.asarray(right)
        name = f"{what}{jax.tree_util.keystr(path)}"
        if left.shape != right.shape or left.dtype != right.dtype:
            raise AssertionError(
                f"{name}: {left.shape} {left.dtype} against {right.shape} {right.dtype}"
            )
        different = bits(left) != bits(right)
        if different.any():
            with np.errstate(invalid="ignore"):  # Infinities may be among them.
                gap = np.abs(left.astype(np.float64) - right.astype(np.float64)).max()
            raise AssertionError(
                f"{name}: {different.sum()} of {different.size} elements differ, "
                f"by at most {gap:.3g}"
            )


UNIT_ROUNDOFF = {"float32": 2.0**-23, "bfloat16": 2.0**-8}


def tolerance(dtype, reduction: int) -> float:
    """Returns the relative error, in norm over a row, allowed to sums in `dtype`.

    The sums have `reduction` zero-mean terms and are taken in float32: their error
    grows with the square root. A rounding to `dtype`, of what is summed or of the
    result, does not.
    """
    summed = UNIT_ROUNDOFF["float32"] * math.sqrt(reduction)
    return 2 * (summed + UNIT_ROUNDOFF[np.dtype(dtype).name])


def assert_rows_close(actual, expected, *, dtype, reduction: int) -> None:
    """Raises `AssertionError` unless each row (last axis) is within `tolerance`.

    Relative row by row: a row of zeros, or of NaN, is never close.
    """
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape} against {expected.shape}")
    gap = np.linalg.norm(actual - expected, axis=-1)
    error = gap / np.linalg.norm(expected, axis=-1)
    allowed = tolerance(dtype, reduction)
    far = ~(error <= allowed)  # NaN is far
    if far.any():
        raise AssertionError(
            f"{far.sum()} of {far.size} rows are off by more than {allowed:.2g}: "
            f"up to {np.max(error):.2g} of their norm"
        )
