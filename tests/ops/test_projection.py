"""Products and gates of rows by every implementation, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from native import emulation, native_oracle as oracle
from ops import row_contract

from spec_jax import testing
from spec_jax.native import blocks
from spec_jax.ops import swiglu


PRODUCTS = {
    "norm and residual": {"has_residual": True},
    "logits": {"has_norm": False, "out_dtype": "float32"},
    "gate": {"is_gate": True},
}
every_product = pytest.mark.parametrize("name", PRODUCTS)
SIZES = ((7, 6), (129, 40))  # (K, N)


def run(impl, product, rows, weights):
    call = row_contract.compiled("gate" if product.is_gate else "project", impl)
    return np.asarray(call(**product.arguments(rows, weights)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_product
def test_products_are_those_of_float64(rng, impl, name, dtype):
    """Fails if a term of a ragged end is lost, an epilogue is left out, gate and up are
    exchanged, or a rounding is at another place than the operation states."""
    if impl == "interpret":
        dtype = "bfloat16"
    for K, N in SIZES:
        product = row_contract.Product(K=K, N=N, dtype=dtype, **PRODUCTS[name])
        rows, weights = product.inputs(rng)
        y, expected = run(impl, product, rows, weights), product.expected(rows, weights)
        assert y.dtype == jnp.dtype(product.out_dtype or dtype)
        is_rounded = y.dtype == jnp.bfloat16 and K > 8 and impl != "xla"
        if is_rounded:
            oracle.assert_rounded_alike(y, expected)
        if K < 8:  # A row is a few sums, one of which may be near 0.
            y, expected = y.reshape(1, -1), expected.reshape(1, -1)
        # A gate is two sums and their product.
        near = {"dtype": y.dtype, "reduction": 4 * K if product.is_gate else K}
        testing.assert_rows_close(y, expected, **near)
        with pytest.raises(AssertionError, match="rows are off"):  # Negative control.
            testing.assert_rows_close(oracle.wide(y)[0] * 1.02, expected, **near)
        if is_rounded:
            with pytest.raises(AssertionError, match="elements differ"):
                oracle.assert_rounded_alike(y * y.dtype.type(1.008), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_product
@pytest.mark.parametrize(
    "impl", ["xla", "interpret", *emulation.every()], indirect=True
)
@pytest.mark.parametrize("form", blocks.QUANTISE)
def test_products_of_blocks_are_those_of_float64(rng, impl, name, dtype, form):
    """Fails if a block's scale is another's, or rows are rounded otherwise than stated:
    products of rows that are not rounded are too far off."""
    if impl == "interpret" and (dtype == "float32" or form == "q4_1"):
        pytest.skip("the kernels of a GPU multiply bfloat16, and no four bits")
    shape = {"K": 161, "N": 40, "dtype": dtype, **PRODUCTS[name]}
    product = row_contract.Product(form=form, **shape)
    rows, weights = product.inputs(rng)
    y, expected = run(impl, product, rows, weights), product.expected(rows, weights)
    # XLA may round a norm otherwise, which moves an integer: a hundredth of an element.
    away = np.abs(oracle.wide(y)[0] - expected).max(axis=1)
    size = np.sqrt(np.mean(expected**2, axis=1))
    most = 0.08 if dtype == "bfloat16" else 1e-4
    assert (away < most * size).all()
    w = weights["w"]
    plain = product.expected(rows, weights | {"w": np.asarray(blocks.matrix(w))})
    turned = w.replace(scales=np.roll(w.scales, 1, axis=1))
    other = product.expected(rows, weights | {"w": turned})
    assert (np.abs(other - expected).max(axis=1) > most * size).all()
    if dtype == "float32":
        assert (np.abs(plain - expected).max(axis=1) > most * size).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_row_and_column(rng, impl, value):
    """Fails if an element reaches another row's or column's sum, or is swallowed."""
    product = row_contract.Product(K=33, N=40, has_norm=False, out_dtype="float32")
    rows, weights = product.inputs(rng, 9)
    clean = run(impl, product, rows, weights)
    rows["x"][3, 32] = weights["w"][6, 0] = value
    y = run(impl, product, rows, weights)
    others, columns = np.arange(9) != 3, np.arange(40) != 6
    testing.assert_same_bits(y[others][:, columns], clean[others][:, columns])
    assert not np.isfinite(y[3]).any() and not np.isfinite(y[:, 6]).any()


def test_large_gates_do_not_overflow():
    """Fails if XLA's sigmoid is made of an exponential that overflows."""
    gate_up = jnp.asarray([[-200.0, 200.0, 2.0, 2.0]], jnp.float32)
    np.testing.assert_array_equal(swiglu.swiglu(gate_up), [[0.0, 400.0]])
