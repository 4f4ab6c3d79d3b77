"""Theory: formulas against simulated rounds, on the host and on the device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.gamma import theory


SIGMAS = 4.5
"""Standard errors that a simulated mean may lie off: 7 in a million by chance."""


def assert_mean(samples, expected):
    """Asserts that `expected` is the samples' mean, within their standard errors."""
    samples = np.asarray(samples, np.float64)
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) <= SIGMAS * error + 1e-12


def simulate_chain(conditional, rounds, seed):
    """Tokens of each round; draft `i` is kept with chance `conditional[i]`."""
    kept = np.random.default_rng(seed).random((rounds, len(conditional))) < conditional
    return 1 + np.cumprod(kept, axis=1).sum(axis=1)


def test_each_position_has_its_own_chance():
    conditional = np.array([0.9, 0.5, 0.7, 0.0, 1.0])
    tokens = theory.tokens_by_gamma(conditional)
    assert tokens.tolist() == pytest.approx([1, 1.9, 2.35, 2.665, 2.665, 2.665])
    for gamma in range(6):
        assert_mean(simulate_chain(conditional[:gamma], 20_000, gamma), tokens[gamma])
    # Negative control: one chance for all, of the same mean, is told apart.
    with pytest.raises(AssertionError):
        mean = conditional[:3].mean()
        simulated = simulate_chain(conditional[:3], 20_000, 3)
        assert_mean(simulated, theory.tokens_by_gamma(np.full(3, mean))[-1])


def test_device_and_host_share_the_formulas():
    conditional = np.array([0.9, 0.8, 0.8, 0.1], np.float32)
    round_s = np.array([1.75, 2.125, 2.5, 3.25, 4.0], np.float32)
    on_device = jax.jit(theory.goodput)(jnp.asarray(conditional), jnp.asarray(round_s))
    np.testing.assert_allclose(
        on_device, theory.goodput(conditional, round_s), rtol=1e-6
    )
    assert on_device.dtype == jnp.float32
