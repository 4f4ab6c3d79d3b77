"""Theory: closed forms against sums in whole numbers."""

import fractions

import numpy as np
import pytest

from experiments.lib import theory
from spec_jax.gamma import theory as by_position


@pytest.mark.parametrize(
    ("acceptance", "gamma"), [(0.0, 4), (0.5, 0), (0.5, 1), (0.8, 9), (1.0, 4)]
)
def test_expected_tokens_is_the_sum(acceptance, gamma):
    tokens = theory.expected_tokens(acceptance, gamma)
    assert tokens == pytest.approx(sum(acceptance**i for i in range(gamma + 1)))
    chain = np.full(gamma, acceptance)
    assert by_position.tokens_by_gamma(chain)[-1] == pytest.approx(tokens)


def test_expected_tokens_keeps_its_digits_next_to_one():
    """Fails if `1 - a**(gamma + 1)` is computed as written."""
    acceptance = 1 - 2**-40
    exact = sum(fractions.Fraction(acceptance) ** i for i in range(6))
    assert theory.expected_tokens(acceptance, 5) == pytest.approx(exact, rel=1e-14)


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


def test_rows_of_the_figure():
    rows = theory.improvement_rows([(0.8, 0.05), (0.3, 0.5)], gamma_max=10)
    assert len(rows) == 22
    assert [row["gamma"] for row in rows[:11]] == list(range(11))
    assert rows[0]["improvement"] == rows[0]["operations"] == 1
    for pair in (rows[:11], rows[11:]):
        best = max(pair, key=lambda row: row["improvement"])
        assert {row["best_gamma"] for row in pair} == {best["gamma"]}
        assert {row["kind"] for row in pair} == {"theory"}
