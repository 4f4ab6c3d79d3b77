"""Rows moved in pages, and taken from a table, by XLA and native kernels: as bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import emulation
from ops import row_contract

from spec_jax import testing


by_xla_and_native = pytest.mark.parametrize(
    "impl", ["xla", "native", *emulation.every()], indirect=True
)
P, C, K, H = 7, 4, 2, 6
TABLE = np.array([[5, 0, 2], [3, 6, P]], np.int32)  # the last page does not exist

# Slot, source, target, whether it is made: a chain of moves, each read before it is
# overwritten; an exchange in the other slot; a move not made; and one onto itself.
MOVES = np.int32([
    (0, 3, 1, 1), (0, 4, 3, 1), (0, 9, 4, 1), (1, 6, 0, 1), (1, 0, 6, 1),
    (0, 10, 11, 0), (1, 2, 2, 1),
])  # fmt: skip


def pools_of(rng, dtype, count=3):
    """Makes pools of random bits: ordinary values, and NaN with payloads."""
    words = rng.integers(2**16, size=(count, P, C, K, H), dtype=np.uint16)
    if dtype == "float32":
        words = words.astype(np.uint32) << 16 | 0x1234
    to_values = lambda x: jax.lax.bitcast_convert_type(jnp.asarray(x), dtype)
    return tuple(map(to_values, words))


PLACES = {
    (slot, page * C + offset): (TABLE[slot, page], offset)
    for slot, page, offset in np.ndindex(*TABLE.shape, C)
    if TABLE[slot, page] < P
}
"""Where the places of slots lie in a pool."""


def moved_by_hand(pools, moves):
    """Returns the bits of the pools after the moves, made one place after the other."""
    all_ = []
    for pool in pools:
        old = np.asarray(testing.bits(pool))
        new = old.copy()
        for slot, source, target, is_made in moves:
            to, at = PLACES.get((slot, target)), PLACES.get((slot, source))
            if is_made and source != target and to is not None:
                new[to] = 0 if at is None else old[at]
        all_.append(new)
    return all_


def move(impl, pools, moves):
    slots, sources, targets, is_made = jnp.asarray(moves, jnp.int32).T
    where = {"page_table": jnp.asarray(TABLE), "slots": slots, "sources": sources}
    where |= {"targets": targets, "moves": is_made > 0}
    return row_contract.compiled("move", impl)(pools, **where)


def assert_moved(pools, expected):
    for pool, bits in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(testing.bits(pool)), bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@by_xla_and_native
def test_places_are_copied_in_all_pools(rng, impl, dtype):
    """Fails if a byte is moved wrongly, or without being asked for."""
    pools = pools_of(rng, dtype)
    expected = moved_by_hand(pools, MOVES)
    assert_moved(move(impl, pools, MOVES), expected)
    for one in MOVES:  # Negative control: one by one, copies differ.
        pools = move(impl, pools, one[None])
    with pytest.raises(AssertionError):
        assert_moved(pools, expected)


@by_xla_and_native
def test_places_that_do_not_exist(rng, impl):
    """Fails if memory beyond a table or a pool is read or written."""
    places = [-1, -(2**31), 12, 2**31 - 1]
    moves = [(0, place, 2, 1) for place in places[:1]]
    moves += [(0, 1, place, 1) for place in places]
    moves += [(slot, 1, 2, 1) for slot in (-1, 2, 2**31 - 1)]
    moves += [(1, 9, 5, 1), (1, 5, 9, 1)]
    pools = pools_of(rng, "bfloat16")
    assert_moved(move(impl, pools, moves), moved_by_hand(pools, moves))


def test_vmap_is_each_call_alone(rng):
    """Fails if mapping over a kernel that writes in place fails or mixes its calls."""
    stacked = tuple(map(jnp.asarray, rng.normal(size=(2, 3, P, C, K, H))))
    stacked = jax.tree.map(lambda x: x.astype(jnp.float32), stacked)
    sources = jnp.stack([jnp.asarray(MOVES[:, 1]) + n for n in range(3)])

    def one(pools, sources):
        return move("portable", pools, jnp.asarray(MOVES).at[:, 1].set(sources))

    mapped = jax.jit(jax.vmap(one))(stacked, sources)
    for n in range(3):
        alone = one(tuple(pool[n] for pool in stacked), sources[n])
        testing.assert_same_bits(tuple(pool[n] for pool in mapped), alone)


@pytest.mark.parametrize("impl", emulation.every(), indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_the_tables(rng, impl, dtype):
    """Fails if a bit of a row changes, another row is taken, or memory outside the
    table, or a padding row of its panels, is read."""
    call = row_contract.compiled("embed", impl)
    for width in (1, 7, 320):
        table = rng.normal(size=(11, width)).astype(jnp.dtype(dtype))
        table[3, 0], table[4], table[5], table[6] = np.nan, np.inf, -np.inf, -0.0
        index = np.concatenate([np.arange(11), rng.integers(11, size=9)])
        index = np.int32([*index, 11, 2**31 - 1, -1, -(2**31)])
        rows = np.asarray(call(table, index, num_active=np.int32(24)))
        testing.assert_same_bits(rows[:20], table[index[:20]])
        assert np.isnan(rows[20:].astype(np.float32)).all()
