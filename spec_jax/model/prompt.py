"""A prompt on its way into a cache: from a list of the host's to a padded bucket."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import decoder, params as params_lib, row_model
from spec_jax.paging import cache as paged


def prefill(
    model: row_model.RowModel,
    params: params_lib.Params,
    kv: paged.PagedKV,
    tokens: list[int],
    **how: Any,
) -> paged.PagedKV:
    """Computes the K/V of all `tokens`, possibly none. Donates `kv`.

    Args:
      **how: as `prefill_features` takes it.
    """
    if not tokens:
        return kv
    return prefill_features(model, params, kv, tokens, taps=(), **how)[0]


def prefill_features(
    model: row_model.RowModel,
    params: params_lib.Params,
    kv: paged.PagedKV,
    tokens: list[int],
    *,
    taps: tuple[int, ...],
    by_rows: bool | None = None,
    slot: int = row_model.SLOT,
    begun: int = 0,
    before: jax.Array | None = None,
) -> tuple[paged.PagedKV, jax.Array]:
    """Does as `prefill`; returns features `[T, taps, D]` too, undefined past tokens.

    `T` is a `decoder.bucket`, for no tokens that of one.

    Args:
      by_rows, slot: as in `RowModel.prefill`.
      begun: how many of the tokens the slot has already.
      before: the features of these, or of more.
    """
    if not tokens:
        shape = decoder.bucket(1), len(taps), model.config.hidden_size
        return kv, jnp.zeros(shape, model.config.dtype)
    padded, length = _padded(tokens)
    return model.prefill_features(
        params,
        kv,
        padded,
        length,
        taps=taps,
        by_rows=by_rows,
        slot=slot,
        begun=np.int32(begun) if begun else None,
        before=before,
    )


def _padded(tokens: list[int]) -> tuple[np.ndarray, np.int32]:
    """Returns the tokens in a bucket, and their number: of the host, since a call hands
    over all that it gets at once."""
    padded = np.zeros((decoder.bucket(len(tokens)),), np.int32)
    padded[: len(tokens)] = tokens
    return padded, np.int32(len(tokens))
