"""Requests to the allocator that fail, and pages that are reused or shared.

`test_random_walk` checks the effect of operations on flags, tables and bytes.
"""

import numpy as np
import page_tables
import pytest
from paged_walk import COMPILED, PAGE_SIZE, SIZES

from spec_jax.paging import allocator, cache


def filled(*lengths, shares=False):
    """Makes a cache of seven pages, whose first slots have these lengths."""
    kv = cache.init(num_pages=7, shares=shares, **SIZES)
    for slot, length in enumerate(lengths):
        kv = COMPILED["extend"](COMPILED["reserve"](kv, slot, length), slot, length)
    return kv


def test_a_cache_that_counts_no_owners_shares_no_page():
    with pytest.raises(ValueError, match="counts no owners: make it with shares=True"):
        allocator.share(filled(9, 0), 0, 1, 4)


def test_pages_return_in_the_order_of_a_stack():
    """Fails if rollback and re-reservation wander through the pool: the page that was
    freed last must be the next one handed out."""
    state = filled(9, 0)
    kv = COMPILED["reserve"](COMPILED["truncate"](state, 0, 1), 0, 9)
    np.testing.assert_array_equal(kv.page_table, state.page_table)
    np.testing.assert_array_equal(kv.free_pages, state.free_pages)


def test_truncation_cuts_no_page_of_others():
    """Fails if truncation lets a slot write into a page that another slot reads."""
    kv = COMPILED["share"](filled(10, 0, shares=True), 1, 0, 10)
    for length in range(9):
        after = COMPILED["truncate"](kv, 1, length)
        is_refused = length % PAGE_SIZE > 0
        assert bool(after.refused[1]) == is_refused
        assert int(after.length[1]) == (10 if is_refused else length)
        page_tables.check_integrity(after)
