"""Native products: the order of their sums, segments, gates and shapes; attention:
ranges of keys and infinite scores; panels of weights, in full or of few bits.

The promises of every implementation are tested in `ops/test_projection` and
`ops/test_row_attention`.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from native import emulation, native_oracle as oracle
from ops import row_contract, row_slabs as slabs

from spec_jax import testing
from spec_jax.native import blocks, build, calls, panels
from spec_jax.parallel import collectives


BOTH_DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
ALL_SETS = pytest.mark.parametrize("isa", emulation.every(amx=True), indirect=True)


@ALL_SETS
@BOTH_DTYPES
@pytest.mark.parametrize(("K", "N"), [(1, 1), (129, 25), (1100, 9), (40, 150)])
def test_sums_have_the_stated_order(rng, isa, dtype, K, N):
    """Fails if a tile, a lone panel or a ragged end sums in an order of its own.
    Negative control: a reversed order, other roundings or pairs give other bits. (A
    product of two bfloat16 is exact in float32: one rounding equals two there.)"""
    x, w = (oracle.normal(rng, (n, K), dtype) for n in (17, N))
    order = oracle.order_of(isa)
    expected = order.project(x, w)
    for live in (1, 3, 4, 5, 8, 9, 17):
        found = row_contract.sums(isa, x, w, live)
        testing.assert_same_bits(found, expected[:live], what=f"{live} live")
    if K == 129:
        change = {"fused": not order.fused}
        if dtype == "bfloat16":
            change = {"has_pairs": not order.has_pairs, "has_tiles": False}
        other = dataclasses.replace(order, **change)
        for y in (order.project(x[:, ::-1], w[:, ::-1]), other.project(x, w)):
            with pytest.raises(AssertionError, match="elements differ"):
                testing.assert_same_bits(y, expected)


@ALL_SETS
def test_pairs_take_denormals_for_zero(isa):
    """Fails if a denormal operand or partial sum is not taken for zero. Without pairs
    the processor's mode decides this, and XLA sets it."""
    order = oracle.order_of(isa)
    if not (order.has_pairs or order.has_tiles):
        pytest.skip(f"{isa} does not multiply by pairs")
    # Row 0 has a denormal operand. Row 1 has a product of 1e-39, which is denormal, and
    # row 2 has a product to add to it, 64 elements on.
    x = np.zeros((3, 96), np.float32)
    w = np.zeros((1, 96), np.float32)
    w[0, [0, 3, 4, 68]] = 1e38, -1e38, 1e-19, 1e-19
    x[0, [0, 3]] = 1e-39
    x[1, 4] = 1e-20
    x[2, [4, 68]] = 1e-20, 1e-17
    x, w = (a.astype(jnp.bfloat16) for a in (x, w))
    y = row_contract.sums(isa, x, w)
    testing.assert_same_bits(y, order.project(x, w))
    assert y[:2].tolist() == [[0.0], [0.0]] and y[2, 0] > 0


def gate(isa, x, w, **options):
    call, norm = row_contract.compiled("gate", isa), np.ones(x.shape[1], x.dtype)
    return np.asarray(call(x, w, norm=norm, num_active=np.int32(len(x)), **options))


def test_extreme_gates(isa):
    """Fails if `silu` overflows or loses NaN; with a row of one, sums are the gates."""
    gates = np.float32([-np.inf, -1e30, -100, -88.5, -87, -20, -1e-30])
    gates = np.concatenate([gates, np.float32([0, 1, 20, 100, 1e30, np.inf, np.nan])])
    w = np.concatenate([gates, np.ones_like(gates)])[:, None]
    y = gate(isa, np.ones((1, 1), np.float32), w, eps=0.0)[0]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gates / (1 + np.exp(-gates.astype(np.float64)))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_allclose(y, expected, rtol=5e-7, atol=1e-36)


