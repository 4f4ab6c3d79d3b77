"""A scene: a window of tokens, and the keys and values of what comes before it.

It is all that a verification depends on beside the model, without a page in it: every
path gets a cache of its own with the same prefix.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from spec_jax.model import qwen3, row_model
from spec_jax.paging import allocator, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """The inputs of both paths.

    Attributes:
      prefix: the tokens of positions `[0, start)`.
      window: the pending token, then the drafted ones; at positions from `start`.
      k, v: of the prefix, per layer `[start, K, H]`.
    """

    prefix: tuple[int, ...]
    window: tuple[int, ...]
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]

    @property
    def start(self) -> int:
        """The position of the pending token."""
        return len(self.prefix)


def capture(
    kv: cache.PagedKV, prefix: tuple[int, ...], window: tuple[int, ...]
) -> Scene:
    """Captures a cache that holds `prefix`, and a window to come.

    Raises:
      ValueError: no token in the window, or a cache of another length.
    """
    if not window:
        raise ValueError("the window is empty: it needs at least the pending token")
    length = int(kv.length[row_model.SLOT])
    if length != len(prefix):
        raise ValueError(f"the cache holds {length} positions, not {len(prefix)}")
    at = _places(kv, length)
    return Scene(
        prefix=prefix,
        window=window,
        k=tuple(np.asarray(pool)[at] for pool in kv.k),
        v=tuple(np.asarray(pool)[at] for pool in kv.v),
    )


def _places(kv: cache.PagedKV, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pages and offsets of the positions `[0, length)`."""
    positions = np.arange(length)
    table = np.asarray(kv.page_table)[row_model.SLOT]
    return table[positions // kv.page_size], positions % kv.page_size


def fill(
    scene: Scene, model: row_model.RowModel, *, page_size: int, num_rows: int
) -> cache.PagedKV:
    """Returns a cache of the model with the prefix, and pages for `num_rows` rows.

    The values are cast if the model has another dtype.
    """
    stop = scene.start + num_rows
    # Scenes of about one length share their executables.
    kv = model.new_cache(capacity=qwen3.bucket(stop), page_size=page_size)
    kv = allocator.reserve(kv, row_model.SLOT, stop)
    at = _places(kv, scene.start)

    def pool_of(pool, values):
        filled = np.array(pool)
        filled[at] = values.astype(filled.dtype)
        return jnp.asarray(filled)

    kv = kv.replace(
        k=tuple(map(pool_of, kv.k, scene.k)), v=tuple(map(pool_of, kv.v, scene.v))
    )
    return allocator.extend(kv, row_model.SLOT, scene.start)
