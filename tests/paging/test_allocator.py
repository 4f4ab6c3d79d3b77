"""Requests to the allocator that fail, and the order in which pages are reused.

`test_random_walk` checks the effect of operations on tables and bytes.
"""

import jax
import numpy as np
import paged_walk
import pytest

from spec_jax import testing
from spec_jax.paging import allocator, cache


PAGE_SIZE, NUM_PAGES, WIDTH = 4, 7, 5
OPERATIONS = paged_walk.FUNCTIONS
COMPILED = {name: jax.jit(operation) for name, operation in OPERATIONS.items()}


def apply(kv, name, slot, *numbers):
    """Runs the operation under `jit`, as the round loop does."""
    return COMPILED[name](kv, *(np.int32(number) for number in (slot, *numbers)))


def filled(*lengths, shares=False):
    """Makes a cache of three slots, and opens one for each given length."""
    kv = cache.init(
        num_layers=1, num_slots=3, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
        pages_per_slot=WIDTH, num_kv_heads=1, head_dim=2, dtype="float32",
        shares=shares,
    )  # fmt: skip
    for slot, length in enumerate(lengths):
        kv = apply(kv, "register", slot)
        kv = apply(kv, "reserve", slot, length)
        kv = apply(kv, "extend", slot, length)
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


def test_invalid_requests():
    """Fails unless a request raises outside `jit`, and inside only sets a flag."""
    for name, (slot, *numbers), words in INVALID:
        state = filled(9, 0, shares=name == "share")
        with pytest.raises(ValueError, match=words):
            OPERATIONS[name](state, slot, *numbers)
        after = apply(state, name, slot, *numbers)
        # A request for a slot that does not exist flags every slot.
        flagged = [slot] if slot in range(3) else [0, 1, 2]
        assert np.flatnonzero(after.refused).tolist() == flagged
        testing.assert_same_bits(after.replace(refused=state.refused), state)
        said = str(flagged).replace("[", r"\[").replace("]", r"\]")
        with pytest.raises(ValueError, match=f"on slots {said} was invalid"):
            allocator.check(after)


def test_a_slot_out_of_pages_is_data_and_recovers():
    """Fails if the slot loses its pages, if the largest position overflows, or if the
    flag stays after another slot made room."""
    before = filled(9, 8)
    for up_to in (17, 2**31 - 1):
        kv = apply(before, "reserve", 1, up_to)
        assert kv.out_of_pages.tolist() == [False, True, False]
        testing.assert_same_bits(kv.replace(out_of_pages=before.out_of_pages), before)
        message = (
            r"out of pages in slots \[1\]: 2 of 7 pages of 4 tokens are free, and a "
            "slot holds at most 20 tokens"
        )
        with pytest.raises(MemoryError, match=message):
            allocator.check(kv)
    kv = apply(apply(kv, "release", 0), "reserve", 1, 17)
    allocator.check(kv)
    cache.check_integrity(kv)
    np.testing.assert_array_equal(kv.num_owned, [0, 5, 0])


def test_pages_return_in_the_order_of_a_stack():
    """Fails if rollback and re-reservation wander through the pool: the page that was
    freed last must be the next one handed out."""
    state = filled(9, 0)
    kv = apply(apply(state, "truncate", 0, 1), "reserve", 0, 9)
    np.testing.assert_array_equal(kv.page_table, state.page_table)
    np.testing.assert_array_equal(kv.free_pages, state.free_pages)
