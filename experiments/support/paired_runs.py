"""One prompt, plain and speculative, in one process: tokens, counters and times.

Both runs get a fresh cache, allocated outside the timed region. The clock runs over
the prompt's prefill and over one call that generates everything; compilation is
done before, by `warm_up`.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from experiments.support import model_pair
from spec_jax import autoregressive, metrics, rounds, session
from spec_jax.model import qwen3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run does with a prompt, beside the models."""

    gamma: int
    gen_tokens: int
    capacity: int
    page_size: int
    stop_ids: tuple[int, ...] = ()
    prefill_by_rows: bool | None = None  # None: what the models do by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """A plain run."""

    tokens: list[int]  # generated, without the prompt
    timing: metrics.Timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculative:
    """A speculative run."""

    tokens: list[int]
    origins: list[rounds.Origin]
    counters: metrics.Counters
    timing: metrics.Timing


def run_plain(
    pair: model_pair.ModelPair, settings: Settings, prompt: list[int]
) -> Plain:
    """Plain decoding.

    Raises:
      ValueError: a prompt that cannot be used.
      MemoryError: out of pages.
    """
    kv = pair.target.new_cache(capacity=settings.capacity, page_size=settings.page_size)
    stop_ids = session.stop_array(settings.stop_ids)
    max_steps = jnp.int32(settings.gen_tokens)
    jax.block_until_ready((kv, stop_ids, max_steps))

    def begin() -> autoregressive.DecodeState:
        return session.begin_plain(
            pair.target,
            pair.params[0],
            kv,
            prompt,
            max_tokens=settings.gen_tokens,
            prefill_by_rows=settings.prefill_by_rows,
        )

    def generate(state: autoregressive.DecodeState) -> autoregressive.DecodeState:
        return autoregressive.generate(
            pair.target, pair.params[0], state, stop_ids=stop_ids, max_steps=max_steps
        )

    _, tokens, timing = _time(begin, generate, num_prompt=len(prompt))
    return Plain(tokens=tokens, timing=timing)


def run_speculative(
    pair: model_pair.ModelPair, settings: Settings, prompt: list[int]
) -> Speculative:
    """Speculative decoding; raises as `run_plain`."""
    session.check_gamma(settings.gamma, pair.drafter.gamma_max)
    sizes = {"capacity": settings.capacity, "page_size": settings.page_size}
    kv = pair.target.new_cache(**sizes)
    memory = pair.drafter.model.new_cache(**sizes)
    stop_ids = session.stop_array(settings.stop_ids)
    gamma, max_rounds = jnp.int32(settings.gamma), jnp.int32(settings.gen_tokens)
    jax.block_until_ready((kv, memory, stop_ids, gamma, max_rounds))

    def begin() -> rounds.RoundState:
        return session.begin(
            pair.target,
            pair.drafter,
            pair.params,
            kv,
            memory,
            prompt,
            max_tokens=settings.gen_tokens,
            prefill_by_rows=settings.prefill_by_rows,
        )

    def generate(state: rounds.RoundState) -> rounds.RoundState:
        return rounds.generate(
            pair.target,
            pair.drafter,
            pair.params,
            state,
            gamma=gamma,
            stop_ids=stop_ids,
            max_rounds=max_rounds,
        )

    state, tokens, timing = _time(begin, generate, num_prompt=len(prompt))
    origins = np.asarray(state.origins)[len(prompt) : int(state.length)]
    return Speculative(
        tokens=tokens,
        origins=[rounds.Origin(origin) for origin in origins],
        counters=count(state, len(tokens)),
        timing=timing,
    )


_State = TypeVar("_State", autoregressive.DecodeState, rounds.RoundState)


def _time(
    begin: Callable[[], _State],
    generate: Callable[[_State], _State],
    *,
    num_prompt: int,
) -> tuple[_State, list[int], metrics.Timing]:
    """Runs both, and returns the last state, its generated tokens and the times.

    Args:
      begin: the prefill; what it needs is complete before the clock starts.
      generate: everything after that.
    """
    started = time.perf_counter()
    state = jax.block_until_ready(begin())
    prefilled = time.perf_counter()
    state = jax.block_until_ready(generate(state))
    finished = time.perf_counter()
    session.check_state(state)
    tokens = np.asarray(state.tokens)[num_prompt : int(state.length)].tolist()
    timing = metrics.Timing(
        prefill_s=prefilled - started,
        decode_s=finished - prefilled,
        tokens=len(tokens),
    )
    return state, tokens, timing


def count(state: rounds.RoundState, num_tokens: int) -> metrics.Counters:
    """The statistics of a finished state as plain numbers."""
    return metrics.Counters(
        tokens=num_tokens,
        rounds=int(state.num_rounds),
        proposed=int(state.num_proposed),
        accepted=int(state.num_accepted),
        cut=int(state.num_cut),
        accepted_hist=tuple(np.asarray(state.accepted_hist).tolist()),
        proposed_at=tuple(np.asarray(state.proposed_at).tolist()),
        accepted_at=tuple(np.asarray(state.accepted_at).tolist()),
    )


def count_mismatches(
    pair: model_pair.ModelPair, settings: Settings, prompt: list[int], tokens: list[int]
) -> int:
    """Positions of a generated text at which plain decoding chooses otherwise.

    Replays the text through plain decoding: every position is judged after the
    prefix that was really committed, whatever came before it.
    """
    kv = pair.target.new_cache(capacity=settings.capacity, page_size=settings.page_size)
    state = session.begin_plain(
        pair.target,
        pair.params[0],
        kv,
        prompt,
        max_tokens=settings.gen_tokens,
        prefill_by_rows=settings.prefill_by_rows,
    )
    new = slice(len(prompt), len(prompt) + len(tokens))
    text = np.array(state.tokens)
    text[new] = tokens
    _, chosen = autoregressive.replay(
        pair.target,
        pair.params[0],
        state.cache,
        tokens=jnp.asarray(text),
        start=jnp.int32(new.start),
        stop=jnp.int32(new.stop),
    )
    return int(np.sum(np.asarray(chosen)[new] != np.asarray(tokens)))


def warm_up(
    pair: model_pair.ModelPair, settings: Settings, prompts: list[list[int]]
) -> float:
    """Compiles everything that the prompts need; returns the seconds it took."""
    started = time.perf_counter()
    brief = dataclasses.replace(settings, gen_tokens=1)
    by_bucket = {qwen3.bucket(max(1, len(prompt) - 1)): prompt for prompt in prompts}
    for prompt in by_bucket.values():
        plain = run_plain(pair, brief, prompt)
        run_speculative(pair, brief, prompt)
        count_mismatches(pair, brief, prompt, plain.tokens)
    return time.perf_counter() - started
