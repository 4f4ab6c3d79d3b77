"""Bits compared on the device, and the rows that say what came of it."""

import hashlib
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
