"""A static cache: the same operations, no page moves, truncation moves a length.

The walk holds the whole state against NumPy arrays that are indexed by slot and
position; the planted faults must break it.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import paged_walk
import pytest
from paged_walk import HEAD_DIM, HEADS, LAYERS, PAGE_SIZE, ROWS_SHAPE, SLOTS

from spec_jax import testing
from spec_jax.paging import allocator, cache, static


WIDTH = 4
CAPACITY = WIDTH * PAGE_SIZE
SIZES = {
    "num_layers": LAYERS,
    "num_slots": SLOTS,
    "page_size": PAGE_SIZE,
    "pages_per_slot": WIDTH,
    "num_kv_heads": HEADS,
    "head_dim": HEAD_DIM,
    "dtype": "float32",
}
# Not `paged_walk.COMPILED`: that counts its traces, those of a paged cache.
COMPILED = {name: jax.jit(paged_walk.FUNCTIONS[name]) for name in paged_walk.FUNCTIONS}
NUM_WALKS, WALK_LENGTH = 30, 40


def filled(*lengths, dtype="float32"):
    """Open slots of the given lengths; the bytes are random, and all different."""
    kv = static.init(**(SIZES | {"dtype": dtype}))
    for slot, length in enumerate(lengths):
        kv = allocator.extend(allocator.register(kv, slot), slot, length)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, LAYERS, *kv.k[0].shape)).astype(dtype)
    return kv.replace(k=tuple(map(jnp.asarray, k)), v=tuple(map(jnp.asarray, v)))


class Walk:
    """One walk, and what the cache should be: arrays by slot and position."""

    def __init__(self, operations):
        self.operations = operations
        self.kv = jax.tree.map(np.asarray, static.init(**SIZES))
        self.bytes = np.zeros((LAYERS, 2, SLOTS, CAPACITY, HEADS, HEAD_DIM), np.float32)
        self.length = [0] * SLOTS
        self.is_open = [False] * SLOTS
        self.out_of_pages = [False] * SLOTS
        self.rng = np.random.default_rng(1)

    def step(self, name, slot, *numbers) -> str:
        """Runs one operation, compares everything and returns its outcome."""
        rows = ()
        if name == "append":
            rows = tuple(self.rng.standard_normal((2, *ROWS_SHAPE), np.float32))
        arguments = [np.int32(number) for number in (slot, *numbers)]
        after = self.operations[name](self.kv, *arguments, *rows)
        self.kv = jax.tree.map(np.asarray, after)
        outcome = self._expect(name, slot, *numbers, *rows)

        static.check_integrity(self.kv)
        refused = outcome == "refused"
        assert self.kv.length.tolist() == self.length
        assert self.kv.registered.tolist() == self.is_open
        assert self.kv.out_of_pages.tolist() == self.out_of_pages
        assert self.kv.refused.tolist() == [
            refused and (each == slot or slot not in range(SLOTS))
            for each in range(SLOTS)
        ]
        pool = paged_walk.pool_of(self.kv).reshape(self.bytes.shape)
        testing.assert_same_bits(pool, self.bytes, what=name)
        self.kv = self.kv.replace(refused=np.zeros(SLOTS, bool))
        return outcome

    def _expect(self, name, slot, *numbers):
        if slot not in range(SLOTS):
            return "refused"
        if name == "register":
            return self._register(slot)
        if name == "append":
            return self._append(slot, *numbers)
        if not self.is_open[slot]:
            return "refused"
        if name == "release":
            self.is_open[slot], self.length[slot] = False, 0
            return "done"
        (number,) = numbers
        if name == "reserve":
            return self._reserve(slot, number)
        least = {"truncate": 0, "extend": self.length[slot]}[name]
        most = {"truncate": self.length[slot], "extend": CAPACITY}[name]
        if not least <= number <= most:
            return "refused"
        self.length[slot] = number
        return "done"

    def _register(self, slot):
        if self.is_open[slot]:
            return "refused"
        self.is_open[slot], self.out_of_pages[slot] = True, False
        return "done"

    def _reserve(self, slot, up_to):
        if up_to < 0:
            return "refused"
        self.out_of_pages[slot] = up_to > CAPACITY
        return "out_of_pages" if self.out_of_pages[slot] else "done"

    def _append(self, slot, count, k, v):
        start = self.length[slot]
        outcome = "refused"
        if self.is_open[slot]:
            outcome = self._reserve(slot, start + count)
        # A closed slot has its pages still, and what is written there means nothing.
        if not self.out_of_pages[slot]:
            rows = np.stack([k, v], axis=1)[:, :, :count]
            self.bytes[:, :, slot, start : start + count] = rows
        if outcome == "done":
            self.length[slot] += count
        return outcome


def fixed_walk(operations) -> list[int]:
    """A walk that does not depend on Hypothesis: the lengths that it ends with."""
    walk = Walk(operations)
    for slot in (0, 1, 2):
        walk.step("register", slot)
        walk.step("append", slot, 5)
    for request in (
        ("truncate", 1, 3),
        ("append", 1, 6),
        ("release", 0),
        ("register", 0),
        ("append", 0, 2),
        ("append", 2, 7),
        ("append", 2, 7),
        ("register", 1),
        ("reserve", 1, CAPACITY + 1),
        ("reserve", 1, -1),
        ("extend", 1, 8),
        ("truncate", 1, 10),
        ("release", -1),
        ("reserve", SLOTS, 1),
    ):
        walk.step(*request)
    return walk.kv.length.tolist()


def test_the_fixed_walk_passes():
    """The walk that the planted faults below must break is itself in order."""
    # Released and begun anew; truncated to 3 and 6 more; 5 and 7, and no room for 7.
    assert fixed_walk(COMPILED) == [2, 9, 12]


def clearing(kv, slot, new_len, *, real=allocator.truncate):
    kv = real(kv, slot, new_len)
    return kv.replace(k=tuple(k.at[slot * WIDTH].set(0) for k in kv.k))


def late_write(kv, layer, *, positions, real=cache.write, **rows):
    return real(kv, layer, positions=positions + 1, **rows)


FAULTS = {
    "bytes cleared": ("truncate", (paged_walk.FUNCTIONS, "truncate", clearing)),
    "one position too many": (
        "truncate",
        (
            paged_walk.FUNCTIONS,
            "truncate",
            lambda kv, slot, n: allocator.truncate(
                kv, slot, jnp.minimum(n + 1, kv.length[slot])
            ),
        ),
    ),
    "pages given back": ("truncate", (static.StaticKV, "pages_change_hands", True)),
    "pages given back on release": (
        "release",
        (static.StaticKV, "pages_change_hands", True),
    ),
    "position off by one": ("append", (cache, "write", late_write)),
    "padding rows written": ("append", (cache, "write", paged_walk.wrapping_write)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    """Negative control: the walk fails where an operation is spoilt."""
    name, (owner, attribute, spoilt) = FAULTS[fault]
    with monkeypatch.context() as patch:
        if isinstance(owner, dict):
            patch.setitem(owner, attribute, spoilt)
        else:
            patch.setattr(owner, attribute, spoilt)
        rows = np.zeros(ROWS_SHAPE, np.float32)
        more = {"truncate": (0,), "release": (), "append": (0, rows, rows)}[name]
        function = paged_walk.FUNCTIONS[name]
        planted = jax.jit(lambda *arguments: function(*arguments))
        kv = jax.tree.map(np.asarray, static.init(**SIZES))
        arguments = [np.int32(x) if isinstance(x, int) else x for x in (0, *more)]
        planted = planted.lower(kv, *arguments).compile()
    with pytest.raises((AssertionError, ValueError)):
        fixed_walk({**COMPILED, name: planted})


def test_out_of_room_is_data():
    """Fails if a full slot loses what it has, or takes its neighbour's room."""
    kv = filled(9, 0)
    allocator.check(allocator.reserve(kv, 0, CAPACITY))
    after = allocator.reserve(kv, 0, CAPACITY + 1)
    assert after.out_of_pages.tolist() == [True, False, False]
    testing.assert_same_bits(after.replace(out_of_pages=kv.out_of_pages), kv)
    with pytest.raises(MemoryError, match="a slot holds at most 16 tokens"):
        allocator.check(after)
    allocator.check(allocator.reserve(after, 0, CAPACITY))


