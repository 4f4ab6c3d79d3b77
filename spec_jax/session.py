"""The host's edge of a generation: checks, allocation, prefill.

What enters the compiled loops is checked here, once, with the values; what leaves
them as a flag is raised here, with what was already committed.
"""

import enum
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import autoregressive, protocols, rounds, sampling
from spec_jax.gamma import policy as policy_lib
from spec_jax.model import params as params_lib, prompt as prompt_lib, row_model
from spec_jax.paging import cache as paged


Tokens = Sequence[int] | np.ndarray | jax.Array
"""Token ids, one dimension of whole numbers."""


class End(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"  # with a stop token
    LIMIT = "limit"  # after as many tokens as were asked for
    CAPACITY = "capacity"  # the cache holds no longer text
    PAGES = "pages"  # the pool had no page left


def token_list(tokens: Tokens, *, what: str = "prompt") -> list[int]:
    """The tokens as a list of Python's integers.

    Raises:
      ValueError: a string, or anything else that is not a row of whole numbers.
    """
    if isinstance(tokens, str | bytes):
        raise ValueError(
            f"{what} is text, {tokens[:40]!r}: give token ids, as "
            "`spec_jax.model.tokenizer` encodes it (`encode`)"
        )
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{what} has shape {list(array.shape)} and dtype {array.dtype}: give one "
            "row of token ids, whole numbers"
        )
    return array.tolist()


def check_prompt(
    prompt: Tokens, *, vocab_size: int, capacity: int, what: str = "prompt"
) -> list[int]:
    """The prompt as a list.

    Raises:
      ValueError: a prompt that cannot be decoded from.
    """
    prompt = token_list(prompt, what=what)
    if not prompt:
        raise ValueError(f"{what} is empty: there is no token to decode from")
    if len(prompt) > capacity:
        raise ValueError(
            f"{what} has {len(prompt)} tokens but the cache holds {capacity}; "
            "shorten it or allow a larger capacity"
        )
    worst = max(prompt) if min(prompt) >= 0 else min(prompt)
    if not 0 <= worst < vocab_size:
        raise ValueError(f"{what} has token {worst}, outside [0, {vocab_size})")
    return prompt


def check_max_tokens(max_tokens: int) -> None:
    """Raises `ValueError` unless `max_tokens` is a whole number of at least 1."""
    is_whole = isinstance(max_tokens, numbers.Integral)
    if not is_whole or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ValueError(f"{max_tokens=} must be a whole number of at least 1")


def check_gamma(gamma: int, gamma_max: int) -> None:
    """Raises `ValueError` unless `0 <= gamma <= gamma_max`."""
    if not 0 <= gamma <= gamma_max:
        raise ValueError(f"{gamma=} is outside [0, {gamma_max}]")


def check_pair(target: row_model.RowModel, drafter: protocols.Drafter) -> None:
    """Raises `ValueError` unless the drafter can propose for the target.

    A drafter without a `vocab_size` repeats tokens that it was shown, and fits any.
    """
    target_size = target.config.vocab_size
    draft_size = getattr(drafter, "vocab_size", target_size)
    if draft_size != target_size:
        raise ValueError(
            f"draft and target have different vocabularies: {draft_size} and "
            f"{target_size} entries"
        )
    if drafter.gamma_max < 1:
        raise ValueError(f"gamma_max={drafter.gamma_max} must be at least 1")
    if drafter.gamma_max + 1 > target.slab:
        raise ValueError(
            f"gamma_max={drafter.gamma_max} needs a slab of {drafter.gamma_max + 1} "
            f"rows, the target has {target.slab}"
        )


def stop_array(stop_ids: Tokens | int) -> jax.Array:
    """Stop tokens for the loops; never empty, so that its shape can stay the same.

    Raises:
      ValueError: not whole numbers.
    """
    if isinstance(stop_ids, numbers.Integral):
        stop_ids = (stop_ids,)
    return jnp.asarray(token_list(stop_ids, what="stop_ids") or [-1], jnp.int32)


def _text_buffer(prompt: list[int], capacity: int) -> jax.Array:
    # The last token of a full sequence has no K/V, so there is one more than fits.
    text = np.zeros((capacity + 1,), np.int32)
    text[: len(prompt)] = prompt
    return jax.device_put(text)


def prefill(
    model: row_model.RowModel,
    params: params_lib.Params,
    kv: paged.PagedKV,
    prompt: Tokens,
    *,
    by_rows: bool | None = None,
) -> paged.PagedKV:
    """K/V of all prompt tokens but the last, which stays pending. Donates `kv`.

    `by_rows` as in `RowModel.prefill`.

    The first generated token therefore comes from the row path like all others.
    """
    prompt = token_list(prompt)
    return prompt_lib.prefill(model, params, kv, prompt[:-1], by_rows=by_rows)


