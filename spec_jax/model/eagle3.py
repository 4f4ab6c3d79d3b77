"""Computes the EAGLE-3 head: one layer that drafts from the target's features.

Li et al. (2025), https://arxiv.org/abs/2503.01840. Pair `i` is the feature of position
`i` and the token at `i + 1`. It predicts the token at `i + 2`; its RoPE position and
its place in the head's own cache are `i`:

    g = fc(features)                          or the `hidden` of the pair before it
    x = [rms_norm(embed(token)), rms_norm(g)]
    h = g + attention(x);  hidden = h + mlp(h);  logits = lm_head(rms_norm(hidden))

A row of a head with a `window` sees that many keys, its own the last.

A parallel head (P-EAGLE, https://arxiv.org/abs/2602.01469) drafts in one pass, and may
have several layers, of which this one is the first. The row of the last pair `i` drafts
the first token. Rows of masks follow it: each has the embedding of the mask's token
and, in place of features, a learnt vector (`mask_hidden`). Mask `m` is at position
`i + 1 + m` and drafts the token that is `m + 1` after the first. Attention is causal: a
mask sees the pairs and the masks before it.

`forward_rows` runs on pages, masks as rows like others, with the operations of the
target's rows; `forward_sequence` and `forward_parallel` over whole sequences, for
training. None knows speculation.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.model import decoder, eagle3_params, head_params, qwen3, sequence
from spec_jax.native import draws as draws_lib, head_steps
from spec_jax.ops import (
    causal_attention,
    dispatch,
    embedding,
    projection,
    rms_norm,
    weights,
)
from spec_jax.paging import cache
from spec_jax.typing import typed


@typed
def forward_rows(
    params: eagle3_params.Eagle3Params,
    config: eagle3_params.Eagle3Config,
    rows: decoder.Rows,
    features: Float[Array, "R features"],
    kv: cache.PagedKV,
    *,
    impl: str,
) -> tuple[cache.PagedKV, Float[Array, "R D"], Float[Array, "R Vd"]]:
    """Runs a slab of pairs through the head, writing their keys and values.

    A row's results depend, bit for bit, on its own token, position and feature and on
    the K/V it sees, for a fixed number of rows. The pages must have been reserved.

    Args:
      rows: `tokens` are the pairs' tokens, `positions` the pairs' numbers.
      features: of all taps, in their order, which `fc` fuses; or, of width `D`, the
        `hidden` of the pair before.

    Returns:
      The cache; `hidden`, the next pair's feature; and float32 logits, of draft tokens.
    """
    params = head_params.prepare(params, impl)
    g = _fuse(params, config, features, num_active=rows.num_active, impl=impl)
    if dispatch.is_fused(impl) and not config.is_parallel:
        at, dtype = rows.positions, g.dtype
        angles = decoder.row_angles(config.layer, at, dtype=dtype, impl=impl)
        model = head_steps.HeadModel(params, config.layer, kv, config)
        return head_steps.step(rows, g, model, angles)
    return _run_operations(params, config, rows, g, kv, impl)


def _fuse(params, config, features, *, num_active, impl):
    """Returns `g [R, D]` of active rows from the features of `forward_rows`."""
    g = features.astype(params.final_norm.dtype)
    if config.features_size != g.shape[1]:
        return g
    g = _norm_features(params, config, g, norm=_row_norm)
    return projection.project(g, params.fc, num_active=num_active, impl=impl)


def _run_operations(params, config, rows, g, kv, impl):
    """Implements `forward_rows` operation by operation, from `g [R, D]`."""
    layer = config.layer
    token = embedding.embed(
        params.embed, rows.tokens, num_active=rows.num_active, impl=impl
    )
    eps = layer.rms_norm_eps
    normed = _row_norm(g, params.hidden_norm, eps)
    x = [_row_norm(token.astype(g.dtype), params.input_norm, eps), normed]
    angles = decoder.row_angles(layer, rows.positions, dtype=g.dtype, impl=impl)
    if config.window:
        rows = rows.replace(firsts=rows.positions - (config.window - 1))
    residual = projection.Residual(
        x=normed if config.norm_before_residual else g,
        normed=jnp.concatenate(x, axis=1),
    )
    norms = [*(weight.input_norm for weight in params.more), params.final_norm]
    for number, weight in enumerate((params, *params.more)):
        pages = kv.k[number], kv.v[number], kv.page_table
        given = weight, norms[number], residual, rows, pages, angles
        residual, k, v = qwen3.run_layer(*given, config=layer, impl=impl)
        kv = cache.replace_layer(kv, number, k=k, v=v)
    hidden, last = residual.x, jax.lax.optimization_barrier(residual)
    logits = qwen3.run_head(params, last, rows.num_active, config=layer, impl=impl)
    if config.norm_output:
        hidden = _row_norm(hidden, params.final_norm, eps)
    return kv, hidden, logits


def run_chains(
    params: eagle3_params.Eagle3Params,
    config: eagle3_params.Eagle3Config,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, "S W"],
    features: Float[Array, "S W features"],
    starts: Int[Array, " S"],
    pending: Int[Array, " S"],
    counts: Int[Array, " S"],
    most: int,
    draws: draws_lib.Draws | None,
) -> tuple[cache.PagedKV, Int[Array, "S most"], Float[Array, "S most Vd"] | None]:
    """Takes in pairs and drafts after them; see `native.head_steps.chains`.

    Gives the same tokens and K/V as `forward_rows` row by row. The pages must have
    been reserved; lengths do not change.

    Args:
      features: of all taps, in their order.

    Returns:
      The cache; drafts, tokens of the target; and, for independent draws, the log
      weights of draft tokens from which they were drawn, otherwise None.
    """
    params = head_params.prepare(params, "native")
    (S, W), flat = tokens.shape, features.reshape(tokens.size, -1)
    # With one slot the first rows are the pending ones; with several they are apart.
    num_active = pending[0] if S == 1 else jnp.int32(S * W)
    g = _fuse(params, config, flat, num_active=num_active, impl="native")
    return head_steps.chains(
        tokens,
        g.reshape(S, W, -1),
        head_steps.HeadModel(params, config.layer, kv, config),
        decoder.chain_angles(config.layer, starts, W + most - 1, dtype=g.dtype),
        names=params.hot,
        starts=starts,
        pending=pending,
        counts=counts,
        most=most,
        draws=draws,
    )


def _row_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns `rms_norm(x, weight)`, compiled apart: its bits never differ."""
    normed = rms_norm.rms_norm(jax.lax.optimization_barrier(x), weight, eps=eps)
    return jax.lax.optimization_barrier(normed)


