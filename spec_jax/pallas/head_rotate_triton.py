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

from spec_jax.pallas import attention_plan as plan, row_jobs


def rotate_and_write(
    heads: jax.Array,  # [R, N + 2K, H]
    q_norm: jax.Array | None,  # [H]
    k_norm: jax.Array | None,  # [H]
    k_pages: jax.Array,  # [P, C, K, H]
    v_pages: jax.Array,  # [P, C, K, H]
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    jobs: row_jobs.RowJobs,
    lay: plan.Layout,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries in tiles, and the pages with the rows written, in place.

    Rows are written to `jobs.stored_at`, and nowhere if that is `LOST`. Queries of
    padding rows, and of the padding of `lay` but for its width, are uninitialised.

    Returns:
      Queries `[K, rows, heads, width]`, key pages, value pages.
    """
    (P, C, K, H), R = k_pages.shape, heads.shape[0]
    pools = [pool.reshape(P * C, K, H) for pool in (k_pages, v_pages)]
    # Heads without norms: the kernel does not read the arrays in their place.
    norms = [heads[0, 0] if norm is None else norm for norm in (q_norm, k_norm)]
    inputs = [heads, *norms, cos, sin, jobs.lengths, jobs.stored_at, *pools]
    outputs = [
        jax.ShapeDtypeStruct((K, lay.rows, lay.heads, lay.width), heads.dtype),
        *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
    ]
    normed = q_norm is not None
    kernel = functools.partial(_kernel, lay=lay, num_kv=K, eps=eps, normed=normed)
    queries, *pools = pl.pallas_call(
        kernel,
        grid=(K, R),
        in_specs=[plan.whole(x) for x in inputs],
        out_specs=[plan.whole(x) for x in outputs],
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
    lay,
    num_kv,
    eps,
    normed,
):
    group, head_dim, width = lay.group, lay.head_dim, lay.width
    kv_head, row = pl.program_id(0), pl.program_id(1)
    half, queries = head_dim // 2, num_kv * group
    # The tile's rows are the group's queries, the key, and padding that is not stored.
    head = jnp.arange(pl.next_power_of_2(group + 1), dtype=jnp.int32)[:, None]
    is_query, is_key = head < group, head == group
    lane = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)[None, :]
    inside = lane < half
    column = jnp.arange(width, dtype=jnp.int32)[None, :]

    def load(ref, *at):
        """Both halves of what lies at `at`, as float32."""
        loads = (
            plt.load(ref.at[*at, lane + start], mask=inside, other=0.0)
            for start in (0, half)
        )
        return [x.astype(jnp.float32) for x in loads]

    @pl.when(lengths_ref[row] != 0)
    def _():
        source = jnp.where(is_query, kv_head * group + head, queries + kv_head)
        norms = None
        if normed:
            pairs = zip(load(q_norm_ref), load(k_norm_ref), strict=True)
            norms = [jnp.where(is_query, *pair) for pair in pairs]
        turn = [
            plt.load(ref.at[row, lane], mask=inside, other=0.0).astype(jnp.float32)
            for ref in (cos_ref, sin_ref)
        ]
        x = load(heads_ref, row, source)
        rotated = _norm_and_rotate(x, norms, turn, head_dim, eps, heads_ref.dtype)

        token = stored_ref[row]
        is_stored = token >= 0
        # What is not stored points past the pool: no two rows to one place.
        key_at = jnp.where(is_key & is_stored, token, k_ref.shape[0])
        for start, part in zip((0, half), rotated, strict=True):
            query_ref = q_ref.at[kv_head, row, head, lane + start]
            plt.store(query_ref, part, mask=is_query & inside)
            key_ref = k_ref.at[key_at, kv_head, lane + start]
            plt.store(key_ref, part, mask=is_key & is_stored & inside)
        if width > head_dim:  # Zero times what is read there must be zero.
            zeros = jnp.zeros((head.size, width), q_ref.dtype)
            mask = (column >= head_dim) & is_query
            plt.store(q_ref.at[kv_head, row, head, column], zeros, mask=mask)

        mask = column < head_dim
        value_ref = heads_ref.at[row, queries + num_kv + kv_head, column]
        value = plt.load(value_ref, mask=mask, other=0.0)
        stored_at = jnp.maximum(token, 0), kv_head, column
        plt.store(v_ref.at[stored_at], value, mask=mask & is_stored)


def _norm_and_rotate(x, weights, turn, head_dim, eps, dtype):
    """Halves of heads, normed and rotated, in `dtype`; all that comes in is float32.

    Without `weights` they are rotated only.
    """
    rounded = lambda value: value.astype(dtype).astype(jnp.float32)
    first, second = x
    if weights is not None:
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
