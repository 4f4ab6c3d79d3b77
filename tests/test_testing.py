"""The comparison of bits, on which every exactness test rests, is itself exact."""

import numpy as np
import pytest

from spec_jax import testing


def arrays(value, dtype="float32"):
    return {"a": [np.asarray([1.0, value], dtype)]}


@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, np.inf, 1e-45])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equal_bits_pass(value, dtype):
    testing.assert_same_bits(arrays(value, dtype), arrays(value, dtype))


@pytest.mark.parametrize(
    "left, right",
    [
        (0.0, -0.0),
        (np.nan, -np.nan),
        (np.inf, -np.inf),
        (np.inf, np.inf - np.inf),
        (1.0, np.nextafter(np.float32(1), np.float32(2))),
        (0.0, 1e-45),
    ],
)
def test_one_other_bit_is_told(left, right):
    """Fails if values that compare equal, or not at all, are taken for one another."""
    with pytest.raises(
        AssertionError, match=r"here\['a'\]\[0\]: 1 of 2 elements differ"
    ):
        testing.assert_same_bits(arrays(left), arrays(right), what="here")


def test_other_kinds_of_arrays_are_told():
    with pytest.raises(AssertionError, match="different structures"):
        testing.assert_same_bits(arrays(1), [np.ones(2, np.float32)])
    with pytest.raises(AssertionError, match="float32 against .* float64"):
        testing.assert_same_bits(arrays(1), arrays(1, "float64"))
    with pytest.raises(AssertionError, match=r"\(2,\) .* against \(3,\)"):
        testing.assert_same_bits(arrays(1), {"a": [np.ones(3, np.float32)]})
