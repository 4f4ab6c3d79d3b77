"""A window of rows through the library's products, after a prefix that is on pages.

Not the row path: a product is compiled for the height of the window, and XLA takes
another path for one row than for five. Two kinds of attention go with it: that of the
rows, and the one-shot attention of prefill.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.model import (
    config as config_lib,
    observe as observe_lib,
    params as params_lib,
    rotary,
    sequence,
)
from spec_jax.ops import bits, paged_attention, rms_norm, rope, swiglu, weights
from spec_jax.paging import cache
from spec_jax.typing import typed


Attention = Literal["rows", "one-shot"]


@typed
def forward(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, " R"],
    start: Int[Array, ""],
    num_active: Int[Array, ""],
    slot: int,
    attention: Attention,
    observe: observe_lib.Observe = observe_lib.pass_on,
) -> tuple[cache.PagedKV, Float[Array, "R V"]]:
    """Runs the active tokens at positions from `start` of a slot.

    Writes their keys and values; the pages must have been reserved, and lengths do
    not change. The logits are float32.

    Args:
      observe: sees all of `observe.OPERATIONS`, and may change any.
    """
    eps = config.rms_norm_eps
    (R,) = tokens.shape
    positions = start + jnp.arange(R, dtype=jnp.int32)
    where = {
        "slots": jnp.full((R,), slot, jnp.int32),
        "positions": positions,
        "num_active": num_active,
    }
    frequencies, scale = rotary.rope_table(config)
    angles = rope.angles(
        positions, jnp.asarray(frequencies), scale=scale, dtype=params.embed.dtype
    )
    x = observe(None, "embed", weights.take_rows(params.embed, tokens))
    for number, layer in enumerate(params.layers):
        see = functools.partial(observe, number)
        q, k, v = _heads(layer, config, x, angles, see)
        # What the pages are to hold: they hold these rows and no others of this call.
        k, v = see("k_cache", k), see("v_cache", v)
        kv = cache.write(kv, number, k=k, v=v, **where)
        if attention == "one-shot":
            attended = _one_shot(q, kv, number, config=config, **where)
        else:
            attended = paged_attention.paged_attention(
                q,
                kv.k[number],
                kv.v[number],
                page_table=kv.page_table,
                scale=config.head_dim**-0.5,
                **where,
            )
        x = _after_attention(layer, x, attended.reshape(R, -1), see, eps=eps)
    normed = rms_norm.rms_norm(x, params.final_norm, eps=eps)
    normed = observe(None, "final_norm", normed)
    logits = jnp.einsum(
        "rd,vd->rv",
        normed,
        weights.matrix(params.head),
        preferred_element_type=jnp.float32,
    )
    return kv, observe(None, "logits", logits)


def _heads(layer, config, x, angles, see):
    """Queries `[R, N, H]`, keys and values `[R, K, H]`, normed and rotated."""
    N, K, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
    normed = see("input_norm", rms_norm.rms_norm(x, layer.input_norm, eps=eps))
    heads = sequence.matmul(normed, layer.qkv)
    heads = heads.reshape(x.shape[0], N + 2 * K, config.head_dim)
    q, k, v = jnp.split(heads, (N, N + K), axis=1)
    q, k, v = see("q", q), see("k", k), see("v", v)
    q = see("q_norm", rms_norm.rms_norm(q, layer.q_norm, eps=eps))
    k = see("k_norm", rms_norm.rms_norm(k, layer.k_norm, eps=eps))
    q = see("q_rope", rope.rotate(q, *angles))
    k = see("k_rope", rope.rotate(k, *angles))
    return q, k, v


def _after_attention(layer, x, attended, see, *, eps):
    """The residual `[R, D]` after the attention's projection and the MLP."""
    attended = see("attention", attended)
    out = see("attention_out", sequence.matmul(attended, layer.attention_out))
    x = see("attention_residual", x + out)
    normed = see("mlp_norm", rms_norm.rms_norm(x, layer.mlp_norm, eps=eps))
    gate, up = jnp.split(sequence.matmul(normed, layer.gate_up), 2, axis=1)
    gate, up = see("gate", gate), see("up", up)
    hidden = see("swiglu", swiglu.swiglu(jnp.concatenate([gate, up], axis=1)))
    down = see("down", sequence.matmul(hidden, layer.down))
    return see("mlp_residual", x + down)


def _one_shot(q, kv, number, *, config, slots, positions, num_active):
    """One softmax over the whole capacity, as prefill takes over its bucket.

    Scores and softmax are float32; probabilities are cast before the second product.
    """
    R, N, H = q.shape
    K = config.num_kv_heads
    T = kv.slot_capacity
    keys, values = (
        bits.from_bits(
            bits.to_bits(pages)
            .at[kv.page_table[slots[0]]]
            .get(mode="fill", fill_value=0),
            pages.dtype,
        ).reshape(T, K, H)
        for pages in (kv.k[number], kv.v[number])
    )
    # Bytes of positions that nobody wrote may be NaN, and 0 * NaN is NaN.
    written = (jnp.arange(T) < positions[0] + num_active)[:, None, None]
    keys, values = (jnp.where(written, pages, 0) for pages in (keys, values))
    scores = jnp.einsum(
        "rkgh,tkh->kgrt",
        q.reshape(R, K, N // K, H),
        keys,
        preferred_element_type=jnp.float32,
    )
    visible = jnp.arange(T)[None, :] <= positions[:, None]
    visible = jnp.broadcast_to(visible, scores.shape)
    scores = jnp.where(visible, scores * config.head_dim**-0.5, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("kgrt,tkh->rkgh", probs, values).reshape(R, N, H)
