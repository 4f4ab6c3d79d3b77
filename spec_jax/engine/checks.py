"""Checks of what enters the compiled loops, and of what leaves them as a flag.

Functions here check input once, on the host, and name its values; they raise what the
loops could only flag, with what was already committed.
"""

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spec_jax.engine import protocols, state as state_lib
from spec_jax.paging import cache as paged


Tokens = Sequence[int] | np.ndarray | jax.Array
"""Token ids, one dimension of whole numbers."""


def token_list(tokens: Tokens, *, what: str = "prompt") -> list[int]:
    """Returns the tokens as a list of Python's integers.

    Raises:
      ValueError: a string, or anything else that is not a row of whole numbers.
    """
    if isinstance(tokens, str | bytes):
        raise ValueError(
            f"{what} is text, {tokens[:40]!r}: give token ids, as a tokenizer's "
            "`encode` makes them"
        )
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{what} has shape {list(array.shape)} and dtype {array.dtype}: give one "
            "row of token ids, whole numbers"
        )
    return array.tolist()


def check_prompt(
    prompt: Tokens, *, vocab_size: int | None, capacity: int, what: str = "prompt"
) -> list[int]:
    """Returns the prompt as a list; `vocab_size=None` bounds no token above.

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
    if worst < 0 or (vocab_size is not None and worst >= vocab_size):
        raise ValueError(f"{what} has token {worst}, outside [0, {vocab_size})")
    return prompt


def warn_positions(drafter: Any, length: int) -> None:
    """Warns where a text of `length` has positions that a drafter's model lacks."""
    most = protocols.complete(drafter).max_positions
    if most is not None and length > most:
        warnings.warn(
            f"{protocols.name_of(drafter)} has {most} positions "
            "(max_position_embeddings), and texts here are longer: its drafts past "
            "them extrapolate, and few may be accepted; the text stays the target's",
            stacklevel=2,
        )


def check_pair(target: Any, drafter: Any) -> None:
    """Raises `ValueError` unless the drafter can propose for the target.

    A drafter without a `vocab_size` repeats tokens that it was shown, and fits any;
    so does any drafter where the target has no config.

    Args:
      target: with `max_rows`, and `config.vocab_size` where it is a model.
      drafter: of one sequence or of slots.
    """
    drafter, config = protocols.complete(drafter), target.config
    draft_size = drafter.vocab_size
    target_size = draft_size if config is None else config.vocab_size
    if draft_size is not None and draft_size != target_size:
        raise ValueError(
            f"draft and target have different vocabularies: {draft_size} and "
            f"{target_size} entries"
        )
    if drafter.gamma_max < 0:  # 0: a slot drafter may keep features, draft nothing.
        raise ValueError(f"gamma_max={drafter.gamma_max} must be at least 0")
    is_tree = protocols.is_tree(drafter)
    most = protocols.MAX_TREE_ROWS if is_tree else target.max_rows
    if drafter.gamma_max + 1 > most:
        raise ValueError(
            f"gamma_max={drafter.gamma_max} needs {drafter.gamma_max + 1} rows a "
            f"window, the target has {most}"
        )
    top_k = 0 if drafter.tree is None else drafter.tree.top_k
    if target_size is not None and top_k > target_size:
        raise ValueError(
            f"tree={drafter.tree} has {top_k} children of a node, and the vocabulary "
            f"has {target_size} tokens: take at most as many children"
        )
    _check_taps(target, drafter)


def _check_taps(target: Any, drafter: Any) -> None:
    """Raises `ValueError` unless the target has the features that a drafter reads."""
    taps, config = protocols.taps_of(drafter), target.config
    name = protocols.name_of(drafter)
    if not taps:
        return
    # Some targets have no features, such as a `ForwardTarget`: taps ().
    if (given := target.taps) not in (None, taps):
        raise ValueError(
            f"{name} reads the target's features at taps={taps}, and "
            f"{type(target).__name__} has taps={given}: take a drafter that reads "
            "tokens alone"
        )
    if config is None:
        return
    most = config.num_layers
    for tap in taps:
        if not isinstance(tap, numbers.Integral) or not 0 <= tap <= most:
            raise ValueError(
                f"{name} has taps={taps}, and {tap!r} is not in 0 .. {most}: features "
                "are hidden_states of the target, 0 the embedding and k the output of "
                "layer k - 1, un-normed"
            )
    size = drafter.feature_size
    if size not in (None, config.hidden_size):
        raise ValueError(
            f"{name} reads features of width {size}, and those of the target have "
            f"{config.hidden_size}: take the drafter that was trained for this target"
        )


