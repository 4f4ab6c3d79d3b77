"""Section (d): whole speculative generations at forced acceptance, against plain ones.

Target and draft run for real, with random weights; what is proposed is overwritten so
that a given share is accepted (`forced_drafter`). Every run must yield the tokens of
plain decoding. The context is noise, the same for all runs, and no prefill is timed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import timing
from experiments.support import (
    forced_drafter,
    gpu_arrays,
    gpu_clock,
    gpu_models,
    gpu_task,
)
from spec_jax import autoregressive, rounds, session


PLAIN = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """What the runs of a section share.

    Attributes:
      params: of target and draft.
      target_box, draft_box: caches, handed on from run to run.
      tokens: `[max_len]`, a random text of which `start` tokens count.
      start, limit: lengths before and after a generation.
    """

    models: gpu_models.Models
    params: tuple[Any, Any]
    target_box: gpu_arrays.CacheBox
    draft_box: gpu_arrays.CacheBox
    tokens: jax.Array
    start: int
    limit: int

    def plain(self) -> np.ndarray:
        """The text that plain decoding writes, `[max_len]` int32."""
        return np.asarray(self.run_plain(self.plain_state()).tokens)

    def plain_state(self) -> autoregressive.DecodeState:
        return autoregressive.init_state(
            jnp.copy(self.tokens),
            length=jnp.int32(self.start),
            limit=jnp.int32(self.limit),
            cache=self.target_box.at(self.start - 1),
        )

    def run_plain(self, state: autoregressive.DecodeState) -> Any:
        state = autoregressive.generate(
            self.models.target,
            self.params[0],
            state,
            stop_ids=session.stop_array(()),
            max_steps=jnp.int32(self.limit),
        )
        self.target_box.kv = state.cache
        return state

    def round_state(self, gamma_max: int) -> rounds.RoundState:
        return gpu_models.round_state(
            self.tokens,
            length=self.start,
            limit=self.limit,
            cache=self.target_box.at(self.start - 1),
            memory=self.draft_box.at(self.start - 1),
            gamma_max=gamma_max,
        )

    def run_rounds(
        self, state: rounds.RoundState, drafter: Any, draft_params: Any, gamma: int
    ) -> rounds.RoundState:
        state = rounds.generate(
            self.models.target,
            drafter,
            (self.params[0], draft_params),
            state,
            gamma=jnp.int32(gamma),
            stop_ids=session.stop_array(()),
            max_rounds=jnp.int32(self.limit),
        )
        self.target_box.kv, self.draft_box.kv = state.cache, state.memory
        return state


def make_runs(task: gpu_task.Task, *, generated: int) -> Runs:
    """Models, weights and caches for generations after the shortest context."""
    sizes, models = task.sizes, gpu_models.models(task)
    start = sizes.contexts[0]
    limit = start + generated
    capacity = limit + models.drafter.gamma_max + 1

    def box(model, seed: int) -> gpu_arrays.CacheBox:
        return gpu_arrays.CacheBox(
            model, capacity=capacity, page_size=sizes.page_size, seed=seed
        )

    target_box = box(models.target, 1)
    return Runs(
        models=models,
        params=(
            gpu_arrays.weights(sizes.target, seed=1),
            gpu_arrays.weights(sizes.draft, seed=2),
        ),
        target_box=target_box,
        draft_box=box(models.drafter.model, 2),
        tokens=gpu_models.text(target_box.kv.slot_capacity, sizes.target.vocab_size),
        start=start,
        limit=limit,
    )


def run(task: gpu_task.Task) -> None:
    """Gamma by gamma, in the order of `sizes`: all its rates beside plain decoding."""
    name = lambda gamma: f"gamma {gamma}"
    gammas = task.chosen(task.sizes.gammas, name=name)
    if not gammas:
        return
    runs = make_runs(task, generated=task.sizes.generated)
    trace = runs.plain()
    again = runs.plain()
    if not np.array_equal(trace, again):
        raise AssertionError("two plain runs of one text differ")
    for gamma in task.in_time(gammas, name=name):
        with task.guard(name(gamma)):
            _run_gamma(task, runs, trace, gamma)


def _run_gamma(task: gpu_task.Task, runs: Runs, trace: np.ndarray, gamma: int) -> None:
    """Plain decoding and a speculative run for each rate, interleaved."""
    sizes = task.sizes
    drafter = forced_drafter.ForcedDrafter(
        inner=runs.models.drafter, vocab_size=sizes.target.vocab_size
    )
    last: dict[Any, Any] = {}

    def plain(state) -> Any:
        last[PLAIN] = runs.run_plain(state)
        return last[PLAIN]

    def thunk(rate: float) -> timing.Thunk:
        mask = forced_drafter.choose_mask(
            rate,
            start=runs.start,
            limit=runs.limit,
            gamma=gamma,
            # A window may reach past the text.
            size=trace.size + drafter.gamma_max,
        )
        params = forced_drafter.ForcedParams(
            draft=runs.params[1], trace=jnp.asarray(trace), kept=jnp.asarray(mask)
        )

        def speculative(state) -> Any:
            last[rate] = runs.run_rounds(state, drafter, params, gamma)
            return last[rate]

        prepare = lambda: runs.round_state(drafter.gamma_max)
        return timing.stopwatch(speculative, prepare)

    thunks = {PLAIN: timing.stopwatch(plain, runs.plain_state)}
    thunks |= {rate: thunk(rate) for rate in sizes.rates}
    # A run takes a second, not the microseconds of a kernel.
    repeats = max(1, sizes.repeats // 4)
    timings = timing.interleave(thunks, repeats=repeats)
    for rate in sizes.rates:
        _report(task, runs, trace, gamma, rate, last[rate], timings)


def _report(task, runs, trace, gamma, rate, state, timings) -> None:
    """The row of one forced rate; tokens that differ are a failure."""
    texts = [
        np.asarray(text)[runs.start : runs.limit] for text in (state.tokens, trace)
    ]
    differing = int(np.sum(texts[0] != texts[1]))
    done = int(state.length) == runs.limit
    if differing or not done:
        task.failures += 1
    proposed, accepted = int(state.num_proposed), int(state.num_accepted)
    num_rounds, generated = int(state.num_rounds), runs.limit - runs.start
    seconds, plain_s = timings.seconds[rate], timings.seconds[PLAIN]
    task.write(
        "rounds",
        acceptance="forced",
        gamma=gamma,
        forced_rate=rate,
        acceptance_rate=accepted / max(proposed, 1),
        accepted_hist=state.accepted_hist,
        rounds=num_rounds,
        tokens=generated,
        tokens_per_target_step=generated / num_rounds,
        context=runs.start,
        matched=done and differing == 0,
        differing_tokens=differing,
        n=len(seconds),
        **gpu_clock.quartiles("plain_ms", [1e3 * s / generated for s in plain_s]),
        **gpu_clock.quartiles("spec_ms", [1e3 * s / generated for s in seconds]),
        **gpu_clock.quartiles("round_ms", [1e3 * s / num_rounds for s in seconds]),
        **gpu_clock.quartiles("speedup", timing.ratios(plain_s, seconds)),
        warm_up_s=timings.warm_up[rate],
    )
