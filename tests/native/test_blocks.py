"""Panels of weights, in full or of eight or four bits: rounding, and order of sums."""

import emulation
import jax.numpy as jnp
import native_oracle as oracle
import numpy as np
import pytest
from ops import row_contract

from spec_jax import testing
from spec_jax.native import blocks, build, calls, panels


SHAPES = ((1, 1), (16, 32), (40, 129))
DTYPES = ("float32", "bfloat16")


@pytest.fixture(params=(*emulation.every(), *emulation.VARIANTS))
def isa(request, monkeypatch) -> str:
    """Loads each instruction set, and variants that sum integers otherwise."""
    return emulation.load(request.param, monkeypatch)


@pytest.fixture(params=blocks.QUANTISE)
def form(request) -> str:
    return request.param


def make(rng, form, N: int, K: int, dtype="bfloat16", scale=1.0) -> blocks.Blocks:
    return blocks.of_matrix(oracle.normal(rng, (N, K), dtype, scale), form=form)


def test_weights_are_rounded_as_by_llama_cpp(rng, form):
    """Fails if an integer or a scale differs in a bit from that of package `gguf`."""
    quants = pytest.importorskip("gguf.quants")
    w = rng.standard_normal((64, 96)).astype(np.float32)
    w[:4] *= np.float32([[1e-9], [1e-4], [1e4], [0]])  # scales that are denormal, 0
    w[5, :32] = np.resize([1, 0.5, 1.5, -0.5, 127], 32)  # halves
    values, *numbers = blocks.QUANTISE[form](w)
    kind = quants.GGMLQuantizationType[form.upper()]
    raw, size = quants.quantize(w, kind).reshape(64, 3, -1), 2 * len(numbers)
    stored = raw[:, :, :size].copy().view(np.float16)
    np.testing.assert_array_equal(np.stack(numbers, axis=-1), stored)
    np.testing.assert_array_equal(values, raw[:, :, size:].view(values.dtype))
    made = blocks.of_matrix(w, form=form)
    assert blocks.integers(made).max() == {"q8_0": 127, "q4_1": 15}[form]
    wide = quants.dequantize(raw.reshape(64, -1), kind)
    testing.assert_same_bits(np.asarray(blocks.matrix(made)), wide)


def test_blocks_of_four_bits_are_widened(rng):
    """Fails if widening changes values of Q4_0, errs in Q4_1 by half as much as
    rounding anew, or differs from `quantise` where a block's grid is of no use."""
    w = rng.standard_normal((64, 96)).astype(np.float32)
    w[0, :32], w[1, :32], w[2, :32] = 0, 5, np.linspace(100, 100.01, 32)
    values, scales, minima = blocks.quantise_to_four(w)
    scales[3, 0] = np.nan

    def both(minima):
        """Returns blocks widened and rounded anew, and the errors of their values."""
        made = blocks.of_parts((values, scales, minima), w.shape, "float32")
        own = np.asarray(blocks.matrix(made))
        ways = blocks.widen(values, scales, minima), blocks.quantise(own)
        held = [blocks.matrix(blocks.of_parts(x, w.shape, "float32")) for x in ways]
        return ways, [np.asarray(x) - own for x in held]

    ways, errors = both(minima)
    for widened, rounded in zip(*ways, strict=True):
        np.testing.assert_array_equal(widened[:4, 0], rounded[:4, 0])
    widened, rounded = (np.square(x[4:]).mean() for x in errors)
    assert widened < rounded / 4 and np.isnan(ways[0][1][3, 0])
    scales[3, 0] = 2.0**-24
    (widened, _), errors = both(-8 * scales)
    assert not errors[0].any() and errors[1].any()
    np.testing.assert_array_equal(widened[1], scales)


@pytest.mark.parametrize("shape", SHAPES)
def test_panels_keep_every_bit(rng, isa, form, shape):
    """Fails if a value is lost or moved, or if a kernel looks up another row."""
    w, lines = make(rng, form, *shape, scale=1e-4), {"q8_0": 17, "q4_1": 10}[form]
    packed = calls.pack(w, isa=isa)
    assert packed.data.shape == (-(-shape[0] // 16), -(-shape[1] // 64), lines, 64)
    assert packed.shape == w.shape and packed.dtype == w.dtype
    testing.assert_same_bits(blocks.unpack(packed), w)
    index = np.int32([shape[0] - 1, 0, shape[0] // 2])
    rows = calls.take_rows(packed, index, num_active=np.int32(3), isa=isa)
    testing.assert_same_bits(rows, blocks.take_rows(w, jnp.asarray(index)))
    testing.assert_same_bits(rows, blocks.matrix(w)[index])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((1, 1), (17, 3), (40, 33), (5, 0), (0, 5)))
def test_panels_of_a_matrix_keep_every_bit(rng, isa, dtype, shape):
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "N"), [(129, 40), (577, 20)])
def test_sums_are_in_the_order_of_blocks(rng, isa, form, dtype, K, N):
    """Fails if a sum has another order, or depends on the number of rows. Negative
    controls: another order, a neighbour's scale and minimum."""
    x, w = oracle.normal(rng, (9, K), dtype), make(rng, form, N, K, dtype)
    # The extremes of integers, and rows of both signs.
    least, most = (-128, 127) if form == "q8_0" else (0x00, 0xFF)
    w = w.replace(values=w.values.at[:, 0].set(least).at[:, 1].set(most))
    x[:, :64] = np.where(rng.integers(0, 2, (9, 64)), 3, -3)
    order = oracle.order_of(isa)
    expected = order.project_bytes(x, w)
    for live in range(1, 10):
        found = row_contract.sums(isa, x, w, live)
        testing.assert_same_bits(found, expected[:live], what=f"{live} live")
    backwards = range(w.values.shape[1])[::-1]
    for fault in ({"order": backwards}, {"neighbour": 1}):
        with pytest.raises(AssertionError, match="elements differ"):
            testing.assert_same_bits(order.project_bytes(x, w, **fault), expected)


@pytest.mark.parametrize("isa", build.available_isas(), indirect=True)
def test_rows_that_are_not_finite(rng, isa, form):
    """Fails if NaN is rounded to an integer, or reaches another row."""
    x, w = oracle.normal(rng, (4, 65), "float32"), make(rng, form, 18, 65, "float32")
    clean = row_contract.sums(isa, x, w)
    x[1, 64], x[2, 3] = np.nan, -np.inf
    x[3] = [0.0] * 64 + [1e-42]  # too small to divide 127 by
    y = row_contract.sums(isa, x, w)
    testing.assert_same_bits(y[0], clean[0])
    assert not np.isfinite(y[1:3]).any() and not y[3].any()
    values, scales = blocks.quantise_rows(jnp.asarray(x))
    assert np.isnan(scales[1, 2]) and np.isnan(scales[2, 0])
    assert not values[3].any() and not scales[3, 0]
    assert np.isfinite(scales[0]).all() and abs(np.asarray(values[0])).max() == 127
    for scale in (np.inf, np.nan):  # of one output: float16 keeps both
        wrong = w.replace(scales=w.scales.at[5, 0].set(scale))
        y = row_contract.sums(isa, x[:1], wrong)[0]
        testing.assert_same_bits(np.delete(y, 5), np.delete(clean[0], 5))
        assert not np.isfinite(y[5]) and np.isnan(y[5]) >= np.isnan(scale)
