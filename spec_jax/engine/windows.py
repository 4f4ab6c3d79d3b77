"""Columns of windows as rows: their pages, their order, and forwards over tiles.

Functions here know pages and a forward over rows, and neither models nor rounds.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import compilation, tree
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
    inputs: Any = None,
) -> tuple[decoder.Rows, Int[Array, "B R"], paged.PagedKV, Any]:
    """Reserves pages, runs all tiles with active rows, and extends the slots.

    Args:
      tile: rows of a forward.
      empty: makes the outputs of so many rows, which those of tiles are put into.
      inputs: of the columns, leaves `[B, R, ..]`; `forward` gets those of its rows.

    Returns:
      The rows, where each column went among them, the cache, and the outputs of all
      rows, leaves `[P, ..]`.
    """
    kv, window, rows, at = _reserve_window(kv, window, tile)
    (height,) = rows.tokens.shape
    inputs = jax.tree.map(functools.partial(_packed, window, height), inputs)

    def step(number, carry):
        kv, outputs = carry
        start = number * tile
        cut = lambda values: jax.lax.dynamic_slice_in_dim(values, start, tile)
        kv, parts = forward(kv, _tile_of(rows, start, tile), jax.tree.map(cut, inputs))

        def keep(all_, part):
            at = (start, *(jnp.int32(0) for _ in part.shape[1:]))
            return jax.lax.dynamic_update_slice(all_, part, at)

        return kv, jax.tree.map(keep, outputs, parts)

    if height == tile:
        kv, outputs = forward(kv, rows, inputs)
    else:
        outputs = empty(height)
        num_tiles = -(-rows.num_active // tile)
        kv, outputs = jax.lax.fori_loop(0, num_tiles, step, (kv, outputs))
    kv = extend_to(kv, _first_place(window) + window.num_active, window.num_active)
    return rows, at, kv, outputs


@compilation.one_kernel
def _reserve_window(
    kv: paged.PagedKV, window: protocols.Window, tile: int
) -> tuple[paged.PagedKV, protocols.Window, decoder.Rows, Int[Array, "B R"]]:
    """Reserves the pages of a window, and packs the columns that have theirs."""
    asked, start = window.num_active > 0, _first_place(window)
    follows = (start == kv.length) | ~asked
    kv = kv.replace(refused=kv.refused | ~follows)
    kv = allocator.reserve_each(kv, start + window.num_active, asked=asked)
    num_active = jnp.where(kv.out_of_pages, 0, window.num_active)
    window = window.replace(num_active=num_active)
    return kv, window, *_pack(window, tile=tile)


def _first_place(window: protocols.Window) -> Int[Array, " B"]:
    """Returns where the K/V of the first of a window's tokens goes."""
    return window.start if window.first is None else window.start + window.first


@compilation.one_kernel
def extend_to(
    kv: paged.PagedKV, new_len: Int[Array, " B"], counts: Int[Array, " B"]
) -> paged.PagedKV:
    """Declares what was written valid, of slots with any rows."""
    return allocator.extend_each(kv, new_len, asked=counts > 0)


def _pack(
    window: protocols.Window, *, tile: int
) -> tuple[decoder.Rows, Int[Array, "B R"]]:
    """Returns all active columns, slot after slot, and where each went.

    Whole tiles, a tree's parents before their children; a column that is not run goes
    past the end.
    """
    B, R = window.tokens.shape
    height = -(-B * R // tile) * tile
    ends = jnp.cumsum(window.num_active, dtype=jnp.int32)
    columns = jnp.arange(R, dtype=jnp.int32)[None, :]
    at = (ends - window.num_active)[:, None] + columns
    at = jnp.where(columns < window.num_active[:, None], at, height)
    pack = functools.partial(_packed, window, height)
    positions, branch = _layout(window, num_rows=R)
    rows = decoder.Rows(
        tokens=pack(window.tokens),
        slots=pack(jnp.arange(B, dtype=jnp.int32)[:, None]),
        positions=pack(positions),
        num_active=ends[-1],
        branch=None if branch is None else pack(branch),
    )
    return rows, at


def _packed(window: protocols.Window, height: int, values: jax.Array) -> jax.Array:
    """Returns the values of active columns as rows, and zeros after them."""
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
) -> tuple[Int[Array, "B R"], Int[Array, "B R A"] | None]:
    """Returns the positions of a window's rows and, of trees, their branches."""
    columns = jnp.arange(num_rows, dtype=jnp.int32)[None, :]
    if window.parents is None:
        return window.start[:, None] + columns, None
    width = cast(int, window.depth_max) + 1
    layout = functools.partial(tree.layout, width=width)
    laid_out = jax.vmap(lambda parents, start: layout(parents, start=start))(
        window.parents, window.start
    )
    first = window.first
    if first is None:
        return laid_out
    cut = lambda values: jax.lax.dynamic_slice_in_dim(values, first, num_rows, axis=1)
    return cut(laid_out[0]), cut(laid_out[1])


def _tile_of(rows: decoder.Rows, start: jax.Array, height: int) -> decoder.Rows:
    def cut(values):
        return jax.lax.dynamic_slice_in_dim(values, start, height)

    return decoder.Rows(
        tokens=cut(rows.tokens),
        slots=cut(rows.slots),
        positions=cut(rows.positions),
        num_active=jnp.clip(rows.num_active - start, 0, height),
        branch=None if rows.branch is None else cut(rows.branch),
    )
