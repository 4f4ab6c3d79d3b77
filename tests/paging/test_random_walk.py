"""Thousands of random operations on a cache, in which planted faults must be found.

`paged_walk` says what is compared after every operation.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import paged_walk
import pytest
from paged_walk import CAPACITY, COMPILED, PAGE_SIZE, ROWS, SLOTS, WIDTH

from spec_jax.model.row_model import CACHE_KINDS
from spec_jax.paging import allocator, cache


NUM_WALKS, WALK_LENGTH = 40, 60
REQUESTS = {
    "append": (13, lambda n: (n % (ROWS + 1),)),
    "rollback": (4, lambda n: (n % 6 - 1,)),
    "declare": (2, lambda n: (n % 6 - 1,)),
    "truncate": (3, lambda n: (n - 2,)),
    "reserve": (2, lambda n: (n - 1 if n < 23 else 2**31 - 1,)),
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
        slot = int(rng.choice(slots))
        if name == "fork":  # Only an empty slot can.
            yield "truncate", slot, 0
        yield name, slot, *REQUESTS[name][1](int(rng.integers(24)))
    if kind == "shared":
        yield from (("truncate", slot, 0) for slot in range(SLOTS))
        yield from [("append", 0, ROWS), ("append", 0, ROWS)]
        yield from [("reserve", 0, CAPACITY), ("reserve", 1, CAPACITY - PAGE_SIZE)]
        # No page is free for a copy, which full pages do not need.
        yield from [("share", 2, 0, 6), ("share", 2, 0, 8)]


def run(operations, kind, num_walks=NUM_WALKS) -> collections.Counter:
    """Returns how often each operation was done, refused and out of pages."""
    rng, outcomes = np.random.default_rng(2), collections.Counter()
    for _ in range(num_walks):
        walk = paged_walk.Walk(operations, kind)
        for name, *numbers in walk_of(rng, kind):
            outcomes[name, walk.step(name, *numbers)] += 1
    return outcomes


@pytest.mark.parametrize("kind", [*CACHE_KINDS, "shared"])
def test_random_walks(kind):
    """Fails if any sequence of operations loses a page, or a token's bits."""
    outcomes = run(COMPILED, kind)
    # The walks are not vacuous: every operation was done and refused, often.
    for name in REQUESTS:
        if name not in ("share", "fork"):
            assert outcomes[name, "done"] >= 5, name
            assert outcomes[name, "refused"] >= 5, name
    assert outcomes["reserve", "out_of_pages"] >= 5
    if kind != "static":
        assert outcomes["append", "out_of_pages"] >= 20
    if kind == "shared":
        assert outcomes["fork", "done"] >= 20 and outcomes["share", "refused"] >= 10
        assert outcomes["share", "out_of_pages"] >= NUM_WALKS
        assert outcomes["share", "done"] >= NUM_WALKS


def late_write(kv, layer, *, positions, real=cache.write, **rows):
    return real(kv, layer, positions=positions + 1, **rows)


def shared_page(tables, slot, count, *, real=allocator._take):
    """Takes pages, but leaves the last one on the free stack."""
    table, owned, stack, num_free = real(tables, slot, count)
    back = num_free + jnp.minimum(count, 1)
    return table, owned, jnp.where(count > 0, tables[2], stack), back


def clears_the_first_page(kv, slot, new_len, *, real=paged_walk.truncate):
    kv = real(kv, slot, new_len)
    return kv.replace(k=tuple(k.at[slot * WIDTH].set(0) for k in kv.k))


ROWS_OF_ZEROS = np.zeros(paged_walk.ROWS_SHAPE, np.float32)
ARGUMENTS = {
    "append": (np.int32(0), np.int32(0), ROWS_OF_ZEROS, ROWS_OF_ZEROS),
    "truncate": (np.int32(0), np.int32(0)),
    "share": (np.int32(0), np.int32(0), np.int32(0)),
}
FAULTS = {
    "position off by one": ("paged", "append", cache, "write", late_write),
    "page handed out twice": ("paged", "append", allocator, "_take", shared_page),
    "last page not copied":
        ("shared", "share", cache, "copy_page", lambda kv, source, target: kv),
    "bytes cleared":
        ("static", "truncate", paged_walk, "truncate", clears_the_first_page),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    """Negative control: a walk fails where an operation is spoilt."""
    kind, name, owner, attribute, spoilt = FAULTS[fault]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, spoilt)
        function = getattr(paged_walk, name)
        planted = jax.jit(lambda *args: function(*args))
        kv = paged_walk.Walk({}, kind).kv
        planted = planted.lower(kv, *ARGUMENTS[name]).compile()
    with pytest.raises((AssertionError, ValueError)):
        run({**COMPILED, name: planted}, kind)
