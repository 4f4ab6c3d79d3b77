"""Norm and rotation of heads within a kernel, keys and values to their pages (Mosaic).

    q = rotate(rms_norm(q, q_norm), cos, sin);  k likewise;  pages[row's token] = k, v

As `head_rotation` has it on Triton, for tiles of 64 heads in shared memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import head_rotation, warpgroup


AT_ONCE = 16  # rows whose places are looked up together

# Nothing here is negative: no need for the signs of `//` and `%`.
div, rem = jax.lax.div, jax.lax.rem


class Tiles(NamedTuple):
    """Shared memory in which heads are turned, and barriers of what comes there."""

    heads: Any  # [64 or more, H]
    cos: Any  # [64, H / 2]
    sin: Any  # [64, H / 2]
    values_came: Any
    keys_came: Any
    queries_came: Any


def scratch(head_dim: int, group: int, dtype: jnp.dtype, *, height: int) -> Tiles:
    """What a kernel is to allocate; `height` are rows of `heads`, 64 at least."""
    angles = plgpu.SMEM((warpgroup.ROWS, head_dim // 2), dtype)
    return Tiles(
        heads=plgpu.SMEM((height, head_dim), dtype),
        cos=angles,
        sin=angles,
        values_came=plgpu.Barrier(),
        keys_came=plgpu.Barrier(num_arrivals=3),
        queries_came=plgpu.Barrier(num_arrivals=3 * group),
    )


def write_rows(
    refs: head_rotation.Heads,
    k_pages: Any,  # [P, C, K, H]
    v_pages: Any,  # [P, C, K, H]
    stored_at: Any,  # [R] int32
    tiles: Tiles,
    *,
    kv_head: jax.Array,  # [] int32
    eps: float,
) -> None:
    """Puts the keys, turned, and the values of one head to the tokens of the pool.

    Of the rows that have one. What this program reads of the pool later is there.
    """
    R, K = refs.heads.shape[0], k_pages.shape[2]
    key_head = refs.heads.shape[1] - 2 * K + kv_head
    for first in range(0, R, warpgroup.ROWS):
        count = min(warpgroup.ROWS, R - first)
        rows, place = pl.ds(first, count), pl.ds(0, count)
        heads = tiles.heads.at[place]
        came = tiles.values_came
        plgpu.copy_gmem_to_smem(refs.heads.at[rows, key_head + K], heads, came)
        plgpu.barrier_wait(came)
        _store_rows(tiles.heads, v_pages, stored_at, kv_head, first, count)
        came = tiles.keys_came
        plgpu.copy_gmem_to_smem(refs.heads.at[rows, key_head], heads, came)
        for ref, tile in ((refs.cos, tiles.cos), (refs.sin, tiles.sin)):
            plgpu.copy_gmem_to_smem(ref.at[rows], tile.at[place], came)
        plgpu.barrier_wait(came)
        whole = tiles.heads.at[pl.ds(0, warpgroup.ROWS)]
        turn(tiles, refs.k_norm, eps=eps, to=whole)
        _store_rows(tiles.heads, k_pages, stored_at, kv_head, first, count)


def _store_rows(tile, pages, stored_at, kv_head, first, count):
    """Copies rows of a tile to their tokens of one head, and waits."""
    C = pages.shape[1]

    def store(turn, _):
        places = [turn * AT_ONCE + i for i in range(min(AT_ONCE, count))]
        # The last one more than once: to one place the same.
        places = [jnp.minimum(place, count - 1) for place in places]
        tokens = [stored_at[first + place] for place in places]
        for place, token in zip(places, tokens, strict=True):

            @pl.when(token >= 0)
            def _(place=place, token=token):
                to = pages.at[div(token, C), rem(token, C), kv_head]
                plgpu.copy_smem_to_gmem(tile.at[place], to)

    plgpu.commit_smem()
    jax.lax.fori_loop(0, pl.cdiv(count, AT_ONCE), store, None)
    plgpu.wait_smem_to_gmem(0)


def fetch_queries(
    refs: head_rotation.Heads,
    tiles: Tiles,
    *,
    kv_head: jax.Array,  # [] int32
    tile: jax.Array,  # [] int32
    tile_rows: int,
    group: int,
) -> None:
    """Asks for the queries of a tile and for what turns them: head by head its rows."""
    rows, came = pl.ds(tile * tile_rows, tile_rows), tiles.queries_came
    for i in range(group):
        own = pl.ds(i * tile_rows, tile_rows)
        source = refs.heads.at[rows, kv_head * group + i]
        plgpu.copy_gmem_to_smem(source, tiles.heads.at[own], came)
        for ref, each in ((refs.cos, tiles.cos), (refs.sin, tiles.sin)):
            plgpu.copy_gmem_to_smem(ref.at[rows], each.at[own], came)


def turn(tiles: Tiles, norm: Any, *, eps: float, to: Any) -> None:
    """Norms and rotates the heads of a tile into `to`, `[64, H]` in shared memory."""
    rows, H = warpgroup.ROWS, to.shape[1]
    starts, shape = (0, H // 2), (rows, H // 2)
    load = lambda ref: warpgroup.load(ref, warpgroup.TABLE).astype(jnp.float32)

    def by_column(start):
        part = norm.at[pl.ds(start, H // 2)]
        loaded = warpgroup.load(part, warpgroup.OF_COLUMN)
        return warpgroup.of_columns(loaded.astype(jnp.float32), shape)

    weights = None if norm is None else [by_column(start) for start in starts]
    x = [load(tiles.heads.at[pl.ds(0, rows), pl.ds(at, H // 2)]) for at in starts]
    angles = [load(tile) for tile in (tiles.cos, tiles.sin)]
    dtype = tiles.heads.dtype
    turned = head_rotation.norm_and_rotate(x, weights, angles, H, eps, dtype)
    for start, half in zip(starts, turned, strict=True):
        to[:, pl.ds(start, H // 2)] = half
