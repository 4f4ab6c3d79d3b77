"""Norm and rotation of heads, keys and values to their pages (Pallas Mosaic).

    q = rotate(rms_norm(q, q_norm), cos, sin);  k likewise;  pages[row's token] = k, v

One program a row, which has all of its heads: as `head_rotation` computes them within
the attention of Triton. Queries go to the tiles that `paged_attention_mosaic` reads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import attention_plan as plan, head_rotation, row_jobs, warpgroup


def append(
    heads: head_rotation.Heads,  # of arrays
    k_pages: Any,  # [P, C, K, H], a reference
    v_pages: Any,  # [P, C, K, H], a reference
    *,
    jobs: row_jobs.RowJobs,
    eps: float,
    lay: plan.Layout,
    interpret: Any,
) -> jax.Array:
    """Writes the rows that have a place; returns the queries `[K, tiles, 64, H]`.

    Of the queries those of rows without pages and of no row are uninitialised.
    """
    (_, C, K, H), R = k_pages.shape, heads.heads.shape[0]
    N, dtype = K * lay.group, heads.heads.dtype
    tiles = lay.rows // lay.tile_rows
    has_norm = heads.q_norm is not None

    def rotate_and_append(stored_ref: Any, *refs: Any) -> None:
        """One row."""
        x_ref, cos_ref, sin_ref = refs[:3]
        norms = refs[3:5] if has_norm else (None, None)
        k_ref, v_ref, out_ref, q_tile, k_tile, v_tile, loaded = refs[-7:]
        row = jax.lax.axis_index("r")
        token = stored_ref[row]

        @pl.when(token >= 0)
        def _():
            spans = (q_tile, 0, N), (k_tile, N, K), (v_tile, N + K, K)
            for tile, first, count in spans:
                source = x_ref.at[row, pl.ds(first, count)]
                plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(0, count)], loaded)
            plgpu.barrier_wait(loaded)
            angles = cos_ref.at[row], sin_ref.at[row]
            for tile, norm in zip((q_tile, k_tile), norms, strict=True):
                _turn(tile, norm, angles, eps)
            page, place = jax.lax.div(token, C), jax.lax.rem(token, C)
            copies = [
                (k_tile.at[pl.ds(0, K)], k_ref.at[page, place]),
                (v_tile.at[pl.ds(0, K)], v_ref.at[page, place]),
            ]
            number = jax.lax.div(row, lay.tile_rows)
            first = jax.lax.rem(row, lay.tile_rows) * lay.group
            for head in range(K):
                own = q_tile.at[pl.ds(head * lay.group, lay.group)]
                to = out_ref.at[head, number, pl.ds(first, lay.group)]
                copies.append((own, to))
            warpgroup.store_from_shared(*copies)

    height = lambda count: pl.cdiv(count, warpgroup.ROWS) * warpgroup.ROWS
    inputs = [jobs.stored_at, heads.heads, heads.cos, heads.sin]
    inputs += [heads.q_norm, heads.k_norm] if has_norm else []
    return warpgroup.kernel(
        rotate_and_append,
        outputs=jax.ShapeDtypeStruct((K, tiles, warpgroup.ROWS, H), dtype),
        grid={"r": R},
        scratch=[
            plgpu.SMEM((height(N), H), dtype),
            plgpu.SMEM((height(K), H), dtype),
            plgpu.SMEM((K, H), dtype),
            plgpu.Barrier(num_arrivals=3),
        ],
        interpret=interpret,
    )(*inputs, k_pages, v_pages)


def _turn(tile, norm, angles, eps):
    """Norms and rotates the heads of a tile `[64 n, H]` in place."""
    rows, H = tile.shape
    shape = warpgroup.ROWS, H // 2

    def by_column(ref, start=0):
        part = ref.at[pl.ds(start, H // 2)]
        loaded = warpgroup.load(part, warpgroup.OF_COLUMN)
        return warpgroup.of_columns(loaded.astype(jnp.float32), shape)

    starts = 0, H // 2
    turn = [by_column(ref) for ref in angles]
    weights = None if norm is None else [by_column(norm, start) for start in starts]
    for first in range(0, rows, warpgroup.ROWS):
        parts = [
            tile.at[pl.ds(first, warpgroup.ROWS), pl.ds(start, H // 2)]
            for start in starts
        ]
        x = [warpgroup.load(part, warpgroup.TABLE) for part in parts]
        x = [half.astype(jnp.float32) for half in x]
        turned = head_rotation.norm_and_rotate(x, weights, turn, H, eps, tile.dtype)
        for part, half in zip(parts, turned, strict=True):
            part[...] = half
