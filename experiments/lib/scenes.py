"""Scenes of a text: what two ways to run a window start from, and what a way is.

The keys and values before the window are those of decoding, or those that the windows
of a path left behind.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.lib import mismatches, superseded
from spec_jax.debug.microscope import history, record as record_lib, scene as scene_lib
from spec_jax.engine import baseline, checks
from spec_jax.model import (
    config as config_lib,
    params as params_lib,
    prompt as prompt_lib,
    qwen3,
    row_model,
)
from spec_jax.typing import check_impl


DECODE = "decode"
"""Autoregressive decoding of the window, one active row at a time: the oracle."""

ROWS = "paged-decode"
"""What the engine runs: the window's rows in one slab."""

PATHS = (DECODE, *superseded.PATHS)
"""Ways to run a window by name, as on the command line; `ROWS` is one of them."""

# Paths of `qwen3.forward_rows`; the kernels of the others fuse nothing.
OF_ROWS = (DECODE, "row-loop", ROWS)
ONE_BY_ONE = (DECODE, "row-loop")

HISTORIES = ("decode", "own")
"""Who wrote the keys and values before the window, of the second run: decoding, as of
the first, or its own path, window by window."""

FOREVER = 1 << 30


def record_path(name: str, model: row_model.RowModel, **how: Any) -> record_lib.Path:
    """Returns the path of that name; `how` has the other fields of `record.Path`."""
    if name not in PATHS:
        raise ValueError(f"path={name!r} is not one of {', '.join(PATHS)}")
    is_models = name in (DECODE, ROWS)
    return record_lib.Path(
        model=model,
        one_by_one=name in ONE_BY_ONE,
        target=None if is_models else superseded.make_path(name, model),
        is_rows=name in OF_ROWS,
        **how,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two ways to run the window."""

    path: str  # of `PATHS`
    impl: str
    dtype: str
    slab: int
    page_size: int
    window_rows: int | None = None  # see `record.Path`
    tree: tuple[int, ...] | None = None  # see `record.Path`

    def __post_init__(self):
        check_impl(self.impl)
        if self.dtype not in config_lib.DTYPES:
            names = ", ".join(config_lib.DTYPES)
            raise ValueError(f"dtype={self.dtype!r} is not one of {names}")
        for name in ("slab", "page_size", "window_rows"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1")

    def record_path(self, config: config_lib.Qwen3Config) -> record_lib.Path:
        """Returns the path on a model of this side's dtype; `impl` must be resolved."""
        model = row_model.RowModel(
            config=dataclasses.replace(config, dtype=self.dtype),
            impl=self.impl,
            slab=self.slab,
        )
        return record_path(
            self.path,
            model,
            page_size=self.page_size,
            window_rows=self.window_rows,
            tree=self.tree,
        )


def text_of_prompt(
    model: row_model.RowModel,
    params: params_lib.Params,
    prompt: Sequence[int],
    *,
    page_size: int,
    cache_length: int | None,
    drafts: int,
    by_rows: bool | None,
) -> mismatches.Text:
    """Returns a window after `cache_length` tokens of the prompt and its continuation.

    Args:
      cache_length: positions before the window; all of the prompt but its last token
        if None.
      drafts: how many tokens are drafted, of decoding's own.
      by_rows: see `RowModel.prefill`.
    """
    start = len(prompt) - 1 if cache_length is None else cache_length
    positions = model.config.max_position_embeddings
    if start + 1 + drafts > positions:
        raise ValueError(
            f"{start} cached tokens and a window of {drafts + 1} do not fit the "
            f"model's {positions} positions"
        )
    prompt = checks.check_prompt(
        prompt, vocab_size=model.config.vocab_size, capacity=positions
    )[: start + 1]
    length = start + 1 + drafts
    tokens = prompt
    if len(prompt) < length:
        kv = model.new_cache(capacity=qwen3.bucket(length), page_size=page_size)
        state = baseline.begin(
            model,
            params,
            kv,
            prompt,
            max_tokens=length - len(prompt),
            prefill_by_rows=by_rows,
        )
        # Without stop tokens: the window may lie past the end of a text.
        state = baseline.generate(model, params, state, max_steps=jnp.int32(FOREVER))
        tokens = baseline.committed(state, vocab_size=model.config.vocab_size)
    prefix, window = tuple(tokens[:start]), tuple(tokens[start:])
    return mismatches.Text(prompt_len=len(prompt), prefix=prefix, window=window)


def decoded(
    text: mismatches.Text,
    model: row_model.RowModel,
    params: params_lib.Params,
    *,
    page_size: int,
    by_rows: bool | None,
) -> scene_lib.Scene:
    """Returns the scene of a text: its prompt prefilled, the rest decoded.

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
    text: mismatches.Text,
    path: record_lib.Path,
    params: params_lib.Params,
    *,
    starts: Sequence[int] | None,
    by_rows: bool | None,
) -> scene_lib.Scene:
    """As `decoded`, but windows of the path wrote what follows the prompt.

    Args:
      starts: of the windows, see `history.write`; the last is that of `text.window`.
        None: windows as high as the slab tile the text.
    """
    if starts is None:
        start = len(text.prefix)
        starts = (*range(text.prompt_len - 1, start, path.model.slab), start)
    sizes = {"page_size": path.page_size, "by_rows": by_rows}
    kv = _prefilled(text, path.model, params, **sizes)
    kv = history.write(path, params, kv, tokens=text.prefix, starts=starts)
    return scene_lib.capture(kv, text.prefix, text.window)


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
