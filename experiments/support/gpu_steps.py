"""Section (c): steps of whole models at their real shapes, over contexts.

Plain steps, steps with several live rows, and draft steps. Many steps are one call, so
that what the host takes to dispatch it is not in the number; the loop around them is,
as it is in a generation. The weights' bytes over the copy's bandwidth, measured in the
same turns, are what a step could take at best.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib import timing
from experiments.support import (
    bandwidth,
    gpu_arrays,
    gpu_clock,
    gpu_models,
    gpu_task,
)
from spec_jax import autoregressive, session
from spec_jax.model import config as config_lib, params as params_lib, row_model


PLAIN = "plain step"
DRAFT = "draft step"


def run(task: gpu_task.Task) -> None:
    """The whole section: the target first, then the draft as a model of its own."""
    sizes, models = task.sizes, gpu_models.models(task)
    subjects = {"target": models.target, "draft": models.drafter.model}
    drafted = (sizes.contexts[0], sizes.contexts[len(sizes.contexts) // 2])
    contexts = {name: sizes.contexts for name in sizes.models} | {DRAFT: drafted}
    for name in contexts:
        contexts[name] = task.chosen(contexts[name], name=_at(name))
    for name in task.in_time([name for name in contexts if contexts[name]]):
        with task.guard(name):
            if name == DRAFT:
                _run_draft(task, models, contexts[name])
            else:
                _run_model(task, name, subjects[name], contexts[name])


def _at(name: str) -> Callable[[int], str]:
    """What names the contexts of `name`."""
    return lambda context: f"{name} at {context}"


def _run_model(
    task: gpu_task.Task,
    name: str,
    model: row_model.RowModel,
    contexts: Sequence[int],
) -> None:
    """Some contexts of one model, the shortest of all with every number of rows."""
    sizes = task.sizes
    params = gpu_arrays.weights(model.config, seed=1)
    longest = max(sizes.contexts) + max(sizes.steps, sizes.height) + 1
    box = gpu_arrays.CacheBox(model, capacity=longest, page_size=sizes.page_size)
    tokens = gpu_models.text(box.kv.slot_capacity, model.config.vocab_size)
    shared = {"params": params, "box": box, "steps": sizes.steps}
    for context in task.in_time(contexts, name=_at(name)):
        with task.guard(_at(name)(context)):
            is_first = context == sizes.contexts[0]
            thunks: dict[Any, timing.Thunk] = {
                PLAIN: plain_steps(model, tokens, context=context, **shared)
            }
            # Elsewhere one row and a window of gamma 4, which is what is used most.
            for live in sizes.live_rows if is_first else (1, 5):
                thunks[live] = live_rows(model, context=context, live=live, **shared)
            _time(task, name, model.config, params, context, thunks)


def _time(
    task: gpu_task.Task,
    name: str,
    config: config_lib.Qwen3Config,
    params: params_lib.Params,
    context: int,
    thunks: dict[Any, timing.Thunk],
) -> None:
    """A row for each thunk, all of them and a copy in turns."""
    sizes = task.sizes
    copy = gpu_clock.copy_loop(sizes.copied_bytes)
    copy_thunk = timing.stopwatch(lambda _: copy.run(), copy.run)
    timings = timing.interleave(
        thunks | {gpu_clock.COPY: copy_thunk}, repeats=sizes.repeats
    )
    weight_bytes = bandwidth.step_bytes(params)
    copy_rates = [copy.num_bytes / s for s in timings.seconds[gpu_clock.COPY]]
    for variant in thunks:
        seconds = timings.seconds[variant]
        ideal_s = [weight_bytes / rate for rate in copy_rates]
        base = PLAIN if PLAIN in thunks else variant
        num_bytes = weight_bytes + context * cache_bytes(config)
        task.write(
            "step",
            model=name,
            step=variant if isinstance(variant, str) else f"{variant} live rows",
            context=context,
            live_rows=variant if isinstance(variant, int) else 1,
            n=len(seconds),
            steps_per_call=sizes.steps,
            **gpu_clock.quartiles("ms", [1e3 * s for s in seconds]),
            **gpu_clock.quartiles(
                "to_plain", timing.ratios(seconds, timings.seconds[base])
            ),
            **gpu_clock.quartiles("to_weights", timing.ratios(seconds, ideal_s)),
            gb_s=num_bytes / timing.quartiles(seconds).median / 1e9,
            copy_gb_s=timing.quartiles(copy_rates).median / 1e9,
            weight_bytes=weight_bytes,
            warm_up_s=timings.warm_up[variant],
        )


def cache_bytes(config: config_lib.Qwen3Config) -> int:
    """Keys and values of one position, all layers."""
    itemsize = jnp.dtype(config.dtype).itemsize
    heads = config.num_kv_heads * config.head_dim
    return 2 * config.num_layers * heads * itemsize


def plain_steps(
    model: row_model.RowModel,
    tokens: jax.Array,
    *,
    params: params_lib.Params,
    box: gpu_arrays.CacheBox,
    context: int,
    steps: int,
) -> timing.Thunk:
    """Seconds of one step of plain decoding, the first after `context` tokens."""
    stop_ids, max_steps = session.stop_array(()), jnp.int32(steps)

    def prepare() -> autoregressive.DecodeState:
        return autoregressive.init_state(
            jnp.copy(tokens),
            length=jnp.int32(context),
            limit=jnp.int32(context + steps),
            cache=box.at(context - 1),
        )

    def run(state: autoregressive.DecodeState) -> Any:
        state = autoregressive.generate(
            model, params, state, stop_ids=stop_ids, max_steps=max_steps
        )
        box.kv = state.cache
        return state

    return timing.stopwatch(run, prepare, calls=steps)


def live_rows(
    model: row_model.RowModel,
    *,
    params: params_lib.Params,
    box: gpu_arrays.CacheBox,
    context: int,
    steps: int,
    live: int,
) -> timing.Thunk:
    """Seconds of one forward of `live` rows, with argmax and truncation."""

    def run(kv: Any) -> Any:
        box.kv, tokens = _repeat_forward(
            model, params, kv, num_live=jnp.int32(live), steps=jnp.int32(steps)
        )
        return box.kv, tokens

    return timing.stopwatch(run, lambda: box.at(context - 1), calls=steps)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("kv",))
def _repeat_forward(model, params, kv, *, num_live, steps):
    """Rows at the same positions `steps` times, forgotten each time.

    Each step's tokens are what the step before it chose, as in decoding.
    """
    start = kv.length[row_model.SLOT]

    def step(_, carry):
        kv, tokens = carry
        kv, logits = model.forward(
            params, kv, tokens=tokens, start=start, num_live=num_live
        )
        return model.truncate(kv, start), model.choose(logits, num_live)

    tokens = jnp.arange(model.slab, dtype=jnp.int32)
    return jax.lax.fori_loop(0, steps, step, (kv, tokens))


def _run_draft(
    task: gpu_task.Task, models: gpu_models.Models, contexts: Sequence[int]
) -> None:
    """What one drafted token costs in the drafter's own loop."""
    sizes, drafter = task.sizes, models.drafter
    model = drafter.model
    params = gpu_arrays.weights(model.config, seed=2)
    gamma = drafter.gamma_max
    capacity = max(contexts) + gamma + 2
    box = gpu_arrays.CacheBox(model, capacity=capacity, page_size=sizes.page_size)
    tokens = gpu_models.text(box.kv.slot_capacity, model.config.vocab_size)

    def thunk(context: int) -> timing.Thunk:
        def run(kv: Any) -> Any:
            box.kv, drafted = _draft(
                drafter, params, kv, tokens, jnp.int32(context), jnp.int32(sizes.steps)
            )
            return box.kv, drafted

        calls = sizes.steps * gamma
        return timing.stopwatch(run, lambda: box.at(context - 1), calls=calls)

    for context in task.in_time(contexts, name=_at(DRAFT)):
        with task.guard(_at(DRAFT)(context)):
            _time(task, "draft", model.config, params, context, {DRAFT: thunk(context)})


@functools.partial(jax.jit, static_argnames=("drafter",), donate_argnames=("kv",))
def _draft(drafter, params, kv, tokens, length, times):
    """Drafts `gamma_max` tokens and forgets them, `times` times."""
    gamma = jnp.int32(drafter.gamma_max)

    def once(_, carry):
        kv, tokens = carry
        kv, proposal = drafter.propose(
            params, kv, tokens=tokens, length=length, gamma=gamma
        )
        kv = drafter.commit(params, kv, length)
        # The next draft begins with another token.
        return kv, tokens.at[length - 1].set(proposal.tokens[0])

    return jax.lax.fori_loop(0, times, once, (kv, tokens))
