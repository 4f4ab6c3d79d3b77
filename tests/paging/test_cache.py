"""Bytes in pages: places, writes, reads, and the check that no page is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import page_tables
import pytest

from spec_jax import testing
from spec_jax.ops import page_write
from spec_jax.paging import allocator, cache, index, static


SIZES = {
    "num_layers": 2, "num_slots": 3, "num_pages": 11, "page_size": 4,
    "pages_per_slot": 5, "num_kv_heads": 2, "head_dim": 3, "dtype": "bfloat16",
}  # fmt: skip
STATIC_SIZES = {name: size for name, size in SIZES.items() if name != "num_pages"}
ROWS = 6


def make_cache():
    """Makes slots of 3, 1 and 1 pages in a pool of NaN, free pages in random order."""
    kv = page_tables.shuffled(cache.init(**SIZES), np.random.default_rng(3))
    k, v = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), (kv.k, kv.v))
    return allocator.reserve(kv.replace(k=k, v=v), 0, 9)


write = jax.jit(cache.write, static_argnames=("layer",))


@functools.partial(jax.jit, static_argnames=("layer", "slot"))
def read(kv, layer, slot):
    """Returns all keys and values of a slot: one executable serves every length."""
    return cache.gather(kv, layer, slot, kv.slot_capacity)


def test_nothing_else_is_written():
    """Fails if a padding row, or a row outside its slot's pages, is written."""
    before = make_cache()
    # Row 5 is padding, rows 1 to 4 have no page.
    slots = np.array([0, 1, 2, 3, -1, 0], np.int32)
    positions = np.array([3, 4, -1, 0, 0, 0], np.int32)
    k, v = np.random.default_rng(0).standard_normal((2, ROWS, 2, 3))
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    where = {"slots": slots, "positions": positions, "num_active": np.int32(ROWS - 1)}
    kv = write(before, 1, k=k, v=v, **where)
    page = int(before.page_table[0, 0])
    for pool, old, row in ((kv.k, before.k, k[0]), (kv.v, before.v, v[0])):
        expected = np.array(old[1])
        expected[page, 3] = row
        testing.assert_same_bits(pool, (old[0], expected))


def test_unowned_positions_read_as_nan():
    """Fails if a read past the slot's pages gives another slot's bytes."""
    kv = make_cache()
    zeros = tuple(map(jnp.zeros_like, kv.k))
    for read_back in read(kv.replace(k=zeros, v=zeros), 0, 0):
        is_nan = np.isnan(np.asarray(read_back, np.float32)).all((1, 2))
        np.testing.assert_array_equal(is_nan, np.arange(20) >= 12)


def test_rows_are_cast_to_the_pools_dtype():
    """Fails if the caller must convert float32 rows, or if their bits are truncated."""
    kv = make_cache()
    row = np.full((ROWS, 2, 3), 1 + 2.0**-8 + 2.0**-9, np.float32)
    at = np.zeros(ROWS, np.int32)
    where = {"slots": at, "positions": at, "num_active": np.int32(1)}
    kv = write(kv, 0, k=row, v=row, **where)
    expected = jnp.full((1, 2, 3), 1 + 2.0**-7, jnp.bfloat16)  # rounded to nearest
    testing.assert_same_bits(read(kv, 0, 0)[0][:1], expected)


