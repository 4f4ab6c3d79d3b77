"""Theory: closed forms against sums, brute force and simulated rounds."""

import fractions
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


@pytest.mark.parametrize(
    ("acceptance", "gamma"), [(0.0, 4), (0.5, 0), (0.5, 1), (0.8, 9), (1.0, 4)]
)
def test_expected_tokens_is_the_sum_and_what_rounds_commit(acceptance, gamma):
    tokens = theory.expected_tokens(acceptance, gamma)
    assert tokens == pytest.approx(sum(acceptance**i for i in range(gamma + 1)))
    chain = np.full(gamma, acceptance)
    assert theory.tokens_by_gamma(chain)[-1] == pytest.approx(tokens)
    assert_mean(simulate_chain(chain, 20_000, seed=gamma), tokens)


def test_simulation_catches_an_exponent_off_by_one():
    """Negative control: `gamma` or `gamma + 2` in place of `gamma + 1`."""
    simulated = simulate_chain(np.full(4, 0.8), 20_000, seed=4)
    for wrong in (3, 5):
        with pytest.raises(AssertionError):
            assert_mean(simulated, theory.expected_tokens(0.8, wrong))


def test_expected_tokens_keeps_its_digits_next_to_one():
    """Fails if `1 - a**(gamma + 1)` is computed as written."""
    acceptance = 1 - 2**-40
    exact = sum(fractions.Fraction(acceptance) ** i for i in range(6))
    assert theory.expected_tokens(acceptance, 5) == pytest.approx(exact, rel=1e-14)


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
        assert_mean(simulated, theory.expected_tokens(mean, 3))


def test_walltime_and_operations_by_hand():
    assert theory.walltime_improvement(0.5, 0.25, 2) == pytest.approx(1.75 / 1.5)
    assert theory.operations_factor(0.5, 0.25, 2) == pytest.approx(3.5 / 1.75)
    for cost in (0.0, 0.3, 2.0):
        assert theory.walltime_improvement(0.9, cost, 0) == 1
        assert theory.operations_factor(0.9, cost, 0) == 1
        # Nothing is ever kept, or everything is.
        assert theory.walltime_improvement(0, cost, 3) == pytest.approx(
            1 / (3 * cost + 1)
        )
        assert theory.walltime_improvement(1, cost, 3) == pytest.approx(
            4 / (3 * cost + 1)
        )


def exact_improvement(acceptance, cost, gamma):
    """Theorem 3.8 as a sum, in whole numbers."""
    a, c = fractions.Fraction(acceptance), fractions.Fraction(cost)
    return sum(a**i for i in range(gamma + 1)) / (1 + gamma * c)


def brute_force(acceptance, cost, gamma_max):
    return max(
        range(gamma_max + 1), key=lambda g: exact_improvement(acceptance, cost, g)
    )


@pytest.mark.parametrize("acceptance", [0.0, 0.125, 0.5, 0.75, 0.875, 1.0])
@pytest.mark.parametrize("cost", [0.0, 0.03125, 0.5, 1.0, 3.0])
def test_best_gamma_is_that_of_brute_force(acceptance, cost):
    best = brute_force(acceptance, cost, 24)
    assert theory.best_gamma(acceptance, cost, gamma_max=24) == best
    assert theory.best_gamma(acceptance, cost, gamma_max=2) == min(best, 2)
    if best < 24:
        assert theory.best_gamma(acceptance, cost) == best
    else:
        with pytest.raises(ValueError, match="every further draft helps.*gamma_max"):
            theory.best_gamma(acceptance, cost)


def test_rows_of_the_figure():
    rows = theory.improvement_rows([(0.8, 0.05), (0.3, 0.5)], gamma_max=10)
    assert len(rows) == 22
    assert [row["gamma"] for row in rows[:11]] == list(range(11))
    assert rows[0]["improvement"] == rows[0]["operations"] == 1
    for pair in (rows[:11], rows[11:]):
        best = max(pair, key=lambda row: row["improvement"])
        assert {row["best_gamma"] for row in pair} == {best["gamma"]}
        assert {row["kind"] for row in pair} == {"theory"}


def test_device_and_host_share_the_formulas():
    conditional = np.array([0.9, 0.8, 0.8, 0.1], np.float32)
    round_s = np.array([1.75, 2.125, 2.5, 3.25, 4.0], np.float32)
    on_device = jax.jit(theory.goodput)(jnp.asarray(conditional), jnp.asarray(round_s))
    np.testing.assert_allclose(
        on_device, theory.goodput(conditional, round_s), rtol=1e-6
    )
    assert on_device.dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.5, 2), "acceptance=1.5 is no probability"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma=-1 must not be negative"),
        (lambda: theory.expected_tokens(0.5, 1.5), "gamma=1.5 must be an integer"),
        (lambda: theory.walltime_improvement(0.5, -1, 2), "cost=-1 must be finite"),
        (lambda: theory.operations_factor(0.5, math.inf, 2), "operations=inf must be"),
        (lambda: theory.best_gamma(0.5, 0.1, gamma_max=-1), "gamma_max=-1 must not"),
    ],
)
def test_bad_numbers_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
