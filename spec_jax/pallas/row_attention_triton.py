"""The attention of a layer on the row path: norm, rotate, write, attend.

One launch of `paged_attention_triton` for a layer, and one of `row_jobs` for a step:
the job list, integers, is the same for all layers.
"""

import jax

from spec_jax.pallas import (
    attention_plan as plan,
    head_rotation,
    paged_attention_triton,
    row_jobs,
)


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
    interpret: bool,
    branch: jax.Array | None = None,  # [R, A] int32
    firsts: jax.Array | None = None,  # [R] int32
    places: jax.Array | None = None,  # [R] int32
    config: plan.Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implements `ops.row_attention.row_attention`. The pages are updated in place.

    An active row whose slot, position or pages do not exist writes nothing, and its
    result is NaN; padding rows write nothing, and their result is uninitialised.
    Without `firsts`, no bytes that a row may not see reach it, NaN included.

    Args:
      branch: for the rows of a tree. `branch[r, a]` is the position in the
        pages where the key of position `positions[r] - A + 1 + a` lies: that position
        itself in the prefix, and anywhere in the slot on the row's branch. The last
        entry is the place where the row itself is written. Entries of negative
        positions are not read.
      firsts: the first position that each row sees, not past its own; None: 0. Earlier
        values that are read for the row's tile must be finite.
      places: the position where each row itself is written, if it is not the last that
        the row sees; not past it. All rows of a slot must then see the same keys. Not
        together with `branch`.

    Raises:
      ValueError: shapes that do not fit together.
      NotImplementedError: heads, groups, dtypes or pools that the kernels cannot take.
    """
    (P, C, K, H), R = k_pages.shape, heads.shape[0]
    N = plan.check_heads(
        heads, k_pages, q_norm, k_norm, cos, sin, slots, positions, num_active
    )
    config = config or plan.default_config(H, heads.dtype, interpret=interpret)
    lay = plan.layout(R, N // K, H, tile=config.tile)
    plan.check_pools(heads, k_pages, v_pages)
    jobs = row_jobs.row_jobs(
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
    out, k_pages, v_pages = paged_attention_triton.attend(
        head_rotation.Heads(heads.reshape(R, N + 2 * K, H), q_norm, k_norm, cos, sin),
        k_pages,
        v_pages,
        page_table=page_table,
        jobs=jobs,
        eps=eps,
        scale=scale,
        lay=lay,
        config=config,
        branch=branch,
        firsts=firsts,
        interpret=interpret,
    )
    return out.reshape(R, N * H), k_pages, v_pages
