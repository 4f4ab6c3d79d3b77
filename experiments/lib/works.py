"""Programs whose time is a step's: loops of plain steps, windows, proposals, rounds.

Many steps are one compiled call, so that the cost of dispatching a call is not
measured; on a GPU the loop around them is, as it is in a generation. A context of `n`
means that the first step attends to `n` positions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.lib import noise, timing
from spec_jax import compilation, tree as tree_lib
from spec_jax.drafters import each
from spec_jax.engine import (
    baseline,
    protocols,
    round as round_lib,
    rows as rows_lib,
    state as states,
)
from spec_jax.model import row_model
from spec_jax.paging import cache as paged
from spec_jax.rules import sampling as sampling_lib


MOVES = 20
"""Moves of a path in the place of a step: one takes microseconds, and of as few as
there are steps the call would take most of the time that is measured."""


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
    function: Callable  # of jit, by which it is compiled
    params: Any  # second argument of `apply`
    caches: Any  # or their shapes; they stay as they are
    prepare: Callable[[Any], Any]  # `caches -> state`, of copies; not timed
    # `(function, params, state) -> outputs`: calls `function` once, which donates the
    # state. It is given `function.trace` too, and so what is compiled ahead is found.
    apply: Callable[[Callable, Any, Any], Any]
    calls: int  # how often `function` does what is to be timed

    def run(self, params: Any, state: Any) -> Any:
        """Calls it; donates the state."""
        return self.apply(self.function, params, state)

    def once(self) -> Any:
        """Prepares and calls it."""
        return self.run(self.params, self.prepare(self.caches))

    def thunk(self) -> timing.Thunk:
        """Seconds of one."""
        run = functools.partial(self.run, self.params)
        prepare = functools.partial(self.prepare, self.caches)
        return timing.stopwatch(
            run, lambda: timing.warmed(run, prepare), calls=self.calls
        )

    def trace(self) -> jax.stages.Traced:
        """The timed call as a program; arrays may be shapes."""
        state = jax.eval_shape(self.prepare, self.caches)
        return self.apply(self.function.trace, self.params, state)


def proposals(lm, sizes, context, *, memory) -> Work:
    """Proposals of `gamma_max` drafts as rounds ask for them, each a token further."""
    drafter, gamma = each.lift(lm.drafter, 1), lm.gamma_max
    config, text = lm.target.config, text_of(lm.target, sizes)
    num_taps = len(protocols.taps_of(drafter))
    shape = sizes.capacity, num_taps, config.hidden_size

    def apply(function, params, memory):
        return function(
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
        function=propose_along,
        params=lm.drafter_params,
        caches=memory,
        prepare=lambda memory: noise.memory_at(memory, context),
        apply=apply,
        calls=sizes.steps * gamma,
    )


def plain_steps(model, params, sizes, context, *, cache, settings=None) -> Work:
    most = jnp.int32(sizes.steps)

    def prepare(kv: paged.PagedKV) -> baseline.DecodeState:
        return baseline.init_state(
            text_of(model, sizes),
            length=jnp.int32(context),
            limit=jnp.int32(context + sizes.steps),
            cache=noise.at_length(kv, context - 1),
            stop_ids=no_stop(),
            sampling=settings,
        )

    return Work(
        program="target: plain steps",
        function=baseline.generate,
        params=params,
        caches=cache,
        prepare=prepare,
        apply=lambda f, params, state: f(model, params, state, max_steps=most),
        calls=sizes.steps,
    )


def moves(model, sizes, context, *, num_rows, cache) -> Work:
    """Moves the path to the last column of a tree, `MOVES` times a step."""
    target = rows_lib.SlotRows(model=model, num_slots=1)
    path = tree_lib.path_to(_two_children(num_rows), num_rows - 1)[1:]
    columns, start = jnp.asarray(path, jnp.int32)[None], context - 1
    calls = MOVES * sizes.steps

    def prepare(kv: paged.PagedKV) -> paged.PagedKV:
        return noise.at_length(kv, start + num_rows)

    @functools.partial(compilation.jit, donate_argnums=0)
    def run(kv):
        def step(number, kv):
            # 0, as XLA does not know: places are computed each time, as in rounds.
            none = jnp.minimum(number, 0)
            kept, first = (jnp.full((1,), n) + none for n in (len(path), start))
            return target.keep_path(kv, columns, kept, start=first)

        return jax.lax.fori_loop(0, calls, step, kv)

    return Work(
        program=f"target: moves of {num_rows}",
        function=run,
        params=None,
        caches=cache,
        prepare=prepare,
        apply=lambda f, params, kv: f(kv),
        calls=calls,
    )


def _two_children(num_rows: int) -> np.ndarray:
    """The parents of a tree in which each node has two children, level by level."""
    return np.maximum(np.arange(num_rows, dtype=np.int32) - 1, 0) // 2


def windows(
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
        return noise.at_length(kv, context - 1)

    def apply(function, params, kv):
        return function(
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
        function=repeat_forward,
        params=params,
        caches=cache,
        prepare=prepare,
        apply=apply,
        calls=sizes.steps,
    )


@functools.partial(
    compilation.jit,
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


def rounds(lm, sizes, context, gamma, *, caches, settings=None) -> Work:
    """`gamma` drafts, verification, commit, truncation of both caches."""
    target = rows_lib.SlotRows(model=lm.target, num_slots=1)
    drafter, most = each.lift(lm.drafter, 1), jnp.int32(sizes.steps)

    def prepare(caches) -> states.State:
        kv = noise.at_length(caches[0], context - 1)
        memory = noise.memory_at(caches[1], context)
        slots = one_slot(
            text_of(lm.target, sizes),
            length=jnp.int32(context),
            # Far enough that no round is cut short.
            limit=jnp.int32(context + sizes.steps * (gamma + 1)),
            gamma=jnp.int32(gamma),
            gamma_max=lm.gamma_max,
            depth_max=protocols.depth_max(lm.drafter),
            sampling=settings,
        )
        return states.State(slots=slots, cache=kv, memory=memory)

    def apply(function, params, state):
        speculator = round_lib.Speculator(params=params, target=target, drafter=drafter)
        return function(speculator, state, max_rounds=most)

    return Work(
        program="rounds",
        function=round_lib.generate,
        params=(lm.params, lm.drafter_params),
        caches=caches,
        prepare=prepare,
        apply=apply,
        calls=sizes.steps,
    )


def no_stop() -> jax.Array:
    """Returns stop tokens that end nothing, in an array to be donated."""
    return jnp.full((1,), states.NO_STOP, jnp.int32)


@functools.partial(jax.jit, static_argnames=("gamma_max", "depth_max"))
def one_slot(
    tokens: jax.Array,
    *,
    length: jax.Array,
    limit: jax.Array,
    gamma: jax.Array,
    gamma_max: int,
    depth_max: int,
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
        depth_max=depth_max,
        sampling=sampling,
        policy=None,
    )
    return jax.tree.map(lambda leaf: leaf[None], slot)


def text_of(model: row_model.RowModel, sizes: Sizes) -> jax.Array:
    return noise.tokens(sizes.capacity + 1, model.config.vocab_size, seed=3)
