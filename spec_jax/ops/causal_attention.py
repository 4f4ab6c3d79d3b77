"""Causal attention over whole sequences: for prefill, training and parity.

Not on the row path: its bits depend on the sequence length it is compiled for.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.ops import bits
from spec_jax.typing import typed


MIN_BLOCK = 128
MAX_BLOCKS = 8


@typed
def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int = 0,
) -> Float[Array, "B T N H"]:
    """Attends from each position to itself and those before it, `window` in all, or,
    with 0, all of them.

    Query head `n` reads key/value head `n // (N / K)`. Scores and softmax are
    float32; the probabilities are cast to `v.dtype` before the second product, as
    Hugging Face's eager attention does. Queries go in at most `MAX_BLOCKS` blocks,
    each of which sees only the keys up to its own end: on a CPU that is more than
    twice as fast as one masked square.

    Its gradient keeps the probabilities in `v.dtype`, and takes its products in the
    dtype of the operands, accumulated in float32.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    # Heads before positions: one contiguous matrix per key/value head.
    queries = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    keys = k.transpose(0, 2, 1, 3).reshape(B * K, T, H)
    values = v.transpose(0, 2, 1, 3).reshape(B * K, T, H)
    heads = queries.reshape(B * K, N // K, T, H)
    attended = _attend(heads, keys, values, scale, window)
    merged = attended.reshape(B, K, N // K, T, H)
    return merged.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(queries, keys, values, scale, window):
    """Attends with `queries [B, G, T, H]` to `keys` and `values [B, T, H]`."""
    return _attend_forward(queries, keys, values, scale, window)[0]


def _attend_forward(queries, keys, values, scale, window):
    outputs, kept = [], []
    for start, stop in _ranges(queries.shape[2]):
        probs = _probs(queries, keys, scale, window, start, stop).astype(values.dtype)
        block = _product("bqt,bth->bqh", probs, values[:, :stop])
        outputs.append(_blocked(block, queries.shape[1]).astype(values.dtype))
        kept.append(probs)
    whole = jnp.concatenate(outputs, axis=2)
    return whole, (queries, keys, values, whole, kept)


def _attend_backward(scale, window, saved, gradient):
    del window  # Where nothing is seen, probabilities are 0.
    queries, keys, values, outputs, kept = saved
    wide = jnp.float32
    # The softmax's `sum_j probs_j dprobs_j` is `dot(output, gradient)`.
    means = jnp.sum(outputs.astype(wide) * gradient.astype(wide), axis=-1)
    dq, dk, dv = [], jnp.zeros(keys.shape, wide), jnp.zeros(values.shape, wide)
    for (start, stop), probs in zip(_ranges(queries.shape[2]), kept, strict=True):
        of_outputs = _rows(gradient, start, stop)
        dprobs = _product("bqh,bth->bqt", of_outputs, values[:, :stop])
        dscores = dprobs - _rows(means, start, stop)[..., None]
        dscores = probs.astype(wide) * dscores * scale
        dscores = dscores.astype(keys.dtype)
        block = _product("bqt,bth->bqh", dscores, keys[:, :stop])
        dq.append(_blocked(block, queries.shape[1]).astype(queries.dtype))
        by_key = bits.row_major(dscores.swapaxes(1, 2))
        part = _product("btq,bqh->bth", by_key, _rows(queries, start, stop))
        dk = dk.at[:, :stop].add(part)
        by_key = bits.row_major(probs.swapaxes(1, 2))
        dv = dv.at[:, :stop].add(_product("btq,bqh->bth", by_key, of_outputs))
    return jnp.concatenate(dq, axis=2), dk.astype(keys.dtype), dv.astype(values.dtype)


_attend.defvjp(_attend_forward, _attend_backward)


def _ranges(num_positions):
    """Returns positions `(start, stop)` of each block of queries, in order."""
    block = max(MIN_BLOCK, -(-num_positions // MAX_BLOCKS))
    starts = range(0, num_positions, block)
    return [(start, min(start + block, num_positions)) for start in starts]


def _rows(x, start, stop):
    """Returns a block of `x [B, G, T, ...]`, as `[B, G * block, ...]`."""
    return x[:, :, start:stop].reshape(x.shape[0], -1, *x.shape[3:])


def _probs(queries, keys, scale, window, start, stop):
    """Returns float32 probabilities `[B, G * block, stop]` of one block of queries."""
    B, G, _, _ = queries.shape
    scores = _product("bqh,bth->bqt", _rows(queries, start, stop), keys[:, :stop])
    scores = scores.reshape(B, G, stop - start, stop)
    keys_at = jnp.arange(stop, dtype=jnp.int32)
    visible = keys_at[None, :] <= keys_at[start:, None]
    if window:
        visible &= keys_at[None, :] > keys_at[start:, None] - window
    visible = jnp.broadcast_to(visible, scores.shape)
    scores = jnp.where(visible, scores * scale, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1).reshape(B, -1, stop)


def _blocked(x, num_groups):
    """Splits `x [B, G * block, H]` into `[B, G, block, H]`."""
    return x.reshape(x.shape[0], num_groups, -1, x.shape[-1])


def _product(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
