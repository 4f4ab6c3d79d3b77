"""Slabs of rows times weights, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.ops import skinny_gemm


ROWS, OUT = 8, 40
REDUCTION = 384  # long enough that bfloat16 sums would be far off

_gemm = jax.jit(skinny_gemm.skinny_gemm)


def inputs(rng, dtype):
    x = rng.standard_normal((ROWS, REDUCTION)).astype(dtype)
    w = rng.standard_normal((OUT, REDUCTION)).astype(dtype)
    return jnp.asarray(x), jnp.asarray(w)


def oracle(x, w):
    return np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_is_that_of_float64(rng, dtype):
    """Fails if sums are kept in bfloat16, or the weight is not transposed."""
    x, w = inputs(rng, jnp.dtype(dtype))
    y = _gemm(x, w)
    assert y.shape == (ROWS, OUT) and y.dtype == jnp.float32
    # Also for bfloat16 inputs: their products are exact in float32.
    near = {"dtype": "float32", "reduction": REDUCTION}
    testing.assert_rows_close(y, oracle(x, w), **near)


FAULTS = {
    "zeros": lambda x, w: jnp.zeros((ROWS, OUT)),
    "rounded to bfloat16": lambda x, w: (x @ w.T).astype(jnp.bfloat16),
    "last term lost": lambda x, w: x[:, :-1] @ w[:, :-1].T,
    "scaled": lambda x, w: x @ w.T * 1.0001,
    "another row": lambda x, w: jnp.roll(x, 1, axis=0) @ w.T,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(rng, fault):
    """Negative control: the oracle tells these from the product."""
    x, w = inputs(rng, jnp.float32)
    with pytest.raises(AssertionError, match="rows are off"):
        testing.assert_rows_close(
            jax.jit(FAULTS[fault])(x, w),
            oracle(x, w),
            dtype="float32",
            reduction=REDUCTION,
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_see_the_others(rng, dtype):
    """Fails if a row's bits depend on its place, or on NaN in other rows."""
    x, w = inputs(rng, jnp.dtype(dtype))
    y = _gemm(x, w)
    alone = jnp.full_like(x, jnp.nan).at[5].set(x[2])
    testing.assert_same_bits(_gemm(alone, w)[5], y[2])


@pytest.mark.parametrize(
    ("rows", "dtype", "message"),
    [
        (1, "float32", "at least 2 rows, got 1"),
        (2, "bfloat16", "rows are bfloat16 but weights are float32"),
    ],
)
def test_refusals(rows, dtype, message):
    """Fails if the one-row path or a mixed product runs."""
    x = np.zeros((rows, 4), np.float32).astype(dtype)
    with pytest.raises(ValueError, match=message):
        skinny_gemm.skinny_gemm(jnp.asarray(x), jnp.zeros((3, 4), jnp.float32))
