"""What tests and experiments need to compare bits."""

import jax
import numpy as np


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """The array's bytes as unsigned integers of the item's size: NaNs compare too."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(actual, expected, *, what: str = "") -> None:
    """Raises `AssertionError` unless two pytrees are equal as integers.

    The message counts the differing elements and gives the largest difference.
    """
    structures = jax.tree.structure(actual), jax.tree.structure(expected)
    if structures[0] != structures[1]:
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
            gap = np.abs(left.astype(np.float64) - right.astype(np.float64)).max()
            raise AssertionError(
                f"{name}: {different.sum()} of {different.size} elements differ, "
                f"by at most {gap:.3g}"
            )
