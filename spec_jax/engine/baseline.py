"""Autoregressive decoding, one token a step: the baseline and the oracle.

It shares the target's rows, and the sampling and processing of a row, with the rounds;
it chooses its tokens and ends its sequences by itself, so that the two check each
other. A target is a `row_model.RowModel`, or any `target.Target` of one slot.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax import compilation, pytree
from spec_jax.engine import (
    checks,
    processing as processing_lib,
    protocols,
    rows,
    state as states,
)
from spec_jax.processors import processor as processor_lib
from spec_jax.rules import sampling as sampling_lib
from spec_jax.typing import check_whole


Status = states.Status


class DecodeState(pytree.Node):
    """Everything that `generate` carries, for one sequence.

    Fields mean what they do in `state.Slots`: `tokens[length - 1]` is pending, it has
    no K/V yet.
    """

    tokens: jax.Array  # [max_len] int32
    length: jax.Array  # [] int32
    status: jax.Array  # [] int32, `Status`
    limit: jax.Array  # [] int32
    capped: jax.Array  # [] bool
    stop_ids: jax.Array  # [num_stop] int32
    sampling: sampling_lib.SamplingSettings | None  # None: greedy
    cache: protocols.Cache
    num_steps: jax.Array  # [] int32
    num_nonfinite: jax.Array  # [] int32
    # The state of the logits' processor after `tokens[:length]`.
    processing: processing_lib.Processing | None = None


@jax.jit
def init_state(
    tokens: Int[Array, " max_len"],
    *,
    length: Int[Array, ""],
    limit: Int[Array, ""],
    cache: protocols.Cache,
    stop_ids: Int[Array, " num_stop"],
    sampling: sampling_lib.SamplingSettings | None = None,
    capped: Bool[Array, ""] | bool = False,
    processing: processing_lib.Processing | None = None,
) -> DecodeState:
    """Returns the state before the first step: `tokens[:length]` is the prompt.

    Without `sampling` it is greedy. Both `sampling` and `processing` are copied.
    """
    return DecodeState(
        tokens=tokens,
        length=length,
        status=jnp.int32(Status.RUNNING),
        limit=limit,
        capped=jnp.asarray(capped, bool),
        stop_ids=stop_ids,
        sampling=jax.tree.map(jnp.array, sampling),
        cache=cache,
        num_steps=jnp.int32(0),
        num_nonfinite=jnp.int32(0),
        processing=jax.tree.map(jnp.array, processing),
    )


def begin(
    target: Any,
    params: protocols.Params,
    kv: Any,
    prompt: checks.Tokens,
    *,
    max_tokens: int,
    prefill_by_rows: bool | None = None,
    sampling: sampling_lib.SamplingSettings | None = None,
    stop_ids: checks.Tokens = (),
    processor: processor_lib.Processor | None = None,
) -> DecodeState:
    """Checks the prompt and prefills all of it but the last token.

    Generation ends after `max_tokens`, or earlier where the cache is full.

    Args:
      kv: the empty cache that the target's `new_cache` made; donated.
      sampling: settings by `sampling.make_settings`; None is greedy.
      processor: of the target's logits; None: logits as they are.

    Raises:
      ValueError: a prompt that cannot be used, `max_tokens` or `stop_ids` that are no
        such numbers, or a processor of another vocabulary.
    """
    capacity = kv.slot_capacity
    check_whole(max_tokens=max_tokens)
    prompt = checks.check_prompt(
        prompt, vocab_size=target.config.vocab_size, capacity=capacity
    )
    limit, capped = checks.limit_of(len(prompt), max_tokens, capacity)
    text, length = checks.text_buffer(prompt, capacity), np.int32(len(prompt))
    processing = processing_lib.begin(
        processor, text, length, vocab_size=target.config.vocab_size
    )
    kv = rows.of(target, 1).prefill(params, kv, prompt, slot=0, by_rows=prefill_by_rows)
    return init_state(
        text,
        length=length,
        limit=np.int32(limit),
        capped=np.bool_(capped),
        cache=kv,
        stop_ids=checks.stop_array(stop_ids),
        sampling=sampling,
        processing=processing,
    )


def run_step(target: Any, params: protocols.Params, state: DecodeState) -> DecodeState:
    """Decodes one token. A step that finds no page commits nothing."""
    n, processing, target = state.length, state.processing, rows.of(target, 1)
    cache, token, is_finite = _next_token(
        target,
        params,
        state.cache,
        state.tokens[n - 1],
        n,
        state.sampling,
        processing,
    )
    stops = jnp.any(token == state.stop_ids)
    failed = target.out_of_pages(cache)[0]
    at = jnp.where(failed, state.tokens.shape[0], n)
    length = jnp.where(failed, n, n + 1)
    at_limit = jnp.where(state.capped, int(Status.CAPACITY), int(Status.LENGTH))
    status = jnp.where(length >= state.limit, at_limit, int(Status.RUNNING))
    status = jnp.where(stops, int(Status.STOP), status)
    status = jnp.where(failed, int(Status.OUT_OF_PAGES), status)
    return state.replace(
        processing=_stepped(processing, token),
        tokens=state.tokens.at[at].set(token, mode="drop"),
        length=length,
        status=status.astype(jnp.int32),
        cache=cache,
        num_steps=state.num_steps + (~failed).astype(jnp.int32),
        num_nonfinite=state.num_nonfinite + (~failed & ~is_finite).astype(jnp.int32),
    )


def _stepped(processing, token):
    """Returns the processing after a token more, if there is one."""
    if processing is None:
        return None
    states = processing.processor.step(processing.states, token)
    return processing.replace(states=states)


def _next_token(target, params, cache, token, position, sampling, processing=None):
    """Feeds the token before `position`; returns the cache, the token of `position`,
    and whether the logits that it was chosen from are finite."""
    one = jnp.int32(1)
    window = protocols.Window(
        tokens=token[None, None], start=position[None] - 1, num_active=one[None]
    )
    cache, verified = target.verify(params, cache, window)
    logits = verified.logits
    if processing is not None:
        row = processing_lib.process(processing.processor, processing.states, logits[0])
        logits = logits.astype(jnp.float32).at[0].set(row)
    row, highest = logits[0], target.choose(logits, one)[0]
    # Where there is a NaN the argmax is the first one. "clip": as in
    # `verification.finite_rows`.
    is_finite = jnp.isfinite(row.at[highest].get(mode="clip"))
    if sampling is None:
        return cache, highest, is_finite
    places = jnp.arange(logits.shape[0], dtype=jnp.int32)
    each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, places.shape), sampling)
    drawn = target.draw(logits, each, positions=position + places, draws=places < one)
    return cache, jnp.where(sampling.temperature == 0, highest, drawn[0]), is_finite


@functools.partial(
    compilation.jit, static_argnames=("target",), donate_argnames=("state",)
)
def generate(
    target: Any,
    params: protocols.Params,
    state: DecodeState,
    *,
    max_steps: Int[Array, ""],
) -> DecodeState:
    """Decodes on the device until the sequence ends, or `max_steps` passed.

    Args:
      state: donated.
    """

    def keep_going(carry):
        step, state = carry
        return (state.status == int(Status.RUNNING)) & (step < max_steps)

    def body(carry):
        step, state = carry
        return step + 1, run_step(target, params, state)

    _, state = jax.lax.while_loop(keep_going, body, (jnp.int32(0), state))
    return state


@functools.partial(
    compilation.jit, static_argnames=("target",), donate_argnames=("cache",)
)
def replay(
    target: Any,
    params: protocols.Params,
    cache: protocols.Cache,
    *,
    tokens: Int[Array, " max_len"],
    start: Int[Array, ""],
    stop: Int[Array, ""],
    sampling: sampling_lib.SamplingSettings | None = None,
    processing: processing_lib.Processing | None = None,
) -> tuple[protocols.Cache, Int[Array, " max_len"]]:
    """Returns what decoding would choose after each prefix of a *given* text.

    Chooses greedily, or draws with `sampling`; `processing` is the state of a logits
    processor after `tokens[:start]`. Feeds `tokens[start - 1 .. stop - 2]` one at a
    time, whichever tokens were chosen. `cache` holds the K/V of `[0, start - 1)` and is
    donated.

    Returns:
      The cache and, at each position `start .. stop - 1`, the token that decoding
      chooses there; elsewhere the given tokens.
    """

    target = rows.of(target, 1)

    def body(position, carry):
        cache, chosen, processing = carry
        cache, token, _ = _next_token(
            target, params, cache, tokens[position - 1], position, sampling, processing
        )
        processing = _stepped(processing, tokens[position])
        return cache, chosen.at[position].set(token), processing

    begun = cache, tokens, processing
    return jax.lax.fori_loop(start, stop, body, begun)[:2]


def check(state: DecodeState, *, vocab_size: int) -> None:
    """Raises what the loop could only flag.

    Raises:
      FloatingPointError: tokens were chosen from logits that are not finite.
      MemoryError: no page was free for the sequence; what was committed until then
        is in `state.tokens[: state.length]`.
      RuntimeError: a cache refused an operation, or the text is not one that the loop
        may write: a fault of the program.
    """
    checks.check_slot(state, vocab_size=vocab_size)
    checks.check_pages(state.status[None], state.length[None], state.cache)
    checks.check_refused([state.cache])
