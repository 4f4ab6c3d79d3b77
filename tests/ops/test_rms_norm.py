"""RMSNorm by XLA and by Triton's kernel, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from native import native_oracle as oracle
from ops import row_contract

from spec_jax import testing
from spec_jax.pallas import rms_norm_triton


SLOW = pytest.mark.slow
EPS = 1e-3  # large enough to be seen in rows of small values

every_impl = pytest.mark.parametrize("impl", ["xla", "interpret"], indirect=True)


def inputs(rng, width, dtype="bfloat16", rows=16):
    """Makes rows of very different size: the small ones show `eps`."""
    sizes = np.resize([1e-2, 1.0, 1e3], rows)[:, None]
    x = (sizes * rng.standard_normal((rows, width))).astype(jnp.dtype(dtype))
    return x, oracle.normal(rng, width, dtype)


def run(impl, x, weight, eps=EPS):
    norm = row_contract.compiled("norm", impl)
    return norm(x, weight, num_active=np.int32(len(x)), eps=eps)


def expected(x, weight, eps=EPS):
    return oracle.rms_norm(*oracle.wide(x, weight), eps, x.dtype)


@every_impl
@pytest.mark.parametrize("width", [1, 80, pytest.param(1000, marks=SLOW)])
def test_rows_are_normalised(rng, impl, width):
    """Fails if the mean is over the padded block or is subtracted, or if squares are
    summed in bfloat16."""
    dtypes = ["bfloat16"] if impl == "interpret" else ["bfloat16", "float32"]
    for dtype in dtypes:
        x, weight = inputs(rng, width, dtype)
        y = run(impl, x, weight)
        assert y.dtype == x.dtype
        near = {"dtype": dtype, "reduction": width}
        testing.assert_rows_close(y, expected(x, weight), **near)
        for wrong in (run(impl, x, weight, eps=0.0), np.asarray(y) * (128 / 80) ** 0.5):
            with pytest.raises(AssertionError, match="rows are off"):
                testing.assert_rows_close(wrong, expected(x, weight), **near)


@every_impl
def test_the_weight_meets_the_rounded_value(rng, impl):
    """Fails if the weight is multiplied in float32, before the cast back."""
    x, weight = inputs(rng, 96)
    actual = np.asarray(run(impl, x, weight))
    oracle.assert_rounded_alike(actual, expected(x, weight))
    # Negative control: the other order gives another result.
    wide, wide_weight = oracle.wide(x, weight)
    scale = 1 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    once = oracle.rounded(wide * scale * wide_weight, "bfloat16")
    with pytest.raises(AssertionError, match="elements differ"):
        oracle.assert_rounded_alike(actual, once)


@pytest.mark.parametrize(
    ("width", "weight", "message"),
    [
        (8, np.ones(7, "bfloat16"), r"weight has shape \(7,\), not \(8,\)"),
        (8, np.ones(8, np.float32), "rows are bfloat16 but the weight is float32"),
        (0, np.ones(0, "bfloat16"), r"rows of 0 elements are not in 1\.\.16384"),
        (16_385, np.ones(16_385, "bfloat16"), "rows of 16385 elements"),
    ],
)
def test_refusals(width, weight, message):
    """Fails if a row that does not fit one block, or its weight, is cut off."""
    kernel = rms_norm_triton.rms_norm
    with pytest.raises(ValueError, match=message):
        kernel(np.ones((2, width), "bfloat16"), weight, num_active=np.int32(2), eps=EPS)
