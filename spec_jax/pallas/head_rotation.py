"""Parts of a kernel: norm and rotate heads, write keys and values to pages.

    q = rotate(rms_norm(q, q_norm), cos, sin);  k likewise;  pages[row's token] = k, v

RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467) per head and rotary
positions (Su et al. 2021, https://arxiv.org/abs/2104.09864), for the fused projection
of queries, keys and values. A head is two halves, each padded to `lay.half_width`, so
that the rotation is elementwise. Sums are float32; each product and sum is rounded to
the activations' dtype where `ops.rms_norm` and `ops.rope` round.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan, launch, slab


class Heads(NamedTuple):
    """References to the projected heads of a slab, and to their norms and angles."""

    heads: Any  # [R, N + 2K, H]
    q_norm: Any  # [H] or None
    k_norm: Any  # [H] or None
    cos: Any  # [R, H / 2]
    sin: Any  # [R, H / 2]


def turned(
    refs: Heads,
    norm_ref: Any,  # [H] or None
    *,
    rows: jax.Array,  # [n] int32
    heads: jax.Array,  # [n] int32
    mask: jax.Array,  # [n] bool
    lay: plan.Layout,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns both halves `[n, half_width]` of heads, normed and turned; else 0."""
    half = lay.head_dim // 2
    lane = jnp.arange(lay.half_width, dtype=jnp.int32)[None, :]
    inside = lane < half

    def load(ref, *at, where):
        loaded = plt.load(ref.at[*at], mask=where, other=0.0)
        return loaded.astype(jnp.float32)

    mine = mask[:, None] & inside
    at = rows[:, None], heads[:, None]
    x = [load(refs.heads, *at, lane + start, where=mine) for start in (0, half)]
    weights = None
    if norm_ref is not None:
        weights = [load(norm_ref, lane + start, where=inside) for start in (0, half)]
    turn = [load(ref, rows[:, None], lane, where=mine) for ref in (refs.cos, refs.sin)]
    return _norm_and_rotate(x, weights, turn, lay.head_dim, eps, refs.heads.dtype)


def write_rows(
    refs: Heads,
    k_ref: Any,  # [P * C, K, H]
    v_ref: Any,  # [P * C, K, H]
    stored_at_ref: Any,  # [R] int32, tokens of the pool; negative: nowhere
    *,
    kv_head: jax.Array,  # [] int32
    has_jobs: jax.Array,  # [] bool
    lay: plan.Layout,
    eps: float,
) -> None:
    """Stores the rows' turned keys and values of one head if the program has jobs.

    All rows that exist are read, so that no load waits for what is stored.
    """
    num_kv, half, R = k_ref.shape[1], lay.head_dim // 2, refs.heads.shape[0]
    group = jnp.arange(slab.ROWS, dtype=jnp.int32)
    group = launch.released(0) + group
    for first_row in range(0, R, slab.ROWS):
        rows = first_row + group
        is_row = rows < R
        tokens = plt.load(stored_at_ref.at[rows], mask=is_row, other=-1)
        is_stored = (tokens >= 0) & has_jobs
        key_head = num_kv * lay.group + kv_head
        column = jnp.arange(lay.width, dtype=jnp.int32)[None, :]
        inside = column < lay.head_dim
        source = refs.heads.at[rows[:, None], key_head + num_kv, column]
        value = plt.load(source, mask=is_row[:, None] & inside, other=0.0)
        keys = turned(
            refs,
            refs.k_norm,
            rows=rows,
            heads=jnp.broadcast_to(key_head, rows.shape),
            mask=is_row,
            lay=lay,
            eps=eps,
        )
        # Rows that are not stored point past the pool, and so at no other row's place.
        at = jnp.where(is_stored, tokens, k_ref.shape[0])[:, None]
        stored = is_stored[:, None]
        lane = jnp.arange(lay.half_width, dtype=jnp.int32)[None, :]
        for start, part in zip((0, half), keys, strict=True):
            place = k_ref.at[at, kv_head, lane + start]
            plt.store(place, part, mask=stored & (lane < half))
        plt.store(v_ref.at[at, kv_head, column], value, mask=stored & inside)


def _norm_and_rotate(x, weights, turn, head_dim, eps, dtype):
    """Norms and rotates halves of heads, float32; returns them in `dtype`.

    Heads and weights are two halves each, and `turn` has cosines and sines. Without
    `weights` the heads are only rotated.
    """
    rounded = lambda value: value.astype(dtype).astype(jnp.float32)
    first, second = x
    if weights is not None:
        squares = sum(jnp.sum(half * half, axis=1) for half in x)
        scale = jax.lax.rsqrt(squares / head_dim + eps)
        scale = jax.lax.broadcast_in_dim(scale, first.shape, (0,))
        first, second = (
            rounded(rounded(half * scale) * weight)
            for half, weight in zip(x, weights, strict=True)
        )
    cos, sin = turn
    return (
        (rounded(first * cos) - rounded(second * sin)).astype(dtype),
        (rounded(second * cos) + rounded(first * sin)).astype(dtype),
    )
