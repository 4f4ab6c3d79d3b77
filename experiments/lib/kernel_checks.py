"""Batch invariance of kernels on this device, compared as integers.

A row's result, and the keys and values that it writes, must not depend on how many
rows are live, which place of the slab it has, how tall the slab is, what the others
hold (NaN here), which pages hold its prefix and how wide the page table is.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import kernels
from spec_jax.pallas import skinny_gemm_triton as triton


HEIGHT = 16
HEIGHTS = (1, 2, 5, 8, 32, 64)
_SHIFTS = (1, 5)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel with its rows."""

    name: str
    run: Any  # `(inputs, pages) -> rows, pages`, compiled; inputs as in `kernels`
    inputs: dict[str, Any]
    pages: Any
    # `(inputs, pages) -> ` what the rows wrote, pytree of `[R, ...]`
    written: Any = lambda inputs, pages: ()
    # What must not matter, by name: `(run, pages, written)` of each
    others: tuple[tuple[str, Any, Any, Any], ...] = ()


def case_of(subject: kernels.Subject, impl: str) -> Case:
    """The kernel as `impl` computes it, with `HEIGHT` rows."""
    if subject.kernel == "attend":
        return _attention(subject, impl)
    subject = dataclasses.replace(subject, copies=1).for_impl(impl)
    fixed, pages = subject.allocate()
    inputs = dict(subject.inputs(impl, None, HEIGHT, HEIGHT))

    @jax.jit
    def call(inputs, fixed):
        return subject.call(impl, None, 0, inputs["x"], (), fixed, inputs)[0]

    run = lambda inputs, pages: (call(inputs, fixed), pages)
    return Case(name=subject.name, run=run, inputs=inputs, pages=pages)


