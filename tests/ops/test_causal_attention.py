"""Causal attention over whole sequences, against attention row by row."""

import functools

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


def compile_():
    """Compiles a fresh executable, so that changed block sizes take effect."""
    return jax.jit(functools.partial(causal_attention.causal_attention, scale=64**-0.5))


_attend = compile_()


def naive(q, k, v, own=None, *, scale, window):
    """Attends as rows say: a query is the last of its column's own rows."""
    own_k, own_v = own or [x[:, :, None][:, :, :0] for x in (k, v)]
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


def assert_close(out, q, k, v):
    """Compares with attention in float32, by rows."""
    assert out.dtype == q.dtype
    T, H = q.shape[1], q.shape[3]
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = naive(*wide, scale=H**-0.5, window=T)
    testing.assert_rows_close(out, expected, dtype=q.dtype, reduction=T + H)


def test_bfloat16(rng):
    """Fails if scores are rounded, or a position sees the one after it."""
    q, k, v = inputs(rng, dtype="bfloat16")
    assert_close(_attend(q, k, v), q, k, v)
    with pytest.raises(AssertionError, match="rows are off"):  # Negative control.
        assert_close(_attend(q, k, k), q, k, v)


def test_many_blocks(rng, monkeypatch):
    """Fails if blocks overlap, or the last and shorter one is lost."""
    monkeypatch.setattr(causal_attention, "MIN_BLOCK", 8)
    monkeypatch.setattr(causal_attention, "MAX_BLOCKS", 3)
    qkv = inputs(rng, length=28)  # blocks of 10, 10 and 8
    assert_close(compile_()(*qkv), *qkv)


def test_later_keys_are_never_used(rng):
    """Fails if a masked key is multiplied by zero: NaN would show."""
    q, k, v = inputs(rng)
    half = 64  # inside the first block
    poisoned = [x.at[:, half:].set(jnp.nan) for x in (q, k)]
    out = _attend(*poisoned, v)
    testing.assert_same_bits(out[:, :half], _attend(q, k, v)[:, :half])


@pytest.mark.parametrize(
    ("behind", "window"), [(0, LENGTH), (3, LENGTH + 3), (3, 40), (3, 2)]
)
def test_rows_behind_each_position(rng, behind, window):
    """Compares attention to a position's own rows, if any, and all gradients."""
    (q, k, v), own = inputs(rng), None
    if behind:
        own = [jnp.stack([inputs(rng)[1] for _ in range(behind)], 2) for _ in "kv"]
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
