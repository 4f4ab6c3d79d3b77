"""`native.panels`: weights in the kernels' order, and back, bit for bit."""

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
def test_panels_keep_every_bit(rng, isa, dtype, shape):
    """Fails if a value is lost, moved or rounded, where NaN keeps its payload; or if
    another row is taken, by JAX or by the kernel."""
    w = oracle.normal(rng, shape, dtype)
    if w.size:
        bits = w.reshape(-1).view(f"uint{8 * w.dtype.itemsize}")
        bits[-1] = np.array(2**31 - 77, np.uint32).astype(bits.dtype)  # a NaN
    packed = calls.pack(w, isa=isa)
    assert packed.data.shape == panels.packed_shape(shape, dtype)
    assert packed.shape == shape and packed.dtype == w.dtype
    testing.assert_same_bits(np.asarray(panels.unpack(packed)), w)
    if w.size:
        index = np.int32([shape[0] - 1, 0, shape[0] // 2])
        taken = calls.take_rows(packed, index, num_active=np.int32(3), isa=isa)
        for rows in (taken, panels.take_rows(packed, index[None])[0]):
            testing.assert_same_bits(np.asarray(rows), w[index])


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
