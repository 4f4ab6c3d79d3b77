"""Turns prompts and stops, as users give them, into token ids and bytes."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax.engine import checks
from spec_jax.language_model import LanguageModel
from spec_jax.model import stop_texts


Prompt = str | Sequence[int] | np.ndarray | jax.Array | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat."""

Stop = int | str | Sequence[int | str] | np.ndarray
"""Token ids and texts that end a generation."""


def encode(
    lm: LanguageModel,
    prompt: Any,
    chat: Mapping[str, Any] | None = None,
    prefix: Any = None,
) -> tuple[list[list[int]], bool]:
    """Returns each prompt's token ids, and whether there was one prompt, not a list.

    Args:
      chat: options of the chat template, see `tokenizer.Tokenizer.apply_chat`.
      prefix: begins every prompt: messages for chats; text or ids, which are encoded
        by themselves, for others.
    """
    alone = _is_one(prompt)
    prompts = [prompt] if alone else list(prompt)
    if not prompts:
        raise ValueError("the list of prompts is empty: give at least one")
    if prefix is not None:
        _check_prefix(prefix, prompts)
    if _is_chat(prefix):
        prompts = [[*prefix, *one] for one in prompts]
    if chat is not None:
        _check_chat(chat, prompts)
    if prefix is None or _is_chat(prefix):
        return [_encode(lm, one, chat or {}) for one in prompts], alone
    first = _encode(lm, prefix, {})
    return [[*first, *_encode(lm, one, {}, begins=False)] for one in prompts], alone


def _is_one(prompt: Any) -> bool:
    """Returns whether this is one prompt: text, a row of ids, or a chat's messages."""
    if isinstance(prompt, str | np.ndarray | jax.Array):
        return True
    _check_kind(prompt)
    is_item = isinstance(prompt[0], numbers.Number | Mapping) if prompt else False
    return bool(is_item)


def _check_kind(prompt: Any) -> None:
    """Raises `ValueError` for a value of a type that no prompt or list of them has."""
    if isinstance(prompt, Mapping):
        raise ValueError(
            f"a prompt of type {type(prompt).__name__}: messages are a list, even one, "
            "as in [{'role': 'user', 'content': 'hi'}]"
        )
    if not isinstance(prompt, str | Sequence | np.ndarray | jax.Array):
        raise ValueError(
            f"a prompt of type {type(prompt).__name__}: give text, token ids, messages "
            "or a list of these"
        )


def _check_prefix(prefix: Any, prompts: Sequence[Any]) -> None:
    """Raises `ValueError` for a prefix that the prompts cannot follow."""
    if not _is_one(prefix) or not len(prefix):
        raise ValueError(
            f"{prefix=}: give one text, row of token ids or list of messages, which is "
            "not empty"
        )
    kinds = {_is_chat(one) for one in (prefix, *prompts)}
    if len(kinds) > 1:
        raise ValueError(
            "prefix= and the prompts are both of messages, or neither: give a chat's "
            "prefix as [{'role': 'system', 'content': ...}]"
        )


def _is_chat(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _check_chat(chat: Any, prompts: Sequence[Any]) -> None:
    """Raises `ValueError` unless options are a mapping by name, and there is a chat."""
    if not isinstance(chat, Mapping) or not all(isinstance(one, str) for one in chat):
        raise ValueError(
            f"{chat=} is no mapping of names: give the template's options, as in "
            "chat={'enable_thinking': True}"
        )
    if chat and not any(map(_is_chat, prompts)):
        raise ValueError(
            f"{chat=} is of chats, and no prompt has messages: give them, as in "
            "[{'role': 'user', 'content': 'hi'}], or leave chat out"
        )


def _encode(
    lm: LanguageModel, prompt: Any, chat: Mapping[str, Any], *, begins: bool = True
) -> list[int]:
    """Returns the token ids of one prompt; `begins` is that of
    `tokenizer.Tokenizer.encode`, and has no effect on a chat."""
    _check_kind(prompt)
    is_chat = _is_chat(prompt)
    if not isinstance(prompt, str) and not is_chat:
        return checks.token_list(prompt)
    if lm.tokenizer is None:
        raise ValueError("the model has no tokenizer: give token ids")
    text = lm.tokenizer.apply_chat(prompt, **chat) if is_chat else prompt
    return lm.tokenizer.encode(text, begins=begins and not is_chat)


def stops(lm: LanguageModel, stop: Stop | None) -> tuple[list[int], tuple[bytes, ...]]:
    """Returns the token ids, and the texts in UTF-8 without repeats; or raises."""
    if stop is None:
        return [], ()
    if isinstance(stop, str | numbers.Number):
        stop = [stop]
    elif getattr(stop, "ndim", 1) == 0:
        stop = np.asarray(stop).reshape(1)
    if isinstance(stop, bytes) or not isinstance(
        stop, Sequence | set | frozenset | np.ndarray | jax.Array
    ):
        raise ValueError(f"{stop=}: give token ids and texts, as in stop=[ID, TEXT]")
    texts = [one for one in stop if isinstance(one, str)]
    if lm.tokenizer is None and texts:
        raise ValueError("the model has no tokenizer: give stop as token ids")
    rest = [one for one in stop if not isinstance(one, str)]
    ids = checks.token_list(rest, what="stop")
    size = lm.target.config.vocab_size
    outside = [one for one in ids if not 0 <= one < size]
    if outside:
        raise ValueError(f"stop has token {outside[0]}, outside [0, {size})")
    return ids, tuple(dict.fromkeys(map(stop_texts.encode, texts)))
