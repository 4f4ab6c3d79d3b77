"""`calls.attend`: rows alone and together as bits, poisoned pages, and float64."""

import dataclasses

import jax
import jax.numpy as jnp
import native_oracle as oracle
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.native import calls
from spec_jax.ops import row_attention
from spec_jax.testing import compare


DTYPES = ("float32", "bfloat16")
HEADS = ((2, 2, 16), (16, 1, 64), (7, 1, 80), (4, 2, 128), (2, 1, 256))  # (N, K, H)
PAGE_SIZES = (1, 8, 16, 64, 256)

_attend = jax.jit(calls.attend, static_argnames=("eps", "scale", "isa"))
_op = jax.jit(row_attention.row_attention, static_argnames=("eps", "scale", "impl"))


def numbers(slab) -> dict:
    return {"eps": 1e-6, "scale": slab.k_pages.shape[3] ** -0.5}


def run(isa, slab, live=None):
    """Attended heads, and both pools after the writes."""
    outputs = _attend(**slab.arguments(live), **numbers(slab), isa=isa)
    return tuple(np.asarray(output) for output in outputs)


def assert_rows_alone(isa, slab, *, attend=run):
    """Asserts the row contract against rows run alone, one after another.

    Returns what the rows gave alone: the attended heads, and the pools after all.
    """
    pools, alone = (slab.k_pages, slab.v_pages), []
    for r in range(slab.num_rows):
        one = dataclasses.replace(slab.rows([r]), k_pages=pools[0], v_pages=pools[1])
        out, *pools = attend(isa, one)
        alone.append(out)
    alone = np.concatenate(alone)
    assert np.isfinite(alone.astype(np.float32)).all()
    for live in range(slab.num_rows + 1):
        which = np.arange(slab.num_rows)
        poisoned = slab.rows(np.where(which < live, which, -1))
        out, *after = attend(isa, poisoned, live)
        testing.assert_same_bits(out[:live], alone[:live], what=f"{live} live")
    testing.assert_same_bits(after, list(pools))
    backwards = np.arange(slab.num_rows)[::-1]
    out, *after = attend(isa, slab.rows(backwards))
    testing.assert_same_bits(out[backwards], alone, what="backwards")
    testing.assert_same_bits(after, list(pools))
    return alone, *pools


def window(*spans):
    """Rows `(slot, position)`: for each slot a range of positions, interleaved."""
    rows = [(s, p) for s, span in enumerate(spans) for p in range(*span)]
    return sorted(rows, key=lambda row: (row[1], row[0]))


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "page_size"), list(zip(HEADS, PAGE_SIZES, strict=True))
)
def test_a_row_is_that_row_alone_and_float64s(rng, isa, dtype, heads, page_size):
    """Fails if a neighbour, a padding row, an unowned page or a later position is seen.

    Slot 0 begins empty, slot 1 crosses a page, slot 2 the block of 32 keys.
    """
    N, K, H = heads
    crossing = max(page_size - 1, 1)
    rows = window((0, 3), (crossing, crossing + 3), (62, 66))
    slab = oracle.make_slab(
        rng,
        rows,
        dtype=dtype,
        N=N,
        K=K,
        H=H,
        page_size=page_size,
        prefix=(0, crossing, 62),
    )
    out, k_pages, v_pages = assert_rows_alone(isa, slab)
    expected, expected_k, expected_v = oracle.attend(slab, **numbers(slab))
    testing.assert_rows_close(out, expected, dtype=dtype, reduction=H + 66)
    written = ~np.isnan(expected_k).any(axis=-1)
    assert not np.isnan(expected_k[written]).any()
    near = {"dtype": dtype, "reduction": H}
    testing.assert_rows_close(k_pages[written], expected_k[written], **near)
    np.testing.assert_array_equal(v_pages.astype(np.float64), expected_v)
    if dtype == "bfloat16":
        new = tuple(np.transpose([slab.locate(s, p) for s, p in rows]))
        oracle.assert_rounded_alike(k_pages[new], expected_k[new])
        oracle.assert_rounded_alike(out, expected)
    assert np.isnan(k_pages[~written].astype(np.float32)).all()


