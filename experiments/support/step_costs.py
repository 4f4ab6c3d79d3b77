"""Step costs: a plain step, a slab with several live rows, a draft step, a round.

Every thunk runs many steps in one compiled call and returns the seconds of one, so
that the cost of dispatching a call is not measured. A context of `n` means that the
first step attends to `n` positions. Contexts are made of zeros: what a step costs
depends on lengths, not on what the cache holds.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib import timing
from experiments.support import bandwidth, model_pair
from spec_jax import autoregressive, rounds, session
from spec_jax.model import params as params_lib, row_model
from spec_jax.paging import allocator, cache as paged, index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that all thunks share, so that contexts share executables.

    Attributes:
      capacity: positions of each cache.
      steps: steps of one call.
    """

    capacity: int
    page_size: int
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Something whose cost is measured.

    Attributes:
      name: unique; as the table shows it.
      thunk: returns the seconds of one.
      ratio_to: name of the cost that it is compared with.
      context: positions that the first step attends to, where that matters.
      num_live: live rows, where that matters.
      gamma: tokens drafted, where that matters.
    """

    name: str
    thunk: timing.Thunk
    ratio_to: str
    context: int | None = None
    num_live: int | None = None
    gamma: int | None = None


PLAIN = "plain step"
ONE_ROW = "1 live row"
READ = "read of its bytes"
LARGE_READ = "read of 256 MiB"
NEW_CACHE = "new cache"


def all_costs(
    pair: model_pair.ModelPair, *, contexts: Sequence[int], page_size: int, steps: int
) -> list[Cost]:
    """Every cost; those that need a drafter are left out if there is none.

    Plain steps are measured in every context, everything else in the first.

    Raises:
      ValueError: contexts beyond the model's positions.
    """
    gamma_max = 0 if pair.drafter is None else pair.drafter.gamma_max
    # As far as `steps` rounds can lead, and a window more.
    capacity = max(contexts) + (steps + 1) * (gamma_max + 1)
    capacity = index.pages_for(capacity, page_size) * page_size
    positions = pair.target.config.max_position_embeddings
    if capacity > positions:
        raise ValueError(
            f"{steps} steps in a context of {max(contexts)} need {capacity} positions, "
            f"the model has {positions}"
        )
    sizes = Sizes(capacity=capacity, page_size=page_size, steps=steps)
    (first, *others), params = contexts, pair.params[0]
    plain = functools.partial(plain_step, pair.target, params, sizes)
    costs = [Cost(name=PLAIN, thunk=plain(first), ratio_to=PLAIN, context=first)]
    costs += [
        Cost(
            name=f"{PLAIN} at {context}",
            thunk=plain(context),
            ratio_to=PLAIN,
            context=context,
        )
        for context in others
    ]
    if pair.drafter is not None:
        costs += _drafter_costs(pair, sizes, first)
    num_bytes = bandwidth.step_bytes(params)
    costs.append(Cost(name=READ, thunk=bandwidth.read(num_bytes), ratio_to=PLAIN))
    if num_bytes < bandwidth.LARGE_READ_BYTES:
        large = bandwidth.read(bandwidth.LARGE_READ_BYTES)
        costs.append(Cost(name=LARGE_READ, thunk=large, ratio_to=PLAIN))
    new_cache = functools.partial(
        pair.target.new_cache, capacity=capacity, page_size=page_size
    )
    allocate = timing.stopwatch(lambda _: new_cache())
    return [*costs, Cost(name=NEW_CACHE, thunk=allocate, ratio_to=PLAIN)]


def _drafter_costs(
    pair: model_pair.ModelPair, sizes: Sizes, context: int
) -> list[Cost]:
    """Verification windows, a draft step, and rounds of each gamma."""
    gamma_max = pair.drafter.gamma_max
    target, draft = (pair.target, pair.drafter.model)
    windows = [
        Cost(
            name=ONE_ROW if n == 1 else f"{n} live rows",
            thunk=live_rows(target, pair.params[0], sizes, context, num_live=n),
            ratio_to=ONE_ROW,
            context=context,
            num_live=n,
        )
        for n in range(1, gamma_max + 2)
    ]
    draft_step = Cost(
        name="draft step",
        thunk=plain_step(draft, pair.params[1], sizes, context),
        ratio_to=PLAIN,
        context=context,
        num_live=1,
    )
    whole_rounds = [
        Cost(
            name=f"round, gamma {gamma}",
            thunk=whole_round(pair, sizes, context, gamma=gamma),
            ratio_to=PLAIN,
            context=context,
            gamma=gamma,
        )
        for gamma in range(1, gamma_max + 1)
    ]
    return [*windows, draft_step, *whole_rounds]


def rows(costs: Sequence[Cost], timings: timing.Timings) -> list[dict[str, Any]]:
    """A JSON row of each cost; ratios are medians over the turns."""
    made = []
    for cost in costs:
        seconds = timings.seconds[cost.name]
        ms = timing.spread([1e3 * s for s in seconds])
        ratio = timing.spread(timing.ratios(seconds, timings.seconds[cost.ratio_to]))
        row = {
            "kind": "step",
            "step": cost.name,
            "context": cost.context,
            "num_live": cost.num_live,
            "gamma": cost.gamma,
            **{"ms": ms.median, "ms_p10": ms.p10, "ms_p90": ms.p90},
            **{"ratio": ratio.median, "ratio_p10": ratio.p10, "ratio_p90": ratio.p90},
            "ratio_to": cost.ratio_to,
            "n": len(seconds),
            "warm_up_s": timings.warm_up[cost.name],
        }
        made.append(row)
    return made


def plain_step(
    model: row_model.RowModel,
    params: params_lib.Params,
    sizes: Sizes,
    context: int,
) -> timing.Thunk:
    """One token of plain decoding; of the draft model, one draft step."""
    state = autoregressive.init_state(
        jnp.zeros((sizes.capacity + 1,), jnp.int32),
        length=jnp.int32(context),
        limit=jnp.int32(context + sizes.steps),
        cache=_filled_cache(model, sizes, context),
    )
    stop_ids, max_steps = session.stop_array(()), jnp.int32(sizes.steps)

    def run(state):
        return autoregressive.generate(
            model, params, state, stop_ids=stop_ids, max_steps=max_steps
        )

    return timing.stopwatch(run, lambda: _copy(state), calls=sizes.steps)


def live_rows(
    model: row_model.RowModel,
    params: params_lib.Params,
    sizes: Sizes,
    context: int,
    *,
    num_live: int,
) -> timing.Thunk:
    """One forward of `num_live` rows of a slab, with argmax and truncation."""
    kv = _filled_cache(model, sizes, context)

    def run(kv):
        return _repeat_forward(
            model, params, kv, num_live=jnp.int32(num_live), steps=sizes.steps
        )

    return timing.stopwatch(run, lambda: _copy(kv), calls=sizes.steps)


@functools.partial(jax.jit, static_argnames=("model", "steps"), donate_argnames=("kv",))
def _repeat_forward(model, params, kv, *, num_live, steps):
    """Runs rows at the same positions `steps` times, and forgets them each time."""
    start = kv.length[row_model.SLOT]

    def step(_, carry):
        kv, tokens = carry
        kv, logits = model.forward(
            params, kv, tokens=tokens, start=start, num_live=num_live
        )
        # Each step's tokens come from the step before it, as in decoding. With fixed
        # ones XLA could move the first layer out of the loop.
        return model.truncate(kv, start), model.choose(logits, num_live)

    tokens = jnp.zeros((model.slab,), jnp.int32)
    return jax.lax.fori_loop(0, steps, step, (kv, tokens))


def whole_round(
    pair: model_pair.ModelPair, sizes: Sizes, context: int, *, gamma: int
) -> timing.Thunk:
    """One round: `gamma` drafts, verification, commit, truncation of both caches."""
    gamma_max = pair.drafter.gamma_max
    state = rounds.init_state(
        jnp.zeros((sizes.capacity + 1,), jnp.int32),
        length=jnp.int32(context),
        # Far enough that no round is cut short.
        limit=jnp.int32(context + sizes.steps * (gamma + 1)),
        cache=_filled_cache(pair.target, sizes, context),
        memory=_filled_cache(pair.drafter.model, sizes, context),
        gamma_max=gamma_max,
    )
    stop_ids = session.stop_array(())

    def run(state):
        return rounds.generate(
            pair.target,
            pair.drafter,
            pair.params,
            state,
            gamma=jnp.int32(gamma),
            stop_ids=stop_ids,
            max_rounds=jnp.int32(sizes.steps),
        )

    return timing.stopwatch(run, lambda: _copy(state), calls=sizes.steps)


def _filled_cache(
    model: row_model.RowModel, sizes: Sizes, context: int
) -> paged.PagedKV:
    """A cache of all positions of the context but the last, which is pending."""
    kv = model.new_cache(capacity=sizes.capacity, page_size=sizes.page_size)
    kv = allocator.reserve(kv, row_model.SLOT, context - 1)
    return allocator.extend(kv, row_model.SLOT, context - 1)


def _copy(state: Any) -> Any:
    """Buffers of its own for a call that donates them."""
    return jax.tree.map(jnp.copy, state)
