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
MOVES = np.array(
    [
        *((0, 3, 1, 1), (0, 4, 3, 1), (0, 9, 4, 1)),
        *((1, 6, 0, 1), (1, 0, 6, 1)),
        *((0, 10, 11, 0), (1, 2, 2, 1)),
    ],
    np.int32,
)


def pools_of(rng, dtype, count=3):
    """Makes pools of random bits: ordinary values, and NaN with payloads."""
    words = rng.integers(2**16, size=(count, P, C, K, H), dtype=np.uint16)
    if dtype == "float32":
        words = words.astype(np.uint32) << 16 | 0x1234
    to_values = lambda x: jax.lax.bitcast_convert_type(jnp.asarray(x), dtype)
    return tuple(map(to_values, words))


def moved_by_hand(pools, moves):
    """Returns the bits of the pools after the moves, made one place after the other."""

    def row(slot, place):
        inside = 0 <= slot < len(TABLE) and 0 <= place < TABLE.shape[1] * C
        if not inside or TABLE[slot, place // C] >= P:
            return None
        return TABLE[slot, place // C], place % C

    all_ = []
    for pool in pools:
        old = np.asarray(testing.bits(pool))
        new = old.copy()
        for slot, source, target, is_made in moves:
            to = row(slot, target)
            if is_made and source != target and to is not None:
                at = row(slot, source)
                new[to] = 0 if at is None else old[at]
        all_.append(new)
    return all_


def move(impl, pools, moves, **changes):
    slots, sources, targets, is_made = jnp.asarray(moves, jnp.int32).T
    where = {"page_table": jnp.asarray(TABLE), "slots": slots, "sources": sources}
    where |= {"targets": targets, "moves": is_made > 0}
    return row_contract.compiled("move", impl)(pools, **(where | changes))


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


def test_bad_input(rng):
    """Fails if shapes or dtypes that the kernel would misread are taken."""
    pools = pools_of(rng, "float32")
    with pytest.raises(ValueError, match="pool has shape"):
        move("portable", (*pools, pools[0][1:]), MOVES)
    with pytest.raises(ValueError, match="page_table has shape"):
        move("portable", pools, MOVES, page_table=jnp.asarray(TABLE)[0])
    with pytest.raises(NotImplementedError, match="one of them"):
        move("portable", (pools[0], pools[1].astype("bfloat16")), MOVES)


def test_vmap_is_each_call_alone(rng):
    """Fails if mapping over a kernel that writes in place fails or mixes its calls."""
    stacked = tuple(map(jnp.asarray, rng.normal(size=(2, 3, P, C, K, H))))
    stacked = jax.tree.map(lambda x: x.astype(jnp.float32), stacked)
    sources = jnp.stack([jnp.asarray(MOVES[:, 1]) + n for n in range(3)])
    one = lambda pools, sources: move("portable", pools, MOVES, sources=sources)
    mapped = jax.jit(jax.vmap(one))(stacked, sources)
    for n in range(3):
        alone = one(tuple(pool[n] for pool in stacked), sources[n])
        testing.assert_same_bits(tuple(pool[n] for pool in mapped), alone)


def take(impl, table, index):
    index = jnp.asarray(index, jnp.int32)
    call = row_contract.compiled("embed", impl)
    return np.asarray(call(table, index, num_active=jnp.int32(len(index))))


@pytest.mark.parametrize("width", [1, 7, 320])
@by_xla_and_native
def test_rows_are_the_tables(rng, impl, width):
    """Fails if a bit of a row changes, or another row is taken."""
    for dtype in ("float32", "bfloat16"):
        table = rng.normal(size=(11, width)).astype(jnp.dtype(dtype))
        table[3, 0], table[4], table[5], table[6] = np.nan, np.inf, -np.inf, -0.0
        index = np.concatenate([np.arange(11), rng.integers(11, size=9)])
        rows = take(impl, jnp.asarray(table), index)
        testing.assert_same_bits(rows, table[index])
        with pytest.raises(AssertionError):  # Negative control: the row beside it.
            testing.assert_same_bits(rows, table[index - 1])


@pytest.mark.parametrize("impl", emulation.every(), indirect=True)
def test_no_such_entry_is_nan(rng, impl):
    """Fails if memory outside the table, or a padding row of its panels, is read."""
    table = jnp.asarray(rng.normal(size=(11, 5)), jnp.float32)
    rows = take(impl, table, [11, 2**31 - 1, -1, -(2**31), 1])
    assert np.isnan(rows[:4]).all()
    testing.assert_same_bits(rows[4], np.asarray(table[1]))
    with pytest.raises(NotImplementedError, match="float32 or bfloat16"):
        take(impl, table.astype(jnp.float16), [1])
