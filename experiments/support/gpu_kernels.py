"""Section (b): each kernel alone, by its plan, beside a copy timed in the same turns.

A product reads its weights and computes little: it is measured in bytes of weights per
second. Calls go over as many copies of the weights as fill several L2 caches; only
`x` is shared, as it is in a model.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.support import (
    gpu_arrays,
    gpu_attention,
    gpu_clock,
    gpu_plans,
    gpu_task,
)
from spec_jax.model import params as params_lib
from spec_jax.pallas import (
    argmax_triton,
    rms_norm_triton,
    skinny_gemm_mosaic as mosaic,
    skinny_gemm_triton as triton,
)


LEAST_CALLS, MOST_COPIES = 8, 96
_BATCH = 4  # candidates that are timed in turns
_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """Weights of a step, and what is done with the product.

    Attributes:
      name: with the model's.
      columns, terms: `N` and `K` of weights `[N, K]`, a gate's two halves together.
    """

    name: str
    columns: int
    terms: int
    is_gate: bool = False
    has_residual: bool = False
    out_dtype: str = "bfloat16"

    @property
    def parts(self) -> int:
        return 2 if self.is_gate else 1

    @property
    def num_bytes(self) -> int:
        return 2 * self.columns * self.terms


def matrices(name: str, sizes: gpu_task.Sizes) -> list[Matrix]:
    """The products of a step of `sizes.target` or `sizes.draft`, by its name."""
    shapes = params_lib.shapes(getattr(sizes, name))
    layer = shapes.layers[0]

    def matrix(what: str, leaf: jax.ShapeDtypeStruct, **extras) -> Matrix:
        columns, terms = leaf.shape
        return Matrix(name=f"{name} {what}", columns=columns, terms=terms, **extras)

    made = {
        "qkv": matrix("qkv", layer.qkv),
        "out": matrix("out", layer.attention_out, has_residual=True),
        "gate": matrix("gate", layer.gate_up, is_gate=True),
        "down": matrix("down", layer.down, has_residual=True),
        "head": matrix("head", shapes.head, out_dtype="float32"),
    }
    return [made[product] for product in sizes.products]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to multiply: an implementation and its plan; None where it has none."""

    impl: str
    plan: Any
    is_own: bool  # what the implementation chooses itself

    @property
    def label(self) -> str:
        plan = "" if self.plan is None else f" {gpu_plans.describe(self.plan)}"
        return self.impl + plan