def _norm_features(params, config, features, *, norm):
    """Returns the input of `fc` from features `[..., taps * Dt]`."""
    eps = config.layer.rms_norm_eps
    if config.fc_norm:
        parts = jnp.split(features, len(config.taps), axis=-1)
        parts = [
            norm(part, weight, eps)
            for part, weight in zip(parts, params.fc_norms, strict=True)
        ]
        features = jnp.concatenate(parts, axis=-1)
    if config.norm_before_fc:
        features = norm(features, params.features_norm, eps)
    return features


class StepOutputs(pytree.Node):
    """Outputs of a step of `forward_sequence`."""

    hidden: jax.Array  # [B, T, D], the features of the next step
    logits: jax.Array  # [B, T, Vd] float32
    k: jax.Array  # [B, T, K, H], rotated
    v: jax.Array  # [B, T, K, H]


@typed
def forward_sequence(
    params: eagle3_params.Eagle3Params,
    config: eagle3_params.Eagle3Config,
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T features"],
    *,
    earlier: Sequence[StepOutputs] = (),
) -> StepOutputs:
    """Runs whole sequences of pairs through the head; differentiable, without a cache.

    Without `earlier`, column `i` is pair `i` with the target's feature. With the
    outputs of steps 0 to `j - 1`, it is pair `i + j` as drafted after pair `i`: it sees
    pairs `0 .. i` of step 0 and, of each later step, its own column.

    Args:
      tokens: of the pairs: those of step 0, shifted left by `j`.
      features: as in `forward_rows`; at step `j`, the `hidden` of step `j - 1`.
    """
    layer = config.layer
    (B, T), eps = tokens.shape, layer.rms_norm_eps
    x, residual = enter(params, config, tokens, features)
    positions = jnp.arange(T, dtype=jnp.int32) + len(earlier)
    q, k, v = sequence.heads(params, layer, x, jnp.broadcast_to(positions, (B, T)))
    how = {"scale": layer.head_dim**-0.5, "window": config.window}
    keys, values = [*(x.k for x in earlier), k], [*(x.v for x in earlier), v]
    own = [jnp.stack(x[1:], axis=2) for x in (keys, values)] if earlier else None
    attended = causal_attention.causal_attention(q, keys[0], values[0], own, **how)
    hidden = sequence.after_attention(params, residual, attended, eps=eps)
    normed = sequence.norm(hidden, params.final_norm, eps)
    return StepOutputs(
        hidden=normed if config.norm_output else hidden,
        logits=sequence.product(normed, weights.matrix(params.lm_head)),
        k=k,
        v=v,
    )


