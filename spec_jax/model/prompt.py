"""A prompt on its way into a cache: from a list of the host's to a padded bucket."""

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
    *,
    by_rows: bool | None = None,
    slot: int = row_model.SLOT,
) -> paged.PagedKV:
    """Computes the K/V of all `tokens`, possibly none. Donates `kv`.

    `by_rows` and `slot` as in `RowModel.prefill`; the slot is empty.
    """
    if not tokens:
        return kv
    padded, length = _padded(tokens)
    return model.prefill(params, kv, padded, length, by_rows=by_rows, slot=slot)


def prefill_features(
    model: row_model.RowModel,
    params: params_lib.Params,
    kv: paged.PagedKV,
    tokens: list[int],
    *,
    taps: tuple[int, ...],
    by_rows: bool | None = None,
    slot: int = row_model.SLOT,
) -> tuple[paged.PagedKV, jax.Array]:
    """Does as `prefill`; returns features `[T, taps, D]` too, undefined past tokens.

    `T` is a `decoder.bucket`, for no tokens that of one.
    """
    if not tokens:
        shape = decoder.bucket(1), len(taps), model.config.hidden_size
        return kv, jnp.zeros(shape, model.config.dtype)
    padded, length = _padded(tokens)
    return model.prefill_features(
        params, kv, padded, length, taps=taps, by_rows=by_rows, slot=slot
    )


def _padded(tokens: list[int]) -> tuple[np.ndarray, np.int32]:
    """Returns the tokens in a bucket, and their number: of the host, since a call hands
    over all that it gets at once."""
    padded = np.zeros((decoder.bucket(len(tokens)),), np.int32)
    padded[: len(tokens)] = tokens
    return padded, np.int32(len(tokens))
