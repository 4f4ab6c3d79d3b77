"""P-EAGLE (https://arxiv.org/abs/2602.01469): an EAGLE-3 head that drafts in one pass.

The row of the last pair `i` drafts the first token. Rows of masks follow it: each has
the embedding of the mask's token and, in place of features, a learnt vector
(`mask_hidden`). Mask `m` is at position `i + 1 + m` and drafts the token that is
`m + 1` after the first:

    pair     features of i, token i + 1    drafts token i + 2
    mask 0   mask_hidden,   MASK           drafts token i + 3
    ..

Attention is causal: a mask sees the pairs and the masks before it. On pages
`eagle3.forward_rows` runs masks, as rows like others.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.model import eagle3, eagle3_params, sequence
from spec_jax.ops import causal_attention
from spec_jax.typing import typed


@typed
def forward_sequence(
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
      tokens, features: of the pairs, as in `eagle3.forward_sequence`.
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
    x, h = eagle3.enter(params, config, tokens, features)
    mask = jnp.asarray([[config.mask_token_id]], tokens.dtype)
    x_mask, h_mask = (
        jnp.broadcast_to(part[:, :, None], (B, A, num_masks, part.shape[-1]))
        for part in eagle3.enter(params, config, mask, params.mask_hidden)
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
