"""Frequencies of the rotary embedding; `test_row_contract` compares its angles."""

import decimal

import numpy as np
import pytest

from spec_jax import testing
from spec_jax.ops import rope


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
