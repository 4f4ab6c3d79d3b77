"""Products and gates of rows by every implementation, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from native import emulation, native_oracle as oracle
from ops import products, row_contract

from spec_jax import testing
from spec_jax.native import blocks
from spec_jax.ops import swiglu
from spec_jax.pallas import skinny_gemm_triton


PRODUCTS = {
    "norm": {},
    "norm and residual": {"has_residual": True},
    "residual": {"has_norm": False, "has_residual": True},
    "logits": {"has_norm": False, "out_dtype": "float32"},
    "gate": {"is_gate": True},
}
# "norm" and "residual" alone repeat "norm and residual", and are slow.
every_product = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("norm", "residual")))
        for name in PRODUCTS
    ],
)
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
        product = products.Product(K=K, N=N, dtype=dtype, **PRODUCTS[name])
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
    product = products.Product(form=form, **shape)
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


def test_small_rows_show_eps(rng, impl):
    """Fails if `eps` is left out: a row of zeros gives the residual."""
    product = products.Product(K=33, N=13, has_residual=True)
    rows, weights = product.inputs(rng, 3)
    rows["x"] = (rows["x"] * np.float32([[0], [1e-4], [1e4]])).astype("bfloat16")
    y = run(impl, product, rows, weights)
    testing.assert_same_bits(y[0], rows["residual"][0])
    near = {"dtype": "bfloat16", "reduction": 33}
    testing.assert_rows_close(y, product.expected(rows, weights), **near)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_row_and_column(rng, impl, value):
    """Fails if an element reaches another row's or column's sum, or is swallowed."""
    product = products.Product(K=33, N=40, has_norm=False, out_dtype="float32")
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


BOTH, NATIVE, TRITON, XLA = (
    ("portable", "interpret"), ("portable",), ("interpret",), ("xla",)
)  # fmt: skip
ones = lambda *shape, dtype="bfloat16": np.ones(shape, dtype)
REFUSALS = (
    (BOTH, {"w": ones(5, 8)}, ValueError, r"w has shape \(5, 8\), not"),
    (BOTH, {"residual": ones(4, 5)}, ValueError, "residual has shape"),
    (BOTH, {"num_active": ones(1, dtype="int32")}, ValueError, "num_active has shape"),
    (BOTH, {"out_dtype": "float16"}, NotImplementedError, "cannot give float16"),
    (NATIVE, {"norm": ones(6)}, ValueError, "norm has shape"),
    (NATIVE, {"w": ones(5, 7, dtype="float16")}, NotImplementedError, "float16"),
    (NATIVE, {"w": ones(5, 7, dtype="float32")}, NotImplementedError, "one of them"),
    (("sse",), {}, ValueError, "isa='sse' is not one of amx"),
    (TRITON, {"w": ones(5, 7, dtype="float32")}, NotImplementedError, "w is float32"),
    (TRITON + XLA, {"out_dtype": "float32", "residual": ones(3, 5)}, ValueError,
     "a residual of bfloat16 cannot give float32"),
    (XLA, {"x": ones(1, 7)}, ValueError, "at least 2 rows, got 1"),
    (XLA, {"w": ones(5, 7, dtype="float32")}, ValueError, "weights are float32"),
)  # fmt: skip


@pytest.mark.parametrize(("impls", "change", "error", "words"), REFUSALS)
def test_refusals(impls, change, error, words):
    """Fails if a kernel takes arrays that it would read or add wrongly."""
    options = {"x": ones(3, 7), "w": ones(5, 7), "num_active": np.int32(3), "eps": 0.0}
    options |= {"norm": None, "residual": None, "out_dtype": "bfloat16"}
    for impl in impls:
        project = row_contract.compiled("project", impl)
        if impl == "interpret":  # Before the types of the operation are checked.
            project = skinny_gemm_triton.project
        with pytest.raises(error, match=words):
            project(**(options | change))
