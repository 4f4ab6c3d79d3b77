"""`calls.move` against numpy: which bytes of which pools change, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.native import calls
from spec_jax.ops import page_move


P, C, K, H = 7, 4, 2, 6
TABLE = np.array([[5, 0, 2], [3, 6, P]], np.int32)  # the last page does not exist

# Slot, source, target, whether: a chain of moves, each read before it is overwritten,
# the other slot's, one that is not made, and one onto itself.
MOVES = np.array(
    [
        *((0, 3, 1, 1), (0, 4, 3, 1), (0, 9, 4, 1)),
        *((1, 6, 0, 1), (1, 0, 6, 1)),
        *((0, 10, 11, 0), (1, 2, 2, 1)),
    ],
    np.int32,
)


def pools_of(rng, dtype, count=3):
    """Ordinary values, and NaN with payloads."""
    shape = P, C, K, H
    words = rng.integers(2**16, size=(count, *shape), dtype=np.uint16)
    if dtype == "float32":
        words = words.astype(np.uint32) << 16 | 0x1234
    to_values = lambda x: jax.lax.bitcast_convert_type(jnp.asarray(x), dtype)
    return tuple(map(to_values, words))


def moved_by_hand(pools, moves, table=TABLE):
    """The bits of the pools after the moves, one place after the other."""

    def row(slot, place):
        inside = 0 <= slot < len(table) and 0 <= place < table.shape[1] * C
        if not inside or table[slot, place // C] >= P:
            return None
        return table[slot, place // C], place % C

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


def arguments_of(moves):
    slots, sources, targets, is_made = jnp.asarray(moves, jnp.int32).T
    where = {"page_table": jnp.asarray(TABLE), "slots": slots}
    return where | {"sources": sources, "targets": targets, "moves": is_made > 0}


def move(pools, moves, isa=None):
    """The native result."""
    call = jax.jit(calls.move, static_argnames="isa")
    return call(pools, **arguments_of(moves), isa=isa)


def assert_moved(pools, expected):
    for pool, bits in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(testing.bits(pool)), bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_places_are_copied_in_all_pools(rng, isa, dtype):
    """Fails if a byte is moved wrongly, or one that is not asked for."""
    pools = pools_of(rng, dtype)
    assert_moved(move(pools, MOVES, isa), moved_by_hand(pools, MOVES))


def test_reading_after_writing_is_caught(rng):
    """Negative control: copies one by one are another result."""
    pools = pools_of(rng, "bfloat16")
    one_by_one = pools
    for one in MOVES:
        one_by_one = move(one_by_one, one[None])
    with pytest.raises(AssertionError):
        assert_moved(one_by_one, moved_by_hand(pools, MOVES))


def test_places_that_do_not_exist(rng, isa):
    """Fails if memory beyond a table or a pool is read or written."""
    places = [-1, -(2**31), 12, 2**31 - 1]
    moves = [(0, place, 2, 1) for place in places[:1]]
    moves += [(0, 1, place, 1) for place in places]
    moves += [(slot, 1, 2, 1) for slot in (-1, 2, 2**31 - 1)]
    moves += [(1, 9, 5, 1), (1, 5, 9, 1)]
    pools = pools_of(rng, "bfloat16")
    assert_moved(move(pools, moves, isa), moved_by_hand(pools, moves))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_implementations_agree(rng, dtype):
    """Fails if implementations of the op differ in a bit."""
    pools = pools_of(rng, dtype)
    native, xla = (
        page_move.page_move(pools, **arguments_of(MOVES), impl=impl)
        for impl in ("native", "xla")
    )
    for one, other in zip(native, xla, strict=True):
        testing.assert_same_bits(one, other)


def test_bad_input(rng):
    """Fails if shapes or dtypes that the kernel would misread are taken."""
    pools = pools_of(rng, "float32")
    with pytest.raises(ValueError, match="pool has shape"):
        move((*pools, pools[0][1:]), MOVES)
    with pytest.raises(ValueError, match="page_table has shape"):
        calls.move(pools, **arguments_of(MOVES) | {"page_table": jnp.asarray(TABLE)[0]})
    with pytest.raises(NotImplementedError, match="one of them"):
        move((pools[0], pools[1].astype("bfloat16")), MOVES)


def test_vmap_is_each_call_alone(rng, isa):
    """Fails if a kernel, one that writes in place too, cannot be mapped over."""
    values = rng.normal(size=(3, 2, P, C, K, H)).astype(np.float32)
    pools = [tuple(map(jnp.asarray, own)) for own in values]
    table, columns = jnp.asarray(TABLE), jnp.asarray(MOVES.T)

    def one(pools, sources):
        slots, _, targets, moves = columns
        return calls.move(
            pools,
            page_table=table,
            slots=slots,
            sources=sources,
            targets=targets,
            moves=moves != 0,
            isa=isa,
        )

    sources = jnp.stack([columns[1] + n for n in range(3)])
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *pools)
    mapped = jax.jit(jax.vmap(one))(stacked, sources)
    for n, own in enumerate(pools):
        alone = jax.jit(one)(own, sources[n])
        testing.assert_same_bits(tuple(pool[n] for pool in mapped), alone)
    logits = jnp.asarray(rng.normal(size=(3, 2, 70)), jnp.float32)
    best = jax.vmap(lambda x: calls.argmax(x, num_active=jnp.int32(2), isa=isa))(logits)
    np.testing.assert_array_equal(best, logits.argmax(-1))