@pytest.mark.parametrize("name", [*SIZES][:-1])
def test_impossible_sizes_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        static.init(**(SIZES | {name: 0}))


def test_broken_tables_are_reported():
    """Negative control of the invariant: slots that exchange pages, a lost length."""
    kv = filled(9, 0)
    static.check_integrity(kv)
    exchanged = kv.replace(page_table=kv.page_table[jnp.array([1, 0, 2])])
    with pytest.raises(ValueError, match=r"slots \[0, 1\] do not own their own pages"):
        static.check_integrity(exchanged)
    for slot, length, message in (
        (1, 17, "slot 1: length 17 exceeds its 4 pages of 4"),
        (2, 1, "slot 2 is not registered but holds 1 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            static.check_integrity(kv.replace(length=kv.length.at[slot].set(length)))


LARGE = SIZES | {"page_size": 64, "pages_per_slot": 64, "head_dim": 32}


def assert_constant_cost(operation) -> None:
    """Raises unless the compiled program has no loop and reads no keys or values."""
    kv = jax.eval_shape(lambda: static.init(**LARGE))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(operation, donate_argnums=0).lower(kv, number, number).compile()
    pool_bytes = sum(x.size * 4 for x in (*kv.k, *kv.v))
    aliased = compiled.memory_analysis().alias_size_in_bytes
    if aliased < pool_bytes:
        raise AssertionError(f"{aliased} of {pool_bytes} bytes keep their place")
    if re.search(r"\bwhile\(", compiled.as_text()):
        raise AssertionError("the program has a loop")
    touched = compiled.cost_analysis()["bytes accessed"]
    if touched > 1024:
        raise AssertionError(f"the program touches {touched} bytes")


def test_truncation_moves_a_length_and_nothing_else():
    """Fails if its cost follows the positions dropped, or a key is read."""
    assert_constant_cost(allocator.truncate)
    kv = filled(9, 3)
    after = allocator.truncate(kv, 0, 2)
    assert after.length.tolist() == [2, 3, 0]
    testing.assert_same_bits(after.replace(length=kv.length), kv)


def test_costs_are_noticed(monkeypatch):
    """Negative control: clearing bytes, giving pages back, and a loop."""
    with pytest.raises(AssertionError, match="bytes"):
        assert_constant_cost(clearing)
    monkeypatch.setattr(static.StaticKV, "pages_change_hands", True)
    with pytest.raises(AssertionError, match="bytes"):
        assert_constant_cost(lambda *arguments: allocator.truncate(*arguments))

    def one_by_one(kv, slot, new_len):
        def step(_, kv):
            return allocator.truncate(kv, slot, kv.length[slot] - 1)

        return jax.lax.fori_loop(0, kv.length[slot] - new_len, step, kv)

    with pytest.raises(AssertionError, match="a loop"):
        assert_constant_cost(one_by_one)
