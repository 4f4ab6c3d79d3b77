"""Log-probabilities of given texts, with the bits of the rows that decode them.

A row's logits do not depend on how many rows run beside it. So a generated text is
scored a slab of rows at a time, not a token a step, and the bits are those of its
generation, with or without speculation, by chains or by trees.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import algorithms, compilation
from spec_jax.engine import (
    checks,
    processing as processing_lib,
    protocols,
    requests as requests_lib,
    rows,
)
from spec_jax.language_model import LanguageModel
from spec_jax.model import row_model
from spec_jax.processors import processor as processor_lib
from spec_jax.rules import sampling as sampling_lib


NAMES = ("log_probs", "drawn_log_probs", "top_tokens", "top_log_probs")
"""The fields of `Scores` that a `results.Generation` has too."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The log-probabilities that a target gives the tokens of a text.

    Attributes:
      tokens: the scored ones.
      log_probs: `[tokens]` float32, nats, by the model's own distribution.
      drawn_log_probs: the same by the distribution that `sampling` draws from, after
        processors, temperature and filters; 0 or -inf if it is greedy, and -inf for a
        token that one of them excludes.
      top_tokens: `[tokens, k]` int32, the k most likely tokens at each place by the
        model's own distribution, in falling order; the lower of two equals is first.
        None if none were requested.
      top_log_probs: `[tokens, k]` float32, nats, their log-probabilities by it.
    """

    tokens: list[int]
    log_probs: np.ndarray
    drawn_log_probs: np.ndarray
    top_tokens: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None


def of_tokens(
    lm: LanguageModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: sampling_lib.SamplingSettings | None,
    *,
    processor: processor_lib.Processor | None = None,
    top: int = 0,
    height: int | None = None,
    by_rows: bool | None = None,
) -> Scores:
    """Returns the scores of valid tokens after a prompt.

    Args:
      processor: of the logits from which the tokens were drawn.
      top: how many of the most likely tokens are named at each place.
      height: active rows of a call, such as 1 in decoding; None: the rows of a slab.
      by_rows: how the prompt is prefilled, see `row_model.RowModel.prefill`.

    Raises:
      ValueError: a prompt that cannot be used, or more tokens than the model has
        positions.
      FloatingPointError: logits that are not finite.
    """
    target, num_prompt, end = lm.target, len(prompt), len(prompt) + len(tokens)
    capacity = requests_lib.capacity_for(target, [prompt], len(tokens))
    size = target.config.vocab_size
    prompt = checks.check_prompt(prompt, vocab_size=size, capacity=capacity)
    text = checks.text_buffer([*prompt, *tokens], capacity)
    processing = processing_lib.begin(
        processor, text, np.int32(num_prompt), vocab_size=size
    )
    kv = target.new_cache(capacity=capacity, page_size=algorithms.PAGE_SIZE)
    kv = rows.of(target, 1).prefill(lm.params, kv, prompt, slot=0, by_rows=by_rows)
    height = target.slab if height is None else height
    _, scored = _scored(
        target,
        height,
        lm.params,
        kv,
        # Room for a slab that begins at the last token.
        checks.text_buffer([*prompt, *tokens], capacity + height),
        np.int32(num_prompt),
        np.int32(end),
        sampling,
        processing,
        top=top,
    )
    found = [np.asarray(x)[num_prompt:end] for x in scored]
    if any(np.isnan(x).any() for x in found[:2]):
        raise FloatingPointError(
            "the logits are not finite: the weights or the prompt hold NaN or infinity"
        )
    named = dict(zip(NAMES, found, strict=False))
    return Scores(tokens=list(tokens), **named)


@functools.partial(
    compilation.jit,
    static_argnames=("target", "height", "top"),
    donate_argnames=("kv",),
)
def _scored(
    target: row_model.RowModel,
    height: int,
    params: Any,
    kv: Any,
    tokens: Int[Array, " max_len"],
    start: Int[Array, ""],
    stop: Int[Array, ""],
    sampling: sampling_lib.SamplingSettings | None,
    processing: processing_lib.Processing | None,
    *,
    top: int = 0,
) -> tuple[Any, tuple[Array, ...]]:
    """Returns the cache; and `log_probs` of `tokens[start:stop]` at their positions:
    two arrays `[max_len]` and, if `top` is not 0, two more `[max_len, top]`.

    `kv` holds the K/V of `[0, start - 1)` and is donated.
    """
    empty: tuple[Array, ...] = (jnp.zeros(tokens.shape, jnp.float32),) * 2
    if top:
        shape = *tokens.shape, top
        empty += jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    def of_slab(carry):
        """Scores the tokens from `first` on whose logits one slab computes."""
        first, kv, found, processing = carry
        num_active = jnp.minimum(stop - first, height)
        fed = jax.lax.dynamic_slice(tokens, (first - 1,), (height,))
        window = protocols.Window(
            tokens=fed[None], start=first[None] - 1, num_active=num_active[None]
        )
        kv, verified = rows.of(target, 1).verify(params, kv, window)
        logits = verified.logits

        def of_row(i, carry):
            """Scores the token whose logits are in row `i`."""
            found, processing = carry
            token = tokens[first + i]
            made = log_probs(logits[i], token, sampling, processing, top=top)
            if processing is not None:
                after = processing.processor.step(processing.states, token)
                processing = processing.replace(states=after)
            found = tuple(
                x.at[first + i].set(y) for x, y in zip(found, made, strict=True)
            )
            return found, processing

        carry = found, processing
        found, processing = jax.lax.fori_loop(0, num_active, of_row, carry)
        return first + num_active, kv, found, processing

    carry = (start, kv, empty, processing)
    done = jax.lax.while_loop(lambda carry: carry[0] < stop, of_slab, carry)
    return done[1:3]


def log_probs(
    logits: Float[Array, " V"],
    token: Int[Array, ""],
    sampling: sampling_lib.SamplingSettings | None,
    processing: processing_lib.Processing | None = None,
    *,
    top: int = 0,
) -> tuple[Array, ...]:
    """Returns a token's log-probabilities by ONE row: the model's, and as drawn; then
    the `top` most likely tokens, and the model's log-probabilities of these, if any."""
    # Without the barrier XLA fuses them with what made the row, and rounds otherwise.
    row = jax.lax.optimization_barrier(logits.astype(jnp.float32))
    settings = sampling
    if settings is None:
        settings = jax.tree.map(lambda leaf: leaf[0], sampling_lib.greedy(1))
    given = row
    if processing is not None:
        given = processing_lib.process(processing.processor, processing.states, row)
    drawn = jax.nn.log_softmax(sampling_lib.log_weights(given, settings))
    both = jax.nn.log_softmax(row)[token], drawn[token]
    if not top:
        return both
    # Ranked by logits, since log-probabilities may round to ties.
    _, likeliest = jax.lax.top_k(row, top)
    return *both, likeliest.astype(jnp.int32), jax.nn.log_softmax(row)[likeliest]
