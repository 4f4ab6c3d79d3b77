"""Thousands of random operations on a cache; mutants (`PAGES`) are negative controls.

`paged_walk` says what is compared after every operation.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import page_tables
import paged_walk
import pytest
from paged_walk import CAPACITY, LARGEST, OF_SEVERAL, PAGE_SIZE, ROWS, SLOTS

from spec_jax.paging import allocator


NUM_WALKS, WALK_LENGTH = 40, 60
LATE = {5: 1, 9: LARGEST}
REQUESTS = {
    "append": (13, lambda n: (n % (ROWS + 1), LATE.get(n, 0))),
    "rollback": (4, lambda n: (n % 6 - 1,)),
    "declare": (2, lambda n: (n % 6 - 1,)),
    "truncate": (3, lambda n: (n - 2,)),
    "reserve": (2, lambda n: (n - 1 if n < 23 else LARGEST,)),
    "reserve_each": (2, lambda n: (n - 3,)),
    "extend_each": (2, lambda n: (n - 1,)),
    "share": (2, lambda n: (n % (SLOTS + 1), n)),
    "fork": (5, lambda n: (n % SLOTS, n // 2)),
}
"""How often each is made, and its numbers, made of one in `0 .. 23`: some are wrong."""


def walk_of(rng, kind):
    """Yields the requests of a walk, mostly valid; some slots do not exist."""
    names = [name for name, (often, _) in REQUESTS.items() for _ in range(often)]
    if kind != "shared":
        names = [name for name in names if name not in ("share", "fork")]
    slots = [*range(SLOTS)] * 6 + [-1, SLOTS]
    for name in rng.choice(names, WALK_LENGTH).tolist():
        asked = [int(rng.choice(slots))]
        if paged_walk.RELATIVE.get(name, name) in OF_SEVERAL:
            asked = np.flatnonzero(rng.random(SLOTS) < 0.5).tolist() or [0]
        if name == "fork":  # Only an empty slot can.
            yield "truncate", {asked[0] % SLOTS: (0,)}
        yield name, {slot: REQUESTS[name][1](int(rng.integers(24))) for slot in asked}
    if kind == "shared":
        yield "truncate", dict.fromkeys(range(SLOTS), (0,))
        yield from [("append", {0: (ROWS, 0)})] * 2
        yield "reserve_each", {0: (CAPACITY,), 1: (CAPACITY - PAGE_SIZE,)}
        # No page is free for a copy, which full pages do not need.
        yield from [("share", {2: (0, 6)}), ("share", {2: (0, 8)})]


def run(operations, kind, num_walks=NUM_WALKS) -> collections.Counter:
    """Returns how often each operation was done, refused and out of pages."""
    rng, outcomes = np.random.default_rng(2), collections.Counter()
    for _ in range(num_walks):
        walk = paged_walk.Walk(operations, kind)
        for name, asked in walk_of(rng, kind):
            outcomes.update((name, outcome) for outcome in walk.step(name, asked))
    return outcomes


@pytest.mark.parametrize(
    ("kind", "impl"),
    [
        ("paged", "xla"), ("paged", "interpret"), ("static", "xla"),
        ("static", "interpret"), ("shared", "xla"),
    ],
)  # fmt: skip
def test_random_walks(kind, impl):
    """Fails if any sequence of operations loses a page, or a token's bits."""
    outcomes = run(paged_walk.compiled(impl), kind)
    # The walks are not vacuous: every operation was done and refused, often.
    for name in REQUESTS:
        if name not in ("share", "fork", "append"):
            assert outcomes[name, "done"] >= 5, name
            assert outcomes[name, "refused"] >= 5, name
    assert outcomes["reserve", "out_of_pages"] >= 5
    if kind != "static":
        assert outcomes["append", "out_of_pages"] >= 20
    if kind == "shared":
        assert outcomes["fork", "done"] >= 20 and outcomes["share", "refused"] >= 10
        assert outcomes["share", "out_of_pages"] >= NUM_WALKS
        assert outcomes["share", "done"] >= NUM_WALKS


def test_a_cache_that_counts_no_owners_shares_no_page():
    with pytest.raises(ValueError, match="counts no owners: make it with shares=True"):
        allocator.share(paged_walk.Walk({}).kv, 0, 1, 4)


def test_pages_return_in_the_order_of_a_stack():
    """Fails if rollback and re-reservation wander through the pool: the page that was
    freed last must be the next one handed out."""
    kv = jax.tree.map(jnp.asarray, paged_walk.Walk({}).kv)
    state = allocator.reserve(kv, 0, 9)
    kv = page_tables.truncate(allocator.extend(state, 0, 9), 0, 1)
    kv = allocator.reserve(kv, 0, 9)
    np.testing.assert_array_equal(kv.page_table, state.page_table)
    np.testing.assert_array_equal(kv.free_pages, state.free_pages)
