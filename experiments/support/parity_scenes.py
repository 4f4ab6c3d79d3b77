"""Scenes of a text: what the two ways to run a window start from.

The keys and values before the window are those of decoding, or those that the windows
of a path left behind. A `record.Path` for each is all that is known of it.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from experiments.support import parity_inputs
from spec_jax import autoregressive, session
from spec_jax.debug.microscope import history, record as record_lib, scene as scene_lib
from spec_jax.model import params as params_lib, qwen3, row_model


HISTORIES = ("decode", "own")
"""Who wrote the keys and values before the window, of the second run: decoding, as of
the first, or its own path, window by window."""

FOREVER = 1 << 30


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
) -> parity_inputs.Text:
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
    return parity_inputs.Text(
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


def decoded_scene(
    text: parity_inputs.Text,
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
    kv = _prefilled(text, model, params, page_size=page_size, by_rows=by_rows)
    start = len(text.prefix)
    if start >= text.prompt_len:
        padded = np.zeros((kv.slot_capacity + 1,), np.int32)
        padded[:start] = text.prefix
        kv, _ = autoregressive.replay(
            model,
            params,
            kv,
            tokens=jnp.asarray(padded),
            start=jnp.int32(text.prompt_len),
            stop=jnp.int32(start + 1),
        )
    return scene_lib.capture(kv, text.prefix, text.window)


def own_scene(
    text: parity_inputs.Text,
    path: record_lib.Path,
    params: params_lib.Params,
    *,
    starts: Sequence[int],
    by_rows: bool | None,
) -> scene_lib.Scene:
    """As `decoded_scene`, but windows of the path wrote what follows the prompt.

    Args:
      starts: of the windows, see `history.write`; the last is that of `text.window`.

    Raises:
      ValueError: as `decoded_scene`, or windows that the path cannot run.
    """
    sizes = {"page_size": path.page_size, "by_rows": by_rows}
    kv = _prefilled(text, path.model, params, **sizes)
    kv = history.write(path, params, kv, tokens=text.prefix, starts=starts)
    return scene_lib.capture(kv, text.prefix, text.window)


def tiled(text: parity_inputs.Text, *, rows: int) -> tuple[int, ...]:
    """Starts of windows of `rows` tokens that tile what follows the prompt."""
    start = len(text.prefix)
    return (*range(text.prompt_len - 1, start, rows), start)


def _prefilled(text, model, params, *, page_size, by_rows):
    """A cache with the prompt in it, all but its last token, and room for the text."""
    tokens = [*text.prefix, *text.window]
    session.check_prompt(
        tokens,
        vocab_size=model.config.vocab_size,
        capacity=model.config.max_position_embeddings,
        what="the text with its window",
    )
    kv = model.new_cache(capacity=qwen3.bucket(len(tokens)), page_size=page_size)
    return session.prefill(
        model, params, kv, tokens[: text.prompt_len], by_rows=by_rows
    )
