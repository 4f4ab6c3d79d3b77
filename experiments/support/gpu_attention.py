"""Section (b), attention: what a layer launches, over contexts and configs.

Norm, rotation, page write, splits and combine of one layer; the list of jobs is made
outside, because a step makes it once for all its layers. Each call attends to a slot
of its own, so that keys and values come from memory.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.support import gpu_arrays, gpu_clock, gpu_plans, gpu_task
from spec_jax.model import config as config_lib, rotary
from spec_jax.ops import rope
from spec_jax.pallas import (
    attention_plan,
    head_rotate_triton,
    paged_attention_triton,
    row_jobs,
)


LIVE_ROWS = (1, 5)
_CALLS, _MOST_SETS = 16, 8


def measure(task: gpu_task.Task, model: config_lib.Qwen3Config) -> None:
    """A row for each config, context and number of live rows."""
    sizes = task.sizes
    pool = Pool(model, sizes)
    configs = gpu_plans.attention_configs(
        model.head_dim, model.dtype, interpret=task.interpret, most=sizes.most_plans
    )
    by_label = {gpu_plans.describe(config): config for config in configs}
    example = {c: pool.call_inputs(sizes.attention_contexts[0], 1, c) for c in configs}
    lowered = {}
    for label, config in by_label.items():
        with task.guard(f"attention: lowering {label}"):
            program = jax.jit(
                chain(model, config, interpret=task.interpret), donate_argnums=(0, 1)
            )
            lowered[label] = program.lower(*pool.pages, pool.heads, example[config][0])
    compiled, failed = gpu_clock.compile_all(lowered)
    for label, error in failed.items():
        with task.guard(f"attention: compiling {label}"):
            raise error
    # The longest first: it is what the kernel is for.
    contexts = sizes.attention_contexts[::-1]
    cases = [(context, live) for context in contexts for live in LIVE_ROWS]
    for context, live in task.in_time(cases, name=lambda case: f"attention {case}"):
        with task.guard(f"attention at {context}, {live} rows"):
            _measure_case(task, pool, compiled, by_label, context, live)


def _measure_case(task, pool, compiled, by_label, context, live) -> None:
    """All configs in turns, at one context."""
    sizes = task.sizes
    num_bytes = context * pool.bytes_per_token
    loops = {gpu_clock.COPY: gpu_clock.copy_loop(sizes.copied_bytes)}
    for label, executable in compiled.items():
        sets = pool.call_inputs(context, live, by_label[label])
        run = _Runner(executable, pool, sets)
        loops[label] = gpu_clock.Loop(run=run, calls=pool.calls, num_bytes=num_bytes)
    timings = gpu_clock.measure(loops, repeats=sizes.repeats, timed_s=sizes.timed_s)
    for number, (label, row) in enumerate(gpu_clock.rows(loops, timings).items()):
        if label != gpu_clock.COPY:
            task.write(
                "attention",
                kernel="attention",
                context=context,
                live_rows=live,
                **row,
                plan=label,
                is_own_plan=number == 1,
            )


class _Runner:
    """Dispatches an executable over its sets of inputs in turn, pages in place."""

    def __init__(self, executable: Callable, pool: "Pool", sets: list[Any]):
        self._executable, self._pool, self._sets = executable, pool, sets
        self._next = 0

    def __call__(self) -> Any:
        inputs = self._sets[self._next % len(self._sets)]
        self._next += 1
        pool = self._pool
        *pool.pages, outputs = self._executable(*pool.pages, pool.heads, inputs)
        return outputs


class Pool:
    """Pages for many slots, and what the calls read beside them.

    Attributes:
      pages: of keys and of values, `[P, C, K, H]`; every call replaces them.
      heads: queries, keys and values of a slab, `[R, N + 2K, H]`.
    """

    def __init__(self, model: config_lib.Qwen3Config, sizes: gpu_task.Sizes):
        self._model, self._sizes = model, sizes
        longest = max(sizes.attention_contexts)
        itemsize = jnp.dtype(model.dtype).itemsize
        self.bytes_per_token = 2 * model.num_kv_heads * model.head_dim * itemsize
        slots = max(
            1, math.ceil(sizes.streamed_bytes / (longest * self.bytes_per_token))
        )
        self._num_pages = slots * (longest // sizes.page_size)
        self._table_width = longest // sizes.page_size
        shape = (
            self._num_pages,
            sizes.page_size,
            model.num_kv_heads,
            model.head_dim,
        )
        self.pages = [gpu_arrays.normal(i, shape, model.dtype) for i in (1, 2)]
        num_heads = model.num_heads + 2 * model.num_kv_heads
        shape = (sizes.height, num_heads, model.head_dim)
        self.heads = gpu_arrays.normal(3, shape, model.dtype)
        self.calls = 1 if sizes.streamed_bytes == 1 else _CALLS
        self._inputs: dict[tuple[int, ...], Any] = {}

    def call_inputs(
        self, context: int, live: int, config: attention_plan.Config
    ) -> list[list[dict[str, Any]]]:
        """Sets of inputs of `calls` calls; no slot comes twice before all had a turn.

        The last live row sees `context` keys.
        """
        lay = _layout(self._model, self._sizes.height, config)
        key = context, live, config.split, lay.tile_rows
        if key not in self._inputs:
            self._inputs[key] = self._make_inputs(*key)
        return self._inputs[key]

    def _make_inputs(
        self, context: int, live: int, split: int, tile_rows: int
    ) -> list[list[dict[str, Any]]]:
        sizes, model = self._sizes, self._model
        width = context // sizes.page_size
        slots = self._num_pages // width
        order = np.random.default_rng(0).permutation(self._num_pages).astype(np.int32)
        positions = context - live + jnp.arange(sizes.height, dtype=jnp.int32)
        frequencies, scale = rotary.rope_table(model)
        cos, sin = rope.angles(
            positions, jnp.asarray(frequencies), scale=scale, dtype=model.dtype
        )
        inputs = []
        for slot in range(min(slots, self.calls * _MOST_SETS)):
            # Past the slot's pages there are none.
            table = np.full((1, self._table_width), self._num_pages, np.int32)
            table[0, :width] = order[slot * width : (slot + 1) * width]
            jobs = _jobs(
                jnp.asarray(table),
                positions,
                jnp.int32(live),
                num_pages=self._num_pages,
                page_size=sizes.page_size,
                split=split,
                tile_rows=tile_rows,
            )
            inputs.append(
                {"table": jnp.asarray(table), "jobs": jobs, "cos": cos, "sin": sin}
            )
        count = max(len(inputs), self.calls)
        in_turn = [inputs[i % len(inputs)] for i in range(count)]
        starts = range(0, count - self.calls + 1, self.calls)
        return [in_turn[start : start + self.calls] for start in starts]


@functools.partial(
    jax.jit, static_argnames=("num_pages", "page_size", "split", "tile_rows")
)
def _jobs(table, positions, live, **sizes):
    slots = jnp.zeros(positions.shape, jnp.int32)
    return row_jobs.row_jobs(table, slots, positions, live, **sizes)


def _layout(
    model: config_lib.Qwen3Config, rows: int, config: attention_plan.Config
) -> attention_plan.Layout:
    group = model.num_heads // model.num_kv_heads
    return attention_plan.layout(rows, group, model.head_dim, tile=config.tile)


def chain(
    model: config_lib.Qwen3Config, config: attention_plan.Config, *, interpret: bool
) -> Callable:
    """The launches of a layer for each of the inputs, one after another.

    They are traced and lowered once, however many the inputs are.
    """

    @jax.jit
    def attend(k_pages, v_pages, heads, inputs):
        lay = _layout(model, heads.shape[0], config)
        # Not its real value: what a norm costs does not depend on its weight.
        norm = jnp.ones((model.head_dim,), heads.dtype)
        queries, k_pages, v_pages = head_rotate_triton.rotate_and_write(
            heads,
            norm,
            norm,
            k_pages,
            v_pages,
            inputs["cos"],
            inputs["sin"],
            jobs=inputs["jobs"],
            lay=lay,
            eps=model.rms_norm_eps,
            interpret=interpret,
        )
        out = paged_attention_triton.attend_packed(
            queries,
            k_pages,
            v_pages,
            page_table=inputs["table"],
            jobs=inputs["jobs"],
            scale=model.head_dim**-0.5,
            lay=lay,
            config=config,
            ancestors=None,
            interpret=interpret,
        )
        return k_pages, v_pages, out

    def run(k_pages, v_pages, heads, inputs):
        outputs = []
        for each in inputs:
            k_pages, v_pages, out = attend(k_pages, v_pages, heads, each)
            outputs.append(out)
        return k_pages, v_pages, outputs

    return run