@pytest.mark.few(8)
@pytest.mark.parametrize("position", [0, 7, 8, 9, 31, 32, 33, 70])
def test_every_reach_and_page_size(rng, isa, position):
    """Fails if a key is missed or seen twice at an edge of a page or of a block."""
    for page_size in PAGE_SIZES:
        slab = oracle.make_slab(
            rng, [(0, position)], dtype="float32", N=2, K=1, H=16,
            page_size=page_size, prefix=(position,),
        )  # fmt: skip
        expected, _, _ = oracle.attend(slab, **numbers(slab))
        out, _, _ = run(isa, slab)
        near = {"dtype": "float32", "reduction": 16 + position}
        testing.assert_rows_close(out, expected, **near)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 1, 16), (4, 2, 40)])
def test_ranges_of_long_texts(rng, isa, dtype, heads):
    """Fails if sums of ranges are combined wrongly, or with what a row does not see.

    Rows lie on both sides of the bounds of ranges, 1,024 and 2,048 keys.
    """
    N, K, H = heads
    rows = window((1022, 1026), (2046, 2049))
    slab = oracle.make_slab(
        rng, rows, dtype=dtype, N=N, K=K, H=H, page_size=64, prefix=(1022, 2046)
    )
    out, *_ = assert_rows_alone(isa, slab)
    expected, *_ = oracle.attend(slab, **numbers(slab))
    testing.assert_rows_close(out, expected, dtype=dtype, reduction=H + 2049)


@pytest.mark.few(4)
@pytest.mark.parametrize("position", [992, 1018, 1024, 2056])
def test_ranges_of_trees(rng, isa, position):
    """Fails if rows of a tree begin their ranges elsewhere than rows of a chain."""
    rows, width = [(0, position + i) for i in range(5)], 8
    slab = oracle.make_slab(
        rng, rows, dtype="bfloat16", N=4, K=2, H=16, page_size=64, prefix=(position,)
    )
    chain = run(isa, slab)
    # A branch that is the chain: the last keys of each row are where they always are.
    branch = slab.positions[:, None] + np.arange(1 - width, 1, dtype=np.int32)
    tree = _attend(**slab.arguments(), **numbers(slab), isa=isa, branch=branch)
    testing.assert_same_bits(list(tree), list(chain))
    branch[3, -2] -= 1  # Negative control: one key taken twice.
    tree = _attend(**slab.arguments(), **numbers(slab), isa=isa, branch=branch)
    assert [*map(bool, (tree[0] != chain[0]).any(axis=1))] == [0, 0, 0, 1, 0]


def test_pages_and_table_width_do_not_matter(isa):
    """Fails if bits depend on where a prefix lies, or on the size of its pages."""
    results = []
    for page_size, width in ((8, None), (8, 30), (16, 9), (64, None), (1, 80)):
        rng = np.random.default_rng(7)
        shuffle = np.random.default_rng(page_size)
        slab = oracle.make_slab(
            rng, [(0, 69), (0, 70)], dtype="bfloat16", N=4, K=2, H=16,
            page_size=page_size, prefix=(69,), table_width=width,
        )  # fmt: skip
        slab = reseeded(slab, shuffle)
        results.append(run(isa, slab)[0])
    for result in results[1:]:
        testing.assert_same_bits(result, results[0])


def reseeded(slab, shuffle):
    """The slab with data of its own seed, on pages of `shuffle`'s choosing."""
    data = np.random.default_rng(1)
    order = shuffle.permutation(slab.k_pages.shape[0]).astype(np.int32)
    owned = slab.page_table < slab.k_pages.shape[0]
    table = np.where(owned, order[np.where(owned, slab.page_table, 0)], 2**31 - 1)
    slab = dataclasses.replace(slab, page_table=table.astype(np.int32))
    per_row = {
        name: oracle.normal(data, getattr(slab, name).shape, slab.heads.dtype)
        for name in ("heads", "cos", "sin", "q_norm", "k_norm")
    }
    pools = {}
    for name in ("k_pages", "v_pages"):
        pools[name] = np.full_like(getattr(slab, name), np.nan)
        for position in range(69):
            row = oracle.normal(data, slab.k_pages.shape[2:], slab.heads.dtype)
            pools[name][slab.locate(0, position)] = row
    return dataclasses.replace(slab, **per_row, **pools)


def small_slab(rng, dtype="float32", **changes):
    """Four rows of two slots, four query heads on two key/value heads."""
    sizes = {"N": 4, "K": 2, "H": 16, "page_size": 8, "prefix": (10, 40)} | changes
    return oracle.make_slab(rng, window((10, 12), (40, 42)), dtype=dtype, **sizes)


