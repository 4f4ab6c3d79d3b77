"""DFlash and DSpark draft a block of tokens in one pass over the target's features.

Papers: https://arxiv.org/abs/2602.06036 and https://arxiv.org/abs/2607.05147. The
context, positions with known features, has keys and values alone. The rows of a block,
an anchor and masks, see all of it and their block, unless `config.attention` says less:

    c = rms_norm(fc(features))                       of position j < start
    k, v = rope(k_norm(c Wk)), c Wv                  at place j of the drafter's cache
    x = embed([anchor, MASK, ..])                    at start, start + 1, ..
    x += attention(input_norm(x)); x += mlp(x)       per layer
    h = rms_norm(x);  U = lm_head(h)

A layer of DFlash2 has convolutions around both sublayers (`convolve`): the input and
the output of attention and of the MLP are mixed with those of the row before.

The heads, which choose the tokens of a block's slots, are in `block_heads`. Nothing
here knows speculation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.model import block_params, decoder, head_params, sequence
from spec_jax.native import block_steps
from spec_jax.ops import (
    dispatch,
    embedding,
    gated_projection,
    projection,
    rms_norm,
    rope,
    row_attention,
    swiglu,
    weights,
)
from spec_jax.paging import cache
from spec_jax.typing import typed


@typed
def append_context(
    params: block_params.BlockParams,
    config: block_params.BlockConfig,
    rows: decoder.Rows,
    features: Float[Array, "R features"],
    kv: cache.PagedKV,
    *,
    impl: str,
) -> cache.PagedKV:
    """Writes the keys and values of positions whose features are known.

    The pages must have been reserved.

    Args:
      rows: slots and positions; their tokens are not read.
      features: of all taps, in their order.
    """
    params, layer = head_params.prepare(params, impl), config.layer
    dtype = params.final_norm.dtype
    angles = decoder.row_angles(layer, rows.positions, dtype=dtype, impl=impl)
    if dispatch.is_fused(impl):
        model = block_steps.BlockModel(params, layer, kv)
        return block_steps.append_context(features.astype(dtype), rows, model, angles)
    K, H, eps = layer.num_kv_heads, layer.head_dim, layer.rms_norm_eps
    shared: dict[str, Any] = {"num_active": rows.num_active, "eps": eps, "impl": impl}
    fused = projection.project(features.astype(dtype), params.fc, **shared)
    for number, weight in enumerate(params.layers):
        made = projection.project(fused, weight.kv, norm=params.hidden_norm, **shared)
        k, v = jnp.split(made.reshape(-1, 2 * K, H), 2, axis=1)
        k = rope.rotate(rms_norm.rms_norm(k, weight.k_norm, eps=eps), *angles)
        kv = cache.write(
            kv,
            number,
            slots=rows.slots,
            positions=rows.positions,
            num_active=rows.num_active,
            k=k,
            v=v,
        )
    return kv


@typed
def forward_block(
    params: block_params.BlockParams,
    config: block_params.BlockConfig,
    rows: decoder.Rows,
    kv: cache.PagedKV,
    *,
    impl: str,
) -> tuple[cache.PagedKV, Float[Array, "R D"], Float[Array, "R Vd"]]:
    """Runs whole blocks of rows, which see their slots' context and their own block.

    Writes the rows' keys and values after the context; the pages must have been
    reserved. No later call uses these keys and values.

    Args:
      rows: block after block, each of `block_size` rows of one slot.

    Returns:
      The cache; the rows' hidden states, after the final norm; and float32 logits, of
      draft tokens.
    """
    params = head_params.prepare(params, impl)
    layer = config.layer
    dtype, eps = params.final_norm.dtype, layer.rms_norm_eps
    if dispatch.is_fused(impl) and config.is_one_call:
        return block_steps.blocks(
            rows,
            block_steps.BlockModel(params, layer, kv),
            decoder.row_angles(layer, rows.positions, dtype=dtype, impl=impl),
            block_size=config.block_size,
        )
    (R,) = rows.tokens.shape
    rows = _padded(rows, dispatch.whole_slabs(impl, R) - R)
    shared: dict[str, Any] = {"num_active": rows.num_active, "eps": eps, "impl": impl}
    x = embedding.embed(
        params.embed, rows.tokens, num_active=rows.num_active, impl=impl
    ).astype(dtype)
    angles = decoder.row_angles(layer, rows.positions, dtype=dtype, impl=impl)
    own = jnp.arange(rows.tokens.shape[0], dtype=jnp.int32) % config.block_size
    for number, weight in enumerate(params.layers):
        sees = config.attention_of(number)
        read, norm, add = _around(
            weight.attention_conv, x, weight.input_norm, own, shared
        )
        heads = [
            projection.project(read, w, norm=norm, **shared)
            for w in (weight.q, weight.kv)
        ]
        attended, k, v = row_attention.row_attention(
            jnp.concatenate(heads, axis=1),
            weight.q_norm,
            weight.k_norm,
            (kv.k[number], kv.v[number], kv.page_table),
            rows.replace(firsts=sees.first(rows.positions, rows.positions - own)),
            angles,
            eps=eps,
            scale=layer.head_dim**-0.5,
            impl=impl,
            block=None if sees.is_causal else config.block_size,
        )
        kv = cache.replace_layer(kv, number, k=k, v=v)
        x = add(attended, weight.attention_out)
        read, norm, add = _around(weight.mlp_conv, x, weight.mlp_norm, own, shared)
        inner = (
            swiglu.swiglu(projection.project(read, weight.gate_up, **shared))
            if norm is None
            else gated_projection.gated_projection(
                read, weight.gate_up, norm=norm, **shared
            )
        )
        x = add(inner, weight.down)
    hidden = rms_norm.rms_norm(x, params.final_norm, **shared)
    logits = projection.project(hidden, params.lm_head, out_dtype="float32", **shared)
    return kv, hidden[:R], logits[:R]


def _around(conv, x, norm, own, shared):
    """Returns a sublayer's input, the norm still to be applied to it or None, and a
    function that returns the residual `x` plus the sublayer's output `y w^T`.

    Args:
      own: the number of each row in its block.
    """
    if conv is None:
        return x, norm, lambda y, w: projection.project(y, w, residual=x, **shared)
    normed = rms_norm.rms_norm(x, norm, **shared)
    kernels = projection.project(normed, conv.kernels, **shared)
    before = jnp.broadcast_to((own > 0)[:, None], x.shape)

    def mix(y, side):
        earlier = jnp.where(before, jnp.roll(y, 1, axis=0), 0)
        return convolve(conv, side, y, earlier, kernels)

    def add(y, w):
        return x + mix(projection.project(y, w, **shared), 1)

    return mix(normed, 0), None, add


def convolve(
    conv: block_params.Convolution,
    side: int,
    x: Float[Array, "*S D"],
    earlier: Float[Array, "*S D"],
    kernels: Float[Array, "*S kernels"],
) -> Float[Array, "*S D"]:
    """Returns `(base_0 + kernel_0) x + (base_1 + kernel_1) earlier`, by channels.

    Args:
      side: 0 for a sublayer's input, 1 for its output.
      earlier: for each row the one before it in its block; for the first, zeros.
      kernels: for both sides, both taps and each group of channels, in this order.
    """
    D, shape = x.shape[-1], (*x.shape[:-1], 2, 2, -1)
    own = kernels.reshape(shape)[..., side, :, :].astype(jnp.float32)
    own = jnp.repeat(own, D // own.shape[-1], axis=-1)
    base = conv.base[side].astype(jnp.float32)
    taps = own + jnp.broadcast_to(base, own.shape)
    rows = jnp.stack([x, earlier], axis=-2).astype(jnp.float32)
    return jnp.sum(taps * rows, axis=-2).astype(x.dtype)


def _padded(rows: decoder.Rows, count: int) -> decoder.Rows:
    """Returns the rows followed by `count` padding rows."""
    pad = lambda values: jnp.pad(values, (0, count)) if count else values
    return rows.replace(
        tokens=pad(rows.tokens), slots=pad(rows.slots), positions=pad(rows.positions)
    )


@typed
def forward_sequence(
    params: block_params.BlockParams,
    config: block_params.BlockConfig,
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T features"],
    anchors: Int[Array, "B A"],
) -> tuple[Float[Array, "B A S D"], Float[Array, "B A S Vd"]]:
    """Runs the blocks of several anchors of whole sequences; differentiable.

    A block sees the features of positions before its anchor, and itself: results are
    those of `append_context` and then `forward_block` at that anchor, up to rounding.

    Args:
      anchors: positions of the blocks' first rows.

    Returns:
      Hidden states after the final norm and float32 logits, for all rows of the blocks.
    """
    layer, eps = config.layer, config.layer.rms_norm_eps
    (B, T), A, S = tokens.shape, anchors.shape[1], config.block_size
    N, K, H = layer.num_heads, layer.num_kv_heads, layer.head_dim
    dtype = params.final_norm.dtype

    def heads(x, weight, norm, positions):
        x = sequence.matmul(x, weight).reshape(*positions.shape, -1, H)
        return sequence.turned(x, norm, layer, positions)

    def keys_values(x, weight, positions):
        k, v = jnp.split(weights.matrix(weight.kv), 2)
        values = sequence.matmul(x, v).reshape(*positions.shape, K, H)
        return heads(x, k, weight.k_norm, positions), values

    fused = sequence.matmul(features.astype(dtype), params.fc)
    fused = sequence.norm(fused, params.hidden_norm, eps)
    places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    rows = jnp.arange(S, dtype=jnp.int32)
    positions = anchors[..., None] + rows[None, None]
    is_context = places[:, None] < anchors[..., None]  # [B, A, T]
    starts = jnp.broadcast_to(anchors[..., None], positions.shape)
    first = jnp.take_along_axis(tokens, anchors, axis=1)[..., None]
    masks = jnp.full((B, A, S - 1), config.mask_token_id, tokens.dtype)
    block = jnp.concatenate([first, masks], axis=-1)
    # The embedding is the target's, and not trained.
    x = jax.lax.stop_gradient(weights.take_rows(params.embed, block)).astype(dtype)
    for number, weight in enumerate(params.layers):
        sees = config.attention_of(number)
        seen, within = is_context[:, :, None], rows[None] <= rows[:, None]
        firsts = sees.first(positions, starts)
        if firsts is not None:
            seen = seen & (places[:, None, None] >= firsts[..., None])
        normed = sequence.norm(x, weight.input_norm, eps)
        normed, finish = _mixed(weight.attention_conv, normed)
        attended = sequence.attend_blocks(
            heads(normed, weight.q, weight.q_norm, positions),
            keys_values(fused, weight, places),
            keys_values(normed, weight, positions),
            seen,
            within if sees.is_causal else None,
        )
        attended = attended.reshape(B, A, S, N * H)
        x += finish(sequence.matmul(attended, weight.attention_out))
        normed, finish = _mixed(weight.mlp_conv, sequence.norm(x, weight.mlp_norm, eps))
        inner = swiglu.swiglu(sequence.matmul(normed, weight.gate_up))
        x += finish(sequence.matmul(inner, weight.down))
    hidden = sequence.norm(x, params.final_norm, eps)
    return hidden, sequence.product(hidden, weights.matrix(params.lm_head))


def _mixed(conv, normed):
    """Returns a sublayer's input, from normed rows `[.., S, D]` of whole blocks, and
    a function of its output that returns what is added to the residual."""
    if conv is None:
        return normed, lambda y: y
    kernels = sequence.matmul(normed, conv.kernels)

    def mix(y, side):
        earlier = jnp.pad(y[..., :-1, :], [(0, 0)] * (y.ndim - 2) + [(1, 0), (0, 0)])
        return convolve(conv, side, y, earlier, kernels)

    return mix(normed, 0), lambda y: mix(y, 1)