def enter(params, config, tokens, features):
    """Returns the first layer's input and its residual, for pairs `[..]`."""
    dtype, eps = params.final_norm.dtype, config.layer.rms_norm_eps
    token = weights.take_rows(params.embed, tokens)
    if not config.has_own_embed:  # It is the target's, and not trained.
        token = jax.lax.stop_gradient(token)
    g = features.astype(dtype)
    if config.features_size == features.shape[-1]:
        g = _norm_features(params, config, g, norm=sequence.norm)
        g = sequence.matmul(g, params.fc)
    normed = sequence.norm(g, params.hidden_norm, eps)
    x = [sequence.norm(token.astype(dtype), params.input_norm, eps), normed]
    residual = normed if config.norm_before_residual else g
    return jnp.concatenate(x, axis=-1), residual


@typed
def forward_parallel(
    params: eagle3_params.Eagle3Params,
    config: eagle3_params.Eagle3Config,
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T features"],
    last: Int[Array, "B A"],
    *,
    num_masks: int,
) -> tuple[Float[Array, "B T D"], Float[Array, "B A {num_masks} D"]]:
    """Runs whole sequences of pairs, and masks after several of them; differentiable.

    Args:
      tokens, features: of the pairs, as in `forward_sequence`.
      last: numbers of the pairs that masks follow.

    Returns:
      Hidden states after the final norm, of pairs and of masks.
    """
    layer, eps, window = config.layer, config.layer.rms_norm_eps, config.window
    (B, T), A = tokens.shape, last.shape[1]
    places = jnp.arange(T, dtype=jnp.int32)[None]
    numbers = jnp.arange(num_masks, dtype=jnp.int32)
    positions = last[..., None] + 1 + numbers[None, None]
    sees = places[None, None] <= last[..., None, None]  # [B, A, 1, T]
    if window:
        sees = sees & (places[None, None] > positions[..., None] - window)
    x, h = enter(params, config, tokens, features)
    mask = jnp.asarray([[config.mask_token_id]], tokens.dtype)
    x_mask, h_mask = (
        jnp.broadcast_to(part[:, :, None], (B, A, num_masks, part.shape[-1]))
        for part in enter(params, config, mask, params.mask_hidden)
    )
    layers: tuple[Any, ...] = (params, *params.more)
    for number, weight in enumerate(layers):
        if number:
            x, x_mask = (sequence.norm(y, weight.input_norm, eps) for y in (h, h_mask))
        q, *context = sequence.heads(weight, layer, x, jnp.broadcast_to(places, (B, T)))
        q_mask, *own = sequence.heads(weight, layer, x_mask, positions)
        of_pairs = causal_attention.causal_attention(
            q, *context, scale=layer.head_dim**-0.5, window=window
        )
        of_masks = sequence.attend_blocks(
            q_mask, context, own, sees, numbers[None] <= numbers[:, None]
        )
        h, h_mask = (
            sequence.after_attention(weight, before, attended, eps=eps)
            for before, attended in ((h, of_pairs), (h_mask, of_masks))
        )
    normed = [sequence.norm(y, params.final_norm, eps) for y in (h, h_mask)]
    return normed[0], normed[1]
