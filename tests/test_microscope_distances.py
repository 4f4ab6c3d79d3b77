"""Distances that the microscope tells: in units in the last place, and relative."""

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from spec_jax.debug.microscope import compare


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@hypothesis.given(st.lists(FLOATS, min_size=2, max_size=2))
def test_ulps_count_the_numbers_between(pair):
    one, other = (np.float32([x]) for x in pair)
    far = int(compare.ulps(one, other)[0])
    assert far == int(compare.ulps(other, one)[0])
    assert (far == 0) == bool(one[0] == other[0])
    towards = np.nextafter(one, other)
    assert int(compare.ulps(towards, other)[0]) == max(far - 1, 0)


def test_two_dtypes_are_compared_in_the_wider_one():
    exact = np.float32([[1.0, 2.5, 3.0]])
    rounded = exact.astype(ml_dtypes.bfloat16)
    assert compare.cell_of(exact, rounded).differing == 0
    near = exact + np.float32(2.0**-16)
    cell = compare.cell_of(near, rounded)
    assert cell.differing == 3 and cell.max_ulp == 0  # nothing, in bfloat16
    assert compare.cell_of(exact * 2, rounded).max_ulp == 128


def test_relative_differences():
    """Of norms, and None where there is no number: what ULPs near zero do not say."""
    ones = np.ones((2, 2), np.float32)
    tiny = np.float32([[1, 1], [1, 1.5]])
    cell = compare.cell_of(ones, tiny)
    assert cell.relative == pytest.approx(0.5 / 2)
    assert compare.cell_of(ones, ones).relative == 0.0
    # A step over zero is nothing beside the rest, and two thousand million ULPs.
    large = np.float32([[1e3, 1e-3]])
    over = compare.cell_of(large, np.float32([[1e3, -1e-3]]))
    assert over.max_ulp > 2**30 and over.relative == pytest.approx(2e-6)
    for one, other in ((ones * 0, ones), (ones, ones * np.nan), (ones * np.inf, ones)):
        assert compare.cell_of(one, other).relative is None
    zeros = compare.cell_of(np.float32([[0.0, 1.0]]), np.float32([[-0.0, 1.0]]))
    assert zeros.differing == 1 and zeros.relative == 0.0


def test_margins_are_in_ulps_of_the_models_dtype():
    logits = np.float32([3.0, 3.125, -1.0, 3.125])
    choice = compare.choice_of(logits, "bfloat16")
    assert choice.token == 1 and [token for token, _ in choice.top] == [1, 3, 0, 2]
    assert choice.margin_ulp == 0
    assert compare.choice_of(logits[:3], "bfloat16").margin_ulp == 0.125 / 2**-6
    assert compare.choice_of(logits[:3], "float32").margin_ulp == 0.125 / 2**-22
    spoiled = compare.choice_of(np.float32([1.0, np.nan, 2.0]), "float32")
    assert spoiled.token == 1 and spoiled.margin_ulp is None
