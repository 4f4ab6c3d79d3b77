"""Step costs: a plain step, a slab with several active rows, a draft step, a round.

Caches are full of noise, and any length can be declared valid: what a step costs
depends on lengths, not on what the cache holds. Calls and contexts are as in `works`.
"""

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib import bench, noise, subjects, works
from spec_jax import loading
from spec_jax.engine import protocols
from spec_jax.model import block_params, params as params_lib, row_model
from spec_jax.rules import sampling as sampling_lib


PLAIN = "plain step"
ONE_ROW = "1 active row"
READ = "read of its bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Something whose cost is measured."""

    name: str  # unique; as the table shows it
    case: bench.Case
    work: works.Work | None = None  # the compiled call of the case, where it is one
    ratio_to: str = PLAIN  # name of the cost that it is compared with
    # Positions that the first step attends to, where that matters
    context: int | None = None
    num_active: int | None = None  # active rows, where that matters
    gamma: int | None = None  # tokens drafted, where that matters
    num_bytes: int | None = None  # that one must read, where that is known
    drafts: int | None = None  # of a proposal, one of which is timed


def _of(work: works.Work, name: str, context: int, **about: Any) -> Cost:
    return Cost(name=name, case=work.thunk, work=work, context=context, **about)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured of a target and its draft."""

    # Of a plain step; everything else is measured at the first of them
    contexts: Sequence[int]
    page_size: int
    steps: int  # of one timed call
    # Active rows at the first context; the most of them at all others too. None: up to
    # the drafter's longest window, at the first context only.
    rows: Sequence[int] | None = None
    prefills: Sequence[int] = ()  # prompt lengths to be prefilled
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
    # As far as `steps` rounds can lead, and a window more.
    rows_ahead = (plan.steps + 1) * (gamma_max + 1)
    longest = max((*plan.contexts, *plan.prefills))
    sizes = {
        "capacity": works.capacity_for(lm.target, longest + rows_ahead, plan.page_size),
        "page_size": plan.page_size,
    }
    caches = works.caches_of(lm, **sizes, as_shapes=plan.as_shapes)
    text, first = works.text_of(lm.target, sizes["capacity"]), plan.contexts[0]
    rows = plan.rows
    if rows is None:
        rows = range(1, gamma_max + 2) if gamma_max else ()
    how = {"steps": plan.steps, "cache": caches[0]}

    def cost(work: works.Work, name: str, context: int, **about: Any) -> Cost:
        name += f" at {context}" * (context != first)
        about["num_bytes"] = _bytes(lm.target, lm.params, context)
        return _of(work, name, context, **about)

    def plain(context: int) -> Cost:
        work = works.plain_steps(lm, text, context, **how, settings=plan.sampling)
        return cost(work, PLAIN, context)

    def window(n: int, context: int) -> Cost:
        work = works.windows(lm, context, num_active=n, **how)
        ratio_to = ONE_ROW if 1 in rows and context == first else PLAIN
        name = ONE_ROW if n == 1 else f"{n} active rows"
        return cost(work, name, context, ratio_to=ratio_to, num_active=n)

    group = [plain(first), *(window(n, first) for n in rows)]
    if lm.drafter is not None:
        group += _drafter_costs(lm, text, caches, plan)
    if not plan.as_shapes:
        group += _others(lm, plan, sizes)
    others = [
        [plain(first), plain(c), *([window(max(plan.rows), c)] if plan.rows else [])]
        for c in plan.contexts[1:]
    ]
    return [group, *others]


def _others(lm: loading.LanguageModel, plan: Plan, sizes: dict) -> Iterator[Cost]:
    """Yields prefills, by whatever prefill the model has, and a plain read."""
    for count in plan.prefills:
        prompt = noise.tokens(count, lm.target.config.vocab_size).tolist()
        prefill = lambda kv, p=prompt: lm.target.prefill(lm.params, kv, p)[0]
        new_cache = functools.partial(lm.target.new_cache, **sizes)
        case = functools.partial(bench.stopwatch, prefill, new_cache)
        yield Cost(name=f"prefill of {count}", case=case, context=count)
    num_bytes = subjects.step_bytes(lm.params)
    case = functools.partial(bench.read, num_bytes)
    yield Cost(name=READ, case=case, num_bytes=num_bytes)


def _drafter_costs(
    lm: loading.LanguageModel, text: jax.Array, caches: Any, plan: Plan
) -> Iterator[Cost]:
    """Yields a draft step, and rounds of each gamma."""
    context, steps, most = plan.contexts[0], plan.steps, lm.gamma_max
    work = works.proposals(lm, text, context, steps=steps, memory=caches[1])
    num_bytes = _pass_bytes(lm, context) // most
    about = {"num_active": 1, "num_bytes": num_bytes, "drafts": most}
    yield _of(work, "draft step", context, **about)
    for gamma in range(1, most + 1) if plan.gammas is None else plan.gammas:
        # Far enough that no round is cut short.
        limit = context + steps * (gamma + 1)
        how = {"caches": caches, "max_rounds": steps, "settings": plan.sampling}
        work = works.rounds(lm, text, context, gamma, limit=limit, **how)
        yield _of(work, f"round, gamma {gamma}", context, gamma=gamma)


def _bytes(model: row_model.RowModel, params: params_lib.Params, context: int) -> int:
    """Returns the bytes of weights, and of keys and values, that a step reads."""
    config = model.config
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    position = numbers * jnp.dtype(config.dtype).itemsize
    return subjects.step_bytes(params) + context * position


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


def rows(costs: Sequence[Cost], timings: bench.Timings) -> list[dict[str, Any]]:
    """Returns a JSON row of each cost; ratios are medians over the turns."""
    made = []
    for cost in costs:
        row = {
            "kind": "step",
            "step": cost.name,
            "context": cost.context,
            "num_active": cost.num_active,
            "gamma": cost.gamma,
            **timings.row(cost.name, ratio_to=cost.ratio_to),
            "ratio_to": cost.ratio_to,
        }
        row["gb_s"] = cost.num_bytes and cost.num_bytes / row["ms"] / 1e6
        if cost.drafts:
            row |= {"drafts": cost.drafts, "pass_bytes": cost.drafts * cost.num_bytes}
        made.append(row)
    return made


def bandwidth(
    params: params_lib.Params, seconds: Mapping[Any, Sequence[float]]
) -> dict[str, Any]:
    """Returns the row that compares a plain step with a read of as many bytes.

    Args:
      seconds: of `PLAIN` and `READ` in each turn.
    """
    num_bytes, read_s = subjects.step_bytes(params), seconds[READ]
    return {
        "kind": "summary",
        "step_bytes": num_bytes,
        "read_gb_s": num_bytes / statistics.median(read_s) / 1e9,
        "bandwidth_share": statistics.median(bench.ratios(read_s, seconds[PLAIN])),
    }
