"""The built-in processors: penalties, biases, bad words, and minimal lengths.

The penalties are those of vLLM: repetition is Hugging Face's, and reads prompt and
answer; presence and frequency are OpenAI's, and read the answer alone. Bad words are
Hugging Face's, and may begin in the prompt. Each processor is its own state, and
requests share nothing of it.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.processors import processor
from spec_jax.typing import check_whole


ANY, NONE = -1, -2
"""In bad words: `ANY` stands for every token; `NONE` equals no token."""


class _Own(processor.Processor):
    """A processor of which requests share nothing."""

    def shared(self) -> Self:
        """Returns the processor without its arrays, which are in the states."""
        return jax.tree.map(lambda leaf: None, self)


class LogitBias(_Own):
    """Adds to logits, whatever the text; made by `logit_bias`. It is its own state."""

    tokens: jax.Array  # [n] int32
    values: jax.Array  # [n] float32, finite or -inf

    def init(self, prompt, length, *, vocab_size):
        """Returns the biases."""
        return self

    def step(self, state, token):
        """Returns the same biases."""
        return state

    def apply(self, state, logits):
        """Adds the biases."""
        return logits.at[state.tokens].add(state.values, mode="drop")

    def allows(self, state, token):
        """Returns whether the token has no bias of -inf."""
        is_none = jnp.isneginf(state.values)
        return ~jnp.any((state.tokens == token) & is_none)

    def check(self, vocab_size):
        """Raises `ValueError` for a token outside the vocabulary."""
        _check_tokens("logit_bias", self.tokens, vocab_size)


class BadWords(_Own):
    """Forbids to complete given sequences of tokens; made by `bad_words`."""

    words: jax.Array  # [n, L] int32, the last token last, `ANY` before the first
    recent: jax.Array | None = None  # [L - 1] int32, of the text; `NONE` before it

    def init(self, prompt, length, *, vocab_size):
        """Returns the words, with the last tokens of the prompt."""
        count = self.words.shape[1] - 1
        at = length - count + jnp.arange(count, dtype=jnp.int32)
        return self.replace(recent=jnp.where(at >= 0, prompt[at], NONE))

    def step(self, state, token):
        """Returns the state with the token at the end of `recent`."""
        recent = jnp.concatenate([state.recent, token[None].astype(jnp.int32)])
        return state.replace(recent=recent[1:])

    def _ending(self, state):
        """Returns the last token of each word that lacks only that; else `NONE`."""
        before = state.words[:, :-1]
        holds = (before == ANY) | (before == state.recent[None])
        return jnp.where(jnp.all(holds, axis=1), state.words[:, -1], NONE)

    def apply(self, state, logits):
        """Forbids the tokens that would end a word."""
        ending = self._ending(state)
        at = jnp.where(ending == NONE, logits.shape[0], ending)
        return logits.at[at].set(-jnp.inf, mode="drop")

    def allows(self, state, token):
        """Returns whether the token ends no word."""
        return ~jnp.any(self._ending(state) == token)

    def check(self, vocab_size):
        """Raises `ValueError` for a token outside the vocabulary."""
        words = np.asarray(self.words)
        _check_tokens("bad_words", words[words != ANY], vocab_size)


class MinTokens(_Own):
    """Forbids stop tokens until enough tokens are generated; made by `min_tokens`. It
    is its own state."""

    left: jax.Array  # [] int32, tokens that are missing
    stop_ids: jax.Array  # [n] int32

    def init(self, prompt, length, *, vocab_size):
        """Returns the processor itself: tokens of the prompt do not count."""
        return self

    def step(self, state, token):
        """Returns the state with one token less missing."""
        return state.replace(left=jnp.maximum(state.left - 1, 0))

    def apply(self, state, logits):
        """Forbids the stop tokens while tokens are missing."""
        at = jnp.where(state.left > 0, state.stop_ids, logits.shape[0])
        return logits.at[at].set(-jnp.inf, mode="drop")

    def allows(self, state, token):
        """Returns whether no tokens are missing, or the token is no stop token."""
        return (state.left <= 0) | ~jnp.any(state.stop_ids == token)

    def check(self, vocab_size):
        """Raises `ValueError` for a token outside the vocabulary."""
        _check_tokens("min_tokens", self.stop_ids, vocab_size)


class Penalties(_Own):
    """Makes tokens of the text less likely; made by `penalties`. It is its own state,
    with the fields that `init` fills."""

    repetition: jax.Array  # [] float32, above 0; 1: none
    presence: jax.Array  # [] float32; 0: none
    frequency: jax.Array  # [] float32; 0: none
    in_prompt: jax.Array | None = None  # [V] bool
    counts: jax.Array | None = None  # [V] int32, of each token in the answer

    def init(self, prompt, length, *, vocab_size):
        """Returns the state with the tokens of the prompt, and counts of 0."""
        is_known = jnp.arange(prompt.shape[0], dtype=jnp.int32) < length
        at = jnp.where(is_known, prompt, vocab_size)
        return self.replace(
            in_prompt=jnp.zeros((vocab_size,), bool).at[at].set(True, mode="drop"),
            counts=jnp.zeros((vocab_size,), jnp.int32),
        )

    def step(self, state, token):
        """Returns the state with the token counted."""
        counts = state.counts.at[token].add(1, mode="drop", wrap_negative_indices=False)
        return state.replace(counts=counts)

    def apply(self, state, logits):
        """Divides logits by the repetition penalty, and subtracts the others.

        A logit of 0 or less is multiplied instead.
        """
        in_answer = state.counts > 0
        weaker = jnp.where(
            logits > 0, logits / state.repetition, logits * state.repetition
        )
        logits = jnp.where(state.in_prompt | in_answer, weaker, logits)
        less = state.frequency * state.counts.astype(jnp.float32)
        # The barrier prevents a fused multiply-add, which would round differently.
        logits -= jax.lax.optimization_barrier(less)
        return logits - jnp.where(in_answer, state.presence, 0.0)


def logit_bias(bias: Mapping[int, float]) -> LogitBias:
    """Returns the processor that adds `bias[token]` to a logit; -inf forbids it.

    Raises:
      ValueError: no token, one that is no token id, or a value that is NaN or +inf.
    """
    if not isinstance(bias, Mapping) or not bias:
        raise ValueError(f"{bias=}: give a value for each token, as in {{42: -5.0}}")
    for token, value in bias.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not value < math.inf:
            raise ValueError(f"bias[{token}]={value}: give a number below infinity")
    return LogitBias(
        tokens=_tokens("bias", list(bias)),
        values=jnp.asarray(np.asarray(list(bias.values()), np.float32)),
    )


def bad_words(words: Sequence[Sequence[int]]) -> BadWords:
    """Returns the processor that forbids to complete one of `words`.

    Args:
      words: sequences of token ids. Hugging Face's processor of that name does the
        same; vLLM's does not look for beginnings in the prompt.

    Raises:
      ValueError: no word, an empty one, or one that is no row of token ids.
    """
    if isinstance(words, str) or not isinstance(words, Sequence) or not words:
        raise ValueError(f"{words=}: give rows of token ids, as in [[5], [7, 9]]")
    rows = [np.asarray(_tokens("a bad word", word)) for word in words]
    table = np.full((len(rows), max(map(len, rows))), ANY, np.int32)
    for row, word in zip(table, rows, strict=True):
        row[len(row) - len(word) :] = word
    return BadWords(words=jnp.asarray(table))


def min_tokens(count: int, stop_ids: Sequence[int]) -> MinTokens:
    """Returns the processor that forbids `stop_ids` among the first `count` tokens.

    Args:
      stop_ids: such as `lm.stop_ids`.

    Raises:
      ValueError: a count outside `[1, 2**31)`, or no stop token.
    """
    check_whole(count=count)
    return MinTokens(left=jnp.int32(count), stop_ids=_tokens("stop_ids", stop_ids))


def penalties(
    *, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> Penalties:
    """Returns vLLM's penalties of tokens that are in the text already.

    Args:
      repetition: divides the logit of a token of the prompt or the answer where it is
        above 0, and multiplies it elsewhere; as Hugging Face's `repetition_penalty`.
      presence: is subtracted from the logit of each token of the answer.
      frequency: is subtracted as often as the token is in the answer.

    Raises:
      ValueError: a value outside `[-1e30, 1e30]`, or a repetition below 1e-30.
    """
    given = {"repetition": repetition, "presence": presence, "frequency": frequency}
    for name, value in given.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not abs(value) <= 1e30:
            raise ValueError(f"{name}={value!r} is not a finite number up to 1e30")
    if not repetition >= 1e-30:
        raise ValueError(f"{repetition=} must be above 0: 1 is no penalty")
    return Penalties(**{name: jnp.float32(value) for name, value in given.items()})


def _tokens(what: str, tokens: Any) -> jax.Array:
    """Returns token ids as an array; raises `ValueError`."""
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise ValueError(f"{what}={tokens!r}: give at least one token id, in a row")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"{what} has a number that is no token: {tokens!r}")
    return jnp.asarray(array.astype(np.int32))


def _check_tokens(what: str, tokens: Any, vocab_size: int) -> None:
    """Raises `ValueError` for a token outside the vocabulary."""
    worst = int(np.asarray(tokens).max(initial=0))
    if worst >= vocab_size:
        raise ValueError(f"{what} has token {worst}, outside [0, {vocab_size})")
