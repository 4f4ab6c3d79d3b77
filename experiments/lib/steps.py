"""Step costs: a plain step, a slab with several active rows, a draft step, a round.

Many steps are one compiled call, so that the cost of dispatching a call is not
measured; on a GPU the loop around them is, as it is in a generation. A context of `n`
means that the first step attends to `n` positions. Caches are full of noise, and any
length can be declared valid: what a step costs depends on lengths, not on what the
cache holds.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib import noise, subjects, timing, works
from spec_jax import loading
from spec_jax.engine import protocols
from spec_jax.model import (
    block_params,
    config as config_lib,
    params as params_lib,
    prompt as prompt_lib,
    row_model,
)
from spec_jax.paging import index
from spec_jax.rules import sampling as sampling_lib


PLAIN = "plain step"
ONE_ROW = "1 active row"
READ = "read of its bytes"
LARGE_READ = "read of 256 MiB"
NEW_CACHE = "new cache"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Something whose cost is measured."""

    name: str  # unique; as the table shows it
    ratio_to: str  # name of the cost that it is compared with
    work: works.Work | None = None  # a compiled call, or
    timed: timing.Thunk | None = None  # a thunk, where it is something else
    # Positions that the first step attends to, where that matters
    context: int | None = None
    num_active: int | None = None  # active rows, where that matters
    gamma: int | None = None  # tokens drafted, where that matters
    num_bytes: int | None = None  # that one must read, where that is known
    drafts: int | None = None  # of a proposal, one of which is timed

    def thunk(self) -> timing.Thunk:
        return self.timed or self.work.thunk()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured of a target and its draft."""

    # Of a plain step; everything else is measured at the first of them
    contexts: Sequence[int]
    page_size: int
    steps: int
    # Active rows at the first context; the most of them at all others too. None: up to
    # the drafter's longest window, at the first context only.
    rows: Sequence[int] | None = None
    prefills: Sequence[int] = ()  # prompt lengths to be prefilled
    tree_rows: Sequence[int] = ()  # rows of trees, each compared with a chain's
    # Of plain steps and rounds; None is greedy
    sampling: sampling_lib.SamplingSettings | None = None
    as_shapes: bool = False  # caches are shapes, to be traced and not run
    gammas: Sequence[int] | None = None  # of rounds; None: from 1 to the drafter's most


def all_costs(lm: loading.LanguageModel, plan: Plan) -> list[list[Cost]]:
    """Returns all costs, in groups measured in turns; `PLAIN` is in each group.

    Those that need a drafter are left out if there is none.

    Raises:
      ValueError: contexts beyond the model's positions.
    """
    gamma_max = 0 if lm.drafter is None else lm.gamma_max
    longest = max((*plan.contexts, *plan.prefills))
    # As far as `steps` rounds can lead, and a window more.
    rows_ahead = (plan.steps + 1) * (gamma_max + 1)
    capacity = longest + max(rows_ahead, *plan.tree_rows, 0)
    capacity = index.pages_for(capacity, plan.page_size) * plan.page_size
    positions = lm.target.config.max_position_embeddings
    if capacity > positions:
        raise ValueError(
            f"{plan.steps} steps in a context of {longest} need {capacity} "
            f"positions, the model has {positions}"
        )
    sizes = works.Sizes(capacity=capacity, page_size=plan.page_size, steps=plan.steps)
    cache = _cache(lm.target, sizes, plan.as_shapes)
    shared = lm.target, lm.params, sizes
    first = plan.contexts[0]

    def plain(context: int) -> Cost:
        return Cost(
            name=PLAIN if context == first else f"{PLAIN} at {context}",
            work=works.plain_steps(
                *shared, context, cache=cache, settings=plan.sampling
            ),
            ratio_to=PLAIN,
            context=context,
            num_bytes=_bytes(*shared[:2], context),
        )

    def window(n: int, context: int) -> Cost:
        suffix = "" if context == first else f" at {context}"
        return Cost(
            name=(ONE_ROW if n == 1 else f"{n} active rows") + suffix,
            work=works.windows(*shared, context, num_active=n, cache=cache),
            ratio_to=(ONE_ROW if ones else PLAIN) if not suffix else PLAIN,
            context=context,
            num_active=n,
            num_bytes=_bytes(*shared[:2], context),
        )

    rows = plan.rows
    if rows is None:
        rows = range(1, gamma_max + 2) if gamma_max else ()
    if plan.tree_rows and 1 not in rows:  # What a tall slab is compared with.
        rows = (1, *rows)
    ones = 1 in rows
    group = [plain(first), *(window(n, first) for n in rows)]
    for n in plan.tree_rows:
        group += _tree_costs(*shared, first, num_rows=n, cache=cache)
    if lm.drafter is not None:
        group += _drafter_costs(lm, sizes, first, cache, plan)
    group += [_prefill(*shared, n) for n in plan.prefills if not plan.as_shapes]
    if not plan.as_shapes:
        group += _traffic(lm, sizes)
    others = [
        [plain(first), plain(c), *([window(max(plan.rows), c)] if plan.rows else [])]
        for c in plan.contexts[1:]
    ]
    return [group, *others]


def _traffic(lm: loading.LanguageModel, sizes: works.Sizes) -> list[Cost]:
    """Plain reads, and a new cache."""
    num_bytes = subjects.step_bytes(lm.params)
    read = timing.read(num_bytes)
    made = [Cost(name=READ, timed=read, ratio_to=PLAIN, num_bytes=num_bytes)]
    if num_bytes < timing.LARGE_READ_BYTES:
        large = timing.read(timing.LARGE_READ_BYTES)
        made.append(Cost(name=LARGE_READ, timed=large, ratio_to=PLAIN))
    new_cache = functools.partial(
        lm.target.new_cache, capacity=sizes.capacity, page_size=sizes.page_size
    )
    allocate = timing.stopwatch(lambda _: new_cache())
    return [*made, Cost(name=NEW_CACHE, timed=allocate, ratio_to=PLAIN)]


def _drafter_costs(
    lm: loading.LanguageModel, sizes: works.Sizes, context: int, cache: Any, plan: Plan
) -> list[Cost]:
    """A draft step, and rounds of each gamma."""
    make = functools.partial(
        noise.noisy_memory,
        lm.drafter,
        capacity=sizes.capacity,
        page_size=sizes.page_size,
    )
    own = jax.eval_shape(make) if plan.as_shapes else make()
    pass_bytes = _pass_bytes(lm, context)
    made = [
        Cost(
            name="draft step",
            work=works.proposals(lm, sizes, context, memory=own),
            ratio_to=PLAIN,
            context=context,
            num_active=1,
            num_bytes=pass_bytes // lm.gamma_max,
            drafts=lm.gamma_max,
        )
    ]
    both = cache, own
    gammas = range(1, lm.gamma_max + 1) if plan.gammas is None else plan.gammas
    for gamma in gammas:
        work = works.rounds(
            lm, sizes, context, gamma, caches=both, settings=plan.sampling
        )
        made.append(
            Cost(
                name=f"round, gamma {gamma}",
                work=work,
                ratio_to=PLAIN,
                context=context,
                gamma=gamma,
            )
        )
    return made


def _tree_costs(model, params, sizes, context, *, num_rows, cache) -> list[Cost]:
    """What trees of so many rows cost: all rows, one of them, and the kept path."""
    window = functools.partial(
        works.windows, model, params, sizes, context, cache=cache, num_columns=num_rows
    )
    chain, path = f"{num_rows} chain rows", num_rows.bit_length() - 1
    parts = {
        chain: (window(num_active=num_rows), PLAIN),
        f"{num_rows} tree rows": (window(num_active=num_rows, is_tree=True), chain),
        f"1 of {num_rows} tree rows": (window(num_active=1, is_tree=True), ONE_ROW),
        f"moving {path} of {num_rows} tree rows": (
            works.moves(model, sizes, context, num_rows=num_rows, cache=cache),
            PLAIN,
        ),
    }
    return [
        Cost(name=name, work=work, ratio_to=ratio_to, context=context)
        for name, (work, ratio_to) in parts.items()
    ]


def _prefill(model, params, sizes, num_tokens) -> Cost:
    """A prompt's K/V, by whatever prefill the model has; seconds of a prompt."""
    prompt = noise.tokens(num_tokens, model.config.vocab_size).tolist()
    timed = timing.stopwatch(
        lambda kv: prompt_lib.prefill(model, params, kv, prompt),
        lambda: model.new_cache(capacity=sizes.capacity, page_size=sizes.page_size),
    )
    name = f"prefill of {num_tokens}"
    return Cost(name=name, timed=timed, ratio_to=PLAIN, context=num_tokens)


