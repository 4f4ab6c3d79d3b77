"""The row attention of Triton, interpreted: rows alone and together, and float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_slabs as slabs
from native import native_oracle as oracle

from spec_jax import testing
from spec_jax.ops import row_attention
from spec_jax.testing import compare


_op = jax.jit(row_attention.row_attention, static_argnames=("eps", "scale", "impl"))


def assert_row_contract(slab, *, attend=slabs.run, lives=None):
    """Asserts that rows give alone what they give together, wherever they stand.

    Returns what they give alone, as `rows_alone`.
    """
    R = slab.num_rows
    alone, *pools = slabs.rows_alone(slab, attend=attend)
    assert np.isfinite(alone.astype(np.float32)).all()
    for live in range(R + 1) if lives is None else lives:
        out, *after = attend(slabs.in_slab(slab, range(live)), live)
        testing.assert_same_bits(out[:live], alone[:live], what=f"{live} live")
        # Interpreted, what is not written is NaN.
        assert np.isnan(out[live:].astype(np.float32)).all()
        if live == R:
            testing.assert_same_bits(after, list(pools))
    for order in (np.arange(R)[::-1], np.random.default_rng(3).permutation(R)):
        out, *after = attend(slabs.in_slab(slab, order), R)
        testing.assert_same_bits(out[:R], alone[order], what=f"{order}")
        testing.assert_same_bits(after, list(pools))
    return alone, *pools


CASES = [
    ((7, 1, 80), 24, "bfloat16"),  # (N, K, H), page size
    ((4, 2, 128), 64, "bfloat16"),
    ((2, 1, 256), 128, "float32"),
]


@pytest.mark.parametrize(("heads", "page_size", "dtype"), CASES)
def test_a_row_is_that_row_alone_and_float64s(rng, heads, page_size, dtype):
    """Fails if a neighbour, a padding row, an unowned page or a later position is seen.

    Slot 0 begins empty, slot 1 crosses a page, slots 2 and 3 a split.
    """
    N, K, H = heads
    crossing = page_size - 1
    rows = slabs.window((0, 3), (crossing, crossing + 3), (62, 66), (30, 36))
    assert len(rows) == slabs.HEIGHT
    slab = oracle.make_slab(
        rng, rows, dtype=dtype, N=N, K=K, H=H, page_size=page_size,
        prefix=(0, crossing, 62, 30),
    )  # fmt: skip
    out, k_pages, v_pages = assert_row_contract(slab)
    expected, expected_k, expected_v = oracle.attend(slab, **slabs.numbers(slab))
    longest = slab.positions.max() + 1
    testing.assert_rows_close(out, expected, dtype=dtype, reduction=H + longest)
    written = ~np.isnan(expected_k).any(axis=-1)
    near = {"dtype": dtype, "reduction": H}
    testing.assert_rows_close(k_pages[written], expected_k[written], **near)
    np.testing.assert_array_equal(v_pages.astype(np.float64), expected_v)
    assert np.isnan(k_pages[~written].astype(np.float32)).all()
    if dtype == "bfloat16":  # The output has rounded probabilities besides.
        new = tuple(np.transpose([slab.locate(*row) for row in rows]))
        oracle.assert_rounded_alike(k_pages[new], expected_k[new])


@pytest.mark.slow
def test_heads_without_norms(rng):
    """Fails if heads are normed by what stands in the place of weights."""
    slab = slabs.in_slab(slabs.small_slab(rng, "float32"), range(8))
    given = slab.arguments(8) | slabs.numbers(slab)
    norms = {"q_norm": None, "k_norm": None}
    normed, *found = (
        [np.asarray(x) for x in _op(**given | changes, impl=impl)]
        for impl, changes in (("interpret", {}), ("interpret", norms), ("xla", norms))
    )
    (out, k_pages, _), (expected, expected_k, _) = found
    near = {"dtype": "float32", "reduction": 80}
    testing.assert_rows_close(out[:8], expected[:8], **near)
    np.testing.assert_array_equal(k_pages, expected_k)
    assert (out[:8] != normed[0][:8]).any(axis=1).all()


def test_default_plan_with_several_splits():
    """Fails if what is shared between rows is not what each would do alone."""
    rng = np.random.default_rng(5)
    rows = slabs.window((3, 5), (254, 259), (515, 519))
    slab = slabs.small_slab(rng, rows=rows, page_size=64, prefix=(3, 254, 515))
    default = lambda slab, live: slabs.run(slab, live, config=None)
    out, *_ = assert_row_contract(slab, attend=default, lives=(0, 1, 5, len(rows)))
    expected, *_ = oracle.attend(slab, **slabs.numbers(slab))
    testing.assert_rows_close(out, expected, dtype="bfloat16", reduction=535)


def paged_otherwise(shuffle, *, page_size, width=None):
    """One slot of 70 positions and always the same data, on pages as they come."""
    data = np.random.default_rng(1)
    slab = oracle.make_slab(
        shuffle, [(0, 69), (0, 70)], dtype="bfloat16", N=4, K=2, H=16,
        page_size=page_size, prefix=(69,), table_width=width,
    )  # fmt: skip
    per_row = {
        name: oracle.normal(data, getattr(slab, name).shape, slab.heads.dtype)
        for name in ("heads", "cos", "sin", "q_norm", "k_norm")
    }
    slab = dataclasses.replace(slab, **per_row)
    for pool in (slab.k_pages, slab.v_pages):
        for position in range(69):
            row = oracle.normal(data, pool.shape[2:], slab.heads.dtype)
            pool[slab.locate(0, position)] = row
    return slabs.in_slab(slab, [0, 1])


def test_pages_and_table_width_do_not_matter():
    """Fails if bits depend on where a prefix lies, or on what it might grow to."""
    results = []
    for page_size, width in ((8, None), (128, 2)):
        shuffle = np.random.default_rng(page_size)
        slab = paged_otherwise(shuffle, page_size=page_size, width=width)
        results.append(slabs.run(slab, 2)[0])
    for result in results[1:]:
        testing.assert_same_bits(result, results[0])


def test_a_fixed_number_of_splits_is_caught():
    """Negative control: splits that are a share of the table's width."""
    results = []
    for width in (9, 30):
        slab = paged_otherwise(np.random.default_rng(8), page_size=8, width=width)
        split = -(-width * 8 // 4 // 16) * 16  # four of them, in whole blocks
        config = dataclasses.replace(slabs.SMALL, split=split)
        results.append(slabs.run(slab, 2, config=config)[0])
    wide = {"dtype": "bfloat16", "reduction": 86}
    testing.assert_rows_close(results[0][:2], results[1][:2], **wide)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(*results)


def test_a_plan_by_active_rows_is_caught(rng):
    """Negative control: blocks of another size where more than one row is live."""
    other = dataclasses.replace(slabs.SMALL, block=32)

    def planted(slab, live):
        return slabs.run(slab, live, config=slabs.SMALL if live == 1 else other)

    slab = slabs.small_slab(rng)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_row_contract(slab, attend=planted)


UNMAPPED = {
    "a page past the pool": {"page_table": (0, 1, 99)},
    "the first page past the pool": {"page_table": (0, 1, 20)},
    "a negative page": {"page_table": (0, 1, -1)},
    "a hole in the prefix": {"page_table": (0, 0, 20)},
    "a position past the table": {"positions": (0, 72)},
    "the last position there is": {"positions": (0, 2**31 - 1)},
    "a negative position": {"positions": (0, -1)},
    "a slot past the table": {"slots": (0, 2)},
    "a negative slot": {"slots": (0, -1)},
}


@pytest.mark.parametrize("fault", UNMAPPED)
def test_rows_without_a_page(rng, fault):
    """Fails if such a row is written anywhere, reads anything, or passes for one."""
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    assert slab.k_pages.shape[0] == 20 and slab.page_table.shape == (2, 9)
    clean, *_ = slabs.run(slab, 8)
    ((name, change),) = UNMAPPED[fault].items()
    array = getattr(slab, name).copy()
    array[change[:-1]] = change[-1]
    lost = {0, 1, 2, 3} if name == "page_table" else {0}  # slot 0: first in order
    broken = dataclasses.replace(slab, **{name: array})
    out, *pools = slabs.run(broken, 8)
    kept = [r for r in range(8) if r not in lost]
    assert np.isnan(out[list(lost)].astype(np.float32)).all()
    if name == "page_table":
        testing.assert_same_bits(out[kept], clean[kept])
    without, *only_kept = slabs.run(slabs.in_slab(slab, kept), len(kept))
    testing.assert_same_bits(pools, only_kept)
    testing.assert_same_bits(out[kept], without[: len(kept)])


def test_the_edges_of_the_table(rng):
    """Fails if the first or the last position of a slot is out of bounds."""
    slab = slabs.small_slab(rng, rows=[(0, 0), (1, 71), (0, 1)], prefix=(0, 71))
    assert slab.page_table.shape == (2, 9)
    slab = slabs.in_slab(slab, range(3))
    out, *pools = slabs.run(slab, 3)
    expected, *expected_pools = oracle.attend(
        slab.rows(range(3)), **slabs.numbers(slab)
    )
    testing.assert_rows_close(out[:3], expected, dtype="bfloat16", reduction=88)
    v_pages = pools[1].astype(np.float64)
    np.testing.assert_array_equal(v_pages, expected_pools[1])
    out, *pools = slabs.run(slab, 0)
    assert np.isnan(out.astype(np.float32)).all()
    testing.assert_same_bits(pools, [slab.k_pages, slab.v_pages])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_reach_what_sees_them(rng, value):
    """Fails if NaN is swallowed by the maximum or the exponential, or leaks."""
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    clean = slabs.run(slab, 8)[0].astype(np.float32)
    sees = (slab.slots == 1) & (slab.positions > 63)
    unmoved = np.flatnonzero(~sees[:8])
    for pool, column in (("k_pages", slice(32, 64)), ("v_pages", 35)):
        pages = getattr(slab, pool).copy()
        pages[slab.locate(1, 33)][1, 3] = value
        out = slabs.run(dataclasses.replace(slab, **{pool: pages}), 8)[0]
        out = out.astype(np.float32)
        others = slab.slots != 1
        testing.assert_same_bits(out[others], clean[others])
        testing.assert_same_bits(out[:8, :32], clean[:8, :32])
        if pool == "k_pages" and value == np.inf:
            continue  # By its sign.
        assert not np.isfinite(out[slab.slots == 1][:, column]).any()
    bad = slab.heads.copy()
    bad[np.flatnonzero(slab.positions == 64)] = value
    out = slabs.run(dataclasses.replace(slab, heads=bad), 8)[0].astype(np.float32)
    testing.assert_same_bits(out[unmoved], clean[unmoved])
    assert not np.isfinite(out[sees]).all(axis=1).any()


def test_the_reference_form_agrees(rng):
    """Fails if norm, rotation or result is rounded elsewhere than in the reference."""
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    out, *pools = slabs.run(slab, 8)
    reference, *expected_pools = _op(
        **slab.arguments(8), **slabs.numbers(slab), impl="xla"
    )
    near = {"dtype": "bfloat16", "reduction": 16 + 66}
    testing.assert_rows_close(out[:8], np.asarray(reference)[:8], **near)
    for pool, expected in zip(pools, expected_pools, strict=True):
        pool, expected = oracle.wide(pool, expected)
        written = ~np.isnan(expected).any(axis=-1)
        np.testing.assert_array_equal(written, ~np.isnan(pool).any(axis=-1))
        # The rotation has three roundings, which XLA may fuse into one.
        allowed = 4 * compare.UNIT_ROUNDOFF["bfloat16"] * np.abs(expected[written])
        gap = np.abs(pool[written] - expected[written])
        assert (gap <= np.maximum(allowed, allowed.max() / 4)).all()


def test_grids_share_nothing(rng):
    """Fails if a kernel keeps another call's grid, or its programs are not alike."""
    slab = slabs.in_slab(slabs.small_slab(rng), range(8))
    several = dataclasses.replace(slabs.SMALL, programs=6)  # three for each head
    results = [
        slabs.run(slab, 8),
        slabs.run(slab, 8, config=several),
        slabs.run(slab, 8),
    ]
    testing.assert_same_bits(results[1:], results[:1] * 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"H": 258}, NotImplementedError, "head size 258 is odd, below 16 or above"),
        ({"H": 8}, NotImplementedError, "head size 8 is odd, below 16"),
        ({"N": 3}, ValueError, "3 query heads for 2 key/value heads"),
        ({"N": 34}, NotImplementedError, "17 query heads to a key/value head"),
        ({"cos": np.ones((8, 9))}, ValueError, r"cos has shape \(8, 9\)"),
        ({"slots": np.zeros(3, np.int32)}, ValueError, "slots has shape"),
        ({"heads": jnp.ones((8, 128))}, NotImplementedError, "pages of one dtype"),
    ],
)
def test_refusals(rng, change, error, message):
    """Fails if a kernel is let loose on arrays of another shape or dtype."""
    name = next(iter(change))
    slab = slabs.small_slab(rng, **(change if name in "HN" else {}))
    if name not in "HN":
        slab = dataclasses.replace(slab, **change)
    with pytest.raises(error, match=message):
        slabs.run(slab, 8)