def begin_plain(
    target: row_model.RowModel,
    params: params_lib.Params,
    kv: paged.PagedKV,
    prompt: Tokens,
    *,
    max_tokens: int,
    prefill_by_rows: bool | None = None,
    settings: sampling.SamplingSettings | None = None,
) -> autoregressive.DecodeState:
    """Checks the prompt and prefills it. `kv` is empty, and donated.

    Generation ends after `max_tokens`, or earlier where the cache is full: `end_of`
    says which. It is greedy without `settings` (`sampling.make_settings`), which are
    copied.

    Raises:
      ValueError: a prompt that cannot be used, or no token to generate.
    """
    capacity, vocab_size = kv.slot_capacity, target.config.vocab_size
    check_max_tokens(max_tokens)
    prompt = check_prompt(prompt, vocab_size=vocab_size, capacity=capacity)
    kv = prefill(target, params, kv, prompt, by_rows=prefill_by_rows)
    return autoregressive.init_state(
        _text_buffer(prompt, capacity),
        length=jnp.int32(len(prompt)),
        limit=jnp.int32(min(len(prompt) + max_tokens, capacity + 1)),
        capped=jnp.bool_(len(prompt) + max_tokens > capacity + 1),
        vocab_size=jnp.int32(vocab_size),
        cache=kv,
        settings=settings,
    )


def begin(
    target: row_model.RowModel,
    drafter: protocols.Drafter,
    params: tuple[params_lib.Params, protocols.Params],
    kv: paged.PagedKV,
    memory: protocols.Memory,
    prompt: Tokens,
    *,
    max_tokens: int,
    prefill_by_rows: bool | None = None,
    settings: sampling.SamplingSettings | None = None,
    policy: policy_lib.State = None,
) -> rounds.RoundState:
    """As `begin_plain`, for the rounds: target and drafter take in the prompt.

    Args:
      params: of the target and of the drafter.
      memory: what `drafter.init` allocated; donated, as `kv` is.
      prefill_by_rows: of the target alone.
      policy: the first state of a gamma policy, which is copied.

    Raises:
      ValueError: a prompt that cannot be used, no token to generate, or a drafter that
        does not fit.
    """
    check_pair(target, drafter)
    capacity, vocab_size = kv.slot_capacity, target.config.vocab_size
    check_max_tokens(max_tokens)
    prompt = check_prompt(prompt, vocab_size=vocab_size, capacity=capacity)
    target_params, draft_params = params
    kv = prefill(target, target_params, kv, prompt, by_rows=prefill_by_rows)
    memory = drafter.prefill(draft_params, memory, prompt)
    return rounds.init_state(
        _text_buffer(prompt, capacity),
        length=jnp.int32(len(prompt)),
        limit=jnp.int32(min(len(prompt) + max_tokens, capacity + 1)),
        capped=jnp.bool_(len(prompt) + max_tokens > capacity + 1),
        vocab_size=jnp.int32(vocab_size),
        cache=kv,
        memory=memory,
        gamma_max=drafter.gamma_max,
        settings=settings,
        policy=policy,
    )


State = rounds.RoundState | autoregressive.DecodeState


def end_of(state: State) -> End | None:
    """Why the generation ended; None while it goes on."""
    if bool(state.starved):
        return End.PAGES
    if bool(state.stopped):
        return End.STOP
    if not bool(state.done):
        return None
    return End.CAPACITY if bool(state.capped) else End.LIMIT


def committed(state: State) -> list[int]:
    """The prompt and what was generated, once `check_state` found nothing wrong.

    Raises as `check_state`.
    """
    check_state(state)
    return np.asarray(state.tokens)[: int(state.length)].tolist()


def check_state(state: State) -> None:
    """Raises what the loops could only flag.

    `committed` calls it; who reads `state.tokens` calls it first.

    Raises:
      FloatingPointError: tokens were chosen from logits that are not finite.
      MemoryError: the generation ended for want of pages. The tokens committed until
        then are in `state.tokens[: state.length]`.
      RuntimeError: a cache refused an operation, or the text is longer than its limit
        or holds what is no token of the target's: a fault of the program.
    """
    kv = state.cache
    _check_text(state)
    check_finite(state)
    if bool(state.starved):
        raise MemoryError(
            f"out of pages after {int(state.length)} tokens: {int(kv.num_free)} of "
            f"{kv.num_pages} pages of {kv.page_size} tokens are free, and a sequence "
            f"holds at most {kv.slot_capacity} tokens"
        )
    check_refused([kv, getattr(state, "memory", None)])


def check_finite(state: State) -> None:
    """Raises `FloatingPointError` if a token was chosen from logits not finite."""
    count = int(state.num_nonfinite)
    if count:
        raise FloatingPointError(
            f"{count} tokens were chosen from logits that hold NaN or infinity, and "
            "mean nothing: look for such values in the target's weights, and for "
            "impossible ones in its config"
        )


def _check_text(state: State) -> None:
    """Raises `RuntimeError` for a text that no loop may write."""
    length, limit = int(state.length), int(state.limit)
    if length > limit:
        raise RuntimeError(f"{length} tokens are committed, past the limit of {limit}")
    text, vocab_size = np.asarray(state.tokens)[:length], int(state.vocab_size)
    outside = np.flatnonzero((text < 0) | (text >= vocab_size))
    if outside.size:
        raise RuntimeError(
            f"token {text[outside[0]]} at position {outside[0]} is committed, outside "
            f"[0, {vocab_size})"
        )


def check_refused(parts: Any) -> None:
    """Raises `RuntimeError` if a cache in a pytree refused an operation of a loop."""
    # A memory may hold caches anywhere, or none.
    leaves = jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, paged.PagedKV))
    if any(bool(c.refused.any()) for c in leaves if isinstance(c, paged.PagedKV)):
        raise RuntimeError("a cache refused an operation of the loop")
