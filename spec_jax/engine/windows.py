"""Columns of windows as rows: their pages, their order, and forwards over tiles.

Functions here know pages and a forward over rows, and neither models nor rounds.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import tree
from spec_jax.engine import protocols
from spec_jax.model import decoder
from spec_jax.paging import allocator, cache as paged


Forward = Callable[[paged.PagedKV, decoder.Rows, Any], tuple[paged.PagedKV, Any]]
"""`forward(kv, rows, inputs) -> (kv, outputs)`: runs a tile, and writes its K/V. Inputs
and outputs are of any structure, with the tile's rows as their leading axis."""


def run(
    forward: Forward,
    kv: paged.PagedKV,
    window: protocols.Window,
    *,
    tile: int,
    empty: Callable[[int], Any],
    impl: str,
    inputs: Any = None,
) -> tuple[decoder.Rows, Int[Array, "B R"], paged.PagedKV, Any]:
    """Makes room for the rows of a window, and runs all tiles with active ones.

    Args:
      tile: rows of a forward.
      empty: makes arrays for the outputs of so many rows, which tiles fill.
      impl: of the cache's operations, see `allocator.append_each`.
      inputs: of the columns, leaves `[B, R, ..]`; `forward` gets those of its rows.

    Returns:
      The rows, where each column went among them, the cache, and the outputs of all
      rows, leaves `[P, ..]`.
    """
    kv, window, rows, at = _append(kv, window, tile, impl)
    (height,) = rows.tokens.shape
    inputs = jax.tree.map(functools.partial(packed, window, height), inputs)
    if height == tile:
        kv, outputs = forward(kv, rows, inputs)
    else:
        kv, outputs = over_tiles(forward, kv, rows, inputs, empty(height), tile=tile)
    return rows, at, kv, outputs


def over_tiles(
    forward: Callable,
    kv: Any,
    rows: decoder.Rows,
    inputs: Any,
    empty: Any,
    *,
    tile: int,
) -> tuple[Any, Any]:
    """Runs the tiles with active rows, in a loop; returns cache and filled `empty`.

    Args:
      forward: as `Forward`, with a cache of any kind.
      inputs: of the rows, leaves `[P, ..]`.
    """

    def step(number, carry):
        kv, outputs = carry
        start = number * tile
        cut = lambda values: jax.lax.dynamic_slice_in_dim(values, start, tile)
        part, given = jax.tree.map(cut, (rows.replace(num_active=None), inputs))
        num_active = jnp.clip(rows.num_active - start, 0, tile)
        kv, parts = forward(kv, part.replace(num_active=num_active), given)

        def keep(all_, part):
            at = (start, *(jnp.int32(0) for _ in part.shape[1:]))
            return jax.lax.dynamic_update_slice(all_, part, at)

        return kv, jax.tree.map(keep, outputs, parts)

    num_tiles = -(-rows.num_active // tile)
    return jax.lax.fori_loop(0, num_tiles, step, (kv, empty))


def _append(
    kv: paged.PagedKV, window: protocols.Window, tile: int, impl: str
) -> tuple[paged.PagedKV, protocols.Window, decoder.Rows, Int[Array, "B R"]]:
    """Returns all active columns that there is room for as rows, slot after slot, and
    where each went.

    The rows fill whole tiles, a tree's parents before their children; a column that is
    not run goes past the end.
    """
    B, R = window.tokens.shape
    height = -(-B * R // tile) * tile
    first = window.start if window.first is None else window.start + window.first
    kv, num_active, slots, positions = allocator.append_each(
        kv, first + window.num_active, window.num_active, num_rows=height, impl=impl
    )
    window = window.replace(num_active=num_active)
    total, at = places(window, height)
    branch = None
    pack = functools.partial(packed, window, height)
    if window.parents is not None:
        positions, branch = map(pack, _layout(window, num_rows=R))
    rows = decoder.Rows(
        tokens=pack(window.tokens),
        slots=slots,
        positions=positions,
        num_active=total,
        branch=branch,
    )
    return kv, window, rows, at


def places(
    window: protocols.Window, height: int
) -> tuple[Int[Array, ""], Int[Array, "B R"]]:
    """Returns how many columns are run, and the row of each, slot after slot; `height`
    where it is not run."""
    ends = jnp.cumsum(window.num_active, dtype=jnp.int32)
    columns = jnp.arange(window.tokens.shape[1], dtype=jnp.int32)[None, :]
    at = (ends - window.num_active)[:, None] + columns
    return ends[-1], jnp.where(columns < window.num_active[:, None], at, height)


def packed(window: protocols.Window, height: int, values: jax.Array) -> jax.Array:
    """Returns the values of active columns as rows; later rows are unspecified."""
    B, R = window.tokens.shape
    values = jnp.broadcast_to(values, (B, R, *values.shape[2:]))
    if B == 1:  # They are packed already.
        return jnp.pad(values[0], [(0, height - R)] + [(0, 0)] * (values.ndim - 2))
    ends = jnp.cumsum(window.num_active, dtype=jnp.int32)
    rows = jnp.arange(height, dtype=jnp.int32)
    slots = jnp.sum(rows[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    columns = rows - (ends - window.num_active).at[slots].get(mode="clip")
    return values.at[slots, columns].get(mode="fill", fill_value=0)


def _layout(
    window: protocols.Window, *, num_rows: int
) -> tuple[Int[Array, "B R"], Int[Array, "B R A"]]:
    """Returns the positions of the rows of trees, and their branches."""
    width = cast(int, window.depth_max) + 1
    layout = lambda parents, start: tree.layout(parents, start=start, width=width)
    laid_out = jax.vmap(layout)(window.parents, window.start)
    first = window.first
    if first is None:
        return laid_out
    cut = lambda values: jax.lax.dynamic_slice_in_dim(values, first, num_rows, axis=1)
    return jax.tree.map(cut, laid_out)
