"""The Mosaic kernels of single rows, interpreted: norm, angles and argmax."""

import functools

import jax
import jax.numpy as jnp
import mosaic_interpreter
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.pallas import (
    angles_mosaic,
    angles_triton,
    argmax_mosaic,
    rms_norm_mosaic,
    rms_norm_triton,
)


PARAMS = mosaic_interpreter.params()


def test_norms_are_those_of_triton(rng):
    """Fails if a row is normed by another, or rounds elsewhere."""
    x = rng.standard_normal((3, 256)).astype(jnp.bfloat16)
    weight = (1 + 0.2 * rng.standard_normal(256)).astype(jnp.bfloat16)
    norm = jax.jit(
        functools.partial(rms_norm_mosaic.rms_norm, eps=1e-6, interpret=PARAMS)
    )
    two = {"num_active": np.int32(2)}
    found = norm(x, weight, **two)
    expected = rms_norm_triton.rms_norm(x, weight, **two, eps=1e-6, interpret=True)
    # Squares may be summed in another order.
    testing.assert_rows_close(found[:2], expected[:2], dtype="bfloat16", reduction=1)
    turned = norm(x[::-1], weight, num_active=np.int32(3))
    testing.assert_same_bits(turned[1:][::-1], found[:2])


def test_angles_are_those_of_triton(rng):
    """Fails if a row has another's position, or a column another's frequency."""
    positions = rng.integers(0, 40_000, 5, np.int32)
    frequencies = rng.uniform(0, 1, 16).astype(np.float32)
    options = {"scale": 1.5, "dtype": jnp.bfloat16}
    angles = functools.partial(angles_mosaic.angles, interpret=PARAMS, **options)
    found = jax.jit(angles)(positions, frequencies)
    expected = angles_triton.angles(positions, frequencies, interpret=True, **options)
    testing.assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_argmax_is_numpys(rng, monkeypatch, dtype):
    """Fails if a tie, a NaN, a zero's sign or a chunk's edge is taken otherwise."""
    monkeypatch.setattr(argmax_mosaic, "CHUNK", 256)
    logits = rng.standard_normal((6, 600)).astype(dtype)
    logits[0, [70, 599]] = 9  # of which the second lies in two chunks
    logits[1, [500, 344]] = 9
    logits[2, [20, 590]] = np.nan
    logits[3] = np.where(np.arange(600) % 2, 0.0, -0.0)
    logits[4] = -np.inf
    argmax = jax.jit(functools.partial(argmax_mosaic.argmax, interpret=PARAMS))
    found = argmax(logits, num_active=np.int32(5))
    expected = [70, 344, 20, 0, 0, 0]
    np.testing.assert_array_equal(found, expected)
    plain = np.argmax(logits[:5].astype(np.float32), axis=1)
    np.testing.assert_array_equal(plain, expected[:5])


def test_refusals():
    """Fails if what is not whole warpgroups is computed in part."""
    with pytest.raises(ValueError, match="rows of 64 elements are not whole 128s"):
        rms_norm_mosaic.rms_norm(
            jnp.ones((2, 64)), jnp.ones(64), num_active=jnp.int32(2), eps=0.0
        )
    for width in (120, 1001):
        with pytest.raises(ValueError, match=f"rows of {width} logits"):
            argmax_mosaic.argmax(jnp.ones((2, width)), num_active=jnp.int32(2))
    with pytest.raises(ValueError, match="12 frequencies are not whole 8s"):
        angles_mosaic.angles(
            jnp.zeros(2, jnp.int32), jnp.ones(12), scale=1.0, dtype=jnp.float32
        )
