"""`native.panels`: weights in the kernels' order, and back, bit for bit."""

import jax.numpy as jnp
import native_oracle as oracle
import numpy as np
import pytest
from ops import row_contract

from spec_jax import testing
from spec_jax.native import calls, panels


SHAPES = ((1, 1), (17, 3), (40, 33), (5, 0), (0, 5))
DTYPES = ("float32", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_undoes_packing(rng, isa, dtype, shape):
    """Fails if a value is lost, moved or rounded: NaN keeps its payload."""
    w = oracle.normal(rng, shape, dtype)
    if w.size:
        bits = w.reshape(-1).view(f"uint{8 * w.dtype.itemsize}")
        bits[-1] = np.array(2**31 - 77, np.uint32).astype(bits.dtype)  # a NaN
    packed = calls.pack(w, isa=isa)
    assert packed.data.shape == panels.packed_shape(shape, dtype)
    assert packed.shape == shape and packed.dtype == w.dtype
    testing.assert_same_bits(np.asarray(panels.unpack(packed)), w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_panels(rng, dtype):
    """Fails if another row is taken, by JAX or by the kernel."""
    w = oracle.normal(rng, (37, 9), dtype)
    packed, index = calls.pack(w), np.int32([[0, 36, 15], [16, 17, 3]])
    rows = np.asarray(panels.take_rows(packed, index))
    testing.assert_same_bits(rows, w[index])
    live = np.int32(6)
    rows = calls.take_rows(packed, jnp.asarray(index.reshape(-1)), num_active=live)
    testing.assert_same_bits(np.asarray(rows), w[index.reshape(-1)])
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(np.asarray(rows), w[index.reshape(-1) - 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_gives_the_bits_of_its_panels(rng, isa, dtype):
    """Fails if products of a matrix and of its panels differ in a bit."""
    x, w = (oracle.normal(rng, (n, 33), dtype) for n in (3, 40))
    how = {"norm": np.ones(33, w.dtype), "num_active": np.int32(3), "eps": 1e-6}
    gate = row_contract.compiled("gate", isa)
    matrix, panels_of_it = (
        (row_contract.sums(isa, x, weight), np.asarray(gate(x, weight, **how)))
        for weight in (w, calls.pack(w))
    )
    testing.assert_same_bits(panels_of_it, matrix)
