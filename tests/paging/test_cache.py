"""Bytes in pages: writes, reads, and the check that no page is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.paging import allocator, cache, static


SIZES = {
    "num_layers": 2, "num_slots": 3, "num_pages": 11, "page_size": 4,
    "pages_per_slot": 5, "num_kv_heads": 2, "head_dim": 3, "dtype": "bfloat16",
}  # fmt: skip
ROWS = 6


@jax.jit
def make_cache():
    """Makes slots of 3, 1 and 1 pages in a pool of NaN, free pages in random order."""
    kv = cache.init(**SIZES)
    poison = functools.partial(jnp.full_like, fill_value=jnp.nan)
    order = np.random.default_rng(3).permutation(kv.num_pages).astype(np.int32)
    kv = kv.replace(
        k=tuple(map(poison, kv.k)),
        v=tuple(map(poison, kv.v)),
        free_pages=jnp.asarray(order),
    )
    lengths = jnp.asarray([9, 4, 1], jnp.int32)

    def open_slot(slot, kv):
        return allocator.reserve(allocator.register(kv, slot), slot, lengths[slot])

    return jax.lax.fori_loop(0, 3, open_slot, kv)


@functools.partial(jax.jit, static_argnames=("layer",))
def write(kv, layer, slots, positions, num_active, k, v):
    return cache.write(
        kv, layer, slots=slots, positions=positions, num_active=num_active, k=k, v=v
    )


@functools.partial(jax.jit, static_argnames=("layer", "slot"))
def read(kv, layer, slot):
    """Returns all keys and values of a slot: one executable serves every length."""
    return cache.gather(kv, layer, slot, kv.slot_capacity)


def write_rows(kv, rows, num_active, *, seed=0, layer=1, write=write):
    """Writes random bytes to rows `(slot, position)`; returns the cache and them."""
    slots, positions = np.asarray(rows, np.int32).T
    shape = (2, ROWS, SIZES["num_kv_heads"], SIZES["head_dim"])
    k, v = np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16)
    return write(kv, layer, slots, positions, np.int32(num_active), k, v), k, v


def test_nothing_else_is_written():
    """Fails if a padding row, or a row outside its slot's pages, is written."""
    before = make_cache()
    rows = [(0, 3), (1, 4), (2, -1), (3, 0), (-1, 0), (0, 0)]
    kv, k, v = write_rows(before, rows, ROWS - 1)  # 5 is padding, 1 to 4 have no page
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
    kv = write(kv, 0, at, at, np.int32(1), row, row)
    expected = jnp.full((1, 2, 3), 1 + 2.0**-7, jnp.bfloat16)  # rounded to nearest
    testing.assert_same_bits(read(kv, 0, 0)[0][:1], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"page_size": -4}, "page_size=-4 must be at least 1"),
        ({"num_pages": 0}, "num_pages=0 must be at least 1"),
        ({"pages_per_slot": 12}, "pages_per_slot=12 exceeds num_pages=11"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    sizes = SIZES | changes
    with pytest.raises(ValueError, match=message):
        cache.init(**sizes)
    if sizes.pop("num_pages") > 0 and sizes["pages_per_slot"] == 5:
        with pytest.raises(ValueError, match=message):
            static.init(**sizes)


def at(name, index, value):
    """Returns a fault: it sets field `name` to `value(kv)` at `index`."""
    return lambda kv: {name: getattr(kv, name).at[index].set(value(kv))}


def number(name, change):
    return lambda kv: {name: getattr(kv, name) + change}


BROKEN_TABLES = {
    "a page lost, another held twice": (
        at("page_table", (0, 0), lambda kv: kv.page_table[1, 0]),
        "pages lost: .*; pages held twice: "),
    "a free page that is owned": (
        at("free_pages", 0, lambda kv: kv.page_table[2, 0]), "pages held twice: "),
    "a page lost from the stack": (
        lambda kv: number("num_free", -1)(kv)
        | at("free_pages", kv.num_free - 1, lambda kv: kv.num_pages)(kv),
        r"pages lost: \[\d+\]; pages held twice: \[\]"),
    "a stale table entry": (
        at("page_table", (1, 1), lambda kv: kv.free_pages[0]),
        "slot 1: stale entries past its 1 pages"),
    "a stale stack entry": (
        number("num_free", -1), "stale entries past the 5 free pages"),
    "a page that does not exist": (
        at("page_table", (0, 1), lambda kv: kv.num_pages), "pages lost: "),
    "num_free out of range": (number("num_free", 99), r"num_free=105 is outside"),
    "too many pages owned": (
        at("num_owned", 1, lambda kv: 6), "slot 1 owns 6 of 5 pages"),
    "length past the pages": (
        at("length", 1, lambda kv: 5), "slot 1: length 5 exceeds its 1 pages of 4"),
    "negative length": (at("length", 1, lambda kv: -1), "slot 1: length -1 "),
    "closed, but holding pages": (
        at("registered", 2, lambda kv: False),
        "slot 2 is not registered but holds 1 pages"),
    "open, without a page": (
        lambda kv: at("num_owned", 2, lambda kv: 0)(kv)
        | at("page_table", (2, 0), lambda kv: kv.num_pages)(kv),
        "slot 2 is registered but holds no page"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound():
    kv = make_cache()
    cache.check_integrity(kv)
    return kv


@pytest.mark.parametrize("fault", BROKEN_TABLES)
def test_broken_tables_are_reported(sound, fault):
    """Fails if `check_integrity` does not notice this fault, or names another."""
    spoil, message = BROKEN_TABLES[fault]
    with pytest.raises(ValueError, match=message):
        cache.check_integrity(sound.replace(**spoil(sound)))


def test_broken_tables_of_a_static_cache_are_reported():
    """Negative control: plants exchanged pages of two slots, and impossible lengths."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_pages"}
    init = lambda: allocator.register(static.init(**sizes), 0)
    kv = jax.jit(lambda: allocator.register(init(), 1))()
    static.check_integrity(kv)
    exchanged = kv.replace(page_table=kv.page_table[jnp.array([1, 0, 2])])
    with pytest.raises(ValueError, match=r"slots \[0, 1\] do not own their own pages"):
        static.check_integrity(exchanged)
    for slot, length, message in (
        (1, 21, "slot 1: length 21 exceeds its 5 pages of 4"),
        (2, 1, "slot 2 is not registered but holds 1 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            static.check_integrity(kv.replace(length=kv.length.at[slot].set(length)))
