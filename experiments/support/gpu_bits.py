"""Bits compared on the device, and the rows that say what came of it."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.support import gpu_task


def differing(actual: Any, expected: Any) -> int:
    """How many elements of two pytrees differ as integers, counted on the device."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return int(sum(_differing(left, right) for left, right in pairs))


@jax.jit
def _differing(left, right):
    return jnp.sum(_bits(left) != _bits(right), dtype=jnp.int32)


def compare_rows(
    actual: Any, expected: Any, *, at: Sequence[int], live: int
) -> tuple[int, int]:
    """Row `r` of `actual` against row `at[r]` of `expected`, for `r` below `live`.

    Which rows are compared is data: nothing is compiled for it.

    Args:
      actual, expected: pytrees of arrays whose first axis is rows.

    Returns:
      How many elements differ as integers, and how many were compared.
    """
    wrong = elements = 0
    at = jnp.asarray(np.asarray(at, np.int32))
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for left, right in pairs:
        wrong += int(_differing_rows(left, right, at, jnp.int32(live)))
        elements += live * math.prod(left.shape[1:])
    return wrong, elements


@jax.jit
def _differing_rows(left, right, at, live):
    unequal = _bits(left) != _bits(right)[at]
    rows = jnp.arange(left.shape[0]).reshape(-1, *[1] * (left.ndim - 1))
    return jnp.sum(unequal & (rows < live), dtype=jnp.int32)


@jax.jit
def take_rows(rows: Any, at: jax.Array) -> Any:
    """The rows `at` of each array of a pytree."""
    return jax.tree.map(lambda x: x[at], rows)


@jax.jit
def poisoned(rows: Any, live: jax.Array) -> Any:
    """NaN in all rows from `live` on, of a pytree of `[R, N]`."""

    def poison(x):
        dead = jnp.arange(x.shape[0])[:, None] >= live
        return jnp.where(dead, jnp.asarray(jnp.nan, x.dtype), x)

    return jax.tree.map(poison, rows)


def _bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def report_hash(task: gpu_task.Task, check: str, tree: Any) -> None:
    """The row that is compared with the same one of another process."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    task.write("hash", check=check, sha256=digest.hexdigest())


def report(
    task: gpu_task.Task, check: str, *, cases: int, elements: int, wrong: int
) -> None:
    """The row of a check that has been made; what differs is a failure."""
    if wrong or not elements:
        task.failures += 1
    task.write(
        "bitwise",
        check=check,
        cases=cases,
        elements=elements,
        differing=wrong,
        equal=wrong == 0 and elements > 0,
    )