@pytest.mark.parametrize(("rows", "K", "N"), [(0, 7, 6), (3, 0, 6), (3, 7, 0)])
def test_empty_shapes(isa, rows, K, N):
    """Fails if an empty dimension divides by zero, or its sums are not zero."""
    x, w = np.ones((rows, K), np.float32), np.ones((N, K), np.float32)
    gates = gate(isa, x, w, eps=1e-6)
    for y, columns in ((row_contract.sums(isa, x, w), N), (gates, N // 2)):
        assert y.shape == (rows, columns) and not y.any()


@ALL_SETS
@BOTH_DTYPES
@pytest.mark.parametrize(("count", "K", "N"), [(1, 7, 5), (8, 5, 290)])
def test_segments_are_products_added_in_a_tree(rng, isa, dtype, count, K, N):
    """Fails if a segment reads another's elements, or sums are not added in a tree."""
    x = oracle.normal(rng, (16, count * K), dtype)
    pieces = [oracle.normal(rng, (N, K), dtype) for _ in range(count)]
    products = [
        row_contract.sums(isa, part, w)
        for part, w in zip(np.split(x, count, axis=1), pieces, strict=True)
    ]
    expected = np.asarray(collectives.tree_sum(products))
    for live in (16, 3):
        rows = row_contract.poisoned(x, live)
        found = calls.project_segments(rows, pieces, num_active=np.int32(live), isa=isa)
        testing.assert_same_bits(np.asarray(found)[:live], expected[:live])
    in_order = np.asarray(functools.reduce(jnp.add, products))
    if count > 2:  # Negative control: one after the other, sums differ.
        with pytest.raises(AssertionError, match="elements differ"):
            testing.assert_same_bits(in_order, expected)


def test_refusals():
    """Fails if a segment, or a gate without its other half, is cut off."""
    x, piece, live = jnp.zeros((2, 9)), jnp.zeros((4, 3)), {"num_active": jnp.int32(2)}
    with pytest.raises(ValueError, match="3 segments: their number must be a power"):
        calls.project_segments(x, [piece] * 3, **live)
    with pytest.raises(ValueError, match=r"x has shape \(2, 9\), not \(2, 6\)"):
        calls.project_segments(x, [piece] * 2, **live)
    with pytest.raises(ValueError, match=r"w has shape \(5, 3\), not \(4, 3\)"):
        calls.gate(x[:, :3], jnp.zeros((5, 3)), norm=jnp.ones(3), eps=0.0, **live)


@BOTH_DTYPES
def test_ranges_of_long_texts(rng, isa, dtype):
    """Fails if sums of ranges are combined wrongly, or have keys that a row cannot see.
    Rows lie on both sides of the bounds of ranges, 1,024 and 2,048 keys."""
    rows = slabs.window((1022, 1026), (2046, 2049))
    slab = oracle.make_slab(
        rng, rows, dtype=dtype, N=4, K=2, H=40, page_size=64, prefix=(1022, 2046)
    )
    attend = functools.partial(slabs.run, isa)
    out, *_ = slabs.assert_row_contract(slab, attend)
    expected, *_ = oracle.attend(slab, **slabs.numbers(slab))
    testing.assert_rows_close(out, expected, dtype=dtype, reduction=40 + 2049)


@pytest.mark.parametrize("position", [1018, 1024])
def test_ranges_of_trees(rng, isa, position):
    """Fails if rows of a tree begin their ranges elsewhere than rows of a chain."""
    rows, width = [(0, position + i) for i in range(5)], 8
    slab = oracle.make_slab(
        rng, rows, dtype="bfloat16", N=4, K=2, H=16, page_size=64, prefix=(position,)
    )
    chain = slabs.run(isa, slab, 5)
    # This branch is the chain itself: the last keys of each row are where they were.
    branch = slab.positions[:, None] + np.arange(1 - width, 1, dtype=np.int32)
    testing.assert_same_bits(slabs.run(isa, slab, 5, branch=branch), chain)
    branch[3, -2] -= 1  # Negative control: one key taken twice.
    tree = slabs.run(isa, slab, 5, branch=branch)
    assert [*map(bool, (tree[0] != chain[0]).any(axis=1))] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_infinite_scores(rng, isa, sign):
    """Fails if a score of -inf gets any weight, or one of inf does not give NaN. The
    first `count` keys of the slot are infinite along the query's first element."""
    for count in (1, 32, 33, 40):
        slab = oracle.make_slab(
            rng, [(0, 40)], dtype="float32", N=1, K=1, H=16, page_size=8, prefix=(40,)
        )
        slab.heads[0, 1:16] = 0  # The query keeps one element, and its sign.
        slab.cos[:], slab.sin[:] = 1, 0
        # The query's zeros meet zeros, as 0 * inf would be NaN.
        for at in (slab.locate(0, position) for position in range(count)):
            slab.k_pages[at] = 0
            slab.k_pages[at][0, 0] = sign * np.sign(slab.heads[0, 0]) * np.inf
        out, *_ = slabs.run(isa, slab, 1)
        with np.errstate(invalid="ignore"):
            expected, *_ = oracle.attend(slab, **slabs.numbers(slab))
        assert np.isnan(expected).all() == (sign > 0)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


WITH_VARIANTS = pytest.mark.parametrize(
    "isa", (*emulation.every(), *emulation.VARIANTS), indirect=True
)
"""Each instruction set, and variants that sum integers otherwise."""
SHAPES = ((1, 1), (16, 32), (40, 129))


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


@WITH_VARIANTS
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


@WITH_VARIANTS
@BOTH_DTYPES
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


@WITH_VARIANTS
@BOTH_DTYPES
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


@WITH_VARIANTS
@BOTH_DTYPES
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
