"""What the microscope is pointed at: a text, a window of it, and two ways to run it.

From flags, or from a line that `spec_round.py --dump-verify-mismatches` wrote.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax import autoregressive, session
from spec_jax.microscope import record as record_lib, scene as scene_lib
from spec_jax.model import (
    config as config_lib,
    params as params_lib,
    qwen3,
    row_model,
)
from spec_jax.typing import IMPLS


FOREVER = 1 << 30

_KEYS = {
    "prompt_ids": list,
    "tokens": list,
    "window": list,
    "position": int,
    "verify_path": str,
    "impl": str,
    "dtype": str,
    "slab": int,
    "page_size": int,
    "weights_sha256": str,
}
"""What a mismatch line must have, and of which type."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Tokens before the window, and the window.

    Attributes:
      prompt_len: of the text's first tokens, that are prefilled; the others were
        decoded. The last one of the prompt is never prefilled.
      prefix: the tokens of positions `[0, start)`.
      window: the pending token, then the drafted ones.
    """

    prompt_len: int
    prefix: tuple[int, ...]
    window: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A line of a mismatch dump: the text, and how it was run."""

    text: Text
    position: int
    verify_path: str
    impl: str
    dtype: str
    slab: int
    page_size: int
    weights_sha256: str


def read_mismatch(spec: str) -> Mismatch:
    """Reads `FILE[:LINE]`, lines counted from 1; the first mismatch without a line.

    Raises:
      ValueError: no such file or line, or a line that is no mismatch.
    """
    path, number = _split_line(spec)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason})") from None
    if not 1 <= number <= len(lines):
        raise ValueError(
            f"{path}: there is no line {number}, the file has {len(lines)}"
        )
    where = f"{path}, line {number}"
    try:
        row = json.loads(lines[number - 1])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict) or row.get("kind") != "mismatch":
        kind = row.get("kind") if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{where}: a line of kind {kind!r}, not 'mismatch'; spec_round.py writes "
            "them with --dump-verify-mismatches"
        )
    return _mismatch_of(row, where)


def _split_line(spec: str) -> tuple[pathlib.Path, int]:
    path, colon, number = spec.rpartition(":")
    if (
        colon
        and number.isascii()
        and number.isdigit()
        and not pathlib.Path(spec).is_file()
    ):
        return pathlib.Path(path), int(number)
    return pathlib.Path(spec), 1


def _mismatch_of(row: Mapping[str, Any], where: str) -> Mismatch:
    for key, kind in _KEYS.items():
        if type(row.get(key)) is not kind:
            raise ValueError(
                f"{where}: {key}={row.get(key)!r} is not of type {kind.__name__}"
            )
    lists = {key: row[key] for key in ("prompt_ids", "tokens", "window")}
    for key, tokens in lists.items():
        if not all(type(token) is int for token in tokens):
            raise ValueError(f"{where}: {key} holds something that is no token")
    prompt, window = lists["prompt_ids"], lists["window"]
    if not prompt or not window:
        raise ValueError(f"{where}: an empty prompt or an empty window")
    known = [*prompt, *lists["tokens"]]
    start = _start(known, row, where)
    settings = {
        field.name: row[field.name]
        for field in dataclasses.fields(Mismatch)
        if field.name != "text"
    }
    text = Text(
        prompt_len=len(prompt), prefix=tuple(known[:start]), window=tuple(window)
    )
    return Mismatch(text=text, **settings)


