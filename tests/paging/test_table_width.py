"""The page table is a limit of its own, beside the pool."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.paging import allocator, cache


PAGE_SIZE, WIDTH = 4, 2


def opened() -> cache.PagedKV:
    """One open slot, whose table is narrower than its pool."""
    kv = cache.init(
        num_layers=1,
        num_slots=1,
        num_pages=WIDTH + 3,
        page_size=PAGE_SIZE,
        pages_per_slot=WIDTH,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
    )
    return allocator.register(kv, 0)


def test_a_table_narrower_than_the_pool_is_the_limit():
    """Fails if pages are taken that the table has no column for: nobody owns them."""
    before = opened()
    after = allocator.reserve(before, 0, WIDTH * PAGE_SIZE + 1)
    np.testing.assert_array_equal(after.out_of_pages, [True])
    testing.assert_same_bits(after.replace(out_of_pages=before.out_of_pages), before)
    with pytest.raises(MemoryError, match="a slot holds at most 8 tokens"):
        allocator.check(after)


def test_the_whole_table_can_be_owned():
    """Negative control: one position less is granted, and the last column is used."""
    kv = allocator.reserve(opened(), 0, WIDTH * PAGE_SIZE)
    allocator.check(kv)
    cache.check_integrity(kv)
    assert (np.asarray(kv.page_table) < kv.num_pages).all()
    assert int(kv.num_owned[0]) == WIDTH
    kv = allocator.extend(kv, 0, jnp.int32(WIDTH * PAGE_SIZE))
    assert int(kv.length[0]) == WIDTH * PAGE_SIZE
