"""The cost of rollback and of rounds: compiled programs never copy the pool.

The checks read what XLA says of the program for a pool of 64 MiB; nothing is run.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from page_tables import truncate

from spec_jax.paging import allocator, cache


NUM_LAYERS, ROWS, POOL_BYTES = 2, 8, 16 * 2**20
SIZES = {
    "num_layers": NUM_LAYERS, "num_slots": 2, "page_size": 16, "pages_per_slot": 512,
    "num_kv_heads": 2, "head_dim": 128, "dtype": "float32",
}  # fmt: skip
INITS = {
    "paged": functools.partial(cache.init, num_pages=1024, **SIZES),
    "static": functools.partial(cache.init, **SIZES),
}


def compile_(function, *, kind="paged", donate=True):
    kv, number = jax.eval_shape(INITS[kind]), jax.ShapeDtypeStruct((), jnp.int32)
    jitted = jax.jit(function, donate_argnums=(0,) if donate else ())
    return jitted.lower(kv, number, number).compile()


def assert_no_copy(compiled, *, num_bytes: float) -> None:
    """Raises unless every pool stays in its buffer, and no more bytes are accessed."""
    memory = compiled.memory_analysis()
    if memory.alias_size_in_bytes < 2 * NUM_LAYERS * POOL_BYTES:
        raise AssertionError(f"only {memory.alias_size_in_bytes} bytes are aliased")
    if memory.temp_size_in_bytes > POOL_BYTES // 64:
        raise AssertionError(f"{memory.temp_size_in_bytes} bytes of temporaries")
    accessed = compiled.cost_analysis()["bytes accessed"]
    if not 0 < accessed <= num_bytes:
        raise AssertionError(f"{accessed} bytes are accessed")


def rounds(kv, slot, times, *, spoil=lambda pool: pool):
    """Reserves, writes, extends, truncates, `times` times; `spoil` plants a fault."""

    def body(_, kv):
        length = kv.length[slot]
        kv = allocator.reserve(kv, slot, length + ROWS)
        for layer in range(NUM_LAYERS):
            rows = jnp.full((ROWS, *kv.k[0].shape[2:]), length, jnp.float32)
            kv = cache.write(
                kv, layer, slots=jnp.full((ROWS,), slot, jnp.int32), k=rows, v=rows,
                positions=length + jnp.arange(ROWS, dtype=jnp.int32),
                num_active=jnp.int32(ROWS - 1),
            )  # fmt: skip
        kv = allocator.extend(kv, slot, length + ROWS - 1)
        kv = kv.replace(k=tuple(map(spoil, kv.k)))
        return truncate(kv, slot, length + 2)

    return jax.lax.fori_loop(0, times, body, kv)


def rewriting(kv, slot, new_len):
    """Truncates, then masks keys by page over the whole pool: a planted fault."""
    kv = truncate(kv, slot, new_len)
    used = jnp.arange(kv.num_pages) < kv.num_free
    mask = used[:, None, None, None]
    return kv.replace(k=tuple(jnp.where(mask, k, 0.0) for k in kv.k))


BOOKKEEPING = 2**16
# A scatter counts as if it read and wrote the whole of its pool, once in a loop.
UPDATES = 2 * 2 * NUM_LAYERS * POOL_BYTES + 2**18


@pytest.mark.parametrize(
    ("kind", "operation", "num_bytes", "num_loops"),
    [
        ("paged", truncate, BOOKKEEPING, 1),  # over the slots
        ("paged", allocator.reserve, BOOKKEEPING, 0),
        ("static", truncate, 1024, 0),
    ],
)
def test_bookkeeping_never_touches_the_pool(kind, operation, num_bytes, num_loops):
    """Fails if an operation on the page table copies or rewrites keys or values, or
    costs more where it drops more positions."""
    compiled = compile_(operation, kind=kind)
    assert_no_copy(compiled, num_bytes=num_bytes)
    assert len(re.findall(r"\bwhile\(", compiled.as_text())) == num_loops


def test_rounds_update_the_pool_in_place():
    """Fails if a loop of rounds copies the pool, once or in every round."""
    assert_no_copy(compile_(rounds), num_bytes=UPDATES)


multiplied = functools.partial(rounds, spoil=lambda pool: pool * 1.5)
rolled = functools.partial(rounds, spoil=lambda pool: jnp.roll(pool, 1))
FAULTS = {
    "not donated": (truncate, {"donate": False}, BOOKKEEPING, "are aliased"),
    "rewritten in place": (rewriting, {}, BOOKKEEPING, "bytes are accessed"),
    "multiplied in the loop": (multiplied, {}, UPDATES, "bytes are accessed"),
    "rolled in the loop": (rolled, {}, UPDATES, "bytes of temporaries"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_copies_are_caught(fault):
    """Negative control: the check fails where the pool is copied or rewritten."""
    function, options, num_bytes, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        assert_no_copy(compile_(function, **options), num_bytes=num_bytes)
