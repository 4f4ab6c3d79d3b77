"""Whole speculative generations at forced acceptance, against plain ones.

Target and draft run for real; what is proposed is overwritten so that a given share is
accepted (`forced_drafter`): random weights accept nothing. Every run must yield the
tokens of decoding alone, and its keys and values as integers. The context is noise,
the same for all runs, and no prefill is timed.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import (
    forced_drafter,
    kernel_checks,
    noise,
    timing,
    works,
)
from spec_jax import loading
from spec_jax.drafters import each
from spec_jax.engine import (
    baseline,
    protocols,
    round as round_lib,
    rows,
    scheduler,
    state as states,
)
from spec_jax.model import row_model
from spec_jax.paging import index


PLAIN = "plain"


def rates(text: str) -> tuple[float | str, ...]:
    """The type of a flag that lists rates to be forced, and names of data sets."""
    known = forced_drafter.DATA_SETS
    try:
        parts = text.split(",")
        found = tuple(part if part in known else float(part) for part in parts)
    except ValueError:
        found = ()
    if not found or not all(rate in known or 0 < rate < 1 for rate in found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of rates between 0 and 1, such as 0.4,0.6; of a head "
            f"it may name {' or '.join(known)}"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Runs:
    """What the runs share.

    Attributes:
      start, limit: lengths before and after a generation.
      target_kv, draft_memory: caches of noise, of which runs take copies.
    """

    lm: loading.LanguageModel
    start: int
    limit: int
    tokens: jax.Array  # `[max_len]`, a random text of which `start` tokens count
    target_kv: Any
    draft_memory: Any

    def plain(self) -> works.Work:
        """Decodes the text."""

        def prepare(kv: Any) -> baseline.DecodeState:
            return baseline.init_state(
                jnp.copy(self.tokens),
                length=jnp.int32(self.start),
                limit=jnp.int32(self.limit),
                cache=noise.at_length(kv, self.start - 1),
                stop_ids=works.no_stop(),
            )

        most, target = jnp.int32(self.limit), self.lm.target
        return works.Work(
            program="forced: plain",
            function=baseline.generate,
            params=self.lm.params,
            caches=self.target_kv,
            prepare=prepare,
            apply=lambda f, params, state: f(target, params, state, max_steps=most),
            calls=1,
        )

    def rounds(self, known: forced_drafter.ForcedParams, gamma: int) -> works.Work:
        """Generates the text by rounds."""
        inner = self.lm.drafter
        drafter = forced_drafter.ForcedDrafter(
            inner=inner, vocab_size=self.lm.target.config.vocab_size
        )

        def prepare(caches: Any) -> states.State:
            kv, memory = caches
            memory = forced_drafter.ForcedMemory(
                inner=noise.memory_at(memory, self.start),
                trace=known.trace[None],
                kept=known.kept[None],
            )
            slots = works.one_slot(
                self.tokens,
                length=jnp.int32(self.start),
                limit=jnp.int32(self.limit),
                gamma=jnp.int32(gamma),
                gamma_max=inner.gamma_max,
                depth_max=protocols.depth_max(inner),
            )
            kv = noise.at_length(kv, self.start - 1)
            return states.State(slots=slots, cache=kv, memory=memory)

        def apply(function, params, state):
            speculator = round_lib.Speculator(
                params=params,
                target=rows.SlotRows(model=self.lm.target, num_slots=1),
                drafter=each.lift(drafter, 1),
            )
            return function(speculator, state, max_rounds=jnp.int32(self.limit))

        return works.Work(
            program="forced: rounds",
            function=round_lib.generate,
            params=(self.lm.params, known.draft),
            caches=(self.target_kv, self.draft_memory),
            prepare=prepare,
            apply=apply,
            calls=1,
        )

    def programs(self, gamma: int) -> list[works.Work]:
        """What `measure` calls, to be traced and not run."""
        size = self.tokens.shape[0]
        empty = forced_drafter.ForcedParams(
            draft=self.lm.drafter_params,
            trace=jnp.zeros((size,), jnp.int32),
            kept=jnp.zeros((size + self.lm.gamma_max,), jnp.int32),
        )
        return [self.plain(), self.rounds(empty, gamma)]

    def written(self, kv: Any) -> Any:
        """Keys and values of what was generated, `[L, T, K, H]` each.

        Less the last token, which has none.
        """
        return _written(kv, self.start - 1, size=self.limit - self.start)


@functools.partial(jax.jit, static_argnames=("size",))
def _written(kv, start, *, size):
    positions = start + jnp.arange(size)
    pages = kv.page_table[row_model.SLOT, positions // kv.page_size]
    at = positions % kv.page_size
    return [jnp.stack([pool[pages, at] for pool in pools]) for pools in (kv.k, kv.v)]


def make_runs(
    lm: loading.LanguageModel,
    *,
    start: int,
    generated: int,
    page_size: int,
    as_shapes: bool = False,
) -> Runs:
    """Caches for generations after `start` tokens of noise, or their shapes."""
    limit = start + generated
    capacity = limit + lm.gamma_max + 1
    capacity = index.pages_for(capacity, page_size) * page_size
    sizes = {"capacity": capacity, "page_size": page_size}
    make_kv = functools.partial(noise.noisy_cache, lm.target, **sizes)
    make_memory = functools.partial(noise.noisy_memory, lm.drafter, **sizes)
    return Runs(
        lm=lm,
        start=start,
        limit=limit,
        tokens=noise.tokens(capacity + 1, lm.target.config.vocab_size, seed=3),
        target_kv=jax.eval_shape(make_kv) if as_shapes else make_kv(),
        draft_memory=jax.eval_shape(make_memory) if as_shapes else make_memory(),
    )


Rate = float | str
"""A share of drafts, or the name of a data set."""


def measure(
    runs: Runs,
    gamma: int,
    rates: Sequence[Rate],
    *,
    repeats: int,
    head: str | None = None,
) -> list[dict[str, Any]]:
    """A row of each rate, all of them and autoregressive decoding in turns.

    Args:
      head: whose published acceptance a data set's name stands for.

    Raises:
      RuntimeError: two plain runs of one text differ.
    """
    plain_work = runs.plain()
    plain = [plain_work.once() for _ in range(2)]
    trace, again = (np.asarray(state.tokens) for state in plain)
    if not np.array_equal(trace, again):
        raise RuntimeError("two plain runs of one text differ")
    expected = runs.written(plain[0].cache)
    del plain  # And its cache.
    drafter = runs.lm.drafter
    depth = drafter.depth_max if protocols.is_tree(drafter) else gamma
    last: dict[Rate, Any] = {}
    done: dict[Rate, list[tuple[states.Slots, int]]] = {rate: [] for rate in rates}

    def timed(work: works.Work, keep: Callable[[Any], Any]) -> timing.Thunk:
        """Without a call before it, of which there are many steps already."""
        return timing.stopwatch(
            lambda state: keep(work.run(work.params, state)),
            lambda: work.prepare(work.caches),
        )

    def thunk(rate: Rate) -> timing.Thunk:
        kept = forced_drafter.choose_kept(
            forced_drafter.chances(rate, depth, head=head),
            start=runs.start,
            limit=runs.limit,
            # A window may reach past the text.
            size=trace.size + drafter.gamma_max,
        )
        params = forced_drafter.ForcedParams(
            draft=runs.lm.drafter_params,
            trace=jnp.asarray(trace),
            kept=jnp.asarray(kept),
        )
        run = timed(
            runs.rounds(params, gamma),
            lambda state: last.update({rate: state}) or state,
        )

        def checked() -> float:
            seconds = run()
            state = last.pop(rate)
            wrong = kernel_checks.differing(runs.written(state.cache), expected)
            # Without the cache, which is large.
            done[rate].append((scheduler.slot_of(state.slots, 0), wrong))
            return seconds

        return checked

    thunks: dict[Any, timing.Thunk] = {PLAIN: timed(plain_work, lambda state: state)}
    thunks |= {rate: thunk(rate) for rate in rates}
    timings = timing.interleave(thunks, repeats=repeats)

    def worst(rate: Rate) -> tuple[states.Slots, int]:
        """The run that differs most from decoding, or has most logits of NaN."""
        differs = lambda one: (
            int(one[0].length) != runs.limit,
            int(one[0].num_nonfinite),
            _differing_tokens(runs, trace, one[0]),
            one[1],
        )
        return max(done[rate], key=differs)

    return [row(runs, trace, gamma, rate, *worst(rate), timings) for rate in rates]


def _differing_tokens(runs: Runs, trace: np.ndarray, slot: states.Slots) -> int:
    new = slice(runs.start, runs.limit)
    return int(np.sum(np.asarray(slot.tokens)[new] != trace[new]))


def row(
    runs: Runs,
    trace: np.ndarray,
    gamma: int,
    rate: Rate,
    slot: states.Slots,
    kv_differing: int,
    timings: timing.Timings,
) -> dict[str, Any]:
    """The row of one forced rate; `equal` is false where a token or a bit differs, and
    where logits are not finite: equal texts of NaN show nothing.

    Args:
      slot: of the run that differs most, leaves without the axis of slots.
    """
    differing = _differing_tokens(runs, trace, slot)
    nonfinite = int(slot.num_nonfinite)
    matched = int(slot.length) == runs.limit and differing == nonfinite == 0
    proposed, accepted = int(slot.num_proposed), int(slot.num_accepted)
    num_rounds, generated = int(slot.num_rounds), runs.limit - runs.start
    seconds, plain_s = timings.seconds[rate], timings.seconds[PLAIN]
    return {
        "kind": "rounds",
        "acceptance": "forced",
        "gamma": gamma,
        "forced_rate": rate,
        "acceptance_rate": accepted / max(proposed, 1),
        "accepted_hist": slot.accepted_hist,
        "rounds": num_rounds,
        "tokens": generated,
        "tokens_per_target_step": generated / num_rounds,
        "context": runs.start,
        "nonfinite_logits": nonfinite,
        "matched": matched,
        "differing_tokens": differing,
        "differing_kv": kv_differing,
        "equal": matched and kv_differing == 0,
        "n": len(seconds),
        **timing.quartile_fields("plain_ms", [1e3 * s / generated for s in plain_s]),
        **timing.quartile_fields("spec_ms", [1e3 * s / generated for s in seconds]),
        **timing.quartile_fields("round_ms", [1e3 * s / num_rounds for s in seconds]),
        **timing.quartile_fields("speedup", timing.ratios(plain_s, seconds)),
        "warm_up_s": timings.warm_up[rate],
    }
