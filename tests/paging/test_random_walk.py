"""Thousands of random operations on a cache, and a fixed walk that must find faults.

`paged_walk` says what is compared after every operation.
"""

import collections

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import paged_walk
import pytest
from hypothesis import strategies as st
from paged_walk import CAPACITY, COMPILED, ROWS, SLOTS, WIDTH

from spec_jax.model.row_model import CACHE_KINDS
from spec_jax.paging import allocator, cache, static


NUM_WALKS, WALK_LENGTH = 25, 60


def requests_strategy(kind):
    """Returns a strategy of mostly valid requests; some slots or numbers are not."""
    # Each request maps a number of `0 .. 23` into its own range, or just outside it.
    suited = {
        "append": lambda n: (n % (ROWS + 1),),
        "rollback": lambda n: (n % 6 - 1,),
        "declare": lambda n: (n % 6 - 1,),
        "truncate": lambda n: (n - 2,),
        "reserve": lambda n: (n - 1,),
        "register": lambda n: (),
        "release": lambda n: (),
    }
    names = [*suited, *["append"] * 9, *["rollback"] * 3, *["truncate"] * 2, "declare"]
    if kind == "shared":
        suited["share"] = lambda n: (n % (SLOTS + 1), n)
        suited["fork"] = lambda n: (n % SLOTS, n // 2)
        names += ["share", *["fork"] * 5]
    slots = [*range(SLOTS)] * 6 + [-1, SLOTS]

    def request(name, slot, number):
        return name, slot, *suited[name](number)

    return st.builds(
        request, st.sampled_from(names), st.sampled_from(slots), st.integers(0, 23)
    )


@pytest.mark.parametrize("kind", ["paged", "shared"])
def test_random_walks(kind):
    """Fails if any sequence of operations loses a page, or a token's bits."""
    outcomes, traced = collections.Counter(), paged_walk.TRACES.copy()

    @hypothesis.settings(
        max_examples=NUM_WALKS,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        st.lists(requests_strategy(kind), min_size=WALK_LENGTH, max_size=WALK_LENGTH)
    )
    def walk_all(requests):
        walk = paged_walk.Walk(COMPILED, kind)
        opened = [("register", slot) for slot in range(SLOTS)]
        for name, slot, *numbers in [*opened, *requests]:
            if name == "fork":  # Only an empty slot can fork.
                walk.step("truncate", slot, 0)
            outcomes[name, walk.step(name, slot, *numbers)] += 1

    walk_all()
    assert outcomes.total() >= 1500
    # The walk is not vacuous: every operation was done and refused, often.
    for name in ("append", "rollback", "truncate", "declare", "reserve", "register"):
        assert outcomes[name, "done"] >= 5, name
        assert outcomes[name, "refused"] >= 5, name
    if kind == "paged":
        assert outcomes["append", "out_of_pages"] >= 20
        assert outcomes["reserve", "out_of_pages"] >= 5
    else:
        assert outcomes["fork", "done"] >= 20 and outcomes["share", "refused"] >= 10
    traced = paged_walk.TRACES - traced
    assert set(traced.values()) == {1}  # every operation was compiled once


def fixed_requests(kind):
    """Returns a walk without Hypothesis: it fills, rolls back, closes and reopens slots
    and, where pages are shared, begins slots with pages of others."""
    rng = np.random.default_rng(2)
    requests = [("register", slot) for slot in range(SLOTS)]
    for _ in range(60):
        slot = int(rng.integers(SLOTS))
        requests.append(("append", slot, int(rng.integers(ROWS + 1))))
        requests.append(("rollback", slot, int(rng.integers(ROWS))))
        if rng.random() < 0.2:
            requests += [("release", slot), ("register", slot)]
        if kind == "shared" and rng.random() < 0.5:
            source, length = (slot + 1) % SLOTS, int(rng.integers(CAPACITY))
            requests += [("truncate", slot, 0), ("fork", slot, source, length)]
    if kind == "shared":
        requests += [("share", 1, 1, 0), ("share", 1, 0, CAPACITY + 1)]
        for source, slot in ((0, 1), (1, 2)):
            requests += [("append", source, ROWS)] * 2
            requests += [("truncate", slot, 0), ("fork", slot, source, CAPACITY)]
            # A cut within a page that both slots hold.
            requests += [("truncate", slot, 1), ("append", slot, 2)]
    requests += [("register", 1), ("reserve", 1, CAPACITY + 1), ("reserve", 1, -1)]
    requests += [("extend", 1, CAPACITY + 1), ("truncate", 1, CAPACITY)]
    return [*requests, ("truncate", 1, 0), ("release", -1), ("reserve", SLOTS, 1)]


def run_fixed(operations, kind) -> collections.Counter:
    walk, outcomes = paged_walk.Walk(operations, kind), collections.Counter()
    for request in fixed_requests(kind):
        outcomes[walk.step(*request)] += 1
    return outcomes


@pytest.mark.parametrize("kind", [*CACHE_KINDS, "shared"])
def test_the_fixed_walk_passes(kind):
    """Checks that the walk passes without the faults that are planted in it below."""
    outcomes = run_fixed(COMPILED, kind)
    assert outcomes["done"] > 100
    assert outcomes["refused"] >= 6 and outcomes["out_of_pages"] >= 1


def give(change):
    """Returns a patch: `change(before, after, slot)` spoils tables of freed pages."""
    real = allocator._give

    def spoilt(tables, slot, count):
        return change(tables, real(tables, slot, count), slot)

    return allocator, "_give", spoilt


def stale_entry(before, after, slot):
    return (before[0], *after[1:])


def shared_page(tables, slot, count, *, real=allocator._take):
    """Takes pages, but leaves the last one on the free stack: a planted fault."""
    table, owned, stack, num_free = real(tables, slot, count)
    back = num_free + jnp.minimum(count, 1)
    return table, owned, jnp.where(count > 0, tables[2], stack), back


def freed_while_shared(tables, slot, count):
    """Frees a page that other slots still hold: a planted fault."""
    return *GIVE(tables[:4], slot, count), tables[4]


def shared_uncounted(kv, slot, source, length, *, real=paged_walk.share):
    after = real(kv, slot, source, length)
    return after.replace(counts=jnp.minimum(after.counts, 1))


def late_write(kv, layer, *, positions, real=cache.write, **rows):
    return real(kv, layer, positions=positions + 1, **rows)


def one_too_many(kv, slot, new_len, *, real=allocator.truncate):
    return real(kv, slot, jnp.minimum(new_len + 1, kv.length[slot]))


def clears_the_first_page(kv, slot, new_len, *, real=allocator.truncate):
    kv = real(kv, slot, new_len)
    return kv.replace(k=tuple(k.at[slot * WIDTH].set(0) for k in kv.k))


GIVE = allocator._give
MOVES_PAGES = static.StaticKV, "has_shared_pool", True
FAULTS = {
    "paged": {
        "padding rows written to page -1":
            ("append", (cache, "write", paged_walk.wrapping_write)),
        "position off by one": ("append", (cache, "write", late_write)),
        "one position too many": ("truncate", (allocator, "truncate", one_too_many)),
        "stale table entry": ("truncate", give(stale_entry)),
        "page handed out twice": ("append", (allocator, "_take", shared_page)),
    },
    "shared": {
        "released while shared": ("release", (allocator, "_give", freed_while_shared)),
        "owners not counted up": ("share", (paged_walk, "share", shared_uncounted)),
        "written while shared": ("truncate", (
            allocator, "_cuts_shared", lambda kv, row, new_len: jnp.bool_(False))),
        "last page not copied": ("share", (
            cache, "copy_page", lambda kv, source, target: kv)),
    },
    "static": {
        "bytes cleared": ("truncate", (allocator, "truncate", clears_the_first_page)),
        "pages given back": ("truncate", MOVES_PAGES),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fault"), [(kind, fault) for kind in FAULTS for fault in FAULTS[kind]]
)
def test_planted_faults_are_caught(kind, fault, monkeypatch):
    """Negative control: the walk fails where an operation is spoilt."""
    name, (owner, attribute, spoilt) = FAULTS[kind][fault]
    rows = np.zeros(paged_walk.ROWS_SHAPE, np.float32)
    arguments = {
        "truncate": (np.int32(0), np.int32(0)),
        "release": (np.int32(0),),
        "append": (np.int32(0), np.int32(0), rows, rows),
        "share": (np.int32(0), np.int32(0), np.int32(0)),
    }[name]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, spoilt)
        is_walks = name in ("append", "share")
        function = getattr(paged_walk if is_walks else allocator, name)
        planted = jax.jit(lambda *args: function(*args))
        planted = planted.lower(paged_walk.Walk({}, kind).kv, *arguments).compile()
    with pytest.raises((AssertionError, ValueError)):
        run_fixed({**COMPILED, name: planted}, kind)
