"""Whole sequences through a model, without a cache: training and parity.

Prefill uses it too. It is *not* the row path: its matrix products and its attention
are those of the library, with numerics of their own.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.model import config as config_lib, families, params as params_lib
from spec_jax.ops import bits, rms_norm, rope, swiglu, weights
from spec_jax.typing import typed


class SequenceOutputs(pytree.Node):
    """Outputs of a forward pass over `[B, T]` tokens."""

    hidden: jax.Array  # [B, T, D], after the final norm
    k: tuple[jax.Array, ...]  # per layer [B, T, K, H], normed and rotated
    v: tuple[jax.Array, ...]  # per layer [B, T, K, H]
    features: jax.Array  # [B, T, taps, D]


einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
"""Sums of products, accumulated in float32 and left in it."""


def matmul(x: jax.Array, w: weights.Weight, bias: jax.Array | None = None) -> jax.Array:
    """Returns `x w^T`, accumulated in float32 and rounded to the dtype of `x`.

    `x` is `[..., K]` and `w` is `[N, K]`; `product` describes the gradients. A
    `bias [N]` is added to the sums before they are rounded.
    """
    sums = weight_product(x, w)
    if bias is not None:
        sums += jnp.broadcast_to(bias.astype(jnp.float32), sums.shape)
    return sums.astype(x.dtype)


def weight_product(x: jax.Array, w: weights.Weight) -> jax.Array:
    """Returns `x w^T` in float32, for a weight in any form, of blocks too."""
    if weights.is_bytes(w):
        return weights.byte_product(x, w)
    return product(x, weights.matrix(w))


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns `x w^T` in float32, for `x [..., K]` and `w [N, K]`.

    The gradients are products of the operands' dtype too, accumulated in float32:
    JAX's own rule would widen a bfloat16 operand to float32 first, and on a CPU read
    a transposed one in place. Together that takes five times as long.
    """
    return einsum("...k,nk->...n", x, w)


def _product_forward(x, w):
    return product(x, w), (x, w)


def _product_backward(operands, gradient):
    x, w = operands
    narrow = gradient.astype(x.dtype)
    dx = einsum("...n,nk->...k", narrow, w)
    rows = bits.row_major(narrow.reshape(-1, narrow.shape[-1]))
    columns = bits.row_major(x.reshape(-1, x.shape[-1]).T)
    dw = einsum("kt,tn->kn", columns, rows)
    return dx.astype(x.dtype), bits.row_major(dw).T.astype(w.dtype)


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns `rms_norm(x, weight)`, whose gradient is float32 inside.

    The gradient of the weight is a product with a row of ones: a CPU sums the first
    axes of an array on one core, ten times as slowly.
    """
    return rms_norm.rms_norm(x, weight, eps=eps)


def _norm_forward(x, weight, eps):
    return norm(x, weight, eps), (x, weight)


def _norm_backward(eps, operands, gradient):
    x, weight = operands
    wide, of_output = x.astype(jnp.float32), gradient.astype(jnp.float32)
    size = jnp.mean(wide * wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(size + eps)
    normed = wide * inverse
    rows = (of_output * normed).reshape(-1, x.shape[-1])
    dweight = jnp.ones(rows.shape[:1], jnp.float32) @ rows
    of_normed = of_output * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)
    along = jnp.mean(of_normed * normed, axis=-1, keepdims=True)
    dx = inverse * (of_normed - normed * along)
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


norm.defvjp(_norm_forward, _norm_backward)


def heads(layer, config, x, positions, *, bias=None):
    """Returns queries `[..., N, H]`, keys and values `[..., K, H]` of `x [..., D]`.

    The layer has one projection for all. Queries and keys are normed, where it has
    such weights, and rotated. A `bias [(N + 2K) * H]` is added to the products.
    """
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    made = matmul(x, layer.qkv, bias)
    made = made.reshape(*x.shape[:-1], N + 2 * K, H)
    q, k, v = jnp.split(made, (N, N + K), axis=-2)
    q = turned(q, layer.q_norm, config, positions)
    return q, turned(k, layer.k_norm, config, positions), v


def turned(x, weight, config, positions):
    """Returns heads `[..., H]`, normed where there is a weight, and rotated."""
    if weight is not None:
        x = norm(x, weight, config.rms_norm_eps)
    frequencies, scale = families.of(config).rope_table(config)
    return rope.rope(x, positions, jnp.asarray(frequencies), scale=scale)


def attend_blocks(q, context, own, is_context, is_own):
    """Attends from each row of blocks to their context and to the rows of its block.

    Args:
      q: `[B, A, S, N, H]`.
      context: keys and values `[B, T, K, H]`.
      own: those of the blocks, `[B, A, S, K, H]`.
      is_context: what rows see, `[B, A, S or 1, T]`.
      is_own: what they see of their block, `[S, S]`; None: all.
    """
    B, A, S, N, H = q.shape
    T, K = context[0].shape[1:3]
    queries = q.reshape(B, A, S, K, N // K, H)

    before = einsum("baskgh,btkh->bakgst", queries, context[0])
    visible = jnp.broadcast_to(is_context[:, :, None, None], before.shape)
    before = jnp.where(visible, before, -math.inf)
    within = einsum("baskgh,baukh->bakgsu", queries, own[0])
    if is_own is not None:
        within = jnp.where(jnp.broadcast_to(is_own, within.shape), within, -math.inf)
    scores = jnp.concatenate([before, within], axis=-1) * H**-0.5
    probs = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = einsum("bakgst,btkh->baskgh", probs[..., :T], context[1])
    out += einsum("bakgsu,baukh->baskgh", probs[..., T:], own[1])
    return out.reshape(B, A, S, N, H).astype(q.dtype)


def after_attention(layer, x: jax.Array, attended: jax.Array, *, eps: float):
    """Returns the residual after a layer whose heads `[..., N, H]` are `attended`."""
    flat = attended.reshape(*x.shape[:-1], -1)
    x += matmul(flat, layer.attention_out)
    inner = matmul(norm(x, layer.mlp_norm, eps), layer.gate_up)
    return x + matmul(swiglu.swiglu(inner), layer.down)


@typed
def forward(
    params: params_lib.Params,
    config: config_lib.ModelConfig,
    tokens: Int[Array, "B T"],
    *,
    taps: tuple[int, ...] = (),
) -> SequenceOutputs:
    """Runs the decoder over whole sequences that start at position 0.

    Args:
      taps: which residual streams to return as features, by Hugging Face's
        `hidden_states` index: 0 is the embedding, `k` the output of layer `k - 1`.
        The last layer's output is `L`; unlike Hugging Face's it is not normed.
    """
    B, T = tokens.shape
    family = families.of(config)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    embed = params.embed
    is_bytes = weights.is_bytes(embed)
    x = weights.take_rows(embed, tokens) if is_bytes else weights.matrix(embed)[tokens]
    keys, values, boundaries = [], [], [x]
    for layer in params.layers:
        x, k, v = family.sequence_layer(layer, config, x, positions)
        keys.append(k)
        values.append(v)
        boundaries.append(x)
    features = jnp.zeros((B, T, 0, config.hidden_size), x.dtype)
    if taps:
        features = jnp.stack([boundaries[tap] for tap in taps], axis=2)
    hidden = family.sequence_norm(params, config, x)
    return SequenceOutputs(
        hidden=hidden, k=tuple(keys), v=tuple(values), features=features
    )


@typed
def logits(
    params: params_lib.Params, config: config_lib.ModelConfig, tokens: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """Computes float32 logits of every position."""
    hidden = forward(params, config, tokens).hidden
    return weight_product(hidden, params.head)