def _attention(subject: kernels.Attention, impl: str) -> Case:
    """Rows of two slots in turn, one of them after a third of the context."""
    rows = np.arange(HEIGHT, dtype=np.int32)
    slots, ends = rows % 2, np.asarray([subject.context, subject.context // 3 + 1])
    positions = np.maximum(ends - HEIGHT // 2, 0).astype(np.int32)[slots] + rows // 2
    inputs = subject.rows_at(jnp.asarray(slots), jnp.asarray(positions))
    inputs["num_active"] = jnp.int32(HEIGHT)

    def layout(name: str, *, seed: int, wider: int):
        own = dataclasses.replace(subject, copies=2, spread=3, seed=seed)
        fixed, pages = own.allocate()
        table = jnp.concatenate(fixed["tables"])
        # Pages that nobody owns hold NaN; the same keys at each position elsewhere.
        pages = tuple(_laid_out(pool, table) for pool in pages)
        pad = jnp.full((2, wider), pages[0].shape[0], jnp.int32)
        fixed["tables"] = (jnp.concatenate([table, pad], axis=1),)

        @jax.jit
        def call(inputs, pages, fixed):
            return own.call(impl, None, 0, inputs["x"], pages, fixed, inputs)

        def written(inputs, pages):
            at = table[inputs["slots"], inputs["positions"] // kernels.PAGE_SIZE]
            offset = inputs["positions"] % kernels.PAGE_SIZE
            return tuple(pool[at, offset] for pool in pages)

        return name, lambda inputs, pages: call(inputs, pages, fixed), pages, written

    _, run, pages, written = layout("", seed=0, wider=0)
    width = pages[0].shape[0]
    others = (
        layout("other pages", seed=1, wider=0),
        layout("a wider table", seed=2, wider=width),
    )
    return Case(
        name=subject.name,
        run=run,
        inputs=inputs,
        pages=pages,
        written=written,
        others=others,
    )


@jax.jit
def _laid_out(pool, table):
    """The first pages' worth of noise at the places of the table, NaN elsewhere."""
    owned = pool[: table.size]
    return jnp.full_like(pool, jnp.nan).at[table.reshape(-1)].set(owned)


def reference(case: Case) -> tuple[Any, Row]:
    """All rows at once, twice; the result, and a row with its hash.

    Raises:
      ValueError: two calls differ, or a result is not finite.
    """
    found = _results(case.run, case.inputs, case.pages, case.written)
    again = _results(case.run, case.inputs, case.pages, case.written)
    if differing(found, again):
        raise ValueError(f"{case.name}: two calls give other bits")
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(found)):
        raise ValueError(f"{case.name} gives numbers that are not finite")
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(found):
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return found, {"kind": "hash", "check": case.name, "sha256": digest.hexdigest()}


def check(case: Case, expected: Any) -> Iterator[Row]:
    """A row of results for each thing that must not matter."""
    grids = {
        "active rows": _among_active(case),
        "alone": _alone(case),
        "other places": _moved(case),
        "other heights": _heights(case),
    }
    for name, run, pages, written in case.others:
        found = _results(run, case.inputs, pages, written)
        grids[name] = [(found, range(HEIGHT), HEIGHT)]
    for grid, results in grids.items():
        cases = wrong = elements = 0
        for actual, at, live in results:
            cases += 1
            counts = compare_rows(actual, expected, at=at, live=live)
            wrong, elements = wrong + counts[0], elements + counts[1]
        yield result(f"{case.name}: {grid}", cases, elements, wrong)


def result(check: str, cases: int, elements: int, wrong: int) -> Row:
    """The row of a check that has been made; what compared nothing is not equal."""
    equal = wrong == 0 and elements > 0
    counts = {"cases": cases, "elements": elements, "differing": wrong}
    return {"kind": "bitwise", "check": check, **counts, "equal": equal}


Results = Iterator[tuple[Any, Sequence[int], int]]
"""Rows, the rows of the reference that they should equal, and how many of them."""


def _results(run: Any, inputs: Any, pages: Any, written: Any) -> tuple[Any, Any]:
    y, pages = run(inputs, pages)
    return y, written(inputs, pages)


def _among_active(case: Case) -> Results:
    for live in range(1, HEIGHT + 1):
        inputs = _poisoned(case.inputs, jnp.int32(live))
        y, pages = case.run(inputs, case.pages)
        yield (y, case.written(case.inputs, pages)), range(HEIGHT), live


def _alone(case: Case) -> Results:
    """Row after row, as decoding writes them."""
    pages = case.pages
    for row in range(HEIGHT):
        at = _turned(row)
        turned = _taken(case.inputs, jnp.asarray(at))
        y, pages = case.run(_poisoned(turned, jnp.int32(1)), pages)
        yield (y, case.written(turned, pages)), at, 1


def _moved(case: Case) -> Results:
    for shift in _SHIFTS:
        at = _turned(shift)
        inputs = _taken(case.inputs, jnp.asarray(at))
        yield _results(case.run, inputs, case.pages, case.written), at, HEIGHT


def _heights(case: Case) -> Results:
    """Each height is another executable; past `HEIGHT` the rows come again."""
    for height in HEIGHTS:
        at = np.arange(height, dtype=np.int32) % HEIGHT
        inputs = _taken(case.inputs, jnp.asarray(at))
        inputs["num_active"] = jnp.int32(height)
        found = _results(case.run, inputs, case.pages, case.written)
        yield found, at, height


def _turned(shift: int) -> np.ndarray:
    return (np.arange(HEIGHT, dtype=np.int32) + shift) % HEIGHT


def _taken(inputs: dict[str, Any], at: jax.Array) -> dict[str, Any]:
    """The inputs with the rows `at`."""
    return {
        name: value[at] if name in kernels.BY_ROW and value is not None else value
        for name, value in inputs.items()
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
        name: jax.tree.map(poison, value) if name in kernels.BY_ROW else value
        for name, value in inputs.items()
    }
    return {**made, "num_active": live}


def control(impl: str) -> Row:
    """Negative control: a plan that depends on the number of rows is seen."""
    terms = 128 if impl == "interpret" else 2048
    subject = kernels.Projection(
        name="control", kernel="project", shape=(64, terms), dtype="bfloat16",
        out_dtype="float32",
    )  # fmt: skip
    fixed, _ = subject.allocate()
    inputs = subject.inputs(impl, None, HEIGHT, HEIGHT)
    plans = (
        triton.Plan(block_n=16, block_k=64),
        triton.Plan(block_n=16, block_k=32, splits=terms // 64),
    )
    call = jax.jit(subject.call, static_argnums=(0, 1, 2))
    one, two = (
        call(impl, plan, 0, inputs["x"], (), fixed, inputs)[0] for plan in plans
    )
    wrong = differing(one, two)
    check = "a plan by the number of rows"
    return {"kind": "control", "check": check, "differing": wrong, "seen": wrong > 0}


def differing(actual: Any, expected: Any) -> int:
    """How many elements of two pytrees differ as integers, counted on the device."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return sum(int(_differing(left, right)) for left, right in pairs)


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


def _bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