def _cache(model: row_model.RowModel, sizes: works.Sizes, as_shapes: bool) -> Any:
    """A cache of noise, or its shape."""
    sizes = {"capacity": sizes.capacity, "page_size": sizes.page_size}
    make = functools.partial(noise.noisy_cache, model, **sizes)
    return jax.eval_shape(make) if as_shapes else make()


def _bytes(model: row_model.RowModel, params: params_lib.Params, context: int) -> int:
    """Bytes of weights, and of keys and values, that a step reads."""
    return subjects.step_bytes(params) + context * cache_bytes(model.config)


def _pass_bytes(lm: loading.LanguageModel, context: int) -> int:
    """Bytes that all drafts of a proposal read: of a block one pass over it, of others
    one step for each draft on a path, in which a head fuses features once."""
    params = lm.drafter_params
    one = _bytes(lm.drafter.model, params, context)
    if isinstance(params, block_params.BlockParams):
        return one
    depth = protocols.depth_max(lm.drafter)
    fused = getattr(params, "fc", None)
    return depth * one - (depth - 1) * params_lib.num_bytes(fused)


def cache_bytes(config: config_lib.Qwen3Config) -> int:
    """Keys and values of one position, all layers."""
    itemsize = jnp.dtype(config.dtype).itemsize
    heads = config.num_kv_heads * config.head_dim
    return 2 * config.num_layers * heads * itemsize


