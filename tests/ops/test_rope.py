"""Rotary embedding: complex rotations in float64, and the relative property."""

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.ops import rope


HEADS, HEAD_DIM = 3, 64
POSITIONS = np.array([0, 1, 7, 128, 5000, 40959], np.int32)
INV_FREQ = rope.inverse_frequencies(HEAD_DIM, 1e6)

_rope = jax.jit(rope.rope, static_argnames=("scale",))


def inputs(rng, dtype):
    x = rng.standard_normal((len(POSITIONS), HEADS, HEAD_DIM))
    return jnp.asarray(x.astype(dtype))


def oracle(x, positions=POSITIONS, inv_freq=INV_FREQ, scale=1.0):
    """Element `i` and `i + H/2` are one complex number; the angle is float32."""
    x = np.asarray(x).astype(np.float64)
    half = x.shape[-1] // 2
    angles = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    turn = scale * np.exp(1j * angles)[:, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.0), ("bfloat16", 1.25)])
def test_heads_are_rotated(rng, dtype, scale):
    """Fails if pairs are neighbours, angles are bfloat16, or the scale is lost."""
    x = inputs(rng, jnp.dtype(dtype))
    y = _rope(x, POSITIONS, INV_FREQ, scale=scale)
    assert y.dtype == x.dtype
    testing.assert_rows_close(y, oracle(x, scale=scale), dtype=dtype, reduction=2)


@pytest.mark.parametrize(
    ("head_dim", "theta"), [(64, 1e4), (80, 1e4), (128, 1e6), (128, 5e6)]
)
def test_frequencies_have_the_same_bits_everywhere(head_dim, theta):
    """Each power to 50 digits, rounded once. Fails on processors with AVX-512 if the
    power is NumPy's in float32.
    """
    with decimal.localcontext(prec=50):
        base = decimal.Decimal(float(np.float32(theta)))
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers = [float(base ** decimal.Decimal(float(x))) for x in exponents]
    expected = np.float32(1) / np.array(powers, np.float32)
    testing.assert_same_bits(rope.inverse_frequencies(head_dim, theta), expected)


def test_position_zero_changes_nothing(rng):
    """Fails if positions are counted from one."""
    x = inputs(rng, jnp.float32)
    y = _rope(x, np.zeros_like(POSITIONS), INV_FREQ, scale=1.0)
    testing.assert_same_bits(y, x)


def test_scores_depend_on_the_distance_only(rng):
    """Fails if queries and keys turn by different angles, or in opposite senses."""
    q, k = (inputs(rng, jnp.float32)[:1] for _ in range(2))
    q, k = (jnp.broadcast_to(x, (6, HEADS, HEAD_DIM)) for x in (q, k))
    starts = np.array([0, 1, 10, 100, 500, 1000], np.int32)
    keys = _rope(k, starts, INV_FREQ, scale=1.0)

    def scores(distance):
        queries = _rope(q, starts + np.int32(distance), INV_FREQ, scale=1.0)
        return np.einsum("rnh,rnh->nr", *map(np.asarray, (queries, keys)))

    near, far = scores(3), scores(4)
    # Angles of position 1000 are rounded to 2**-15 radians.
    np.testing.assert_allclose(near, near[:, :1].repeat(6, 1), atol=2e-3)
    # Negative control: another distance gives another score.
    assert np.abs(near - far).min(1).max() > 0.1


FAULTS = {
    "zeros": lambda x, at, freq: jnp.zeros_like(x),
    "not rotated": lambda x, at, freq: x,
    "next position": lambda x, at, freq: rope.rope(x, at + 1, freq, scale=1.0),
    "backwards": lambda x, at, freq: rope.rope(x, -at, freq, scale=1.0),
    "scaled": lambda x, at, freq: rope.rope(x, at, freq, scale=1.02),
    "other frequencies": lambda x, at, freq: rope.rope(x, at, freq**0.9, scale=1.0),
    "neighbours paired": lambda x, at, freq: rope.rope(
        jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1), at, freq, scale=1.0
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(rng, fault):
    """Negative control: the oracle tells these from the rotation."""
    x = inputs(rng, jnp.bfloat16)
    with pytest.raises(AssertionError, match="rows are off"):
        testing.assert_rows_close(
            jax.jit(FAULTS[fault])(x, POSITIONS, INV_FREQ),
            oracle(x),
            dtype="bfloat16",
            reduction=2,
        )


@pytest.mark.parametrize(("head_dim", "theta"), [(80, 1e4), (128, 1e6)])
def test_inverse_frequencies(head_dim, theta):
    """Fails if the exponent counts pairs instead of elements, or is rounded early."""
    actual = rope.inverse_frequencies(head_dim, theta)
    i = np.arange(head_dim // 2)
    expected = np.exp(-np.log(theta) * 2 * i / head_dim)
    assert actual.dtype == np.float32
    assert actual[0] == 1.0
    # The exponent is float32: relative error ln(theta) * 2**-24 and a few roundings.
    np.testing.assert_allclose(actual, expected, rtol=2e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(
            rope.inverse_frequencies(head_dim, theta * 1.001), expected, rtol=2e-6
        )
