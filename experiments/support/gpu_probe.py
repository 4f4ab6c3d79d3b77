"""Section (0): does what all the others need work on this machine?

The compilers that are found, then one call of each kind of kernel and a plain step of
the draft model, each by itself: what fails here would fail for minutes later.
"""

import functools
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.support import (
    gpu_arrays,
    gpu_bits,
    gpu_bitwise,
    gpu_bitwise_attention,
    gpu_kernels,
    gpu_models,
    gpu_steps,
    gpu_task,
)


_TOOLS = ("ptxas", "nvcc", "nvidia-smi")


def run(task: gpu_task.Task) -> None:
    """The whole section: a row for each item."""
    jobs: dict[str, Callable[[], None]] = {
        "programs": lambda: _find_programs(task),
        # Needs libdevice, a file of the CUDA toolkit.
        "cos": lambda: _call_twice(task, "cos", jnp.cos, gpu_arrays.normal(0, (64,))),
    }
    for name, build in _kernels(task).items():
        jobs[name] = functools.partial(_run_case, task, name, build)
    jobs["attention"] = lambda: _attend(task)
    if not task.interpret:  # Mosaic's interpreter takes seconds for the least product.
        jobs["mosaic"] = lambda: _multiply_by_mosaic(task)
    jobs["plain step"] = lambda: _step(task)
    for name in task.in_time(task.chosen(jobs)):
        with task.guard(name):
            jobs[name]()


def _find_programs(task: gpu_task.Task) -> None:
    """Where the programs are that XLA may call, and their versions."""
    for name in _TOOLS:
        path = shutil.which(name)
        version = None
        if path is not None:
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=20
            )
            version = (done.stdout.strip().splitlines() or [None])[-1]
        task.write("probe", item=name, path=path, version=version)


def _call_twice(task: gpu_task.Task, name: str, call: Callable, *args: Any) -> None:
    """Compiles and calls; two calls must give the same bits, all of them finite."""
    call = jax.jit(call)
    started = time.perf_counter()
    first = jax.block_until_ready(call(*args))
    compiled_at = time.perf_counter()
    again = jax.block_until_ready(call(*args))
    finished = time.perf_counter()
    is_finite = all(
        bool(jnp.all(jnp.isfinite(leaf.astype(jnp.float32))))
        for leaf in jax.tree.leaves(first)
    )
    equal = is_finite and gpu_bits.differing(first, again) == 0
    task.failures += not equal
    task.write(
        "probe",
        item=name,
        equal=equal,
        first_s=compiled_at - started,
        again_s=finished - compiled_at,
    )


def _kernels(task: gpu_task.Task) -> dict[str, Callable[[], gpu_bitwise.Case]]:
    """The kernels of the smaller model's step, by name."""
    cases = gpu_bitwise.row_cases(task)
    smallest = task.sizes.models[-1]
    others = ("norm", "argmax")
    return {
        name: build
        for name, build in cases.items()
        if name in others or name.startswith(f"{smallest} ")
    }


def _run_case(
    task: gpu_task.Task, name: str, build: Callable[[], gpu_bitwise.Case]
) -> None:
    case = build()
    live = jnp.int32(task.sizes.height)
    _call_twice(task, name, case.call, case.rows, case.fixed, live)


def _attend(task: gpu_task.Task) -> None:
    """The attention of a layer, over the two shortest prefixes of section (a)."""
    attend, layout, slab = gpu_bitwise_attention.example(task)
    # All rows are active; what is written to the pages is not looked at.
    call = lambda layout, slab: attend(layout, slab, task.sizes.height)[0]
    _call_twice(task, "attention", call, layout, slab)


def _multiply_by_mosaic(task: gpu_task.Task) -> None:
    """The first product that has whole blocks."""
    sizes = task.sizes
    for matrix in gpu_kernels.matrices(sizes.models[-1], sizes):
        for variant in gpu_kernels.variants(matrix, task):
            if variant.impl == "mosaic" and not matrix.is_gate:
                call = gpu_kernels.multiply(matrix, variant, interpret=False)
                rows = gpu_arrays.normal(0, (sizes.height, matrix.terms))
                weights = gpu_arrays.normal(1, (matrix.columns, matrix.terms))
                without = lambda x, w, call=call: call(x, w, None, None)
                _call_twice(task, "mosaic", without, rows, weights)
                return
    raise ValueError("no product of this model is whole blocks of Mosaic's")


def _step(task: gpu_task.Task) -> None:
    """Plain steps of the draft model after the shortest context."""
    sizes, model = task.sizes, gpu_models.models(task).drafter.model
    context = sizes.contexts[0]
    params = gpu_arrays.weights(model.config, seed=1)
    box = gpu_arrays.CacheBox(
        model, capacity=context + sizes.steps + 1, page_size=sizes.page_size
    )
    tokens = gpu_models.text(box.kv.slot_capacity, model.config.vocab_size)
    step = gpu_steps.plain_steps(
        model, tokens, params=params, box=box, context=context, steps=sizes.steps
    )
    started = time.perf_counter()
    step()
    first_s = time.perf_counter() - started
    task.write("probe", item="plain step", first_s=first_s, again_s=step())