def with_hidden_page(slab):
    """The slab behind a page of keys that weigh nothing: all else moves by a page."""
    pages, C, K, H = slab.k_pages.shape
    heads, cos, sin = oracle.wide(slab.heads, slab.cos[:, None], slab.sin[:, None])
    q = heads.reshape(slab.num_rows, -1, H)[:, : -2 * K]
    q = oracle.rms_norm(q, *oracle.wide(slab.q_norm), 1e-6, "float32")
    q = oracle.rotate(q, cos, sin, "float32").reshape(slab.num_rows, K, -1, H)
    grow = ((0, 1), (0, 0), (0, 0), (0, 0))
    k_pages, v_pages = np.pad(slab.k_pages, grow), np.pad(slab.v_pages, grow)
    for head in range(K):
        queries = np.nan_to_num(q[:, head].reshape(-1, H))  # NaN in padding rows
        # A key whose score is -1e4 for every one of them.
        k_pages[pages, :, head] = np.linalg.pinv(queries) @ np.full(len(queries), -4e4)
    table = np.pad(slab.page_table, ((0, 0), (1, 0)), constant_values=pages)
    return dataclasses.replace(
        slab,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=table.astype(np.int32),
        positions=slab.positions + np.int32(C),
    )


def test_a_split_by_rows_is_caught(rng):
    """Negative control: key blocks of other bounds where there is more than one row."""

    def planted(isa, slab, live=None):
        if slab.num_rows == 1:
            return run(isa, slab, live)
        out, *pools = run(isa, with_hidden_page(slab), live)
        return out, *(pool[:-1] for pool in pools)

    slab = small_slab(rng)
    testing.assert_rows_close(
        planted(None, slab)[0], run(None, slab)[0], dtype="float32", reduction=58
    )
    with pytest.raises(AssertionError, match="elements differ"):
        assert_rows_alone(None, slab, attend=planted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_form_agrees(rng, dtype):
    """Fails if norm, rotation or result is rounded elsewhere than in the reference."""
    slab = small_slab(rng, dtype)
    native, reference = (
        _op(**slab.arguments(), **numbers(slab), impl=impl)
        for impl in ("native", "xla")
    )
    near = {"dtype": dtype, "reduction": 16 + 41}
    testing.assert_rows_close(native[0], reference[0], **near)
    for pool, expected in zip(native[1:], reference[1:], strict=True):
        pool, expected = oracle.wide(pool, expected)
        written = ~np.isnan(expected).any(axis=-1)
        np.testing.assert_array_equal(written, ~np.isnan(pool).any(axis=-1))
        # The rotation has three roundings, which XLA may fuse into one.
        allowed = 4 * compare.UNIT_ROUNDOFF[dtype] * np.abs(expected[written]).max()
        assert np.abs(pool[written] - expected[written]).max() <= allowed


UNMAPPED = {
    "a page past the pool": {"page_table": (0, 1, 99)},
    "the first page past the pool": {"page_table": (0, 1, 14)},
    "a negative page": {"page_table": (0, 1, -1)},
    "a hole in the prefix": {"page_table": (0, 0, 14)},
    "a position past the table": {"positions": (0, 48)},
    "the last position there is": {"positions": (0, 2**31 - 1)},
    "a negative position": {"positions": (0, -1)},
    "a slot past the table": {"slots": (0, 2)},
    "a negative slot": {"slots": (0, -1)},
}


@pytest.mark.few(8)
@pytest.mark.parametrize("fault", UNMAPPED)
def test_rows_without_a_page(rng, isa, fault):
    """Fails if such a row is written anywhere, reads anything, or passes for one."""
    slab = small_slab(rng)
    assert slab.k_pages.shape[0] == 14
    clean, *_ = run(isa, slab)
    ((name, change),) = UNMAPPED[fault].items()
    array = getattr(slab, name).copy()
    array[change[:-1]] = change[-1]
    lost = {0, 1} if name == "page_table" else {0}  # rows of slot 0: first in order
    assert list(slab.slots[:2]) == [0, 0]
    broken = dataclasses.replace(slab, **{name: array})
    out, k_pages, v_pages = run(isa, broken)
    kept = [r for r in range(4) if r not in lost]
    for r in lost:
        assert np.isnan(out[r]).all()
    if name == "page_table":
        testing.assert_same_bits(out[kept], clean[kept])
    _, *only_kept = run(isa, slab.rows(kept))
    testing.assert_same_bits([k_pages, v_pages], only_kept)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_reach_what_sees_them(rng, isa, dtype, value):
    """Fails if NaN is swallowed by the maximum or the exponential, or leaks."""
    slab = small_slab(rng, dtype)
    clean, *_ = (x.astype(np.float32) for x in run(isa, slab))
    sees = slab.slots == 1
    for pool, column in (("k_pages", slice(32, 64)), ("v_pages", 35)):
        pages = getattr(slab, pool).copy()
        pages[slab.locate(1, 33)][1, 3] = value
        out, *_ = run(isa, dataclasses.replace(slab, **{pool: pages}))
        out = out.astype(np.float32)
        testing.assert_same_bits(out[~sees], clean[~sees])
        testing.assert_same_bits(out[sees, :32], clean[sees, :32])
        if pool == "k_pages" and value == np.inf:
            continue  # By its sign: see below.
        assert not np.isfinite(out[sees][:, column]).any()
    later = {}
    for pool in ("k_pages", "v_pages"):
        later[pool] = getattr(slab, pool).copy()
        later[pool][slab.locate(1, 42)] = value
    out, *_ = run(isa, dataclasses.replace(slab, **later))
    testing.assert_same_bits(out.astype(np.float32), clean)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("count", [1, 32, 33, 40])
def test_infinite_scores(rng, isa, sign, count):
    """Fails if a score of -inf weighs anything, or one of inf is not NaN.

    The first `count` keys of the slot are infinite along the query's first element.
    """
    slab = oracle.make_slab(
        rng, [(0, 40)], dtype="float32", N=1, K=1, H=16, page_size=8, prefix=(40,)
    )
    slab.heads[0, 1:16] = 0  # The query keeps one element, and its sign.
    slab.cos[:], slab.sin[:] = 1, 0
    for position in range(count):
        slab.k_pages[slab.locate(0, position)] = 0
        direction = np.sign(slab.heads[0, 0])
        slab.k_pages[slab.locate(0, position)][0, 0] = sign * direction * np.inf
    # 0 * inf would be NaN in the other elements: they are 1 * 0.
    out, *_ = run(isa, slab)
    with np.errstate(invalid="ignore"):
        expected, *_ = oracle.attend(slab, **numbers(slab))
    assert np.isnan(expected).all() == (sign > 0)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_a_nan_row_spoils_its_own_slot_only(rng, isa):
    """Fails if an active row of NaN reaches another slot, or the rows before it."""
    slab = small_slab(rng)
    clean, *_ = run(isa, slab)
    bad = slab.heads.copy()
    bad[1] = np.nan  # slot 0, position 11
    out, *_ = run(isa, dataclasses.replace(slab, heads=bad))
    others = [0, 2, 3]
    testing.assert_same_bits(out[others], clean[others])
    assert np.isnan(out[1]).all()


def test_two_calls_share_nothing(rng, isa):
    """Fails if a kernel keeps scratch between calls or writes to its arguments."""
    slab = small_slab(rng)
    before = [array.copy() for array in dataclasses.asdict(slab).values()]
    first = run(isa, slab)
    run(isa, small_slab(rng))
    testing.assert_same_bits(run(isa, slab), first)
    testing.assert_same_bits(list(dataclasses.asdict(slab).values()), before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"H": 258}, NotImplementedError, "head size 258 is odd, or above 256"),
        ({"H": 15}, NotImplementedError, "head size 15 is odd"),
        ({"N": 3}, ValueError, "3 query heads for 2 key/value heads"),
        ({"cos": np.ones((4, 9))}, ValueError, r"cos has shape \(4, 9\)"),
        ({"slots": np.zeros(3, np.int32)}, ValueError, "slots has shape"),
        ({"q_norm": jnp.ones(16, "bfloat16")}, NotImplementedError, "one of them"),
        (
            {"q_norm": None},
            ValueError,
            "norms of queries and of keys: both, or neither",
        ),
        ({"page_table": np.zeros(3, np.int32)}, ValueError, "page_table has shape"),
    ],
)
def test_refusals(rng, change, error, message):
    """Fails if the kernel is let loose on arrays of another shape or dtype."""
    name = next(iter(change))
    slab = small_slab(rng, **(change if name in "HN" else {}))
    if name not in "HN":
        slab = dataclasses.replace(slab, **change)
    with pytest.raises(error, match=message):
        run(None, slab)
