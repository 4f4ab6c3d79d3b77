"""The argmax kernels in interpret mode, against NumPy and `jnp.argmax`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.pallas import argmax_triton


CHUNK = argmax_triton.CHUNK
WIDTHS = (1, 5, CHUNK, CHUNK + 1, 3 * CHUNK - 7)
WIDTH = 2 * CHUNK + 100

_jitted = jax.jit(functools.partial(argmax_triton.argmax, interpret=True))


def _argmax(logits, live=None):
    return _jitted(logits, num_active=np.int32(len(logits) if live is None else live))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_is_found(rng, width):
    """Fails if a chunk is left out, or logits past the end are compared."""
    # All below the zeros that a block has past the end.
    logits = rng.standard_normal((5, width)).astype(np.float32) - 10
    indices = _argmax(logits)
    assert indices.dtype == jnp.int32
    np.testing.assert_array_equal(indices, np.argmax(logits, axis=-1))


def test_the_whole_vocabulary(rng):
    """Fails if the chunks of 151,936 logits are more than the second kernel reads."""
    logits = rng.standard_normal((2, 151_936)).astype(np.float32)
    logits[1, -1] = 10
    np.testing.assert_array_equal(_argmax(logits), np.argmax(logits, axis=-1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_of_equals_wins(rng, dtype):
    """Fails if a later chunk, or a later element of a chunk, replaces an equal."""
    logits = np.zeros((4, WIDTH), dtype)
    logits[1, [7, CHUNK - 1, CHUNK, WIDTH - 1]] = 1
    logits[2, [CHUNK + 5, CHUNK + 3]] = 2
    logits[3] = rng.integers(-3, 3, WIDTH).astype(dtype)
    expected = [0, 7, CHUNK + 3, np.argmax(logits[3])]
    np.testing.assert_array_equal(_argmax(logits), expected)


def test_special_values():
    """Fails if NaN is passed over, zeros differ, or all of a row is minus infinity."""
    inf, nan = np.inf, np.nan
    rows = {
        "zeros are equal": ([-1, -0.0, 0.0], 1),
        "denormals are not zeros": ([0.0, 1e-45, -1e-45], 1),
        "nothing finite": ([-inf] * 3, 0),
        "infinity": ([3e38, inf, inf], 1),
        "NaN above infinity": ([inf, nan, inf], 1),
        "the first NaN": ([0.0, nan, nan], 1),
        "a negative NaN": ([inf, -1.0, np.copysign(nan, -1)], 2),
    }
    logits = np.full((len(rows), WIDTH), -inf, np.float32)
    expected = []
    for row, (values, index) in enumerate(rows.values()):
        logits[row, CHUNK - 1 : CHUNK + 2] = values
        expected.append(0 if np.isneginf(values).all() else CHUNK - 1 + index)
    np.testing.assert_array_equal(_argmax(logits), expected)
    # XLA on a CPU flushes denormals: that row is not to be compared.
    same = np.arange(len(rows)) != 1
    reference = jnp.argmax(logits, axis=-1)
    np.testing.assert_array_equal(np.asarray(reference)[same], np.array(expected)[same])


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_rows_do_not_see_each_other(rng, rows):
    """Fails if a row's result depends on its place, or on NaN in another."""
    logits = rng.standard_normal((16, CHUNK + 9)).astype(np.float32)
    expected = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(_argmax(logits[16 - rows :]), expected[16 - rows :])
    live = rows // 2
    some = np.where(np.arange(16) < live, np.roll(expected, rows), 0)[:rows]
    np.testing.assert_array_equal(_argmax(logits[16 - rows :], live), some)
    logits[16 - rows] = np.nan
    expected[16 - rows] = 0
    np.testing.assert_array_equal(_argmax(logits[16 - rows :]), expected[16 - rows :])


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (np.zeros((2, 0), np.float32), ValueError, r"rows of 0 logits.*1\.\.4194304"),
        (np.zeros((2, 8), np.float16), NotImplementedError, "not float16"),
        (np.zeros((2, 8), np.int32), NotImplementedError, "not int32"),
    ],
)
def test_refusals(logits, error, message):
    """Fails if logits that the order is not made for are compared."""
    with pytest.raises(error, match=message):
        _argmax(logits)
