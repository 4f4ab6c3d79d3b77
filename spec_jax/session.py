"""The host's edge of a generation: checks, allocation, prefill.

What enters the compiled loops is checked here, once, with the values; what leaves
them as a flag is raised here, with what was already committed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import autoregressive, protocols, rounds, sampling
from spec_jax.gamma import policy as policy_lib
from spec_jax.model import params as params_lib, prompt as prompt_lib, row_model
from spec_jax.paging import cache as paged


def check_prompt(
    prompt: list[int], *, vocab_size: int, capacity: int, what: str = "prompt"
) -> None:
    """Raises `ValueError` for a prompt that cannot be decoded from."""
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


def stop_array(stop_ids: tuple[int, ...]) -> jax.Array:
    """Stop tokens for the loops; never empty, so that its shape can stay the same."""
    return jnp.asarray(stop_ids or (-1,), jnp.int32)


def _text_buffer(prompt: list[int], capacity: int) -> jax.Array:
    # The last token of a full sequence has no K/V, so there is one more than fits.
    text = np.zeros((capacity + 1,), np.int32)
    text[: len(prompt)] = prompt
    return jax.device_put(text)


def prefill(
    model: row_model.RowModel,
    params: params_lib.Params,
    kv: paged.PagedKV,
    prompt: list[int],
    *,
    by_rows: bool | None = None,
) -> paged.PagedKV:
    """K/V of all prompt tokens but the last, which stays pending. Donates `kv`.

    `by_rows` as in `RowModel.prefill`.

    The first generated token therefore comes from the row path like all others.
    """
    return prompt_lib.prefill(model, params, kv, prompt[:-1], by_rows=by_rows)


def begin_plain(
    target: row_model.RowModel,
    params: params_lib.Params,
    kv: paged.PagedKV,
    prompt: list[int],
    *,
    max_tokens: int,
    prefill_by_rows: bool | None = None,
    settings: sampling.SamplingSettings | None = None,
) -> autoregressive.DecodeState:
    """Checks the prompt and prefills it. `kv` is empty, and donated.

    Generation ends after `max_tokens`, or earlier where the cache is full. It is
    greedy without `settings` (`sampling.make_settings`), which are copied.
    """
    capacity = kv.slot_capacity
    check_prompt(prompt, vocab_size=target.config.vocab_size, capacity=capacity)
    kv = prefill(target, params, kv, prompt, by_rows=prefill_by_rows)
    return autoregressive.init_state(
        _text_buffer(prompt, capacity),
        length=jnp.int32(len(prompt)),
        limit=jnp.int32(min(len(prompt) + max_tokens, capacity + 1)),
        cache=kv,
        settings=settings,
    )


def begin(
    target: row_model.RowModel,
    drafter: protocols.Drafter,
    params: tuple[params_lib.Params, protocols.Params],
    kv: paged.PagedKV,
    memory: protocols.Memory,
    prompt: list[int],
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
      ValueError: a prompt that cannot be used, or a drafter that does not fit.
    """
    check_pair(target, drafter)
    capacity = kv.slot_capacity
    check_prompt(prompt, vocab_size=target.config.vocab_size, capacity=capacity)
    target_params, draft_params = params
    kv = prefill(target, target_params, kv, prompt, by_rows=prefill_by_rows)
    memory = drafter.prefill(draft_params, memory, prompt)
    return rounds.init_state(
        _text_buffer(prompt, capacity),
        length=jnp.int32(len(prompt)),
        limit=jnp.int32(min(len(prompt) + max_tokens, capacity + 1)),
        cache=kv,
        memory=memory,
        gamma_max=drafter.gamma_max,
        settings=settings,
        policy=policy,
    )


def check_state(state: rounds.RoundState | autoregressive.DecodeState) -> None:
    """Raises what the loops could only flag.

    Raises:
      MemoryError: the generation ended for want of pages. The tokens committed until
        then are in `state.tokens[: state.length]`.
      RuntimeError: a cache refused an operation: a fault of the program.
    """
    kv = state.cache
    if bool(state.starved):
        raise MemoryError(
            f"out of pages after {int(state.length)} tokens: {int(kv.num_free)} of "
            f"{kv.num_pages} pages of {kv.page_size} tokens are free, and a sequence "
            f"holds at most {kv.slot_capacity} tokens"
        )
    check_refused([kv, getattr(state, "memory", None)])


def check_refused(parts: Any) -> None:
    """Raises `RuntimeError` if a cache in a pytree refused an operation of a loop."""
    # A memory may hold caches anywhere, or none.
    leaves = jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, paged.PagedKV))
    if any(bool(c.refused.any()) for c in leaves if isinstance(c, paged.PagedKV)):
        raise RuntimeError("a cache refused an operation of the loop")