def variants(matrix: Matrix, task: gpu_task.Task) -> list[Variant]:
    """What is compared for a matrix, the model's own way first."""
    most = task.sizes.most_plans
    shape = matrix.columns, matrix.terms
    plans = gpu_plans.triton_plans(*shape, parts=matrix.parts, most=most)
    made = [
        Variant(impl=task.impl, plan=plan, is_own=number == 0)
        for number, plan in enumerate(plans)
    ]
    if not task.interpret:  # Mosaic's interpreter takes seconds for the least product.
        plans = gpu_plans.mosaic_plans(*shape, most=max(1, most // 4))
        made += [
            Variant(impl="mosaic", plan=plan, is_own=number == 0)
            for number, plan in enumerate(plans)
        ]
    return [*made, Variant(impl="xla", plan=None, is_own=True)]


def multiply(matrix: Matrix, variant: Variant, *, interpret: bool) -> Callable:
    """The product `(x, w, residual, norm) -> y` of a variant."""
    module = mosaic if variant.impl == "mosaic" else triton
    # Mosaic has interpreters of its own, of other types.
    shared = {"plan": variant.plan, "interpret": interpret}

    def gate(x, w, residual, norm):
        live = jnp.int32(x.shape[0])
        return module.gate(x, w, num_live=live, norm=norm, eps=_EPS, **shared)

    def project(x, w, residual, norm):
        return module.project(
            x,
            w,
            num_live=jnp.int32(x.shape[0]),
            norm=None,
            residual=residual,
            eps=_EPS,
            out_dtype=jnp.dtype(matrix.out_dtype),
            **shared,
        )

    def xla(x, w, residual, norm):
        return jax.lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(matrix.out_dtype)

    if variant.impl == "xla":
        return xla
    return gate if matrix.is_gate else project


def chain(call: Callable, *, shares_rows: bool) -> Callable:
    """One call for each entry of `xs`, over the weights in turn.

    It is traced and lowered once, however many they are.
    A norm of the same rows is computed once, whatever the calls, and so counts little.
    XLA would make one product of two that share their rows: it gets others each time.
    """

    call = jax.jit(call)

    def run(xs, ws, residual, norm):
        outputs = []
        for number in range(len(xs)):
            x = xs[number // len(ws)] if shares_rows else xs[number]
            outputs.append(call(x, ws[number % len(ws)], residual, norm))
        return outputs

    return run


def num_copies(num_bytes: int, sizes: gpu_task.Sizes) -> int:
    """Copies of weights that calls take in turn."""
    return min(max(1, math.ceil(sizes.streamed_bytes / num_bytes)), MOST_COPIES)


def operands(matrix: Matrix, sizes: gpu_task.Sizes) -> tuple[Any, ...]:
    """`xs, ws, residual, norm` for `chain`."""
    copies = num_copies(matrix.num_bytes, sizes)
    least = 1 if sizes.streamed_bytes == 1 else LEAST_CALLS
    calls = copies * math.ceil(least / copies)
    shape, rows = (matrix.columns, matrix.terms), sizes.height
    xs = [gpu_arrays.normal(i, (rows, matrix.terms)) for i in range(calls)]
    ws = [
        gpu_arrays.normal(1000 + i, shape, stddev=matrix.terms**-0.5)
        for i in range(copies)
    ]
    residual = None
    if matrix.has_residual:
        residual = gpu_arrays.normal(2000, (rows, matrix.columns))
    return xs, ws, residual, gpu_arrays.normal(3000, (matrix.terms,))


def measure_matrix(matrix: Matrix, task: gpu_task.Task) -> None:
    """A row for each variant: first the implementations' own, then a few at a time.

    Those of a batch are timed in turns with a copy, and written when they are known.
    """
    arguments = operands(matrix, task.sizes)
    tried = variants(matrix, task)
    others = [each for each in tried if not each.is_own]
    batches = [[each for each in tried if each.is_own]]
    batches += [others[i : i + _BATCH] for i in range(0, len(others), _BATCH)]
    names = lambda batch: f"{matrix.name}: {', '.join(each.label for each in batch)}"
    for batch in task.in_time(batches, name=names):
        _measure_batch(matrix, task, batch, arguments)


def _measure_batch(
    matrix: Matrix,
    task: gpu_task.Task,
    batch: Sequence[Variant],
    arguments: tuple[Any, ...],
) -> None:
    """A row for each variant of the batch."""
    by_label = {each.label: each for each in batch}
    lowered = {}
    for label, variant in by_label.items():
        with task.guard(f"{matrix.name}: lowering {label}"):
            call = multiply(matrix, variant, interpret=task.interpret)
            program = jax.jit(chain(call, shares_rows=variant.impl != "xla"))
            lowered[label] = program.lower(*arguments)
    calls = len(arguments[0])

    def loop(executable: Callable) -> gpu_clock.Loop:
        run = functools.partial(executable, *arguments)
        return gpu_clock.Loop(run=run, calls=calls, num_bytes=matrix.num_bytes)

    for label, row in _time(task, matrix.name, lowered, loop).items():
        variant = by_label[label]
        task.write(
            "kernel",
            kernel=matrix.name,
            shape=(matrix.columns, matrix.terms),
            copies=len(arguments[1]),
            **{**row, "impl": variant.impl},
            plan=None if variant.plan is None else gpu_plans.describe(variant.plan),
            is_own_plan=variant.is_own,
        )


def _time(
    task: gpu_task.Task,
    name: str,
    lowered: Mapping[str, Any],
    loop: Callable[[Callable], gpu_clock.Loop],
) -> dict[str, dict]:
    """Compiles, runs each once by itself, and times those that work."""
    sizes = task.sizes
    compiled, failed = gpu_clock.compile_all(lowered)
    for label, error in failed.items():
        with task.guard(f"{name}: compiling {label}"):
            raise error
    loops = {gpu_clock.COPY: gpu_clock.copy_loop(sizes.copied_bytes)}
    for label, executable in compiled.items():
        with task.guard(f"{name}: running {label}"):
            made = loop(executable)
            jax.block_until_ready(made.run())
            loops[label] = made
    timings = gpu_clock.measure(loops, repeats=sizes.repeats, timed_s=sizes.timed_s)
    rows = gpu_clock.rows(loops, timings)
    rows.pop(gpu_clock.COPY)
    return rows


def measure_small(
    name: str, call: Callable, xs: Sequence[jax.Array], task: gpu_task.Task
) -> None:
    """A kernel without plans: one row."""
    call = jax.jit(call)
    lowered = {"own": jax.jit(lambda xs: [call(x) for x in xs]).lower(xs)}
    num_bytes = xs[0].size * xs[0].dtype.itemsize

    def loop(executable: Callable) -> gpu_clock.Loop:
        run = functools.partial(executable, xs)
        return gpu_clock.Loop(run=run, calls=len(xs), num_bytes=num_bytes)

    for row in _time(task, name, lowered, loop).values():
        shape = xs[0].shape
        task.write("kernel", kernel=name, shape=shape, **row, is_own_plan=True)


def measure_copy(task: gpu_task.Task) -> None:
    """The copy alone, and a read: what all else is measured against."""
    array = gpu_arrays.normal(0, (task.sizes.copied_bytes // 4,), "float32")
    total = jax.jit(jnp.sum)
    read = gpu_clock.Loop(
        run=lambda: total(array), calls=1, num_bytes=task.sizes.copied_bytes
    )
    loops = {
        gpu_clock.COPY: gpu_clock.copy_loop(task.sizes.copied_bytes),
        "read (XLA's sum)": read,
    }
    timings = gpu_clock.measure(
        loops, repeats=task.sizes.repeats, timed_s=task.sizes.timed_s
    )
    for name, row in gpu_clock.rows(loops, timings).items():
        shape = (task.sizes.copied_bytes,)
        task.write("kernel", kernel=name, shape=shape, **row, is_own_plan=True)


def run(task: gpu_task.Task) -> None:
    """The whole section; the large model's products come first."""
    sizes = task.sizes
    small = 2 if sizes.streamed_bytes == 1 else 32
    jobs: dict[str, Callable[[], None]] = {"copy": lambda: measure_copy(task)}

    for name in sizes.models:
        for matrix in matrices(name, sizes):
            jobs[matrix.name] = functools.partial(measure_matrix, matrix, task)
        if name == "target":
            jobs["attention"] = lambda: gpu_attention.measure(task, sizes.target)
    width, vocabulary = sizes.target.hidden_size, sizes.target.vocab_size
    weight = gpu_arrays.normal(0, (width,))
    norm = functools.partial(
        rms_norm_triton.rms_norm, weight=weight, eps=_EPS, interpret=task.interpret
    )
    argmax = functools.partial(argmax_triton.argmax, interpret=task.interpret)
    for name, call, shape, dtype in (
        ("norm", norm, (sizes.height, width), "bfloat16"),
        ("argmax", argmax, (sizes.height, vocabulary), "float32"),
    ):

        def small_job(name=name, call=call, shape=shape, dtype=dtype) -> None:
            xs = [gpu_arrays.normal(i, shape, dtype) for i in range(small)]
            measure_small(name, call, xs, task)

        jobs[name] = small_job
    for name in task.in_time(task.chosen(jobs)):
        with task.guard(name):
            jobs[name]()
