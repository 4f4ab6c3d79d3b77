"""Pages that slots share: truncation, the copy of a page, and counts of owners.

`test_allocator` checks other requests that are refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cache import at

from spec_jax import testing
from spec_jax.paging import allocator, cache


PAGE_SIZE, NUM_PAGES, WIDTH, SLOTS = 4, 8, 4, 4
share = jax.jit(allocator.share)
truncate = jax.jit(allocator.truncate)
truncate_each = jax.jit(allocator.truncate_each)


@functools.cache
def make_cache(*, length: int) -> cache.PagedKV:
    """Makes a cache with `length` random positions in slot 0; other slots are empty."""
    kv = cache.init(
        num_layers=2, num_slots=SLOTS, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
        pages_per_slot=WIDTH, num_kv_heads=1, head_dim=2, dtype="float32", shares=True,
    )  # fmt: skip
    for slot in range(SLOTS):
        kv = allocator.register(kv, slot)
    kv = allocator.extend(allocator.reserve(kv, 0, length), 0, length)
    shape = (2, *kv.k[0].shape)
    k, v = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    return kv.replace(k=tuple(map(jnp.asarray, k)), v=tuple(map(jnp.asarray, v)))


@pytest.mark.parametrize("length", range(9))
def test_truncation_cuts_no_page_of_others(length):
    """Fails if truncation lets a slot write into a page that another slot reads."""
    kv = share(make_cache(length=10), 0, 1, 10)
    after = truncate(kv, 1, length)
    each = truncate_each(kv, jnp.full(SLOTS, length), asked=jnp.arange(SLOTS) == 1)
    testing.assert_same_bits(each, after)
    is_refused = length % PAGE_SIZE > 0
    assert bool(after.refused[1]) == is_refused
    assert int(after.length[1]) == (10 if is_refused else length)
    cache.check_integrity(after)
    if is_refused:
        with pytest.raises(ValueError, match="or others hold the page there"):
            allocator.truncate(kv, 1, length)


def test_no_page_for_the_copy():
    """Fails if anything but a flag changes, or if full pages need a free one."""
    kv = make_cache(length=16)
    kv = truncate(kv, 1, 0)  # Slot 1 gives its only page back.
    kv = allocator.reserve(kv, 2, 12)
    assert int(kv.num_free) == 0
    after = share(kv, 0, 1, 5)
    with pytest.raises(MemoryError, match=r"out of pages in slots \[1\]: 0 of 8"):
        allocator.check(after)
    testing.assert_same_bits(after.replace(out_of_pages=kv.out_of_pages), kv)
    after = share(after, 0, 1, 8)
    allocator.check(after)
    assert int(after.length[1]) == 8


def test_a_cache_that_counts_no_owners():
    kv = make_cache(length=10).replace(counts=None)
    with pytest.raises(ValueError, match="counts no owners: make it with shares=True"):
        allocator.share(kv, 0, 1, 4)


BROKEN = {
    "an owner too many": (
        lambda kv: {"counts": kv.counts.at[kv.page_table[0, 0]].add(1)},
        r"pages \[\d\] have \[2\] owners, and \[3\] are counted"),
    "an owner of a free page": (
        lambda kv: {"counts": kv.counts.at[kv.free_pages[0]].set(1)},
        r"pages \[\d\] have \[0\] owners, and \[1\] are counted"),
    "a free page that is owned": (
        at("free_pages", 0, lambda kv: kv.page_table[0, 0]), "pages held twice: "),
    "a page of others that is not full": (
        at("length", 1, lambda kv: 6),
        "slot 1 of length 6 would write into page .* which 2 slots hold"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_counts_are_reported(case):
    """Fails if `check_integrity` does not notice this fault, or names another."""
    kv = share(make_cache(length=10), 0, 1, 10)
    cache.check_integrity(kv)
    spoil, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        cache.check_integrity(kv.replace(**spoil(kv)))