def rows(costs: Sequence[Cost], timings: timing.Timings) -> list[dict[str, Any]]:
    """A JSON row of each cost; ratios are medians over the turns."""
    made = []
    for cost in costs:
        seconds = timings.seconds[cost.name]
        ratio = timing.ratios(seconds, timings.seconds[cost.ratio_to])
        median = timing.spread(seconds).median
        row = {
            "kind": "step",
            "step": cost.name,
            "context": cost.context,
            "num_active": cost.num_active,
            "gamma": cost.gamma,
            **timing.spread_fields("ms", [1e3 * s for s in seconds]),
            **timing.spread_fields("ratio", ratio),
            "ratio_to": cost.ratio_to,
            "gb_s": cost.num_bytes and cost.num_bytes / median / 1e9,
            "n": len(seconds),
            "warm_up_s": timings.warm_up[cost.name],
        }
        if cost.drafts:
            row |= {"drafts": cost.drafts, "pass_bytes": cost.drafts * cost.num_bytes}
        made.append(row)
    return made


def bandwidth(
    params: params_lib.Params, seconds: dict[str, Sequence[float]]
) -> dict[str, float | int | bool | None]:
    """What a plain step achieves of what a plain read of as many bytes does.

    Args:
      seconds: of `PLAIN`, `READ` and `LARGE_READ` in each turn; weights that are large
        enough themselves are not read a second time.
    """
    num_bytes, cache = subjects.step_bytes(params), timing.cache_bytes()
    step_s, read_s = seconds[PLAIN], seconds[READ]
    large_bytes = max(num_bytes, timing.LARGE_READ_BYTES)
    large_read_s = seconds.get(LARGE_READ, read_s)
    return {
        "step_bytes": num_bytes,
        "last_level_cache_bytes": cache,
        "fits_in_cache": None if cache is None else num_bytes <= cache,
        "read_gb_s": num_bytes / timing.spread(read_s).median / 1e9,
        "read_best_gb_s": num_bytes / min(read_s) / 1e9,
        "memory_gb_s": large_bytes / timing.spread(large_read_s).median / 1e9,
        "achieved_gb_s": num_bytes / timing.spread(step_s).median / 1e9,
        "bandwidth_share": timing.spread(timing.ratios(read_s, step_s)).median,
    }
