"""Section (a): the row contract on the device, compared as integers.

Every kernel at the shapes of the models: rows among 1 to 16 live ones, alone, at other
places of the slab and in executables of other heights, beside rows that are NaN; then
whole steps, verification against decoding. The hash of each result is compared between
processes by whoever started them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.support import (
    gpu_arrays,
    gpu_bits,
    gpu_bitwise_attention,
    gpu_bitwise_step,
    gpu_kernels,
    gpu_task,
)
from spec_jax.pallas import (
    argmax_triton,
    rms_norm_triton,
    skinny_gemm_triton as triton,
)


HEIGHTS = (1, 2, 5, 8)
_EPS = 1e-6
_SHIFT = 5


class Case(NamedTuple):
    """A kernel: `call(rows, fixed, num_live)` for pytrees of rows and of the rest."""

    name: str
    call: Callable
    rows: Any
    fixed: Any


def row_cases(task: gpu_task.Task) -> dict[str, Callable[[], Case]]:
    """The kernels whose rows know nothing of each other; built when they are asked."""
    sizes = task.sizes
    made: dict[str, Callable[[], Case]] = {}
    for name in sizes.models:
        for matrix in gpu_kernels.matrices(name, sizes):
            made[matrix.name] = functools.partial(_product_case, matrix, task)
    made["norm"] = functools.partial(_norm_case, task)
    made["argmax"] = functools.partial(_argmax_case, task)
    return made


def _product_case(matrix: gpu_kernels.Matrix, task: gpu_task.Task) -> Case:
    shape, height = (matrix.columns, matrix.terms), task.sizes.height
    rows = {"x": gpu_arrays.normal(1, (height, matrix.terms))}
    if matrix.has_residual:
        rows["residual"] = gpu_arrays.normal(2, (height, matrix.columns))
    fixed = {
        "w": gpu_arrays.normal(3, shape, stddev=matrix.terms**-0.5),
        "norm": gpu_arrays.normal(4, (matrix.terms,)),
    }
    return Case(matrix.name, _product(matrix, task.interpret), rows, fixed)


def _product(
    matrix: gpu_kernels.Matrix, interpret: bool, plan: triton.Plan | None = None
) -> Callable:
    """The product as the model calls it, norm included where it has one."""

    def call(rows, fixed, num_live):
        shared = {"num_live": num_live, "eps": _EPS, "interpret": interpret}
        x, w, norm = rows["x"], fixed["w"], fixed["norm"]
        if matrix.is_gate:
            return triton.gate(x, w, norm=norm, plan=plan, **shared)
        return triton.project(
            x,
            w,
            norm=None if matrix.has_residual else norm,
            residual=rows.get("residual"),
            out_dtype=jnp.dtype(matrix.out_dtype),
            plan=plan,
            **shared,
        )

    return call


def _norm_case(task: gpu_task.Task) -> Case:
    width = task.sizes.target.hidden_size

    def call(rows, fixed, num_live):
        return rms_norm_triton.rms_norm(
            rows["x"], fixed["weight"], eps=_EPS, interpret=task.interpret
        )

    rows = {"x": gpu_arrays.normal(1, (task.sizes.height, width))}
    return Case("norm", call, rows, {"weight": gpu_arrays.normal(2, (width,))})


def _argmax_case(task: gpu_task.Task) -> Case:
    shape = task.sizes.height, task.sizes.target.vocab_size

    def call(rows, fixed, num_live):
        return argmax_triton.argmax(rows["x"], interpret=task.interpret)

    return Case("argmax", call, {"x": gpu_arrays.normal(1, shape, "float32")}, {})


def check_rows(case: Case, task: gpu_task.Task) -> None:
    """One row of results for each way in which rows could come to matter."""
    height = task.sizes.height
    call = jax.jit(case.call)
    reference = call(case.rows, case.fixed, jnp.int32(height))
    gpu_bits.report_hash(task, case.name, reference)
    finite = bool(jnp.all(jnp.isfinite(reference.astype(jnp.float32))))
    if not finite:
        raise ValueError(f"{case.name} gives numbers that are not finite")
    if task.only_hashes:
        return
    for grid, results in (
        ("live rows", _among_live(call, case, height)),
        ("alone", _alone(call, case, height)),
        ("other places", _moved(call, case, height)),
        ("other heights", _heights(call, case, height, task)),
    ):
        count = wrong = elements = 0
        for actual, at, live in results:
            count += 1
            found = gpu_bits.compare_rows(actual, reference, at=at, live=live)
            wrong, elements = wrong + found[0], elements + found[1]
        name = f"{case.name}: {grid}"
        gpu_bits.report(task, name, cases=count, elements=elements, wrong=wrong)


Results = Iterator[tuple[jax.Array, Sequence[int], int]]
"""Rows, the rows of the reference that they should equal, and how many of them."""


def _among_live(call: Callable, case: Case, height: int) -> Results:
    for live in range(1, height + 1):
        rows = gpu_bits.poisoned(case.rows, jnp.int32(live))
        yield call(rows, case.fixed, jnp.int32(live)), range(height), live


def _alone(call: Callable, case: Case, height: int) -> Results:
    for row in range(height):
        at = _turned(height, row)
        rows = gpu_bits.take_rows(case.rows, jnp.asarray(at))
        rows = gpu_bits.poisoned(rows, jnp.int32(1))
        yield call(rows, case.fixed, jnp.int32(1)), at, 1


def _moved(call: Callable, case: Case, height: int) -> Results:
    for shift in (1, _SHIFT):
        at = _turned(height, shift)
        rows = gpu_bits.take_rows(case.rows, jnp.asarray(at))
        yield call(rows, case.fixed, jnp.int32(height)), at, height


def _turned(height: int, shift: int) -> np.ndarray:
    return (np.arange(height, dtype=np.int32) + shift) % height


def _heights(call: Callable, case: Case, height: int, task) -> Results:
    """Each height is another executable."""
    for rows in HEIGHTS[1:3] if task.interpret else HEIGHTS:
        first = jax.tree.map(lambda x, n=rows: x[:n], case.rows)
        yield call(first, case.fixed, jnp.int32(rows)), range(rows), rows


def check_control(task: gpu_task.Task) -> None:
    """Negative control: a plan that depends on the number of rows is seen."""
    terms = 128 if task.interpret else 2048
    matrix = gpu_kernels.Matrix(
        name="control", columns=64, terms=terms, out_dtype="float32"
    )
    case = _product_case(matrix, task)
    plans = [
        triton.Plan(block_n=16, block_k=64),
        triton.Plan(block_n=16, block_k=32, splits=terms // 64),
    ]
    results = [
        jax.jit(_product(matrix, task.interpret, plan))(
            case.rows, case.fixed, jnp.int32(task.sizes.height)
        )
        for plan in plans
    ]
    wrong = gpu_bits.differing(*results)
    if not wrong:
        task.failures += 1
    task.write("control", check="a plan by the number of rows", differing=wrong)


def show_xla(task: gpu_task.Task) -> None:
    """Not a check: whether XLA's own product gives one row the bits of sixteen."""
    config = task.sizes.draft
    x = gpu_arrays.normal(1, (task.sizes.height, config.hidden_size))
    w = gpu_arrays.normal(2, (config.qkv_size, config.hidden_size))
    dot = jax.jit(
        lambda x, w: jax.lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
    )
    wrong = gpu_bits.differing(dot(x[:1], w), dot(x, w)[:1])
    task.write("seen", check="XLA's product of one row and of 16", differing=wrong)


def run(task: gpu_task.Task) -> None:
    """The whole section: the step first, because all else is a part of it."""
    jobs: dict[str, Callable[[], None]] = {
        "control": lambda: check_control(task),
        "step": lambda: gpu_bitwise_step.check(task),
        "attention": lambda: gpu_bitwise_attention.check(task),
    }
    for name, build in row_cases(task).items():
        jobs[name] = lambda build=build: check_rows(build(), task)
    jobs["XLA"] = lambda: show_xla(task)
    if task.only_hashes:
        del jobs["control"], jobs["XLA"]
    for name in task.in_time(task.chosen(jobs)):
        with task.guard(name):
            jobs[name]()
