"""The token of highest logit, by every implementation, and which of equals wins."""

import jax.numpy as jnp
import numpy as np
import pytest
from ops import row_contract
from slow_cases import slow


# Around pieces of 512 and 16,384 (native) and of 4,096 (Triton); Qwen3's vocabulary.
WIDTHS = (1, 7, 513, 4097, 16_385, slow(151_936))


def run(impl, logits):
    call = row_contract.compiled("argmax", impl)
    indices = call(logits, num_active=np.int32(len(logits)))
    assert indices.dtype == jnp.int32
    return np.asarray(indices)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_numpys(rng, impl, width):
    """Fails if a piece or a tail is missed, a later equal wins, a NaN loses to a
    later one or to infinity, or zeros of both signs differ."""
    # Most logits are below the zeros that a block has past the end.
    x = rng.normal(size=(12, width)).astype(np.float32) - 10
    x[1] = rng.integers(-3, 3, width)
    x[2] = -np.inf
    x[3, rng.integers(width)] = np.inf
    x[4] = np.where(rng.random(width) < 0.5, 0.0, -0.0)
    for first, value in ((5, np.nan), (7, -np.nan), (9, np.inf)):
        x[first : first + 2, width // 3] = value
        x[first, rng.integers(width)] = np.nan
        x[first + 1, rng.integers(width)] = np.inf
    x[11, -1] = 10
    np.testing.assert_array_equal(run(impl, x), np.argmax(x, axis=-1))
    if width > 500:  # Negative control: the last of equals differs.
        last = width - 1 - np.argmax(x[:, ::-1], axis=-1)
        assert (run(impl, x) != last)[[1, 2, 4]].all()


def test_every_place_is_seen(impl):
    """Fails if the largest logit is found anywhere but at its place."""
    places = [0, 1, 511, 512, 4095, 4096, 16_383, 16_384, 20_479]
    x = np.zeros((len(places), 20_480), np.float32)
    x[np.arange(len(places)), places] = 1.0
    assert run(impl, x).tolist() == places


def test_denormals_are_not_zeros():
    """Fails if a GPU's kernels take denormals for zeros, as XLA on a CPU does."""
    rows = np.float32([[0.0, 1e-45, -1e-45], [-1e-45, -2e-45, -3e-45]])
    assert run("interpret", rows).tolist() == [1, 0]
