"""Norm and rotation of the heads of a slab, keys and values to their pages.

    q = rotate(rms_norm(q, q_norm), cos, sin);  k likewise;  pages[row's token] = k, v

RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467) per head and rotary
positions (Su et al. 2021, https://arxiv.org/abs/2104.09864), for the fused projection
of queries, keys and values. One launch: program `(kv_head, row)` has the `G` queries,
the key and the value of one key/value head of one row, reads and writes
`(G + 2) * H` values, and meets no other program's. Sums are float32; each product and
sum is rounded to the activations' dtype where `ops.rms_norm` and `ops.rope` round.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import paged_attention_triton as paged, row_jobs


def rotate_and_write(
    heads: jax.Array,  # [R, N + 2K, H]
    q_norm: jax.Array,  # [H]
    k_norm: jax.Array,  # [H]
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    jobs: row_jobs.RowJobs,
    lay: paged.Layout,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries in tiles, and the pages with the rows written, in place.

    Rows are written to `jobs.stored_at`, and nowhere if that is `LOST`. Queries of
    dead rows, and of the padding of `lay` but for its width, are uninitialised.

    Returns:
      Queries `[K, rows, heads, width]`, key pages, value pages.
    """
    (P, C, K, H), R = k_pages.shape, heads.shape[0]
    pools = [pool.reshape(P * C, K, H) for pool in (k_pages, v_pages)]
    inputs = [heads, q_norm, k_norm, cos, sin, jobs.lengths, jobs.stored_at, *pools]
    outputs = [
        jax.ShapeDtypeStruct((K, lay.rows, lay.heads, lay.width), heads.dtype),
        *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
    ]
    kernel = functools.partial(
        _kernel, group=lay.group, num_kv=K, head_dim=H, width=lay.width, eps=eps
    )
    queries, *pools = pl.pallas_call(
        kernel,
        grid=(K, R),
        in_specs=[paged.whole(x) for x in inputs],
        out_specs=[paged.whole(x) for x in outputs],
        out_shape=outputs,
        input_output_aliases={7: 1, 8: 2},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="head_rotate",
    )(*inputs)
    k_pages, v_pages = (pool.reshape(P, C, K, H) for pool in pools)
    return queries, k_pages, v_pages


def _kernel(
    heads_ref,  # [R, N + 2K, H]
    q_norm_ref,  # [H]
    k_norm_ref,  # [H]
    cos_ref,  # [R, H / 2]
    sin_ref,  # [R, H / 2]
    lengths_ref,  # [R]
    stored_ref,  # [R]
    _k_ref,  # the pages again, which nothing reads
    _v_ref,
    q_ref,  # [K, rows, heads, width]
    k_ref,  # [P * C, K, H]
    v_ref,  # [P * C, K, H]
    *,
    group,
    num_kv,
    head_dim,
    width,
    eps,
):
    kv_head, row = pl.program_id(0), pl.program_id(1)
    half = head_dim // 2
    lane = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)[None, :]
    inside = lane < half

    def halves(ref, *at):
        """Both halves of heads, `[heads, half]` each, as float32."""
        return [
            plt.load(ref.at[*at, lane + start], mask=inside, other=0.0).astype(
                jnp.float32
            )
            for start in (0, half)
        ]

    def rotated(head, norm_ref):
        x = [
            plt.load(
                heads_ref.at[row, head, lane + start],
                mask=(head >= 0) & inside,
                other=0.0,
            ).astype(jnp.float32)
            for start in (0, half)
        ]
        turn = [
            plt.load(ref.at[row, lane], mask=inside, other=0.0).astype(jnp.float32)
            for ref in (cos_ref, sin_ref)
        ]
        return _norm_and_rotate(
            x, halves(norm_ref), turn, head_dim, eps, heads_ref.dtype
        )

    def store(ref, at, pair, mask):
        for start, part in zip((0, half), pair, strict=True):
            plt.store(ref.at[*at, lane + start], part, mask=mask & inside)

    @pl.when(lengths_ref[row] != 0)
    def _queries():
        head = jnp.arange(q_ref.shape[2], dtype=jnp.int32)[:, None]
        # A padding head reads the last one of the group, and is not stored.
        pair = rotated(kv_head * group + jnp.minimum(head, group - 1), q_norm_ref)
        store(q_ref, (kv_head, row, head), pair, head < group)
        if width > head_dim:  # Zero times what is read there must be zero.
            column = jnp.arange(width, dtype=jnp.int32)[None, :]
            zeros = jnp.zeros((q_ref.shape[2], width), q_ref.dtype)
            mask = (column >= head_dim) & (head < group)
            plt.store(q_ref.at[kv_head, row, head, column], zeros, mask=mask)

    token = stored_ref[row]

    @pl.when(token >= 0)
    def _key_and_value():
        first = jnp.full((1, 1), num_kv * group, jnp.int32) + kv_head
        everywhere = jnp.full((1, 1), True)
        store(k_ref, (token, kv_head), rotated(first, k_norm_ref), everywhere)
        column = jnp.arange(width, dtype=jnp.int32)
        mask = column < head_dim
        at = row, num_kv * (group + 1) + kv_head, column
        value = plt.load(heads_ref.at[at], mask=mask, other=0.0)
        plt.store(v_ref.at[token, kv_head, column], value, mask=mask)


def _norm_and_rotate(x, weights, turn, head_dim, eps, dtype):
    """Halves of heads, normed and rotated, in `dtype`; all that comes in is float32."""
    rounded = lambda value: value.astype(dtype).astype(jnp.float32)
    squares = sum(jnp.sum(half * half, axis=1, keepdims=True) for half in x)
    scale = jax.lax.rsqrt(squares / head_dim + eps)
    first, second = (
        rounded(rounded(half * scale) * weight)
        for half, weight in zip(x, weights, strict=True)
    )
    cos, sin = turn
    return (
        (rounded(first * cos) - rounded(second * sin)).astype(dtype),
        (rounded(second * cos) + rounded(first * sin)).astype(dtype),
    )
