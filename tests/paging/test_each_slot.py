"""Operations on all slots at once: the same tables as from one operation a slot."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import page_tables
import pytest

from spec_jax import testing
from spec_jax.paging import allocator, cache
from spec_jax.pallas import allocation_triton


SLOTS, PAGES, PAGE_SIZE, WIDTH = 4, 10, 4, 4
LARGEST = 2**31 - 1

NUM_ROWS = SLOTS * 14

IMPLS = ["xla", "interpret"]
"""Appends and truncations: several XLA operations, or one interpreted Triton kernel."""


def appended(length, number):
    """Returns the end and the count of the rows that a number appends to a slot. -1 and
    `LARGEST` ask for rows that do not follow the slot's last position."""
    start = jnp.where(number == -1, length + 1, length)
    start = jnp.where(number == LARGEST, LARGEST - 2, start)
    count = jnp.where(number == LARGEST, 3, jnp.where(number == -1, 1, number % 14))
    return start + count, count


def append_each(kv, numbers, *, asked, impl="xla"):
    up_to, counts = appended(kv.length, numbers)
    counts = jnp.where(asked, counts, 0)
    how = {"num_rows": NUM_ROWS, "impl": impl}
    return allocator.append_each(kv, up_to, counts, **how)[0]


def append(kv, slot, number):
    """Does as `append_each` for one slot, by single operations of the allocator."""
    up_to, count = appended(kv.length[slot], number)
    start = up_to - count
    refused = kv.refused[slot] | ((count > 0) & (start != kv.length[slot]))
    kv = kv.replace(refused=kv.refused.at[slot].set(refused))
    kv = jax.lax.cond(
        count > 0, lambda kv: allocator.reserve(kv, slot, up_to), lambda kv: kv, kv
    )
    count = jnp.where(kv.out_of_pages[slot], 0, count)
    up_to = start + count
    return jax.lax.cond(
        count > 0, lambda kv: allocator.extend(kv, slot, up_to), lambda kv: kv, kv
    )


SINGLE = (allocator.reserve, allocator.extend, page_tables.truncate, append)
SINGLE = {function.__name__: jax.jit(function) for function in SINGLE}
NAMES = ("reserve", "extend", "truncate")
EACH = {name: getattr(allocator, f"{name}_each") for name in NAMES}
EACH |= {"append": append_each}
WITH_KERNELS = {"truncate", "append"}


@functools.cache
def make(kind: str) -> cache.PagedKV:
    """Makes an empty cache of one tiny layer."""
    sizes = {"num_layers": 1, "num_slots": SLOTS, "page_size": PAGE_SIZE}
    sizes |= {"pages_per_slot": WIDTH, "num_kv_heads": 1, "head_dim": 1}
    sizes |= {} if kind == "static" else {"num_pages": PAGES}
    return cache.init(**sizes, dtype="float32")


def one_by_one(name, kv, numbers, asked):
    """Runs the single operation on each slot for which `asked` is true."""
    for slot in np.flatnonzero(asked).astype(np.int32):
        kv = SINGLE[name](kv, slot, numbers[slot])
    return kv


@functools.cache
def _at_once(operation, **how):
    return jax.jit(
        lambda kv, numbers, asked: operation(kv, numbers, asked=asked, **how)
    )


def run(kind, steps, faults=None, impl="xla") -> collections.Counter:
    """Raises unless each step does to the cache what the single operations do.

    Args:
      steps: name, a number for each slot and whether it is asked.
      faults: operations that replace the allocator's.

    Returns:
      How many slots had each operation refused and out_of_pages.
    """
    outcomes, kv = collections.Counter(), make(kind)
    operations = EACH | (faults or {})
    for name, numbers, asked in steps:
        numbers, asked = np.asarray(numbers, np.int32), np.asarray(asked)
        kv = kv.replace(refused=jnp.zeros_like(kv.refused))
        expected = one_by_one(name, kv, numbers, asked)
        how = {} if name not in WITH_KERNELS or impl == "xla" else {"impl": impl}
        found = _at_once(operations[name], **how)(kv, numbers, asked)
        testing.assert_same_bits(found, expected, what=name)
        page_tables.check_integrity(found)
        is_refused = np.asarray(found.refused)
        is_lost = np.asarray(found.out_of_pages) & ~is_refused
        is_lost &= name in ("reserve", "append")
        outcomes[name, "refused"] += int(np.sum(asked & is_refused))
        outcomes[name, "out_of_pages"] += int(np.sum(asked & is_lost))
        kv = found
    return outcomes


