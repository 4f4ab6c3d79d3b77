"""DSpark's heads (https://arxiv.org/abs/2607.05147): from a block's slots to tokens.

A sequential head corrects the logits `U_k` of a slot by the token before it, one slot
after the other; a confidence head says how sure it is before the slot's token is drawn:

    vanilla    U_k += out(embed(x))                            x: the token before
    gated      U_k += out(sigmoid(mix([h_k, embed(x)])) * embed(x))
    recurrent  a state of the slots before, too: see `_mix`
    selector   U_k += out(embed(x) * mix(h_k)), of the best tokens by U_k: `candidates`
    confidence sigmoid(w [h_k, embed(x)] + b)

The hidden states `h_k` and logits are those of `block_draft`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.model import block_params
from spec_jax.native import block_steps, draws as draws_lib
from spec_jax.ops import dispatch, projection, skinny_gemm, weights
from spec_jax.typing import typed


NATIVE_HEADS: tuple[str, ...] = ("none", *block_params.DSPARK_HEADS)
"""Sequential heads that `run_slots` goes over; another goes by operations."""

Product = Callable[[jax.Array, weights.Weight], jax.Array]
"""`product(x, w)`: `x w^T` in float32."""


def row_product(impl: str) -> Product:
    """Returns the product of the row path, of a resolved `impl`, for a few rows."""

    def product(x: jax.Array, w: weights.Weight) -> jax.Array:
        count = x.shape[0]
        height = dispatch.whole_slabs(impl, max(count, skinny_gemm.MIN_ROWS))
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
    """Returns logits of which a selector's are those of a slot's best tokens, and -inf.

    With ties for the last one it has a few more.
    """
    if not config.top_k:
        return logits
    last = jax.lax.top_k(logits, config.top_k)[0][..., -1:]
    return jnp.where(logits >= jnp.broadcast_to(last, logits.shape), logits, -jnp.inf)


def first_state(
    config: block_params.BlockConfig, shape: tuple[int, ...]
) -> Float[Array, "*shape r"]:
    """Returns what a sequential head carries into the first slot of blocks."""
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
      state: of the slot before, or `first_state`.
      token: before the one that the slot predicts.
      product: of the path that runs it.

    Returns:
      The state; what is added to the slot's logits, float32, of draft tokens; and the
      logit of the confidence, that the slot's token is kept if all before it are. Each
      None where the drafter has no such head.
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
    """Returns the logits of confidences of what is `known` of slots; None: no head."""
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
    """Chooses the token of each slot after the one before it, by native kernels.

    Args:
      anchor: the token before the first slot.
      hidden: from the first row of blocks on; the last `W` are of the slots.
      logits: of slots that predict.
      counts: slots of each block to go over.
      draws: see `native.block_steps.slot_chains`.

    Returns:
      Tokens of the target, 0 from `counts` on; the logits of their confidences, as
      `correct` says them, which mean nothing from there on; and of independent draws
      the log weights of draft tokens that they were drawn from, otherwise None.
    """
    markov, used = params.markov, hidden[:, -logits.shape[1] :]
    mix = None
    if markov is not None and markov.mix is not None and markov.mix_bias is not None:
        read = hidden if config.head == "rnn" else used
        mix = block_steps.Mix(weight=markov.mix, bias=markov.mix_bias, hidden=read)
    tokens, log_weights = block_steps.slot_chains(
        logits,
        anchor,
        counts,
        names=params.hot,
        embed=None if markov is None else markov.embed,
        out=None if markov is None else markov.out,
        mix=mix,
        draws=draws,
    )
    known = [used]
    if markov is not None and config.confidence_with_markov:
        before = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
        known.append(weights.take_rows(markov.embed, before).astype(hidden.dtype))
    return tokens, _confidence(params, known), log_weights


def _mix(config, markov, state, before, hidden, product):
    """Returns the state, and what the second product of a head reads."""
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
    """Returns the chance that each draft is kept, of logits of confidences.

    That of draft `i` is known before its token is drawn. Calibrated, where the config
    has temperatures and shifts.
    """
    count = confidence.shape[-1]
    scales = config.confidence_temperatures[:count] or 1.0
    shifts = config.confidence_shifts[:count] or 0.0
    scale, shift = (
        jnp.broadcast_to(jnp.asarray(each, jnp.float32), confidence.shape)
        for each in (scales, shifts)
    )
    return jnp.cumprod(jax.nn.sigmoid(confidence / scale + shift), axis=-1)
