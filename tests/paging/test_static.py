"""A static cache: the same operations, no page moves, truncation moves a length.

What operations do to tables and bytes is in `test_random_walk`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_walk import LAYERS, PAGE_SIZE, SIZES, WIDTH

from spec_jax import testing
from spec_jax.paging import allocator, static


CAPACITY = WIDTH * PAGE_SIZE


def filled(*lengths, dtype="float32"):
    """Open slots of the given lengths; the bytes are random, and all different."""
    kv = static.init(**(SIZES | {"dtype": dtype}))
    for slot, length in enumerate(lengths):
        kv = allocator.extend(allocator.register(kv, slot), slot, length)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, LAYERS, *kv.k[0].shape)).astype(dtype)
    return kv.replace(k=tuple(map(jnp.asarray, k)), v=tuple(map(jnp.asarray, v)))


def clearing(kv, slot, new_len, *, real=allocator.truncate):
    kv = real(kv, slot, new_len)
    return kv.replace(k=tuple(k.at[slot * WIDTH].set(0) for k in kv.k))


def test_out_of_room_is_data():
    """Fails if a full slot loses what it has, or takes its neighbour's room."""
    kv = filled(9, 0)
    allocator.check(allocator.reserve(kv, 0, CAPACITY))
    after = allocator.reserve(kv, 0, CAPACITY + 1)
    assert after.out_of_pages.tolist() == [True, False, False]
    testing.assert_same_bits(after.replace(out_of_pages=kv.out_of_pages), kv)
    with pytest.raises(MemoryError, match="a slot holds at most 20 tokens"):
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
        (1, 21, "slot 1: length 21 exceeds its 5 pages of 4"),
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
    monkeypatch.setattr(static.StaticKV, "has_shared_pool", True)
    with pytest.raises(AssertionError, match="bytes"):
        assert_constant_cost(lambda *arguments: allocator.truncate(*arguments))

    def one_by_one(kv, slot, new_len):
        def step(_, kv):
            return allocator.truncate(kv, slot, kv.length[slot] - 1)

        return jax.lax.fori_loop(0, kv.length[slot] - new_len, step, kv)

    with pytest.raises(AssertionError, match="a loop"):
        assert_constant_cost(one_by_one)
