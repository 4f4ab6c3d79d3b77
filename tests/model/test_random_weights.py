"""The weights of tests are those that the package draws, up to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import random_weights

from spec_jax.model import params as params_lib


SHAPES = {
    "wide": jax.ShapeDtypeStruct((301, 70), jnp.float32),
    "norm": jax.ShapeDtypeStruct((5,), jnp.bfloat16),
    "half": jax.ShapeDtypeStruct((9, 4), jnp.bfloat16),
    "gate_bias": jax.ShapeDtypeStruct((3,), jnp.float32),
}


def largest_differences(key, other) -> dict[str, float]:
    """Between what XLA draws with one key, and NumPy with the other."""
    expected = random_weights.DRAWN_BY_XLA(key, SHAPES, stddev=0.3)
    found = params_lib.draw(other, SHAPES, stddev=0.3)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert kinds(found) == kinds(expected)
    double = lambda x: np.asarray(x, np.float64)
    apart = lambda x, y: float(np.abs(double(x) - double(y)).max())
    return jax.tree.map(apart, found, expected)


def test_weights_are_those_of_the_package():
    """Fails if tests run on other numbers than a user's `init` gives."""
    assert params_lib.draw is random_weights.draw
    found = largest_differences(jax.random.key(7), jax.random.key(7))
    assert found["wide"] < 1e-6 and found["half"] < 1e-2
    assert found["norm"] == found["gate_bias"] == 0
    drawn = jax.jit(lambda key: params_lib.draw(key, SHAPES, stddev=0.3))
    assert drawn(jax.random.key(7))["wide"].shape == (301, 70)


def test_another_key_is_seen():
    """Negative control."""
    assert largest_differences(jax.random.key(7), jax.random.key(8))["wide"] > 1e-2
