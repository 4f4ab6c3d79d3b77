"""Requests to the allocator that fail, and pages that are reused or shared.

`test_random_walk` checks the effect of operations on flags, tables and bytes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_walk import COMPILED, FUNCTIONS, PAGE_SIZE, SIZES, SLOTS

from spec_jax import testing
from spec_jax.paging import allocator, cache


def filled(*lengths, shares=False):
    """Makes a cache of seven pages, and opens a slot for each given length."""
    kv = cache.init(num_pages=7, shares=shares, **SIZES)
    for slot, length in enumerate(lengths):
        kv = COMPILED["register"](kv, slot)
        kv = COMPILED["reserve"](kv, slot, length)
        kv = COMPILED["extend"](kv, slot, length)
    return kv


INVALID = [  # slot 0 holds 9 tokens in 3 pages, slot 1 none, slot 2 is closed
    ("register", (0,), "slot 0 is already registered"),
    ("register", (3,), r"slot 3 is outside \[0, 3\)"),
    ("reserve", (0, -1), r"cannot reserve up to -1 in slot 0 \(registered: True\)"),
    ("reserve", (-1, 0), r"slot -1 is outside \[0, 3\)"),
    ("extend", (0, 13), "slot 0 from 9 to 13: it owns 12 positions"),
    ("truncate", (0, 10), "slot 0 to 10: its length is 9"),
    ("truncate", (2, 0), r"slot 2 to 0: its length is 0 \(registered: False\)"),
    ("release", (2,), "slot 2 is not registered"),
    # The slot that changes, the slot that it shares with, and how many positions.
    ("share", (0, 0, 4), "cannot begin slot 0 with 4 positions of slot 0"),
    ("share", (1, 0, 10), "with 10 positions of slot 0, which has 9"),
    ("share", (1, 0, -1), "with -1 positions of slot 0"),
    ("share", (0, 1, 0), "cannot begin slot 0 with 0 positions"),
]


def test_invalid_requests_raise_outside_jit():
    kv, sharing = filled(9, 0), filled(9, 0, shares=True)
    for name, numbers, words in INVALID:
        with pytest.raises(ValueError, match=words):
            FUNCTIONS[name](sharing if name == "share" else kv, *numbers)
    with pytest.raises(ValueError, match="counts no owners: make it with shares=True"):
        allocator.share(kv, 0, 1, 4)


@pytest.mark.parametrize(
    "name, numbers, error, words",
    [
        ("release", (2,), ValueError, r"on slots \[2\] was invalid"),
        ("release", (3,), ValueError, r"on slots \[0, 1, 2\] was invalid"),
        ("reserve", (1, 17), MemoryError, r"out of pages in slots \[1\]: 2 of 7 pages "
         "of 4 tokens are free, and a slot holds at most 20 tokens"),
    ],
)  # fmt: skip
def test_what_was_flagged_is_raised_at_the_edge(name, numbers, error, words):
    kv = filled(9, 8)
    allocator.check(kv)
    with pytest.raises(error, match=words):
        allocator.check(COMPILED[name](kv, *numbers))


def test_pages_return_in_the_order_of_a_stack():
    """Fails if rollback and re-reservation wander through the pool: the page that was
    freed last must be the next one handed out."""
    state = filled(9, 0)
    kv = COMPILED["reserve"](COMPILED["truncate"](state, 0, 1), 0, 9)
    np.testing.assert_array_equal(kv.page_table, state.page_table)
    np.testing.assert_array_equal(kv.free_pages, state.free_pages)


def test_truncation_cuts_no_page_of_others():
    """Fails if truncation, of one slot or of each, lets a slot write into a page that
    another slot reads."""
    kv = COMPILED["share"](filled(10, 0, shares=True), 1, 0, 10)
    truncate_each = jax.jit(allocator.truncate_each)
    for length in range(9):
        after = COMPILED["truncate"](kv, 1, length)
        wanted, asked = jnp.full(SLOTS, length), jnp.arange(SLOTS) == 1
        testing.assert_same_bits(truncate_each(kv, wanted, asked=asked), after)
        is_refused = length % PAGE_SIZE > 0
        assert bool(after.refused[1]) == is_refused
        assert int(after.length[1]) == (10 if is_refused else length)
        cache.check_integrity(after)
    with pytest.raises(ValueError, match="or others hold the page there"):
        allocator.truncate(kv, 1, 3)
