"""SwiGLU against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.ops import swiglu


WIDTH = 64

_swiglu = jax.jit(swiglu.swiglu)


def inputs(rng, dtype):
    return jnp.asarray((3 * rng.standard_normal((5, 2 * WIDTH))).astype(dtype))


def oracle(gate_up):
    gate_up = np.asarray(gate_up).astype(np.float64)
    gate, up = gate_up[:, :WIDTH], gate_up[:, WIDTH:]
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_times_up(rng, dtype):
    """Fails if the halves are exchanged, or interleaved."""
    gate_up = inputs(rng, jnp.dtype(dtype))
    y = _swiglu(gate_up)
    assert y.dtype == gate_up.dtype
    testing.assert_rows_close(y, oracle(gate_up), dtype=dtype, reduction=1)


def test_large_gates_do_not_overflow():
    """Fails if the sigmoid is made of an exponential that overflows."""
    gate_up = jnp.asarray([[-200.0, 200.0, 2.0, 2.0]], jnp.float32)
    np.testing.assert_array_equal(_swiglu(gate_up), [[0.0, 400.0]])


FAULTS = {
    "halves exchanged": lambda x: swiglu.swiglu(jnp.roll(x, WIDTH, axis=-1)),
    "interleaved": lambda x: jax.nn.silu(x[:, ::2]) * x[:, 1::2],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(rng, fault):
    """Negative control: the oracle tells these from SwiGLU."""
    gate_up = inputs(rng, jnp.bfloat16)
    wrong = jax.jit(FAULTS[fault])(gate_up)
    with pytest.raises(AssertionError, match="rows are off"):
        testing.assert_rows_close(wrong, oracle(gate_up), dtype="bfloat16", reduction=1)
