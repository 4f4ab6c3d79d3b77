"""Causal attention over whole sequences, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.ops import causal_attention


BATCH, HEADS, KV_HEADS = 2, 6, 2
LENGTH = 150  # two blocks, the second one ragged


def inputs(rng, length=LENGTH, head_dim=64, dtype="float32"):
    """Draws queries, keys and values; each sequence has its own."""

    def normal(heads):
        x = rng.standard_normal((BATCH, length, heads, head_dim))
        return jnp.asarray(x.astype(jnp.dtype(dtype)))

    return normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)


def compile_(scale):
    """Compiles a fresh executable, so that changed block sizes take effect."""
    return jax.jit(
        lambda q, k, v: causal_attention.causal_attention(q, k, v, scale=scale)
    )


_attend = compile_(64**-0.5)


def oracle(q, k, v):
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = np.einsum("bqnh,btnh->bnqt", q, k) / np.sqrt(q.shape[-1])
    length = q.shape[1]
    scores[:, :, np.triu(np.ones((length, length), bool), k=1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnqt,btnh->bqnh", weights, v)


def assert_close(out, q, k, v):
    assert out.dtype == q.dtype
    reduction = q.shape[1] + q.shape[3]
    testing.assert_rows_close(out, oracle(q, k, v), dtype=q.dtype, reduction=reduction)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_causal(rng, dtype):
    """Fails if a position sees the one after it, or not itself."""
    qkv = inputs(rng, dtype=dtype)
    assert_close(_attend(*qkv), *qkv)


def test_many_blocks(rng, monkeypatch):
    """Fails if blocks overlap, or the last and shorter one is lost."""
    monkeypatch.setattr(causal_attention, "MIN_BLOCK", 8)
    monkeypatch.setattr(causal_attention, "MAX_BLOCKS", 3)
    qkv = inputs(rng, length=28)  # blocks of 10, 10 and 8
    assert_close(compile_(64**-0.5)(*qkv), *qkv)


def test_later_keys_are_never_used(rng):
    """Fails if a masked key is multiplied by zero: NaN would show."""
    q, k, v = inputs(rng)
    half = 64  # inside the first block
    poisoned = [x.at[:, half:].set(jnp.nan) for x in (q, k)]
    out = _attend(*poisoned, v)
    testing.assert_same_bits(out[:, :half], _attend(q, k, v)[:, :half])


def naive(q, k, v, own, *, scale, window):
    """Attends as rows say: a query is the last of its column's own rows."""
    own_k, own_v = own
    B, T, N, H = q.shape
    queries = q.reshape(B, T, KV_HEADS, -1, H)
    columns, behind = jnp.arange(T), own_k.shape[2]
    ages = columns[:, None] + behind - columns[None, :]
    seen = (ages >= behind) & (ages < window)
    before = jnp.where(seen, jnp.einsum("btkgh,bskh->bkgts", queries, k), -jnp.inf)
    own = jnp.einsum("btkgh,btjkh->bkgtj", queries, own_k)
    own = jnp.where(jnp.arange(behind)[::-1] < window, own, -jnp.inf)
    probs = jax.nn.softmax(jnp.concatenate([before, own], axis=-1) * scale, axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", probs[..., :T], v)
    out += jnp.einsum("bkgtj,btjkh->btkgh", probs[..., T:], own_v)
    return out.reshape(q.shape)


@pytest.mark.parametrize("window", [LENGTH + 3, 40, 2])
def test_rows_behind_each_position(rng, window):
    """Compares attention to a position's own rows, and all gradients."""
    q, k, v = inputs(rng)
    own = [jnp.stack([inputs(rng)[1] for _ in range(3)], axis=2) for _ in "kv"]
    weights = inputs(rng)[0]

    def pulled(attend, window):
        how = {"scale": 64**-0.5, "window": window}
        bound = lambda q, k, v, own: attend(q, k, v, own, **how)
        made, pull = jax.vjp(bound, q, k, v, own)
        return jax.tree.leaves((made, pull(weights)))

    expected = pulled(naive, window)
    actual = pulled(causal_attention.causal_attention, window)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    # Negative control: a window of one key less.
    assert not np.allclose(pulled(naive, window - 1)[0], expected[0], atol=2e-5)


FAULTS = {
    "no scale": lambda q, k, v: _attend(q * 8, k, v),  # 8 = sqrt(H)
    "heads interleaved": lambda q, k, v: _attend(
        q.reshape(BATCH, LENGTH, KV_HEADS, -1, 64).swapaxes(2, 3).reshape(q.shape), k, v
    ),
    "keys as values": lambda q, k, v: _attend(q, k, k),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(rng, fault):
    """Negative control: the oracle tells these faults from attention."""
    qkv = inputs(rng)
    with pytest.raises(AssertionError, match="rows are off"):
        assert_close(FAULTS[fault](*qkv), *qkv)
