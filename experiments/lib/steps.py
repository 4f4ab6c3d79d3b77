"""Step costs: a plain step, a slab with several active rows, a draft step, a round.

Caches are full of noise, and any length can be declared valid: the cost of a step
depends on lengths, not on values of the cache. Calls and contexts are as in `works`.
"""

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    """An operation whose cost is measured."""

    name: str  # unique; as the table shows it
    case: bench.Case
    work: works.Work | None = None  # the compiled call of the case, where it is one
    ratio_to: str = PLAIN  # name of the cost that it is compared with
    # Positions that the first step attends to, where that matters
    context: int | None = None
    num_active: int | None = None  # active rows, where that matters
    gamma: int | None = None  # tokens drafted, where that matters
    num_bytes: int | None = None  # that it must read, where that is known
    drafts: int | None = None  # of a proposal; the time is that of one draft


def _of(work: works.Work, name: str, context: int, **about: Any) -> Cost:
    return Cost(name=name, case=work.thunk, work=work, context=context, **about)


def all_costs(
    lm: loading.LanguageModel,
    *,
    contexts: Sequence[int],
    page_size: int,
    steps: int,
    rows: Sequence[int] | None = None,
    prefills: Sequence[int] = (),
    gammas: Sequence[int] | None = None,
    sampling: sampling_lib.SamplingSettings | None = None,
    as_shapes: bool = False,
) -> list[list[Cost]]:
    """Returns all costs, in groups measured in turns; `PLAIN` is in each group.

    Costs that need a drafter are left out without one.

    Args:
      contexts: of a plain step; everything else is measured at the first of them.
      steps: number of steps of one timed call.
      rows: numbers of active rows at the first context, the largest at all others, too.
        None: up to the drafter's longest window, at the first context only.
      prefills: lengths of prompts.
      gammas: of rounds; None: from 1 to the drafter's most.
      sampling: settings of plain steps and rounds; None is greedy.
      as_shapes: make calls to be traced, and not run.

    Raises:
      ValueError: contexts beyond the model's positions.
    """
    gamma_max = 0 if lm.drafter is None else lm.gamma_max
    first, most = contexts[0], max(rows or (), default=0)
    # The most that `steps` rounds can commit, and a window more.
    committed = (steps + 1) * (gamma_max + 1)
    positions = max((*contexts, *prefills)) + max(committed, most)
    stage = works.make_stage(lm, positions, page_size, as_shapes=as_shapes)
    if rows is None:
        rows = range(1, gamma_max + 2) if gamma_max else ()

    def cost(work: works.Work, name: str, context: int, **about: Any) -> Cost:
        name += f" at {context}" * (context != first)
        about["num_bytes"] = _bytes(lm.target, lm.params, context)
        return _of(work, name, context, **about)

    def plain(context: int) -> Cost:
        work = stage.plain_steps(context, steps=steps, settings=sampling)
        return cost(work, PLAIN, context)

    def window(n: int, context: int) -> Cost:
        work = stage.windows(context, steps=steps, num_active=n)
        ratio_to = ONE_ROW if 1 in rows and context == first else PLAIN
        name = ONE_ROW if n == 1 else f"{n} active rows"
        return cost(work, name, context, ratio_to=ratio_to, num_active=n)

    group = [plain(first), *(window(n, first) for n in rows)]
    if gamma_max:
        gammas = range(1, gamma_max + 1) if gammas is None else gammas
        group += _drafter_costs(stage, first, steps, gammas, sampling)
    if not as_shapes:
        group += _others(lm, prefills, positions, page_size)
    at = lambda n: [plain(first), plain(n)] + ([window(most, n)] if most else [])
    return [group, *map(at, contexts[1:])]


def _others(
    lm: loading.LanguageModel, prefills: Sequence[int], positions: int, page_size: int
) -> Iterator[Cost]:
    """Yields costs of prefills, by the model's own prefill, and of a plain read."""
    for count in prefills:
        prompt = noise.tokens(count, lm.target.config.vocab_size).tolist()
        prefill = lambda kv, p=prompt: lm.target.prefill(lm.params, kv, p)[0]
        capacity = works.capacity_for(lm.target, positions, page_size)
        sizes = {"capacity": capacity, "page_size": page_size}
        new_cache = functools.partial(lm.target.new_cache, **sizes)
        case = functools.partial(bench.stopwatch, prefill, new_cache)
        yield Cost(name=f"prefill of {count}", case=case, context=count)
    num_bytes = subjects.step_bytes(lm.params)
    case = functools.partial(bench.read, num_bytes)
    yield Cost(name=READ, case=case, num_bytes=num_bytes)


def _drafter_costs(
    stage: works.Stage, context: int, steps: int, gammas: Sequence[int], settings: Any
) -> Iterator[Cost]:
    """Yields the costs of a draft step, and of rounds of each gamma."""
    drafts = stage.lm.gamma_max
    about = {"num_active": 1, "drafts": drafts}
    about["num_bytes"] = _pass_bytes(stage.lm, context) // drafts
    yield _of(stage.proposals(context, steps=steps), "draft step", context, **about)
    for gamma in gammas:
        # Far enough that no round is cut short.
        sizes = {"limit": context + steps * (gamma + 1), "max_rounds": steps}
        work = stage.rounds(context, gamma, **sizes, settings=settings)
        yield _of(work, f"round, gamma {gamma}", context, gamma=gamma)


def _bytes(model: row_model.RowModel, params: params_lib.Params, context: int) -> int:
    """Returns the bytes of weights, and of keys and values, that a step reads."""
    config = model.config
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    position = numbers * jnp.dtype(config.dtype).itemsize
    return subjects.step_bytes(params) + context * position


def _pass_bytes(lm: loading.LanguageModel, context: int) -> int:
    """Returns the bytes that all drafts of a proposal read: a block takes one pass, all
    others a step for each draft on a path, in which a head fuses features once."""
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
        names = ("context", "num_active", "gamma", "ratio_to")
        row = {"kind": "step", "step": cost.name}
        row |= {name: getattr(cost, name) for name in names}
        row |= timings.row(cost.name, ratio_to=cost.ratio_to)
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
      seconds: those of `PLAIN` and of `READ` in each turn.
    """
    num_bytes, read_s = subjects.step_bytes(params), seconds[READ]
    return {
        "kind": "summary",
        "step_bytes": num_bytes,
        "read_gb_s": num_bytes / statistics.median(read_s) / 1e9,
        "bandwidth_share": statistics.median(bench.ratios(read_s, seconds[PLAIN])),
    }
