"""The attention of a layer on the row path: norm, rotate, write, attend.

Three launches: `head_rotate_triton`, and the two of `paged_attention_triton`. The job
list that they share is whole numbers, the same for all layers of a step.
"""

import jax

from spec_jax.pallas import (
    head_rotate_triton as head_rotate,
    paged_attention_triton as paged,
    row_jobs,
)


def attend(
    heads: jax.Array,  # [R, (N + 2K) * H]
    q_norm: jax.Array,  # [H]
    k_norm: jax.Array,  # [H]
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_live: jax.Array,  # [] int32
    eps: float,
    scale: float,
    interpret: bool,
    ancestors: jax.Array | None = None,  # [R, A] int32
    config: paged.Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `ops.row_attention.row_attention`. The pages are updated in place.

    A live row whose slot, position or pages do not exist writes nothing, and its
    result is NaN; dead rows write nothing, and their result is zero.

    Args:
      ancestors: see `paged_attention_triton.paged_attention`; the row itself is
        written to the position of its last entry.

    Raises:
      ValueError: shapes that do not belong together.
      NotImplementedError: heads, groups, dtypes or pools that the kernels cannot take.
    """
    (P, C, K, H), R = k_pages.shape, heads.shape[0]
    N = heads.shape[1] // H - 2 * K
    if N < 1 or N % K:
        raise ValueError(f"{N} query heads for {K} key/value heads")
    config = config or paged.default_config(H, heads.dtype, interpret=interpret)
    lay = paged.layout(R, N // K, H, tile=config.tile)
    paged.check_pools(heads, k_pages, v_pages)
    _check_shapes(
        heads=(heads, (R, (N + 2 * K) * H)),
        q_norm=(q_norm, (H,)),
        k_norm=(k_norm, (H,)),
        cos=(cos, (R, H // 2)),
        sin=(sin, (R, H // 2)),
        slots=(slots, (R,)),
        positions=(positions, (R,)),
        num_live=(num_live, ()),
    )
    jobs = row_jobs.row_jobs(
        page_table,
        slots,
        positions,
        num_live,
        num_pages=P,
        page_size=C,
        split=config.split,
        tile_rows=lay.tile_rows,
        ancestors=ancestors,
    )
    queries, k_pages, v_pages = head_rotate.rotate_and_write(
        heads.reshape(R, N + 2 * K, H),
        q_norm,
        k_norm,
        k_pages,
        v_pages,
        cos,
        sin,
        jobs=jobs,
        lay=lay,
        eps=eps,
        interpret=interpret,
    )
    out = paged.attend_packed(
        queries,
        k_pages,
        v_pages,
        page_table=page_table,
        jobs=jobs,
        scale=scale,
        lay=lay,
        config=config,
        ancestors=ancestors,
        interpret=interpret,
    )
    return out.reshape(R, N * H), k_pages, v_pages


def _check_shapes(**pairs: tuple[jax.Array, tuple[int, ...]]) -> None:
    """Raises unless every array has its shape: the kernels do not look."""
    for name, (array, shape) in pairs.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")
