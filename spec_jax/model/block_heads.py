"""Heads of DSpark (https://arxiv.org/abs/2607.05147) and DFlash2: they choose tokens.

A sequential head corrects the logits `U_k` of a slot by the token before it, one slot
after the other; a confidence head estimates, before the slot's token is drawn, the
probability that it is kept:

    vanilla    U_k += out(embed(x))                            x: the token before
    gated      U_k += out(sigmoid(mix([h_k, embed(x)])) * embed(x))
    rnn        reads a state of the slots before, too: see `_mix`
    selector   U_k += out(embed(x) * mix(h_k)), for the best tokens only: `candidates`
    confidence sigmoid(w [h_k, embed(x)] + b); `h_k` and `U_k` are of `block_draft`
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.model import block_params
from spec_jax.native import block_steps, draws as draws_lib
from spec_jax.ops import dispatch, projection, weights
from spec_jax.typing import typed


Product = Callable[[jax.Array, weights.Weight], jax.Array]
"""A function `product(x, w)` that returns `x w^T` in float32."""


def row_product(impl: str) -> Product:
    """Returns the product of the row path, of a resolved `impl`, for a few rows."""

    def product(x: jax.Array, w: weights.Weight) -> jax.Array:
        count = x.shape[0]
        height = dispatch.whole_slabs(impl, max(count, projection.MIN_ROWS))
        y = projection.project(
            jnp.pad(x, ((0, height - count), (0, 0))),
            w,
            num_active=jnp.int32(count),
            out_dtype="float32",
            impl=impl,
        )
        return y[:count]

    return product


def candidates(
    config: block_params.BlockConfig, logits: Float[Array, "*S Vd"]
) -> Float[Array, "*S Vd"]:
    """Returns the logits; for a selector, -inf but for each slot's `top_k` best tokens.

    Tokens that tie with the last of them are kept, too.
    """
    if not config.top_k:
        return logits
    last = jax.lax.top_k(logits, config.top_k)[0][..., -1:]
    return jnp.where(logits >= jnp.broadcast_to(last, logits.shape), logits, -jnp.inf)


def first_state(
    config: block_params.BlockConfig, shape: tuple[int, ...]
) -> Float[Array, "*shape r"]:
    """Returns the state of a sequential head before the first slot of blocks: zeros."""
    return jnp.zeros((*shape, config.markov_rank), jnp.float32)


@typed
def correct(
    params: block_params.BlockParams,
    config: block_params.BlockConfig,
    state: Float[Array, "*S r"],
    token: Int[Array, "*S"],
    hidden: Float[Array, "*S D"],
    *,
    product: Product,
) -> tuple[
    Float[Array, "*S r"],
    Float[Array, "*S Vd"] | None,
    Float[Array, "*S"] | None,
]:
    """Runs the sequential and the confidence head on a slot of each block.

    Args:
      state: after the slot before, or `first_state`.
      token: the one before the token that the slot predicts.
      product: the matrix product of the path that calls this.

    Returns:
      The state; what is added to the slot's logits of draft tokens, float32, None
      without a sequential head; and the logit of the probability that the slot's token
      is kept if all before it are, None without a confidence head.
    """
    markov = params.markov
    known, bias = [hidden], None
    if markov is not None:
        before = weights.take_rows(markov.embed, token).astype(hidden.dtype)
        state, mixed = _mix(config, markov, state, before, hidden, product)
        bias = product(mixed.astype(hidden.dtype), markov.out)
        if config.confidence_with_markov:
            known.append(before)
    return state, bias, _confidence(params, known)


def _confidence(params, known):
    """Returns logits of confidences from what is `known` of slots; None: no head."""
    if params.confidence is None or params.confidence_bias is None:
        return None
    read = jnp.concatenate(known, axis=-1).astype(jnp.float32)
    row = params.confidence[0].astype(jnp.float32)
    offset = params.confidence_bias[0].astype(jnp.float32)
    return jnp.einsum("...d,d->...", read, row) + offset


@typed
def run_slots(
    params: block_params.BlockParams,
    config: block_params.BlockConfig,
    anchor: Int[Array, " B"],
    hidden: Float[Array, "B H D"],
    logits: Float[Array, "B W Vd"],
    *,
    counts: Int[Array, " B"],
    draws: draws_lib.Draws | None,
) -> tuple[
    Int[Array, "B W"], Float[Array, "B W"] | None, Float[Array, "B W Vd"] | None
]:
    """Chooses the token of each slot after the one before it, by native kernels, which
    have no selectors.

    Args:
      anchor: the token before the first slot.
      hidden: of all rows of the blocks; the last `W` rows are the slots.
      logits: of the slots, which all predict a token.
      counts: slots of each block to go over.
      draws: see `native.block_steps.slot_chains`.

    Returns:
      Tokens of the target, 0 from `counts` on; the logits of their confidences, as of
      `correct`, which mean nothing from `counts` on; and, for independent draws, the
      log weights of draft tokens from which they were drawn, otherwise None.
    """
    markov, used = params.markov, hidden[:, -logits.shape[1] :]
    read = None
    if markov is not None and markov.mix_bias is not None:
        read = hidden if config.head == "rnn" else used
    tokens, log_weights = block_steps.slot_chains(
        logits,
        anchor,
        counts,
        names=params.hot,
        markov=markov,
        hidden=read,
        draws=draws,
    )
    known = [used]
    if markov is not None and config.confidence_with_markov:
        before = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
        known.append(weights.take_rows(markov.embed, before).astype(hidden.dtype))
    return tokens, _confidence(params, known), log_weights


def _mix(config, markov, state, before, hidden, product):
    """Returns the next state, and the input of a head's output product."""
    if config.head == "vanilla":
        return state, before
    if config.head == "selector":
        return state, product(hidden, markov.mix) * before.astype(jnp.float32)
    if config.head == "gated":
        read = [hidden, before]
    else:
        read = [state.astype(hidden.dtype), before, hidden]
    mixed = product(jnp.concatenate(read, axis=-1), markov.mix)
    mixed += jnp.broadcast_to(markov.mix_bias.astype(jnp.float32), mixed.shape)
    if config.head == "gated":
        return state, jax.nn.sigmoid(mixed) * before.astype(jnp.float32)
    kept, new, out = jnp.split(mixed, 3, axis=-1)
    kept = jax.nn.sigmoid(kept)
    return kept * state + (1 - kept) * jnp.tanh(new), jnp.tanh(out)


@typed
def survival(
    config: block_params.BlockConfig, confidence: Float[Array, "*S W"]
) -> Float[Array, "*S W"]:
    """Returns the survival of each draft, from the logits of confidences.

    The survival of draft `i` is known before its token is drawn. Applies the config's
    temperatures and shifts, if it has them.
    """
    count = confidence.shape[-1]
    scales = config.confidence_temperatures[:count] or 1.0
    shifts = config.confidence_shifts[:count] or 0.0
    scale, shift = (
        jnp.broadcast_to(jnp.asarray(each, jnp.float32), confidence.shape)
        for each in (scales, shifts)
    )
    return jnp.cumprod(jax.nn.sigmoid(confidence / scale + shift), axis=-1)
