"""Section (f): how long programs take to compile, and how many kernels they launch.

Nothing is allocated: programs are compiled for shapes. Tracing, lowering and XLA are
timed apart; this process has compiled nothing before.
"""

import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.support import gpu_models, gpu_task
from spec_jax import autoregressive, rounds
from spec_jax.model import config as config_lib, params as params_lib, row_model


_LAUNCHED = re.compile(
    r"= \S+ (fusion|custom-call|copy|dynamic-update-slice|dynamic-slice|sort|"
    r"scatter|reduce|convolution|dot|iota|broadcast|concatenate|pad|slice)\("
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


def run(task: gpu_task.Task) -> None:
    """Each program; the one that a generation needs first comes first."""
    jobs = programs(task)
    for name in task.in_time(task.chosen(jobs)):
        with task.guard(name):
            _compile(task, name, jobs[name])


def programs(task: gpu_task.Task) -> dict[str, Callable[[], jax.stages.Traced]]:
    """What traces each program, by name."""
    models = gpu_models.models(task)
    if task.interpret:  # Compiled for a CPU, they show no more than that they can be.
        return {"speculative generation": lambda: _rounds(task, models)}
    return {
        "target: plain generation": lambda: _plain(task, models.target),
        "speculative generation": lambda: _rounds(task, models),
        "draft: plain generation": lambda: _plain(task, models.drafter.model),
        "target: one forward": lambda: _forward(task, models.target),
    }


def _compile(
    task: gpu_task.Task, name: str, trace: Callable[[], jax.stages.Traced]
) -> None:
    started = time.perf_counter()
    traced = trace()
    traced_at = time.perf_counter()
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    finished = time.perf_counter()
    memory = compiled.memory_analysis()
    task.write(
        "compile",
        program=name,
        trace_s=traced_at - started,
        lower_s=lowered_at - traced_at,
        compile_s=finished - lowered_at,
        total_s=finished - started,
        launches=count_launches(compiled.as_text()),
        temp_bytes=getattr(memory, "temp_size_in_bytes", None),
        alias_bytes=getattr(memory, "alias_size_in_bytes", None),
    )


def count_launches(hlo: str) -> int:
    """Instructions of an optimised program that are kernels or copies on a device.

    Those in the body of a loop count once; the insides of fusions do not. An estimate:
    XLA decides last what is a kernel (`tests/pallas/hopper.py` reads that from a dump).
    """
    inside_others = set(_CALLED.findall(hlo))
    count, counts_here = 0, False
    for line in hlo.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            counts_here = header[1] not in inside_others
        elif counts_here and _LAUNCHED.search(line):
            count += 1
    return count


def _shape(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _cache(task: gpu_task.Task, model: row_model.RowModel) -> Any:
    sizes = task.sizes
    capacity = max(sizes.contexts) + sizes.height
    return jax.eval_shape(
        lambda: model.new_cache(capacity=capacity, page_size=sizes.page_size)
    )


def _weights(config: config_lib.Qwen3Config) -> params_lib.Params:
    return params_lib.shapes(config)


def _text(cache: Any) -> jax.ShapeDtypeStruct:
    return _shape(cache.slot_capacity + 1)


def _plain(task: gpu_task.Task, model: row_model.RowModel) -> jax.stages.Traced:
    cache = _cache(task, model)
    state = jax.eval_shape(
        lambda tokens, n, kv: autoregressive.init_state(
            tokens, length=n, limit=n, cache=kv
        ),
        *(_text(cache), _shape(), cache),
    )
    return autoregressive.generate.trace(
        model, _weights(model.config), state, stop_ids=_shape(1), max_steps=_shape()
    )


def _rounds(task: gpu_task.Task, models: gpu_models.Models) -> jax.stages.Traced:
    target, drafter = models.target, models.drafter
    cache, memory = _cache(task, target), _cache(task, drafter.model)
    state = jax.eval_shape(
        lambda tokens, n, kv, memory: rounds.init_state(
            tokens,
            length=n,
            limit=n,
            cache=kv,
            memory=memory,
            gamma_max=drafter.gamma_max,
        ),
        *(_text(cache), _shape(), cache, memory),
    )
    params = _weights(target.config), _weights(drafter.model.config)
    return rounds.generate.trace(
        target,
        drafter,
        params,
        state,
        gamma=_shape(),
        stop_ids=_shape(1),
        max_rounds=_shape(),
    )


def _forward(task: gpu_task.Task, model: row_model.RowModel) -> jax.stages.Traced:
    def forward(params, kv, tokens, num_live):
        start = kv.length[row_model.SLOT]
        kv, logits = model.forward(
            params, kv, tokens=tokens, start=start, num_live=num_live
        )
        return kv, model.choose(logits, num_live)

    cache = _cache(task, model)
    return jax.jit(forward, donate_argnums=1).trace(
        _weights(model.config), cache, _shape(model.slab), _shape()
    )