def stop_array(stop_ids: Tokens, *, size: int | None = None) -> np.ndarray:
    """Returns stop tokens for the loops, int32; never empty.

    Args:
      size: the least size of the array, padded with `NO_STOP`; None: as many as given.

    Raises:
      ValueError: ids that are not whole numbers, or that int32 does not hold.
    """
    ids = token_list(stop_ids, what="stop_ids")
    if any(abs(token) >= 2**31 for token in ids):
        raise ValueError(f"stop_ids={ids} has a number that is no token: 2**31 or more")
    array = np.full((max(1, len(ids), size or 0),), state_lib.NO_STOP, np.int32)
    array[: len(ids)] = ids
    return array


def text_buffer(prompt: list[int], capacity: int) -> np.ndarray:
    """Returns the prompt in a buffer of `capacity + 1` tokens, int32.

    The last token of a full sequence has no K/V, so there is one more than fits.
    """
    text = np.zeros((capacity + 1,), np.int32)
    text[: len(prompt)] = prompt
    return text


def limit_of(num_prompt: int, max_tokens: int, capacity: int) -> tuple[int, bool]:
    """Returns the length at which a sequence ends, and whether the cache decides it."""
    wanted = num_prompt + max_tokens
    return min(wanted, capacity + 1), wanted > capacity + 1


def check_slot(slot: Any, *, vocab_size: int | None = None) -> None:
    """Raises what the loops could only flag of ONE sequence.

    Args:
      slot: `state.Slots` of one slot, or a `baseline.DecodeState`.
      vocab_size: of the target; None bounds no token.

    Raises:
      FloatingPointError: tokens were chosen from logits that are not finite.
      RuntimeError: the text is longer than its limit, or holds a number that is no
        token of the target: a fault of the program.
    """
    length, limit = int(slot.length), int(slot.limit)
    if length > limit:
        raise RuntimeError(f"{length} tokens are committed, past the limit of {limit}")
    text = np.asarray(slot.tokens)[:length]
    bound = np.inf if vocab_size is None else vocab_size
    outside = np.flatnonzero((text < 0) | (text >= bound))
    if outside.size:
        raise RuntimeError(
            f"token {text[outside[0]]} at position {outside[0]} is committed, outside "
            f"[0, {vocab_size})"
        )
    if num_nonfinite := int(slot.num_nonfinite):
        raise FloatingPointError(
            f"{num_nonfinite} tokens were chosen from logits that hold NaN or "
            "infinity, and mean nothing: look for such values in the target's weights, "
            "and for impossible ones in its config"
        )


def check_pages(status: jax.Array, length: jax.Array, kv: Any) -> None:
    """Raises `MemoryError` where a slot ended because it found no page.

    Args:
      status, length: of the slots, `[B]`.
      kv: the target's cache, whose numbers the message gives.
    """
    failed = np.asarray(status) == int(state_lib.Status.OUT_OF_PAGES)
    if not failed.any():
        return
    lengths = np.asarray(length)[failed].tolist()
    free = ""
    if isinstance(kv, paged.PagedKV):
        free = (
            f": {int(kv.num_free)} of {kv.num_pages} pages of {kv.page_size} tokens "
            f"are free, and a sequence holds at most {kv.slot_capacity} tokens"
        )
    raise MemoryError(
        f"out of pages in slots {np.flatnonzero(failed).tolist()} after {lengths} "
        f"tokens{free}"
    )


def check_refused(parts: Any) -> None:
    """Raises `RuntimeError` if a cache in a pytree refused an operation of a loop."""
    # A memory may hold caches anywhere, or none.
    leaves = jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, paged.PagedKV))
    if any(bool(c.refused.any()) for c in leaves if isinstance(c, paged.PagedKV)):
        raise RuntimeError("a cache refused an operation of the loop")
