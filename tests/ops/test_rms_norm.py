"""RMSNorm against float64, and the order of its roundings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.ops import rms_norm


EPS = 1e-3  # large enough to be seen in rows of small values
WIDTH = 96

_norm = jax.jit(rms_norm.rms_norm, static_argnames=("eps",))


def inputs(rng, dtype):
    """Rows of very different size: the small ones show `eps`."""
    sizes = np.array([1e-2, 1.0, 1e3])[:, None, None]
    x = rng.standard_normal((3, 5, WIDTH)) * sizes
    weight = rng.standard_normal(WIDTH)
    return jnp.asarray(x.astype(dtype)), jnp.asarray(weight.astype(dtype))


def oracle(x, weight, eps=EPS):
    x, weight = (np.asarray(each).astype(np.float64) for each in (x, weight))
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_normalised(rng, dtype):
    """Fails if the mean is subtracted, or squares are summed in bfloat16."""
    x, weight = inputs(rng, jnp.dtype(dtype))
    y = _norm(x, weight, eps=EPS)
    assert y.dtype == x.dtype
    testing.assert_rows_close(y, oracle(x, weight), dtype=dtype, reduction=WIDTH)


def test_the_weight_meets_the_rounded_value(rng):
    """Fails if the weight is multiplied in float32, before the cast back."""
    x, weight = inputs(rng, jnp.bfloat16)
    wide, wide_weight = (np.asarray(each).astype(np.float32) for each in (x, weight))
    mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide / np.sqrt(mean_square + np.float32(EPS))
    rounded_twice = normed.astype(jnp.bfloat16).astype(np.float32) * wide_weight
    rounded_once = normed * wide_weight
    actual = np.asarray(_norm(x, weight, eps=EPS))
    # The library's reciprocal root may round a borderline value the other way.
    assert (actual == rounded_twice.astype(jnp.bfloat16)).mean() > 0.98
    # Negative control: the other order is another result.
    assert (actual == rounded_once.astype(jnp.bfloat16)).mean() < 0.9


FAULTS = {
    "zeros": lambda x, w: jnp.zeros_like(x),
    "no eps": lambda x, w: rms_norm.rms_norm(x, w, eps=0.0),
    "no weight": lambda x, w: rms_norm.rms_norm(x, jnp.ones_like(w), eps=EPS),
    "mean subtracted": lambda x, w: rms_norm.rms_norm(
        x - jnp.mean(x, axis=-1, keepdims=True), w, eps=EPS
    ),
    "one element lost": lambda x, w: rms_norm.rms_norm(x.at[..., 0].set(0), w, eps=EPS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(rng, fault):
    """Negative control: the oracle tells these from RMSNorm."""
    x, weight = inputs(rng, jnp.bfloat16)
    with pytest.raises(AssertionError, match="rows are off"):
        testing.assert_rows_close(
            jax.jit(FAULTS[fault])(x, weight),
            oracle(x, weight),
            dtype="bfloat16",
            reduction=WIDTH,
        )
