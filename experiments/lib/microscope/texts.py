"""Scenes of a text: the K/V before its window are decoding's, or a path's own.

A path that is not batch-invariant starts a window from what its earlier windows wrote,
and that is not what decoding would have written. Here it is written again.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from experiments.lib.microscope import record, scene as scene_lib
from spec_jax.engine import baseline, checks
from spec_jax.model import params as params_lib, prompt as prompt_lib, qwen3, row_model
from spec_jax.paging import allocator, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Tokens before a window, and the window.

    Attributes:
      prompt_len: of the first tokens, which are prefilled but for the last of them; the
        others were decoded.
      prefix: the tokens of positions `[0, start)`.
      window: the pending token, then the drafted ones.
    """

    prompt_len: int
    prefix: tuple[int, ...]
    window: tuple[int, ...]


def of_prompt(
    model: row_model.RowModel,
    params: params_lib.Params,
    prompt: Sequence[int],
    *,
    drafts: int,
    page_size: int,
) -> Text:
    """Returns a window of the prompt's last token and `drafts` tokens of decoding.

    Raises:
      ValueError: a prompt that cannot be used, or no room for the drafts.
    """
    length, positions = len(prompt) + drafts, model.config.max_position_embeddings
    if length > positions:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {drafts} drafts do not fit the "
            f"model's {positions} positions"
        )
    kv = model.new_cache(capacity=qwen3.bucket(length), page_size=page_size)
    state = baseline.begin(model, params, kv, prompt, max_tokens=drafts)
    # Without stop tokens: the window may lie past the end of a text.
    state = baseline.generate(model, params, state, max_steps=jnp.int32(drafts))
    tokens = baseline.committed(state, vocab_size=model.config.vocab_size)
    start = len(prompt) - 1
    prefix, window = tuple(tokens[:start]), tuple(tokens[start:])
    return Text(prompt_len=len(prompt), prefix=prefix, window=window)


def decoded(
    text: Text,
    model: row_model.RowModel,
    params: params_lib.Params,
    *,
    page_size: int,
    by_rows: bool | None = None,
) -> scene_lib.Scene:
    """Returns the scene of a text: its prompt prefilled, the rest decoded.

    Args:
      by_rows: see `RowModel.prefill`.

    Raises:
      ValueError: tokens that are not of the model's vocabulary.
    """
    kv = _prefilled(text, model, params, page_size=page_size, by_rows=by_rows)
    start = len(text.prefix)
    if start >= text.prompt_len:
        kv, _ = baseline.replay(
            model,
            params,
            kv,
            tokens=jnp.asarray(checks.text_buffer(text.prefix, kv.slot_capacity)),
            start=jnp.int32(text.prompt_len),
            stop=jnp.int32(start + 1),
        )
    return scene_lib.capture(kv, text.prefix, text.window)


def own(
    text: Text,
    path: record.Path,
    params: params_lib.Params,
    *,
    starts: Sequence[int],
    by_rows: bool,
) -> scene_lib.Scene:
    """Does as `decoded`, but windows of the path wrote what follows the prompt."""
    sizes = {"page_size": path.page_size, "by_rows": by_rows}
    kv = _prefilled(text, path.model, params, **sizes)
    kv = write(path, params, kv, tokens=text.prefix, starts=starts)
    return scene_lib.capture(kv, text.prefix, text.window)


def write(
    path: record.Path,
    params: params_lib.Params,
    kv: cache.PagedKV,
    *,
    tokens: Sequence[int],
    starts: Sequence[int],
) -> cache.PagedKV:
    """Runs a committed text, window by window, as the rounds that committed it did.

    The keys and values of a row depend on its own prefix and on the height of its
    window, not on the drafts behind it: the tokens that were committed stand for those
    and for drafts that were rejected, whose rows are left dead here. So nothing has to
    be truncated, and `path.window_rows` must be that of the rounds.

    Args:
      kv: holds the positions `[0, starts[0])`.
      tokens: the text, `[0, starts[-1])` or more of it.
      starts: positions of the windows' pending tokens, and of the one to come.

    Raises:
      ValueError: a cache of another length, or a window that does not fit.
      MemoryError: a cache without room for the text.
    """
    for start, stop in itertools.pairwise(starts):
        for where in record.calls(path, tokens[start:stop], start):
            kv, _ = record.run(path, params, kv, **where)
    allocator.check(kv)
    return kv


def _prefilled(text, model, params, *, page_size, by_rows):
    """Returns a cache with the prompt but its last token, and room for the text."""
    tokens = checks.check_prompt(
        np.asarray([*text.prefix, *text.window]),
        vocab_size=model.config.vocab_size,
        capacity=model.config.max_position_embeddings,
        what="the text with its window",
    )
    kv = model.new_cache(capacity=qwen3.bucket(len(tokens)), page_size=page_size)
    known = tokens[: text.prompt_len - 1]
    return prompt_lib.prefill(model, params, kv, known, by_rows=by_rows)