EVERY = [True, True, True, False]
FIXED = (
    ("reserve", [5, 9, 1, 0], EVERY),
    ("extend", [5, 9, 3, 0], [True, True, False, False]),
    ("extend", [7, 10, 3, 0], [False, False, True, False]),
    ("reserve", [9, 16, 8, 0], [True, False, True, False]),
    ("truncate", [4, 2, 1, 0], [False, True, False, False]),
    # Three pages are free; the slots want one, three and one: the second gets none.
    ("reserve", [16, 16, 9, 0], EVERY),
    ("reserve", [16, 16, 16, 0], EVERY),
    ("truncate", [0, 0, 0, 0], [False, True, True, True]),
    # Slot 1 has pages enough for 4 positions: it is no longer out of pages.
    ("reserve", [16, 4, 9, 0], [False, True, False, False]),
    ("extend", [12, -1, 40, 0], EVERY),
    ("reserve", [1, 1, 1, 1], [True] * 4),
    ("append", [3, 4, 9, 0], EVERY),
    ("truncate", [2, 1, 9, 0], EVERY),
    # Slots 1 and 2: rows that do not follow, rows past the largest position.
    ("append", [5, -1, LARGEST, 2], [True] * 4),
    # Slot 0 finds too few pages, and leaves them to slot 1.
    ("append", [9, 6, 0, 0], EVERY),
    ("append", [9, 9, 9, 0], [False] * 4),
)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["paged", "static"])
def test_a_fixed_walk(kind, impl):
    """Checks that the walk passes without the faults that are planted in it below."""
    outcomes = run(kind, FIXED, impl=impl)
    assert outcomes["extend", "refused"] == 2
    assert outcomes["reserve", "out_of_pages"] == (2 if kind == "paged" else 0)
    assert outcomes["append", "refused"] == 2
    assert outcomes["append", "out_of_pages"] == (1 if kind == "paged" else 0)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_slots_are_placed_one_after_another(impl):
    """Fails if a row that has room is left out, moved or given to another slot."""
    append = functools.partial(allocator.append_each, num_rows=NUM_ROWS, impl=impl)
    kv, had = make("paged"), jnp.array([5, 0, 6, 0])
    kv = allocator.append_each(kv, had, had, num_rows=NUM_ROWS)[0]
    # Slots own six of ten pages.
    more = jnp.array([8, 13, 1, 2])
    kv, counts, slots, positions = jax.jit(append)(kv, had + more, more)
    assert counts.tolist() == [8, 0, 1, 2]
    expected = [
        (slot, had[slot] + i) for slot in (0, 2, 3) for i in range(counts[slot])
    ]
    found = list(zip(slots.tolist(), positions.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert kv.length.tolist() == [13, 0, 7, 2]


@pytest.mark.parametrize("name", EACH)
def test_operations_on_all_slots_are_caught(name):
    """Negative control: the operation is done to all slots, those not asked too."""

    def planted(kv, numbers, *, asked):
        return EACH[name](kv, numbers, asked=jnp.ones_like(asked))

    with pytest.raises((AssertionError, ValueError)):
        run("paged", FIXED, faults={name: planted})


def test_a_fault_in_a_kernel_is_caught(monkeypatch):
    """Negative control: the kernel counts a page too many for a length."""
    real = allocation_triton.Pages.covering
    planted = lambda *args: real(*args) + 1
    monkeypatch.setattr(allocation_triton.Pages, "covering", planted)
    # A new function: no other test has traced it without the fault.
    truncate = lambda *args, **how: EACH["truncate"](*args, **how)
    with pytest.raises((AssertionError, ValueError)):
        run("paged", FIXED, faults={"truncate": truncate}, impl="interpret")
