"""Causal attention over whole sequences: for prefill, training and parity.

Not on the row path: its bits depend on the sequence length it is compiled for.
"""

import functools
from collections.abc import Sequence

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
    own: Sequence[Float[Array, "B T J K H"]] | None = None,
    *,
    scale: float,
    window: int = 0,
) -> Float[Array, "B T N H"]:
    """Attends from each position to itself and those before it, `window` in all, or,
    with 0, all of them. With `own`, the keys and the values of `J` rows behind each
    position, it attends to these, too: it is the last one, from which `window` counts.

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
    each = None  # [B * K, T, J, H]
    if own is not None:
        each = [x.transpose(0, 3, 1, 2, 4).reshape(B * K, T, -1, H) for x in own]
    attended = _attend(heads, keys, values, each, scale, window)
    merged = attended.reshape(B, K, N // K, T, H)
    return merged.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(queries, keys, values, own, scale, window):
    """Attends with `queries [B, G, T, H]` to `keys` and `values [B, T, H]`, and each
    query to its `own`, `[B, T, J, H]`."""
    return _attend_forward(queries, keys, values, own, scale, window)[0]


def _attend_forward(queries, keys, values, own, scale, window):
    outputs, kept, of_own = [], [], []
    own_scores = None if own is None else _dots(queries, own[0])
    for start, stop in _ranges(queries.shape[2]):
        probs = _probs(queries, keys, own_scores, scale, window, start, stop)
        probs = probs.astype(values.dtype)
        kept.append(probs[..., :stop])
        block = _product("bqt,bth->bqh", kept[-1], values[:, :stop])
        outputs.append(_blocked(block, queries.shape[1]))
        if own is not None:
            of_own.append(_blocked(probs[..., stop:], queries.shape[1]))
    whole, shares = jnp.concatenate(outputs, axis=2), None
    if own is not None:
        shares = jnp.concatenate(of_own, axis=2)
        whole += _mixed(shares, own[1])
    whole = whole.astype(values.dtype)
    return whole, (queries, keys, values, own, whole, kept, shares)


def _attend_backward(scale, window, saved, gradient):
    del window  # Where nothing is seen, probabilities are 0.
    queries, keys, values, own, outputs, kept, shares = saved
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
        dq.append(_blocked(block, queries.shape[1]))
        by_key = bits.row_major(dscores.swapaxes(1, 2))
        part = _product("btq,bqh->bth", by_key, _rows(queries, start, stop))
        dk = dk.at[:, :stop].add(part)
        by_key = bits.row_major(probs.swapaxes(1, 2))
        dv = dv.at[:, :stop].add(_product("btq,bqh->bth", by_key, of_outputs))
    whole, down = jnp.concatenate(dq, axis=2), None
    if own is not None:
        dscores = _dots(gradient, own[1]) - means[..., None]
        dscores = shares.astype(wide) * dscores * scale
        whole += _mixed(dscores, own[0])
        down = [
            jnp.sum(x[..., None] * y[..., None, :].astype(wide), axis=1).astype(y.dtype)
            for x, y in ((dscores, queries), (shares, gradient))
        ]
    made = (whole, queries), (dk, keys), (dv, values)
    return *(x.astype(y.dtype) for x, y in made), down


_attend.defvjp(_attend_forward, _attend_backward)


def _dots(x, own):
    """Returns the products of `x [B, G, T, H]` with `own [B, T, J, H]`, `[B, G, T, J]`,
    as sums over few elements: a product of so small matrices takes far longer."""
    wide = jnp.float32
    return jnp.sum(x[..., None, :].astype(wide) * own[:, None].astype(wide), axis=-1)


def _mixed(shares, own):
    """Returns sums `[B, G, T, H]` of `own [B, T, J, H]` by `shares [B, G, T, J]`."""
    wide = jnp.float32
    return jnp.sum(shares[..., None].astype(wide) * own[:, None].astype(wide), axis=-2)


def _ranges(num_positions):
    """Returns positions `(start, stop)` of each block of queries, in order."""
    block = max(MIN_BLOCK, -(-num_positions // MAX_BLOCKS))
    starts = range(0, num_positions, block)
    return [(start, min(start + block, num_positions)) for start in starts]


def _rows(x, start, stop):
    """Returns a block of `x [B, G, T, ...]`, as `[B, G * block, ...]`."""
    return x[:, :, start:stop].reshape(x.shape[0], -1, *x.shape[3:])


def _probs(queries, keys, own_scores, scale, window, start, stop):
    """Returns float32 probabilities of one block, `[B, G * block, stop + J]`."""
    B, G, _, _ = queries.shape
    scores = _product("bqh,bth->bqt", _rows(queries, start, stop), keys[:, :stop])
    scores = scores.reshape(B, G, stop - start, stop)
    behind = 0 if own_scores is None else own_scores.shape[-1]
    keys_at = jnp.arange(stop, dtype=jnp.int32)
    visible = keys_at[None, :] <= keys_at[start:, None]
    if window:
        visible &= keys_at[None, :] > keys_at[start:, None] + behind - window
    visible = jnp.broadcast_to(visible, scores.shape)
    scores = jnp.where(visible, scores * scale, -jnp.inf)
    if own_scores is not None:
        own = own_scores[:, :, start:stop] * scale
        if window:
            is_seen = jnp.arange(1, behind + 1, dtype=jnp.int32) > behind - window
            own = jnp.where(jnp.broadcast_to(is_seen, own.shape), own, -jnp.inf)
        scores = jnp.concatenate([scores, own], axis=-1)
    return jax.nn.softmax(scores, axis=-1).reshape(B, -1, stop + behind)


def _blocked(x, num_groups):
    """Splits `x [B, G * block, H]` into `[B, G, block, H]`."""
    return x.reshape(x.shape[0], num_groups, -1, x.shape[-1])


def _product(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
