"""Batch invariance of kernels on this device, compared as integers.

A row's result, and the keys and values that it writes, must not depend on how many
rows are live, which place of the slab it has, how tall the slab is, what the others
hold (NaN here), which pages hold its prefix and how wide the page table is.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import noise
from spec_jax.pallas import skinny_gemm_triton as triton
from spec_jax.testing import compare


HEIGHT = 16
HEIGHTS = (1, 2, 5, 8, 32, 64)
_SHIFTS = (1, 5)

BY_ROW = ("x", "residual", "slots", "positions", "cos", "sin")
"""The inputs that have an entry for each row."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel with its rows."""

    run: Any  # `(inputs, pages) -> rows, pages`, compiled
    inputs: dict[str, Any]
    pages: Any = ()
    # `(inputs, pages) -> ` what the rows wrote, pytree of `[R, ...]`
    written: Any = lambda inputs, pages: ()
    # What must not matter, by name: the case with it
    others: Mapping[str, "Case"] = dataclasses.field(default_factory=dict)

    def results(self, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the rows of the kernel, and what they wrote."""
        y, pages = self.run(inputs, self.pages)
        return y, self.written(inputs, pages)


def check(name: str, case: Case) -> Iterator[Row]:
    """Yields the hash of all rows at once, then a row for what must not matter.

    Raises:
      ValueError: two calls differ, or a result is not finite.
    """
    expected = jax.device_get(case.results(case.inputs))
    if differing(expected, case.results(case.inputs)):
        raise ValueError(f"{name}: two calls give other bits")
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(expected):
        if not np.isfinite(leaf.astype(np.float32)).all():
            raise ValueError(f"{name} gives numbers that are not finite")
        digest.update(np.ascontiguousarray(leaf).tobytes())
    yield {"kind": "hash", "check": name, "sha256": digest.hexdigest()}
    found: dict[str, list[tuple[int, int]]] = {}
    for grid, actual, at, live in _grids(case):
        counts = compare_rows(actual, expected, at=at, live=live)
        found.setdefault(grid, []).append(counts)
    for grid, counts in found.items():
        wrong, elements = map(sum, zip(*counts, strict=True))
        yield {
            "kind": "bitwise",
            "check": f"{name}: {grid}",
            "cases": len(counts),
            "elements": elements,
            "differing": wrong,
            "equal": wrong == 0 and elements > 0,  # What compared nothing is not equal.
        }


def _grids(case: Case) -> Iterator[tuple[str, Any, np.ndarray, int]]:
    """Yields what is varied, rows, the rows of the reference that they should equal,
    and how many of them."""
    rows = np.arange(HEIGHT, dtype=np.int32)
    for live in range(1, HEIGHT + 1):
        y, pages = case.run(_poisoned(case.inputs, jnp.int32(live)), case.pages)
        yield "active rows", (y, case.written(case.inputs, pages)), rows, live
    pages = case.pages
    for row in rows:  # One after the other, as decoding writes them.
        at = (rows + row) % HEIGHT
        turned = _taken(case.inputs, at)
        y, pages = case.run(_poisoned(turned, jnp.int32(1)), pages)
        yield "alone", (y, case.written(turned, pages)), at, 1
    for shift in _SHIFTS:
        at = (rows + shift) % HEIGHT
        yield "other places", case.results(_taken(case.inputs, at)), at, HEIGHT
    for height in HEIGHTS:  # Past `HEIGHT` the rows come again.
        at = np.arange(height, dtype=np.int32) % HEIGHT
        inputs = _taken(case.inputs, at) | {"num_active": jnp.int32(height)}
        yield "other heights", case.results(inputs), at, height
    for name, other in case.others.items():
        yield name, other.results(case.inputs), rows, HEIGHT


def _taken(inputs: dict[str, Any], at: np.ndarray) -> dict[str, Any]:
    """The inputs with the rows `at`."""
    rows = jnp.asarray(at)
    return {
        name: value[rows] if name in BY_ROW else value for name, value in inputs.items()
    }


@jax.jit
def _poisoned(inputs, live):
    """NaN, and no slot or position that there is, in all rows from `live` on."""

    def poison(x):
        padding = jnp.arange(x.shape[0]) >= live
        padding = padding.reshape(-1, *[1] * (x.ndim - 1))
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.where(padding, jnp.asarray(jnp.nan if is_float else -1, x.dtype), x)

    made = {
        name: jax.tree.map(poison, value) if name in BY_ROW else value
        for name, value in inputs.items()
    }
    return {**made, "num_active": live}


def control(impl: str) -> Row:
    """Negative control: a plan that depends on the number of rows is seen."""
    interpret = impl == "interpret"
    terms = 128 if interpret else 2048
    matrix = noise.normal(0, (64, terms), "bfloat16", stddev=terms**-0.5)
    x = noise.normal(1, (HEIGHT, terms), "bfloat16")
    plans = (
        triton.Plan(block_n=16, block_k=64),
        triton.Plan(block_n=16, block_k=32, splits=terms // 64),
    )
    how = {"num_active": jnp.int32(HEIGHT), "norm": None, "eps": 1e-6}
    how |= {"residual": None, "out_dtype": jnp.dtype("float32")}
    one, two = (
        triton.project(x, matrix, plan=plan, interpret=interpret, **how)
        for plan in plans
    )
    wrong = differing(one, two)
    check = "a plan by the number of rows"
    return {"kind": "control", "check": check, "differing": wrong, "seen": wrong > 0}


def differing(actual: Any, expected: Any) -> int:
    """Counts the elements of two pytrees that differ as integers."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return sum(
        int(np.sum(compare.bits(left) != compare.bits(right))) for left, right in pairs
    )


def compare_rows(
    actual: Any, expected: Any, *, at: Sequence[int], live: int
) -> tuple[int, int]:
    """Compares row `r` of `actual` with row `at[r]` of `expected`, of the first `live`.

    Args:
      actual, expected: pytrees of arrays whose first axis is rows.

    Returns:
      How many elements differ as integers, and how many were compared.
    """
    rows = np.asarray(at)[:live]
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    unequal = [
        compare.bits(left)[:live] != compare.bits(right)[rows] for left, right in pairs
    ]
    return sum(int(x.sum()) for x in unequal), sum(x.size for x in unequal)
