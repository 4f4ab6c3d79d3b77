"""Rotary embedding, and angles by kernels, against complex rotations in float64."""

import decimal
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import row_contract

from spec_jax import testing
from spec_jax.ops import rope


HEADS, HEAD_DIM = 3, 64
# The last position of Qwen3, and the first ones.
POSITIONS = np.array([0, 1, 7, 128, 5000, 40959], np.int32)
INV_FREQ = rope.inverse_frequencies(HEAD_DIM, 1e6)

_rope = jax.jit(rope.rope, static_argnames=("scale",))


def inputs(rng, dtype):
    x = rng.standard_normal((len(POSITIONS), HEADS, HEAD_DIM))
    return jnp.asarray(x.astype(dtype))


# Products are rounded to float32, as in every implementation.
RADIANS = (POSITIONS.astype(np.float32)[:, None] * INV_FREQ).astype(np.float64)


def oracle(x, scale):
    """Rotates in float64: elements `i` and `i + H/2` are one complex number."""
    x = np.asarray(x).astype(np.float64)
    half = x.shape[-1] // 2
    turn = scale * np.exp(1j * RADIANS)[:, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.0), ("bfloat16", 1.25)])
def test_heads_are_rotated(rng, dtype, scale):
    """Fails if pairs are neighbours, angles are bfloat16, or the scale is lost."""
    x = inputs(rng, jnp.dtype(dtype))
    y = _rope(x, POSITIONS, INV_FREQ, scale=scale)
    assert y.dtype == x.dtype
    near = {"dtype": dtype, "reduction": 2}
    testing.assert_rows_close(y, oracle(x, scale), **near)
    neighbours = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    for wrong in (  # Negative controls.
        _rope(x, POSITIONS + 1, INV_FREQ, scale=scale),
        _rope(x, -POSITIONS, INV_FREQ, scale=scale),
        _rope(neighbours, POSITIONS, INV_FREQ, scale=scale),
    ):
        with pytest.raises(AssertionError, match="rows are off"):
            testing.assert_rows_close(wrong, oracle(x, scale), **near)


@pytest.mark.parametrize(
    ("head_dim", "theta"), [(64, 1e4), (80, 1e4), (128, 1e6), (128, 5e6)]
)
def test_frequencies_have_the_same_bits_everywhere(head_dim, theta):
    """Compares with powers that have 50 digits and are rounded once. Fails on
    processors with AVX-512 if the power is NumPy's in float32.
    """
    with decimal.localcontext(prec=50):
        base = decimal.Decimal(float(np.float32(theta)))
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers = [float(base ** decimal.Decimal(float(x))) for x in exponents]
    expected = np.float32(1) / np.array(powers, np.float32)
    testing.assert_same_bits(rope.inverse_frequencies(head_dim, theta), expected)


@pytest.mark.parametrize("impl", ["xla", "interpret"], indirect=True)
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.0), ("bfloat16", 1.25)])
def test_angles_are_those_of_float64(impl, dtype, scale):
    """Fails if a position, a frequency or a half is another's, or scale is left out."""
    angles = row_contract.compiled("angles", impl)
    found = angles(POSITIONS, INV_FREQ, scale=scale, dtype=dtype)
    rounding = {"float32": 2.0**-22, "bfloat16": 2.0**-8}[dtype]
    for values, turned in zip(found, (np.cos(RADIANS), np.sin(RADIANS)), strict=True):
        assert values.dtype == dtype and values.shape == (POSITIONS.size, HEAD_DIM // 2)
        np.testing.assert_allclose(
            np.asarray(values).astype(np.float64), scale * turned, atol=scale * rounding
        )


def test_implementations_without_kernels_keep_the_reference():
    """Fails if "native" or "xla" traces another program than `rope.angles`."""
    how = {"scale": 1.0, "dtype": "bfloat16"}
    programs = [functools.partial(rope.angles, **how)]
    for impl in ("native", "xla", "interpret"):
        programs.append(functools.partial(rope.row_angles, impl=impl, **how))
    traced = [str(jax.make_jaxpr(f)(POSITIONS, INV_FREQ).eqns) for f in programs]
    assert traced[0] == traced[1] == traced[2]
    assert "pallas_call" in traced[3] and "pallas_call" not in traced[0]