def _start(known: Sequence[int], row: Mapping[str, Any], where: str) -> int:
    """The position of the window's pending token."""
    window, position = row["window"], row["position"]
    starts = [len(known)]
    if not row["tokens"] and window[0] == known[-1]:
        # A first window's pending token is the last of the prompt.
        starts = [len(known) - 1, len(known)]
    for start in starts:
        judged = dict(enumerate([*window[1:], None], start))
        if position in judged and judged[position] == row.get("drafted_token"):
            return start
    raise ValueError(
        f"{where}: no row at position {position} that judges the token "
        f"{row.get('drafted_token')} is in the window from position {starts[-1]}: "
        f"{window}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two ways to run the window.

    Raises:
      ValueError: a path, an implementation or a dtype that does not exist, or a size
        below one.
    """

    path: str
    impl: str
    dtype: str
    slab: int
    page_size: int

    def __post_init__(self):
        choices = {
            "path": record_lib.PATHS,
            "impl": IMPLS,
            "dtype": config_lib.DTYPES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        for name in ("slab", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def record_path(self, config: config_lib.Qwen3Config) -> record_lib.Path:
        """The path on a model of this side's dtype; `impl` must be resolved."""
        model = row_model.RowModel(
            config=dataclasses.replace(config, dtype=self.dtype),
            impl=self.impl,
            slab=self.slab,
        )
        return record_lib.Path(name=self.path, model=model, page_size=self.page_size)


def text_of_prompt(
    model: row_model.RowModel,
    params: params_lib.Params,
    prompt: Sequence[int],
    *,
    page_size: int,
    cache_length: int | None,
    drafts: Sequence[int] | int,
    wrong_draft: int | None,
    by_rows: bool | None,
) -> Text:
    """A window after `cache_length` tokens of the prompt and what plain decoding adds.

    Args:
      cache_length: positions before the window; all of the prompt but its last token
        if None.
      drafts: the drafted tokens; or how many, of plain decoding's own.
      wrong_draft: which of them, from 1, to replace by a token that differs.
      by_rows: see `RowModel.prefill`.

    Raises:
      ValueError: a prompt or a draft that cannot be used.
    """
    start = len(prompt) - 1 if cache_length is None else cache_length
    num_drafts = drafts if isinstance(drafts, int) else len(drafts)
    decoded = drafts if isinstance(drafts, int) else 0
    positions = model.config.max_position_embeddings
    if start + 1 + num_drafts > positions:
        raise ValueError(
            f"{start} cached tokens and a window of {num_drafts + 1} do not fit the "
            f"model's {positions} positions"
        )
    if wrong_draft is not None and wrong_draft > num_drafts:
        raise ValueError(
            f"there is no draft {wrong_draft} to make wrong: {num_drafts} are drafted"
        )
    session.check_prompt(
        list(prompt), vocab_size=model.config.vocab_size, capacity=positions
    )
    prompt = list(prompt)[: start + 1]
    tokens = _decode(
        model,
        params,
        prompt,
        start + 1 + decoded,
        page_size=page_size,
        by_rows=by_rows,
    )
    window = tokens[start:] if isinstance(drafts, int) else [tokens[start], *drafts]
    if wrong_draft is not None:
        window[wrong_draft] = (window[wrong_draft] + 1) % model.config.vocab_size
    return Text(
        prompt_len=len(prompt), prefix=tuple(tokens[:start]), window=tuple(window)
    )


def _decode(model, params, prompt, length, *, page_size, by_rows) -> list[int]:
    """The prompt, and plain decoding's continuation up to `length` tokens."""
    if len(prompt) >= length:
        return prompt
    state = session.begin_plain(
        model,
        params,
        model.new_cache(capacity=qwen3.bucket(length), page_size=page_size),
        prompt,
        max_tokens=length - len(prompt),
        prefill_by_rows=by_rows,
    )
    state = autoregressive.generate(
        model,
        params,
        state,
        # The window may lie past the end of a text.
        stop_ids=session.stop_array(()),
        max_steps=jnp.int32(FOREVER),
    )
    session.check_state(state)
    return np.asarray(state.tokens)[: int(state.length)].tolist()


def scene_of(
    text: Text,
    model: row_model.RowModel,
    params: params_lib.Params,
    *,
    page_size: int,
    by_rows: bool | None,
) -> scene_lib.Scene:
    """The scene of a text: its prompt prefilled, the rest of its prefix decoded.

    Raises:
      ValueError: tokens that are not of the model's vocabulary.
    """
    tokens, start = [*text.prefix, *text.window], len(text.prefix)
    session.check_prompt(
        tokens,
        vocab_size=model.config.vocab_size,
        capacity=model.config.max_position_embeddings,
        what="the text with its window",
    )
    capacity = qwen3.bucket(len(tokens))
    kv = model.new_cache(capacity=capacity, page_size=page_size)
    prompt = tokens[: text.prompt_len]
    kv = session.prefill(model, params, kv, prompt, by_rows=by_rows)
    if start >= text.prompt_len:
        kv, _ = autoregressive.replay(
            model,
            params,
            kv,
            tokens=jnp.asarray(tokens + [0] * (capacity - len(tokens)), jnp.int32),
            start=jnp.int32(text.prompt_len),
            stop=jnp.int32(start + 1),
        )
    return scene_lib.capture(kv, text.prefix, text.window)
