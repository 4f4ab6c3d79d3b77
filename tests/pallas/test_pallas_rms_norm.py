"""The RMSNorm kernel in interpret mode: rows alone and together, and float64."""

import functools
import subprocess
import sys

import gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.pallas import rms_norm_triton


EPS = 1e-3  # large enough to be seen in rows of small values

_norm_active = jax.jit(
    functools.partial(rms_norm_triton.rms_norm, interpret=True),
    static_argnames=("eps",),
)


def _norm(x, weight, *, eps):
    """Of rows that are all active."""
    return _norm_active(x, weight, num_active=np.int32(len(x)), eps=eps)


def inputs(rng, width, rows=16):
    sizes = np.resize([1e-2, 1.0, 1e3], rows)[:, None]
    x = (sizes * rng.standard_normal((rows, width))).astype(jnp.bfloat16)
    return x, 1 + oracle.normal(rng, width, scale=0.2)


@pytest.mark.parametrize("width", [1, 64, 80, 1000])
def test_rows_are_normalised(rng, width):
    """Fails if the mean is of the block and not of the row, or a rounding is lost."""
    x, weight = inputs(rng, width)
    y, expected = _norm(x, weight, eps=EPS), oracle.rms_norm(x, weight, EPS)
    assert y.dtype == x.dtype
    testing.assert_rows_close(y, expected, dtype="bfloat16", reduction=width)
    oracle.assert_rounded_alike(y, expected)


FAULTS = {
    "zeros": lambda y: np.zeros_like(y),
    "another row": lambda y: np.roll(y, 1, axis=0),
    "mean of a block of 128": lambda y: oracle.wide(y) * (128 / 80) ** 0.5,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(rng, fault):
    """Negative control: the oracle tells these from the norm."""
    x, weight = inputs(rng, 80)
    y = np.asarray(_norm(x, weight, eps=EPS))
    with pytest.raises(AssertionError, match="rows are off"):
        testing.assert_rows_close(
            FAULTS[fault](y),
            oracle.rms_norm(x, weight, EPS),
            dtype="bfloat16",
            reduction=80,
        )


def test_a_row_is_that_row_alone(rng):
    """Fails if a row's bits depend on how many there are, or on NaN in another."""
    x, weight = inputs(rng, 80)
    alone = np.concatenate([_norm(x[r : r + 1], weight, eps=EPS) for r in range(16)])
    for rows in (2, 5, 16):
        testing.assert_same_bits(_norm(x[:rows], weight, eps=EPS), alone[:rows])
    spoilt = x.copy()
    spoilt[3] = np.nan
    others = np.arange(16) != 3
    y = np.asarray(_norm(spoilt, weight, eps=EPS))
    testing.assert_same_bits(y[others], alone[others])
    assert np.isnan(y[3]).all()
    some = _norm_active(x, weight, num_active=np.int32(5), eps=EPS)
    testing.assert_same_bits(some[:5], alone[:5])


TRACED_BY_A_NEW_PROCESS = """
import jax, jax.numpy as jnp
from spec_jax.pallas import rms_norm_triton

traces = []

@jax.jit
def norm(x):
    traces.append(x)
    return rms_norm_triton.rms_norm(
        x, x[0], num_active=jnp.int32(16), eps=1e-6, interpret=True
    )

for _ in range(3):
    norm(jnp.ones((16, 64), jnp.bfloat16))
print(len(traces))
"""


def test_the_first_interpreted_kernel_is_traced_once():
    """Fails if interpreting a kernel makes jax forget what it traced: 0.11 and on."""
    command = [sys.executable, "-W", "ignore", "-c", TRACED_BY_A_NEW_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


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
    """Fails if a row that is not one block is cut off."""
    with pytest.raises(ValueError, match=message):
        _norm(np.ones((2, width), "bfloat16"), weight, eps=EPS)
