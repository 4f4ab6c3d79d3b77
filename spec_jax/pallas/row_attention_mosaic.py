"""The attention of a layer on the row path, on Pallas Mosaic: one launch.

Norm, rotate, append, attend to the splits of the keys and add them
(`paged_attention_mosaic`); for all layers of a step one more, `row_jobs_mosaic`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.pallas import (
    attention_plan as plan,
    head_rotation,
    paged_attention_mosaic,
    row_jobs as jobs_lib,
    row_jobs_mosaic,
    warpgroup,
)


CONFIG = plan.Config(programs=warpgroup.PROGRAMS, tile=warpgroup.ROWS)
"""The plan. As a program reads with TMA, one is enough for a multiprocessor."""

HEAD = 128  # elements: one for each thread of a warpgroup


def attend(
    heads: jax.Array,  # [R, (N + 2K) * H]
    q_norm: jax.Array | None,  # [H]
    k_norm: jax.Array | None,  # [H]
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    eps: float,
    scale: float,
    interpret: Any = False,
    branch: jax.Array | None = None,  # [R, A] int32
    places: jax.Array | None = None,  # [R] int32
    config: plan.Config = CONFIG,
    jobs: jobs_lib.RowJobs | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `row_attention_triton.attend`, of bfloat16 heads of whole warpgroups.

    Args:
      interpret: False, or jax's `InterpretGPUParams()`.
      jobs: made for these rows and `tile_rows`; None makes them.

    Raises:
      ValueError: shapes that do not belong together.
      NotImplementedError: heads, groups, pages, dtypes or pools that the kernels cannot
        take.
    """
    (P, C, K, H), R = k_pages.shape, heads.shape[0]
    N = plan.check_heads(
        heads, k_pages, q_norm, k_norm, cos, sin, slots, positions, num_active
    )
    _check(heads, k_pages, q_norm, k_norm, config)
    plan.check_pools(heads, k_pages, v_pages)
    lay = plan.Layout(
        group=N // K,
        heads=N // K,
        rows=R,
        tile_rows=tile_rows(R, N // K, config),
        head_dim=H,
        width=H,
        half_width=H // 2,
    )
    jobs = jobs or row_jobs_mosaic.row_jobs(
        page_table,
        slots,
        positions,
        num_active,
        num_pages=P,
        page_size=C,
        split=config.split,
        tile_rows=lay.tile_rows,
        num_kv_heads=K,
        interpret=interpret,
        branch=branch,
        places=places,
    )
    pools = jax.new_ref(k_pages), jax.new_ref(v_pages)
    out = paged_attention_mosaic.attend(
        head_rotation.Heads(heads.reshape(R, N + 2 * K, H), q_norm, k_norm, cos, sin),
        *pools,
        page_table=page_table,
        jobs=jobs,
        eps=eps,
        scale=scale,
        lay=lay,
        config=config,
        branch=branch,
        interpret=interpret,
    )
    k_pages, v_pages = (jax.freeze(pool) for pool in pools)
    return out.reshape(R, N * H), k_pages, v_pages


def tile_rows(num_rows: int, group: int, config: plan.Config = CONFIG) -> int:
    """The rows of a tile, whole tiles: which rows are together changes no bit."""
    most = config.tile // group
    return max(n for n in range(1, most + 1) if num_rows % n == 0)


def _check(heads, k_pages, q_norm, k_norm, config):
    """Raises `NotImplementedError` for what the kernels cannot take."""
    _, C, K, H = k_pages.shape
    group = heads.shape[1] // H // K - 2
    if heads.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"the Mosaic kernels take bfloat16, not {heads.dtype}"
        )
    if H != HEAD:
        raise NotImplementedError(f"head size {H}: the Mosaic kernels take {HEAD}")
    if group > plan.MAX_GROUP:
        raise NotImplementedError(
            f"{group} query heads to a key/value head: at most {plan.MAX_GROUP}"
        )
    if (q_norm is None) != (k_norm is None):
        raise NotImplementedError("queries or keys alone are normed: both, or neither")
    if C % 8 or (C % config.block and config.block % C):
        raise NotImplementedError(
            f"pages of {C} positions: a multiple of 8 that divides {config.block}, or "
            "that it divides"
        )
