"""`calls.gate`: rows alone and together as bits, and against float64."""

import jax
import jax.numpy as jnp
import native_oracle as oracle
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.native import calls
from spec_jax.ops import gated_projection


DTYPES = ("float32", "bfloat16")
SHAPES = ((1, 1), (7, 5), (33, 13), (80, 64))  # (K, F)

_gate = jax.jit(calls.gate, static_argnames=("eps", "isa"))
_op = jax.jit(gated_projection.gated_projection, static_argnames=("eps", "impl"))


def inputs(rng, dtype, K, F, rows):
    x, w = (oracle.normal(rng, shape, dtype) for shape in ((rows, K), (2 * F, K)))
    norm = oracle.normal(rng, (K,), dtype, 0.2) + np.ones((), jnp.dtype(dtype))
    return x, w, norm


def run(isa, x, w, norm, live=None, eps=1e-6):
    live = np.int32(len(x) if live is None else live)
    return np.asarray(_gate(x, w, norm=norm, num_active=live, eps=eps, isa=isa))


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "F"), SHAPES)
def test_a_row_is_that_row_alone(rng, isa, dtype, K, F):
    """Fails if gates of another row are used, or a padding row is read."""
    x, *weights = inputs(rng, dtype, K, F, 16)
    alone = np.concatenate([run(isa, x[r : r + 1], *weights) for r in range(16)])
    assert np.isfinite(alone.astype(np.float32)).all()
    for live in range(17):
        poisoned = np.where(np.arange(16)[:, None] < live, x, np.nan).astype(x.dtype)
        together = run(isa, poisoned, *weights, live=live)
        testing.assert_same_bits(together[:live], alone[:live], what=f"{live} live")
    rolled = run(isa, np.roll(x, 5, axis=0), *weights)
    testing.assert_same_bits(rolled, np.roll(alone, 5, axis=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "F"), SHAPES)
def test_gates_are_those_of_float64(rng, isa, dtype, K, F):
    """Fails if gate and up are exchanged, or a rounding is left out."""
    x, w, norm = inputs(rng, dtype, K, F, 5)
    near = {"dtype": dtype, "reduction": 4 * K}  # two sums, and their product
    expected = oracle.gate(x, w, norm=norm, eps=1e-6)
    y = run(isa, x, w, norm)
    if F < 8:
        y, expected = y.reshape(1, -1), expected.reshape(1, -1)
    testing.assert_rows_close(y, expected, **near)
    exchanged = run(isa, x, np.roll(w, F, axis=0), norm).reshape(y.shape)
    with pytest.raises(AssertionError, match="rows are off"):
        testing.assert_rows_close(exchanged, expected, **near)


def test_roundings_are_where_the_op_says(rng, isa):
    """Fails if a rounding to bfloat16 is left out: of a sum, of silu, of the norm."""
    x, w, norm = inputs(rng, "bfloat16", 80, 64, 8)
    y, expected = run(isa, x, w, norm), oracle.gate(x, w, norm=norm, eps=1e-6)
    oracle.assert_rounded_alike(y, expected)
    with pytest.raises(AssertionError, match="elements differ"):
        oracle.assert_rounded_alike(y * y.dtype.type(1.008), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_form_agrees(rng, dtype):
    """Fails if gates are rounded elsewhere than in the reference."""
    x, w, norm = inputs(rng, dtype, 80, 64, 6)
    y, reference = (
        _op(x, w, norm=norm, num_active=np.int32(6), eps=1e-6, impl=impl)
        for impl in ("native", "xla")
    )
    testing.assert_rows_close(y, reference, dtype=dtype, reduction=320)


def test_extreme_gates(isa):
    """Fails if `silu` overflows, or swallows NaN: the gate itself, by a row of one."""
    gates = np.float32([-np.inf, -1e30, -100, -88.5, -87, -20, -1e-30])
    gates = np.concatenate([gates, np.float32([0, 1, 20, 100, 1e30, np.inf, np.nan])])
    w = np.concatenate([gates, np.ones_like(gates)])[:, None]
    y = run(isa, np.ones((1, 1), np.float32), w, np.ones(1, np.float32), eps=0.0)[0]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gates / (1 + np.exp(-gates.astype(np.float64)))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_allclose(y, expected, rtol=5e-7, atol=1e-36)


def test_nan_stays_in_its_row(rng, isa):
    """Fails if NaN is swallowed by the activation, or reaches another row."""
    x, w, norm = inputs(rng, "float32", 33, 13, 9)
    clean = run(isa, x, w, norm)
    x[4, 0] = np.nan
    y = run(isa, x, w, norm)
    others = np.arange(9) != 4
    testing.assert_same_bits(y[others], clean[others])
    assert np.isnan(y[4]).all()


@pytest.mark.parametrize(("rows", "K", "F"), [(0, 7, 5), (3, 0, 5), (3, 7, 0)])
def test_empty_shapes(isa, rows, K, F):
    """Fails if an empty dimension divides by zero."""
    x, w = np.ones((rows, K), np.float32), np.ones((2 * F, K), np.float32)
    y = run(isa, x, w, np.ones(K, np.float32))
    assert y.shape == (rows, F) and not y.any()


def test_half_a_pair_is_refused():
    """Fails if an odd number of weight rows is cut in the middle."""
    with pytest.raises(ValueError, match=r"w has shape \(5, 2\), not \(4, 2\)"):
        run(None, np.ones((1, 2), np.float32), np.ones((5, 2), np.float32), np.ones(2))
