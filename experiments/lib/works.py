"""Programs to time steps: loops of plain steps, of windows, of proposals, of rounds.

Many steps are one compiled call, so that the cost of dispatching a call is not
measured; on a GPU the cost of the loop around them is, since generations have it, too.
A context of `n` means that the first step attends to `n` positions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from experiments.lib import bench, noise
from spec_jax import algorithms, compilation, loading
from spec_jax.drafters import each
from spec_jax.engine import (
    baseline,
    checks,
    protocols,
    round as round_lib,
    rows as rows_lib,
    state as states,
)
from spec_jax.model import row_model
from spec_jax.paging import index


@dataclasses.dataclass(frozen=True)
class Work:
    """A compiled call that can be run, and traced without running."""

    program: str  # name of what is compiled; contexts, rows and gammas are data
    # A function of jit with all of its arguments, except the last one by position
    call: functools.partial
    prepare: Callable[[Any], Any]  # `caches -> that argument`, from copies; untimed
    caches: Any  # or their shapes; never changed
    calls: int  # how often `call` repeats the timed operation

    def prepared(self) -> Any:
        """Returns the argument of `call`, which donates it."""
        return self.prepare(self.caches)

    def once(self) -> Any:
        """Returns the result of one call, with an argument of its own."""
        return self.call(self.prepared())

    def thunk(self, *, warms: bool = True) -> bench.Thunk:
        """Returns a thunk that times the call; `warms` is that of `bench.stopwatch`."""
        return bench.stopwatch(self.call, self.prepared, calls=self.calls, warms=warms)

    def trace(self) -> jax.stages.Traced:
        """Traces the timed call; arrays may be shapes.

        The call's own function is traced, so that programs compiled ahead are found
        again.
        """
        state = jax.eval_shape(self.prepare, self.caches)
        return self.call.func.trace(*self.call.args, state, **self.call.keywords)


def capacity_for(model: row_model.RowModel, needed: int, page_size: int) -> int:
    """Returns positions in whole pages; raises `ValueError` where a model has fewer."""
    capacity = index.pages_for(needed, page_size) * page_size
    positions = model.config.max_position_embeddings
    if capacity > positions:
        raise ValueError(
            f"the longest context and what follows need {capacity} positions, the "
            f"model has {positions}: give fewer --steps or shorter --contexts"
        )
    return capacity


@dataclasses.dataclass(frozen=True)
class Stage:
    """Models for works, a random text `[max_len]` that fills the caches, and caches
    full of noise, or their shapes."""

    lm: loading.LanguageModel
    text: jax.Array
    cache: Any  # the target's
    memory: Any  # the drafter's; None: there is no drafter

    def plain_steps(
        self,
        context: int,
        *,
        steps: int,
        settings: Any = None,
        program: str = "target: plain steps",
    ) -> Work:
        """Returns the work of decoding `steps` tokens after `context` of the text."""

        def prepare(kv):
            return baseline.init_state(
                jnp.copy(self.text),
                length=jnp.int32(context),
                limit=jnp.int32(context + steps),
                cache=noise.at_length(kv, context - 1),
                stop_ids=checks.stop_array(()),
                sampling=settings,
            )

        models, most = (self.lm.target, self.lm.params), jnp.int32(steps)
        call = functools.partial(baseline.generate, *models, max_steps=most)
        return Work(program, call, prepare, self.cache, steps)

    def windows(self, context: int, *, steps: int, num_active: int) -> Work:
        """Returns the work of verifying one window `steps` times: `repeat_forward`.

        Raises:
          ValueError: the window goes beyond the cache: none of its rows would run.
        """
        room = self.text.shape[0] - context
        if num_active > room:
            raise ValueError(
                f"{num_active} rows at {context}: the cache has {room} left"
            )
        how = {"num_active": jnp.int32(num_active), "steps": steps}
        models = (self.lm.target, self.lm.params)
        call = functools.partial(repeat_forward, *models, **how)
        prepare = lambda kv: noise.at_length(kv, context - 1)
        return Work("target: windows", call, prepare, self.cache, steps)

    def proposals(self, context: int, *, steps: int) -> Work:
        """Returns the work of proposing `gamma_max` drafts `steps` times, as rounds ask
        for them, each time a token further."""
        lm, taps = self.lm, protocols.taps_of(self.lm.drafter)
        shape = self.text.shape[0] - 1, len(taps), lm.target.config.hidden_size
        call = functools.partial(
            propose_along,
            each.lift(lm.drafter, 1),
            lm.drafter_params,
            tokens=self.text[None],
            features=jnp.ones(shape, lm.target.config.dtype) if taps else None,
            start=jnp.int32(context),
            gamma=jnp.int32(lm.gamma_max),
            steps=jnp.int32(steps),
        )
        prepare = lambda memory: noise.memory_at(memory, context)
        calls = steps * lm.gamma_max
        return Work("draft: proposals", call, prepare, self.memory, calls)

    def rounds(
        self,
        context: int,
        gamma: int,
        *,
        limit: int,
        max_rounds: int,
        settings: Any = None,
        drafter: protocols.Drafter | None = None,
        memory_at: Callable[[Any, int], Any] = noise.memory_at,
        program: str = "rounds",
    ) -> Work:
        """Returns the work of whole rounds: draft, verify, commit and truncate.

        Args:
          limit: rounds follow the first `context` tokens, up to so many tokens or
            `max_rounds`.
          drafter: replaces the model's drafter, whose parameters it has.
          memory_at: returns its memory as a round finds it after so many tokens.
        """
        lm, drafter = self.lm, drafter or self.lm.drafter

        def prepare(caches) -> states.State:
            kv, memory = caches
            slots = states.empty_slots(
                num_slots=1,
                max_len=self.text.shape[0],
                num_stop=1,
                gamma_max=lm.gamma_max,
                depth_max=protocols.depth_max(drafter),
                sampling=settings,
                policy=None,
            )
            at = functools.partial(jnp.full, (1,), dtype=jnp.int32)
            slots = slots.replace(
                tokens=jnp.copy(self.text)[None],
                status=at(int(states.Status.RUNNING)),
                length=at(context),
                limit=at(limit),
                gamma=at(gamma),
            )
            kv, memory = noise.at_length(kv, context - 1), memory_at(memory, context)
            return states.State(slots=slots, cache=kv, memory=memory)

        algo, most = algorithms.speculative(lm.target, drafter), jnp.int32(max_rounds)
        speculator = algo.speculator((lm.params, lm.drafter_params), 1)
        call = functools.partial(round_lib.generate, speculator, max_rounds=most)
        return Work(program, call, prepare, (self.cache, self.memory), max_rounds)


def make_stage(
    lm: loading.LanguageModel,
    positions: int,
    page_size: int,
    *,
    as_shapes: bool = False,
) -> Stage:
    """Makes a stage with caches of so many positions, or their shapes; raises as
    `capacity_for`."""
    make = jax.eval_shape if as_shapes else lambda call: call()
    capacity = capacity_for(lm.target, positions, page_size)
    sizes = {"capacity": capacity, "page_size": page_size}
    cache, memory = make(functools.partial(noise.noisy_cache, lm.target, **sizes)), None
    if lm.drafter is not None:
        memory = make(functools.partial(noise.noisy_memory, lm.drafter, **sizes))
    text = noise.tokens(capacity + 1, lm.target.config.vocab_size, seed=3)
    return Stage(lm, text, cache, memory)


@functools.partial(
    compilation.jit,
    static_argnames=("model", "steps", "num_columns"),
    donate_argnames=("kv",),
)
def repeat_forward(model, params, kv, *, num_active, steps, num_columns=None):
    """Verifies rows at the same positions `steps` times, and truncates them each time.

    Args:
      kv: cache of one slot or several.
      num_active: active rows of each slot, or one number for all.
      num_columns: columns of the window, active or not; None: as many as a slab's rows.
    """
    (num_slots,) = kv.length.shape
    target = rows_lib.SlotRows(model=model, num_slots=num_slots)
    num_active = jnp.broadcast_to(num_active, (num_slots,))
    width = num_columns or model.slab
    start, asked = kv.length, jnp.ones((num_slots,), bool)

    def step(carry, _):
        kv, tokens = carry
        window = protocols.Window(tokens=tokens, start=start, num_active=num_active)
        kv, verified = target.verify(params, kv, window)
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
    drafter, params, memory, *, tokens, features, start, gamma, steps
) -> tuple[protocols.Memory, Int[Array, ""]]:
    """Proposes `steps` times, each time a committed token further.

    Args:
      tokens: a text `[1, max_len]`, of which `start` tokens are committed.
      features: of the text `[T, taps, D]`, for a drafter that reads the target.
    """

    def step(i, carry):
        """Proposes once; no draft is kept."""
        memory, seen = carry
        length = (start + i)[None]
        text = {"tokens": tokens, "length": length}
        memory, proposal = drafter.propose(
            params, memory, **text, gamma=gamma[None], sampling=None
        )
        # XLA would not compute a proposal that is not used.
        seen += jnp.sum(proposal.tokens) + proposal.num_drafted[0]
        handed = {}
        if features is not None:
            shape = 1, 1 + protocols.depth_max(drafter), *features.shape[1:]
            row = features[length[0] - 1]
            handed["features"] = jnp.zeros(shape, row.dtype).at[0, 0].set(row)
        asked = jnp.ones((1,), bool)
        memory = drafter.commit(params, memory, length + 1, asked=asked, **handed)
        return memory, seen

    return jax.lax.fori_loop(0, steps, step, (memory, jnp.int32(0)))
