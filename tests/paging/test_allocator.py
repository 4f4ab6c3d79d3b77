"""Who owns which page: refusals, page boundaries, and use inside a loop."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.paging import allocator, cache


PAGE_SIZE, NUM_PAGES, WIDTH = 4, 7, 5
OPERATIONS = {
    "register": allocator.register,
    "reserve": allocator.reserve,
    "extend": allocator.extend,
    "truncate": allocator.truncate,
    "release": allocator.release,
}
COMPILED = {name: jax.jit(operation) for name, operation in OPERATIONS.items()}


def apply(kv, name, slot, *numbers):
    """The operation under `jit`, as the round loop uses it."""
    return COMPILED[name](kv, *(np.int32(number) for number in (slot, *numbers)))


def new_cache():
    return cache.init(
        num_layers=1,
        num_slots=3,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        pages_per_slot=WIDTH,
        num_kv_heads=1,
        head_dim=2,
        dtype="float32",
    )


def filled(*lengths):
    """Open slots of the given lengths; the bytes are random."""
    kv = new_cache()
    for slot, length in enumerate(lengths):
        kv = apply(kv, "register", slot)
        kv = apply(kv, "reserve", slot, length)
        kv = apply(kv, "extend", slot, length)
    bytes_ = np.random.default_rng(0).standard_normal(kv.k[0].shape, np.float32)
    return kv.replace(k=(jnp.asarray(bytes_),), v=(jnp.asarray(-bytes_),))


INVALID = [  # slot 0 holds 9 tokens in 3 pages, slot 1 none, slot 2 is closed
    ("register", (0,), "slot 0 is already registered"),
    ("reserve", (0, -1), r"cannot reserve up to -1 in slot 0 \(registered: True\)"),
    ("reserve", (2, 4), r"cannot reserve up to 4 in slot 2 \(registered: False\)"),
    ("extend", (0, 13), "slot 0 from 9 to 13: it owns 12 positions"),
    ("extend", (0, 8), "slot 0 from 9 to 8: "),
    ("extend", (2, 0), "slot 2 from 0 to 0: it owns 0 positions"),
    ("truncate", (0, 10), "slot 0 to 10: its length is 9"),
    ("truncate", (0, -1), "slot 0 to -1: its length is 9"),
    ("truncate", (1, 1), "slot 1 to 1: its length is 0"),
    ("truncate", (2, 0), r"slot 2 to 0: its length is 0 \(registered: False\)"),
    ("release", (2,), "slot 2 is not registered"),
]
NO_SUCH_SLOT = [
    (name, (slot, *[0] * (name not in ("register", "release"))))
    for name in OPERATIONS
    for slot in (-1, 3)
]


@pytest.fixture(scope="module")
def state():
    return filled(9, 0)


@pytest.mark.parametrize(("name", "numbers", "message"), INVALID)
def test_invalid_requests(state, name, numbers, message):
    """Raised with the values outside `jit`; under it a flag, and nothing else."""
    with pytest.raises(ValueError, match=message):
        OPERATIONS[name](state, *numbers)
    after = apply(state, name, *numbers)
    flags = [slot == numbers[0] for slot in range(3)]
    np.testing.assert_array_equal(after.refused, flags)
    testing.assert_same_bits(after.replace(refused=state.refused), state)
    message = rf"an operation on slots \[{numbers[0]}\] was invalid"
    with pytest.raises(ValueError, match=message):
        allocator.check(after)


@pytest.mark.parametrize(("name", "numbers"), NO_SUCH_SLOT)
def test_slots_that_do_not_exist(state, name, numbers):
    """Fails if slot -1 is taken for the last one, or a page is lost to slot 3."""
    with pytest.raises(ValueError, match=rf"slot {numbers[0]} is outside \[0, 3\)"):
        OPERATIONS[name](state, *numbers)
    after = apply(state, name, *numbers)
    assert np.asarray(after.refused).all()  # none of them has a flag for it
    testing.assert_same_bits(after.replace(refused=state.refused), state)


def test_valid_requests_raise_no_flag(state):
    """Negative control of the flags, and eager calls agree with compiled ones."""
    kv, eager = state, state
    for name, numbers in (
        ("register", (2,)),
        ("reserve", (2, 6)),
        ("extend", (2, 6)),
        ("truncate", (0, 4)),
        ("release", (1,)),
    ):
        kv = apply(kv, name, *numbers)
        eager = OPERATIONS[name](eager, *numbers)
        testing.assert_same_bits(eager, kv)
        allocator.check(kv)
        cache.check_integrity(kv)


@pytest.mark.parametrize(
    ("lengths", "name", "numbers"),
    [
        ((9, 16), "register", (2,)),  # no page is free
        ((9, 8), "reserve", (1, 17)),  # three pages missing, two free
        ((1,), "reserve", (0, 21)),  # five pages missing, six free, five columns
        ((9, 0), "reserve", (0, 2**31 - 1)),  # must not overflow
    ],
)
def test_out_of_pages_is_data(lengths, name, numbers):
    """Fails if a slot out of pages loses what it has, or keeps half of a request."""
    before = filled(*lengths)
    after = apply(before, name, *numbers)
    flags = [slot == numbers[0] for slot in range(3)]
    np.testing.assert_array_equal(after.out_of_pages, flags)
    testing.assert_same_bits(after.replace(out_of_pages=before.out_of_pages), before)
    message = (
        rf"out of pages in slots \[{numbers[0]}\]: {int(before.num_free)} of 7 pages "
        "of 4 tokens are free, and a slot holds at most 20 tokens"
    )
    with pytest.raises(MemoryError, match=message):
        allocator.check(after)
    testing.assert_same_bits(OPERATIONS[name](before, *numbers), after)


def test_a_slot_out_of_pages_recovers():
    """Fails if the flag stays after another slot made room."""
    kv = apply(filled(9, 8), "reserve", 1, 17)
    kv = apply(apply(kv, "release", 0), "reserve", 1, 17)
    allocator.check(kv)
    cache.check_integrity(kv)
    np.testing.assert_array_equal(kv.num_owned, [0, 5, 0])


BOUNDARIES = [0, 1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE, 9]


@pytest.mark.parametrize("new_len", BOUNDARIES)
def test_truncate_at_page_boundaries(state, new_len):
    """Fails if a page too many or too few is kept, or the first page is lost."""
    after = apply(state, "truncate", 0, new_len)
    cache.check_integrity(after)
    kept = {0: 1, 1: 1, 3: 1, 4: 1, 5: 2, 8: 2, 9: 3}[new_len]
    assert int(after.length[0]) == new_len
    assert int(after.num_owned[0]) == kept
    assert int(after.num_free) == int(state.num_free) + 3 - kept
    assert bool(after.registered[0])
    # No bytes are cleared or moved, and the pages that are kept are the same ones.
    testing.assert_same_bits((after.k, after.v), (state.k, state.v))
    np.testing.assert_array_equal(
        after.page_table[0, :kept], state.page_table[0, :kept]
    )
    np.testing.assert_array_equal(after.page_table[1:], state.page_table[1:])
    # The slot grows again, over the whole table, on pages that it does not have yet.
    grown = apply(apply(after, "reserve", 0, 20), "extend", 0, 20)
    cache.check_integrity(grown)
    allocator.check(grown)
    assert len(set(np.asarray(grown.page_table[0]).tolist())) == WIDTH


def test_pages_return_in_the_order_of_a_stack(state):
    """Fails if rollback and re-reservation wander through the pool: a page that was
    just freed is the next one handed out."""
    kv = apply(apply(state, "truncate", 0, 1), "reserve", 0, 9)
    np.testing.assert_array_equal(kv.page_table, state.page_table)
    np.testing.assert_array_equal(kv.free_pages, state.free_pages)


def one_life(kv, slot):
    """Every operation once, on one slot."""
    kv = allocator.register(kv, slot)
    kv = allocator.reserve(kv, slot, 7)
    rows = jnp.full((2, 1, 2), 1.5, jnp.float32)
    kv = cache.write(
        kv,
        0,
        slots=jnp.full((2,), slot, jnp.int32),
        positions=jnp.asarray([5, 6], jnp.int32),
        num_active=jnp.int32(2),
        k=rows,
        v=rows,
    )
    kv = allocator.extend(kv, slot, 7)
    kv = allocator.truncate(kv, slot, 6)
    return allocator.release(kv, slot)


def test_operations_inside_a_while_loop():
    """Fails if an operation changes a shape or dtype, or is traced once per step."""
    chex.clear_trace_counter()

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=1)
    def live(kv, times):
        def body(carry):
            step, kv = carry
            return step + 1, one_life(kv, step % 3)

        return jax.lax.while_loop(lambda carry: carry[0] < times, body, (0, kv))[1]

    kv = new_cache()
    for times in (1, 2, 50):
        after = live(kv, times)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, kv)
        cache.check_integrity(after)
        allocator.check(after)
        assert int(after.num_free) == NUM_PAGES
        assert int((after.k[0] == 1.5).sum()) == 4  # one page, reused every time
        kv = after
