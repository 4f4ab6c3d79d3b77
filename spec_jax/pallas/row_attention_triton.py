"""The attention of a layer on the row path: norm, rotate, write, attend.

One launch, `paged_attention_triton`, and for all layers of a step one more, the job
list of `row_jobs`: whole numbers, the same for each.
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
    Bytes that a row may not see never reach it, NaN included.

    Args:
      branch: for the rows of a tree. `branch[r, a]` is the position in the
        pages where the key of position `positions[r] - A + 1 + a` lies: that position
        itself in the prefix, and anywhere in the slot on the row's branch. The last
        entry is the row's own, where it is written. Entries of negative positions are
        not read.
      firsts: the first position that each row sees, not past its own; None: 0. A key
        that its neighbours see before that must be finite.
      places: for rows that lie elsewhere than at the last position that they see: at
        which position before it. All rows of a slot then see the same keys. Not with
        `branch`.

    Raises:
      ValueError: shapes that do not belong together.
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