@pytest.mark.parametrize(
    ("init", "changes", "message"),
    [
        (cache.init, {"page_size": -4}, "page_size=-4 must be at least 1"),
        (cache.init, {"num_pages": 0}, "num_pages=0 must be at least 1"),
        (cache.init, {"pages_per_slot": 12}, "pages_per_slot=12 exceeds num_pages=11"),
        (cache.init, {"num_slots": 12}, "num_pages=11 is fewer than num_slots=12, and"),
        (static.init, {"num_layers": 0}, "num_layers=0 must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(init, changes, message):
    sizes = STATIC_SIZES if init is static.init else SIZES
    with pytest.raises(ValueError, match=message):
        init(**sizes | changes)


@jax.jit
def make_shared():
    """Makes a cache in which slot 1 began with the ten positions of slot 0."""
    kv = allocator.reserve(cache.init(**SIZES, shares=True), 0, 10)
    return allocator.share(allocator.extend(kv, 0, 10), 0, 1, 10)


def make_static():
    return static.init(**STATIC_SIZES)


def at(name, index, value):
    """Returns a fault: it sets field `name` to `value(kv)` at `index(kv)`."""

    def spoil(kv):
        where = index(kv) if callable(index) else index
        what = value(kv) if callable(value) else value
        return kv.replace(**{name: getattr(kv, name).at[where].set(what)})

    return spoil


def both(first, second):
    return lambda kv: second(first(kv))


NO_PAGE = lambda kv: kv.num_pages
TWICE = "pages are lost or held twice"
BROKEN = {
    "a page lost, another held twice": (
        make_cache, at("page_table", (0, 0), lambda kv: kv.page_table[1, 0]), TWICE),
    "a free page that is owned": (
        make_cache, at("free_pages", 0, lambda kv: kv.page_table[2, 0]), TWICE),
    "a page lost from the stack": (
        make_cache, both(at("num_free", (), 5), at("free_pages", 5, NO_PAGE)), TWICE),
    "a page that does not exist": (
        make_cache, at("page_table", (0, 1), NO_PAGE), TWICE),
    "a stale table entry": (
        make_cache, at("page_table", (1, 1), lambda kv: kv.free_pages[0]), "the table"),
    "a stale stack entry": (make_cache, at("num_free", (), 5), "stale .* the stack"),
    "num_free out of range": (make_cache, at("num_free", (), 105), "num_free=105 of"),
    "too many pages owned": (make_cache, at("num_owned", 1, 6), "slots own .3 6 1. p"),
    "length past the pages": (make_cache, at("length", 1, 5), "lengths .0 5 0. of"),
    "negative length": (make_cache, at("length", 1, -1), "lengths .* -1 "),
    "a slot without a page": (
        make_cache, both(at("num_owned", 2, 0), at("page_table", (2, 0), NO_PAGE)),
        "slots own .3 1 0. pages"),
    "an owner too many": (
        make_shared, at("counts", lambda kv: kv.page_table[0, 0], 3), "other owners"),
    "an owner of a free page": (
        make_shared, at("counts", lambda kv: kv.free_pages[0], 1), "other owners are"),
    "a free page that is shared": (
        make_shared, at("free_pages", 0, lambda kv: kv.page_table[0, 0]), TWICE),
    "a page of others that is not full": (
        make_shared, at("length", 1, 6), "a shared page is not full"),
    "exchanged pages": (
        make_static,
        lambda kv: kv.replace(page_table=kv.page_table[jnp.array([1, 0, 2])]),
        "slots do not own their own pages"),
    "a length past the slot": (make_static, at("length", 1, 21), "lengths .* 21 "),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_tables_are_reported(fault):
    """Fails if `check_integrity` does not notice this fault, or names another."""
    make, spoil, message = BROKEN[fault]
    page_tables.check_integrity(make())
    with pytest.raises(AssertionError, match=message):
        page_tables.check_integrity(spoil(make()))


NOWHERE = np.iinfo(np.int32).max
TABLE = np.array([[7, 2, 5], [1, 9, 11]], np.int32)  # 11 is P: no page is owned

locate = jax.jit(page_write.locate, static_argnames=("page_size",))


@pytest.mark.parametrize(
    ("slot", "position"),
    [(0, -1), (0, -5), (1, 12), (0, 10**6), (-1, 0), (-2, 3), (2, 0), (-1, -1)],
)
def test_outside_the_table_is_nowhere(slot, position):
    """Fails if an index outside the table finds a page; negative ones must not wrap."""
    asked = {"slots": np.int32([slot, 1]), "positions": np.int32([position, 0])}
    pages, _ = locate(TABLE, page_size=4, **asked)
    np.testing.assert_array_equal(pages, [NOWHERE, 1])


@pytest.mark.parametrize("page_size", [1, 4, 256])
def test_pages_for_covers_exactly(page_size):
    """Fails if a length near a page boundary takes one page too many or too few, or if
    the largest int32 overflows to a negative number of pages."""
    for length in (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size):
        pages = index.pages_for(length, page_size)
        assert (pages - 1) * page_size < length <= pages * page_size
    traced = index.pages_for(jnp.arange(9, dtype=jnp.int32), page_size)
    assert traced.tolist() == [index.pages_for(n, page_size) for n in range(9)]
    largest = jnp.int32(2**31 - 1)
    assert int(index.pages_for(largest, page_size)) == -(-(2**31 - 1) // page_size)
