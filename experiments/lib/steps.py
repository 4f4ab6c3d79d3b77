"""Step costs: a plain step, a slab with several active rows, a draft step, a round.

Many steps are one compiled call, so that the cost of dispatching a call is not
measured; on a GPU the loop around them is, as it is in a generation. A context of `n`
means that the first step attends to `n` positions. Caches are full of noise, and any
length can be declared valid: what a step costs depends on lengths, not on what the
cache holds.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.lib import noise, subjects, timing
from spec_jax import loading, tree as tree_lib
from spec_jax.drafters import each
from spec_jax.engine import (
    baseline,
    protocols,
    round as round_lib,
    rows as rows_lib,
    state as states,
)
from spec_jax.model import (
    config as config_lib,
    params as params_lib,
    prompt as prompt_lib,
    row_model,
)
from spec_jax.paging import allocator, cache as paged, index
from spec_jax.rules import sampling as sampling_lib


PLAIN = "plain step"
ONE_ROW = "1 active row"
READ = "read of its bytes"
LARGE_READ = "read of 256 MiB"
NEW_CACHE = "new cache"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that all thunks share, so that contexts share executables."""

    capacity: int  # positions of each cache
    page_size: int
    steps: int  # steps of one call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A compiled call, in two parts that can be traced without running."""

    program: str  # what is compiled; contexts, rows and gammas are data, and share it
    params: Any  # first argument of `run`
    caches: Any  # or their shapes; they stay as they are
    prepare: Callable[[Any], Any]  # `caches -> state`, of copies; not timed
    run: Callable[[Any, Any], Any]  # `(params, state) -> outputs`; donates the state
    calls: int  # how often `run` does what is to be timed

    def thunk(self) -> timing.Thunk:
        """Seconds of one."""
        return timing.stopwatch(
            lambda state: self.run(self.params, state),
            lambda: self.prepare(self.caches),
            calls=self.calls,
        )

    def trace(self) -> jax.stages.Traced:
        """The timed call as a program; arrays may be shapes."""
        state = jax.eval_shape(self.prepare, self.caches)
        return jax.jit(self.run, donate_argnums=1).trace(self.params, state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Something whose cost is measured."""

    name: str  # unique; as the table shows it
    ratio_to: str  # name of the cost that it is compared with
    work: Work | None = None  # a compiled call, or
    timed: timing.Thunk | None = None  # a thunk, where it is something else
    # Positions that the first step attends to, where that matters
    context: int | None = None
    num_active: int | None = None  # active rows, where that matters
    gamma: int | None = None  # tokens drafted, where that matters
    num_bytes: int | None = None  # that one must read, where that is known

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
    sizes = Sizes(capacity=capacity, page_size=plan.page_size, steps=plan.steps)
    cache = _cache(lm.target, sizes, plan.as_shapes)
    shared = lm.target, lm.params, sizes
    first = plan.contexts[0]

    def plain(context: int) -> Cost:
        return Cost(
            name=PLAIN if context == first else f"{PLAIN} at {context}",
            work=_plain(*shared, context, cache=cache, settings=plan.sampling),
            ratio_to=PLAIN,
            context=context,
            num_bytes=_bytes(*shared[:2], context),
        )

    def window(n: int, context: int) -> Cost:
        suffix = "" if context == first else f" at {context}"
        return Cost(
            name=(ONE_ROW if n == 1 else f"{n} active rows") + suffix,
            work=_window(*shared, context, num_active=n, cache=cache),
            ratio_to=(ONE_ROW if ones else PLAIN) if not suffix else PLAIN,
            context=context,
            num_active=n,
            num_bytes=_bytes(*shared[:2], context),
        )

    rows = plan.rows or (range(1, gamma_max + 2) if gamma_max else ())
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


def _traffic(lm: loading.LanguageModel, sizes: Sizes) -> list[Cost]:
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
    lm: loading.LanguageModel, sizes: Sizes, context: int, cache: Any, plan: Plan
) -> list[Cost]:
    """A draft step, and rounds of each gamma."""
    draft, params = lm.drafter.model, lm.drafter_params
    make = functools.partial(
        noisy_memory, lm.drafter, capacity=sizes.capacity, page_size=sizes.page_size
    )
    own = jax.eval_shape(make) if plan.as_shapes else make()
    made = [
        Cost(
            name="draft step",
            work=_proposals(lm, sizes, context, memory=own),
            ratio_to=PLAIN,
            context=context,
            num_active=1,
            num_bytes=_bytes(draft, params, context),
        )
    ]
    both = cache, own
    for gamma in range(1, lm.gamma_max + 1):
        work = _round(lm, sizes, context, gamma, caches=both, settings=plan.sampling)
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


def _proposals(lm, sizes, context, *, memory) -> Work:
    """Proposals of `gamma_max` drafts as rounds ask for them, each a token further."""
    drafter, gamma = each.lift(lm.drafter, 1), lm.gamma_max
    config, text = lm.target.config, _text(lm.target, sizes)
    num_taps = len(protocols.taps_of(drafter))
    shape = sizes.capacity, num_taps, config.hidden_size

    def run(params, memory):
        return propose_along(
            drafter,
            params,
            memory,
            tokens=text[None],
            features=jnp.ones(shape, config.dtype) if num_taps else None,
            sampling=None,
            start=jnp.int32(context),
            gamma=jnp.int32(gamma),
            steps=jnp.int32(sizes.steps),
            stride=jnp.int32(1),
        )

    return Work(
        program="draft: proposals",
        params=lm.drafter_params,
        caches=memory,
        prepare=lambda memory: memory_at(memory, context),
        run=run,
        calls=sizes.steps * gamma,
    )


def _plain(model, params, sizes, context, *, cache, settings=None) -> Work:
    most = jnp.int32(sizes.steps)

    def prepare(kv: paged.PagedKV) -> baseline.DecodeState:
        return baseline.init_state(
            _text(model, sizes),
            length=jnp.int32(context),
            limit=jnp.int32(context + sizes.steps),
            cache=at_length(kv, context - 1),
            stop_ids=no_stop(),
            sampling=settings,
        )

    def run(params, state):
        return baseline.generate(model, params, state, max_steps=most)

    return Work(
        program="target: plain steps",
        params=params,
        caches=cache,
        prepare=prepare,
        run=run,
        calls=sizes.steps,
    )


def _tree_costs(model, params, sizes, context, *, num_rows, cache) -> list[Cost]:
    """What trees of so many rows cost: all rows, one of them, and the kept path."""
    window = functools.partial(
        _window, model, params, sizes, context, cache=cache, num_columns=num_rows
    )
    chain, path = f"{num_rows} chain rows", num_rows.bit_length() - 1
    parts = {
        chain: (window(num_active=num_rows), PLAIN),
        f"{num_rows} tree rows": (window(num_active=num_rows, is_tree=True), chain),
        f"1 of {num_rows} tree rows": (window(num_active=1, is_tree=True), ONE_ROW),
        f"moving {path} of {num_rows} tree rows": (
            _move(model, params, sizes, context, num_rows=num_rows, cache=cache),
            PLAIN,
        ),
    }
    return [
        Cost(name=name, work=work, ratio_to=ratio_to, context=context)
        for name, (work, ratio_to) in parts.items()
    ]


def _move(model, params, sizes, context, *, num_rows, cache) -> Work:
    """Moves the path to the last column of a tree, again and again."""
    target = rows_lib.SlotRows(model=model, num_slots=1)
    path = tree_lib.path_to(_two_children(num_rows), num_rows - 1)[1:]
    columns, start = jnp.asarray(path, jnp.int32)[None], context - 1

    def prepare(kv: paged.PagedKV) -> paged.PagedKV:
        return at_length(kv, start + num_rows)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, kv):
        del params

        def step(_, kv):
            kept = jnp.full((1,), len(path), jnp.int32)
            return target.keep_path(kv, columns, kept, start=jnp.full((1,), start))

        return jax.lax.fori_loop(0, sizes.steps, step, kv)

    return Work(
        program=f"target: moves of {num_rows}",
        params=params,
        caches=cache,
        prepare=prepare,
        run=run,
        calls=sizes.steps,
    )


def _two_children(num_rows: int) -> np.ndarray:
    """The parents of a tree in which each node has two children, level by level."""
    return np.maximum(np.arange(num_rows, dtype=np.int32) - 1, 0) // 2


def _window(
    model,
    params,
    sizes,
    context,
    *,
    num_active,
    cache,
    num_columns=None,
    is_tree=False,
) -> Work:
    live = jnp.int32(num_active)

    def prepare(kv: paged.PagedKV) -> paged.PagedKV:
        return at_length(kv, context - 1)

    def run(params, kv):
        return repeat_forward(
            model,
            params,
            kv,
            num_active=live,
            steps=sizes.steps,
            num_columns=num_columns,
            is_tree=is_tree,
        )

    kind = f" of {num_columns} {'tree' if is_tree else 'chain'} rows"
    return Work(
        program="target: windows" + (kind if num_columns else ""),
        params=params,
        caches=cache,
        prepare=prepare,
        run=run,
        calls=sizes.steps,
    )


@functools.partial(
    jax.jit,
    static_argnames=("model", "steps", "num_columns", "is_tree"),
    donate_argnames=("kv",),
)
def repeat_forward(
    model, params, kv, *, num_active, steps, num_columns=None, is_tree=False
):
    """Verifies rows at the same positions `steps` times, and forgets them each time.

    Args:
      kv: of one slot or several.
      num_active: of each slot, or of all.
      num_columns: of the window, active or not; None: those of a slab.
      is_tree: whether each node has two children; otherwise the window is a chain.
    """
    (num_slots,) = kv.length.shape
    target = rows_lib.SlotRows(model=model, num_slots=num_slots)
    num_active = jnp.broadcast_to(num_active, (num_slots,))
    width, shape = num_columns or model.slab, {}
    if is_tree:
        above = jnp.asarray(_two_children(width))
        shape = {"parents": above[None], "depth_max": width.bit_length()}
    start, asked = kv.length, jnp.ones((num_slots,), bool)

    def step(carry, _):
        kv, tokens = carry
        kv, verified = target.verify(
            params,
            kv,
            protocols.Window(
                tokens=tokens, start=start, num_active=num_active, **shape
            ),
        )
        chosen = target.choose(verified.logits, verified.num_active)
        # Each step's tokens come from the step before it, as in decoding. With fixed
        # ones XLA could move the first layer out of the loop.
        tokens = verified.by_column(chosen, fill=0)
        return (target.truncate(kv, start, asked=asked), tokens), None

    tokens = jnp.arange(width, dtype=jnp.int32)[None]
    tokens = jnp.broadcast_to(tokens, (num_slots, width))
    return jax.lax.scan(step, (kv, tokens), None, length=steps)[0]


@functools.partial(jax.jit, static_argnames=("drafter",), donate_argnames=("memory",))
def propose_along(
    drafter: protocols.SlotDrafter,
    params: protocols.Params,
    memory: protocols.Memory,
    *,
    tokens: Int[Array, "1 max_len"],
    features: Float[Array, "T taps D"] | None,
    sampling: protocols.Sampling,
    start: Int[Array, ""],
    gamma: Int[Array, ""],
    steps: Int[Array, ""],
    stride: Int[Array, ""],
) -> tuple[protocols.Memory, Int[Array, ""]]:
    """Proposes `steps` times, each time `stride` committed tokens further.

    Args:
      features: of the text, for a drafter that reads the target.
    """
    asked = jnp.ones((1,), bool)

    def commit(memory, length):
        """Commits `stride` tokens; with features one after the other, as rounds that
        draft nothing do."""
        if features is None:
            return drafter.commit(params, memory, length + stride, asked=asked)
        shape = 1, 1 + protocols.depth_max(drafter), *features.shape[1:]

        def one(j, memory):
            row = features[length[0] + j - 1]
            handed = jnp.zeros(shape, features.dtype).at[0, 0].set(row)
            new_len = length + j + 1
            return drafter.commit(params, memory, new_len, asked=asked, features=handed)

        return jax.lax.fori_loop(0, stride, one, memory)

    def step(i, carry):
        """One proposal, none of which is kept."""
        memory, seen = carry
        length = (start + i * stride)[None]
        memory, proposal = drafter.propose(
            params,
            memory,
            tokens=tokens,
            length=length,
            gamma=gamma[None],
            sampling=sampling,
        )
        # A proposal that nobody looks at would not be computed.
        seen += jnp.sum(proposal.tokens) + proposal.num_drafted[0]
        return commit(memory, length), seen

    return jax.lax.fori_loop(0, steps, step, (memory, jnp.int32(0)))


def _round(lm, sizes, context, gamma, *, caches, settings=None) -> Work:
    """`gamma` drafts, verification, commit, truncation of both caches."""
    target = rows_lib.SlotRows(model=lm.target, num_slots=1)
    drafter, most = each.lift(lm.drafter, 1), jnp.int32(sizes.steps)

    def prepare(caches) -> states.State:
        kv = at_length(caches[0], context - 1)
        memory = memory_at(caches[1], context)
        slots = one_slot(
            _text(lm.target, sizes),
            length=jnp.int32(context),
            # Far enough that no round is cut short.
            limit=jnp.int32(context + sizes.steps * (gamma + 1)),
            gamma=jnp.int32(gamma),
            gamma_max=lm.gamma_max,
            sampling=settings,
        )
        return states.State(slots=slots, cache=kv, memory=memory)

    def run(params, state):
        speculator = round_lib.Speculator(params=params, target=target, drafter=drafter)
        return round_lib.generate(speculator, state, max_rounds=most)

    return Work(
        program="rounds",
        params=(lm.params, lm.drafter_params),
        caches=caches,
        prepare=prepare,
        run=run,
        calls=sizes.steps,
    )


def no_stop() -> jax.Array:
    """Returns stop tokens that end nothing, in an array to be donated."""
    return jnp.full((1,), states.NO_STOP, jnp.int32)


@functools.partial(jax.jit, static_argnames=("gamma_max",))
def one_slot(
    tokens: jax.Array,
    *,
    length: jax.Array,
    limit: jax.Array,
    gamma: jax.Array,
    gamma_max: int,
    sampling: sampling_lib.SamplingSettings | None = None,
) -> states.Slots:
    """Returns one slot that generates after `tokens[:length]`; leaves are `[1, ...]`.

    There is no stop token; all arrays are new ones.
    """
    slot = states.begin_slot(
        tokens,
        length=length,
        limit=limit,
        capped=False,
        gamma=gamma,
        stop_ids=no_stop(),
        gamma_max=gamma_max,
        depth_max=gamma_max,
        sampling=sampling,
        policy=None,
    )
    return jax.tree.map(lambda leaf: leaf[None], slot)


def _prefill(model, params, sizes, num_tokens) -> Cost:
    """A prompt's K/V, by whatever prefill the model has; seconds of a prompt."""
    prompt = noise.tokens(num_tokens, model.config.vocab_size).tolist()
    timed = timing.stopwatch(
        lambda kv: prompt_lib.prefill(model, params, kv, prompt),
        lambda: model.new_cache(capacity=sizes.capacity, page_size=sizes.page_size),
    )
    name = f"prefill of {num_tokens}"
    return Cost(name=name, timed=timed, ratio_to=PLAIN, context=num_tokens)


def _text(model: row_model.RowModel, sizes: Sizes) -> jax.Array:
    return noise.tokens(sizes.capacity + 1, model.config.vocab_size, seed=3)


def _cache(model: row_model.RowModel, sizes: Sizes, as_shapes: bool) -> Any:
    """A cache of noise, or its shape."""
    sizes = {"capacity": sizes.capacity, "page_size": sizes.page_size}
    make = functools.partial(noisy_cache, model, **sizes)
    return jax.eval_shape(make) if as_shapes else make()


def noisy_cache(
    model: row_model.RowModel, *, capacity: int, page_size: int
) -> paged.PagedKV:
    """A cache each of whose positions holds keys and values, none of them valid."""
    kv = model.new_cache(capacity=capacity, page_size=page_size)
    leaves, structure = jax.tree.flatten((kv.k, kv.v))
    # One after another: two full caches at once may not fit.
    kv = kv.replace(k=(), v=())
    for number, leaf in enumerate(leaves):
        shape, dtype = leaf.shape, leaf.dtype
        leaves[number] = leaf = None
        leaves[number] = noise.normal(number, shape, dtype)
    k, v = jax.tree.unflatten(structure, leaves)
    return kv.replace(k=k, v=v)


def noisy_memory(drafter: Any, *, capacity: int, page_size: int) -> Any:
    """The memory of a draft model or a head, whose cache is as `noisy_cache` has it."""
    sizes = {"capacity": capacity, "page_size": page_size}
    kv = noisy_cache(drafter.model, **sizes)
    if not protocols.taps_of(drafter):
        return kv
    return each.lift(drafter, 1).init(**sizes).replace(kv=kv)


def memory_at(memory: Any, length: int) -> Any:
    """A copy of such a memory as a round finds it after `length` tokens.

    Of a head the last pair was not taken in: its feature waits.
    """
    if isinstance(memory, paged.PagedKV):
        return at_length(memory, length - 1)
    ring = jax.tree.map(jnp.copy, memory.ring)
    ring = ring.replace(
        first=jnp.full((1,), length - 2, jnp.int32),
        end=jnp.full((1,), length - 1, jnp.int32),
    )
    return memory.replace(kv=at_length(memory.kv, length - 2), ring=ring)


@jax.jit
def at_length(kv: paged.PagedKV, length: int) -> paged.PagedKV:
    """A copy of the cache with `[0, length)` valid, and as many pages as that takes."""
    slot = row_model.SLOT
    kv = allocator.truncate(kv, slot, jnp.minimum(length, kv.length[slot]))
    kv = allocator.reserve(kv, slot, length)
    return allocator.extend(kv, slot, length)


def _bytes(model: row_model.RowModel, params: params_lib.Params, context: int) -> int:
    """Bytes of weights, and of keys and values, that a step reads."""
    return subjects.step_bytes(params) + context * cache_bytes(model.config)


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
