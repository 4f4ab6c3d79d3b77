"""The cost of rollback and of rounds: compiled programs never copy the pool.

The checks read the program that XLA made for a pool of 64 MiB; nothing is run.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from spec_jax.paging import allocator, cache, static


NUM_LAYERS, POOL_SHAPE = 2, (1024, 16, 2, 128)
POOL = "f32[1024,16,2,128]"
POOL_BYTES = 16 * 2**20
ROWS = 8
# Instructions that take an array of the pool's size without touching all of it.
PASSED_ON = {"parameter", "tuple", "get-tuple-element", "while", "bitcast"}
UPDATED = {"scatter", "dynamic-update-slice"}


def abstract_cache() -> cache.PagedKV:
    P, C, K, H = POOL_SHAPE
    return jax.eval_shape(lambda: cache.init(
        num_layers=NUM_LAYERS, num_slots=2, num_pages=P, page_size=C,
        pages_per_slot=512, num_kv_heads=K, head_dim=H, dtype="float32",
    ))  # fmt: skip


def compile_(function, *, donate: bool = True):
    number = jax.ShapeDtypeStruct((), jnp.int32)
    jitted = jax.jit(function, donate_argnums=(0,) if donate else ())
    return jitted.lower(abstract_cache(), number, number).compile()


def whole_pool_instructions(text: str) -> list[str]:
    """Lists instructions that make an array of the pool's shape, outside fused bodies.

    A fusion counts as its root: an in-place update that is fused with the values it
    writes is an update, a fused multiplication is not.
    """
    roots, found, computation = {}, [], ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = header[1]
        made = re.match(
            rf"\s+(ROOT )?%?[\w.-]+ = {re.escape(POOL)}\S* ([\w-]+)\(", line
        )
        if not made:
            continue
        called = re.search(r"calls=%?([\w.-]+)", line)
        found.append((computation, made[2], called and called[1]))
        if made[1]:
            roots[computation] = made[2]
    bodies = {called for _, _, called in found if called}
    return [
        roots.get(called, name) if called else name
        for computation, name, called in found
        if computation not in bodies
    ]


def assert_no_copy(compiled, *, allowed: set[str]) -> None:
    """Raises unless every pool array stays in its buffer and none is rewritten."""
    num_pools = 2 * NUM_LAYERS
    memory = compiled.memory_analysis()
    if memory.alias_size_in_bytes < num_pools * POOL_BYTES:
        raise AssertionError(f"only {memory.alias_size_in_bytes} bytes are aliased")
    if memory.temp_size_in_bytes > POOL_BYTES // 64:
        raise AssertionError(f"{memory.temp_size_in_bytes} bytes of temporaries")
    text = compiled.as_text()
    (aliases,) = re.findall(r"input_output_alias=\{(.*?)\}, entry", text)
    for number in range(num_pools):
        if f"{{{number}}}: ({number}, {{}}" not in aliases:
            raise AssertionError(f"pool {number} is not aliased: {aliases}")
    instructions = whole_pool_instructions(text)
    assert "parameter" in instructions, "the text of the program was not understood"
    if rewritten := set(instructions) - allowed:
        raise AssertionError(f"whole pools are made by {sorted(rewritten)}")


def rounds(kv, slot, times, *, spoil=lambda pool: pool):
    """Reserves, writes, extends, truncates, `times` times; `spoil` plants a fault."""

    def body(_, kv):
        length = kv.length[slot]
        kv = allocator.reserve(kv, slot, length + ROWS)
        for layer in range(NUM_LAYERS):
            rows = jnp.full((ROWS, *POOL_SHAPE[2:]), length, jnp.float32)
            kv = cache.write(
                kv, layer, slots=jnp.full((ROWS,), slot, jnp.int32), k=rows, v=rows,
                positions=length + jnp.arange(ROWS, dtype=jnp.int32),
                num_active=jnp.int32(ROWS - 1),
            )  # fmt: skip
        kv = allocator.extend(kv, slot, length + ROWS - 1)
        kv = kv.replace(k=tuple(map(spoil, kv.k)))
        return allocator.truncate(kv, slot, length + 2)

    return jax.lax.fori_loop(0, times, body, kv)


def rewriting(kv, slot, new_len):
    """Truncates, then masks keys by page over the whole pool: a planted fault."""
    kv = allocator.truncate(kv, slot, new_len)
    used = jnp.arange(POOL_SHAPE[0]) < kv.num_free
    mask = used[:, None, None, None]
    return kv.replace(k=tuple(jnp.where(mask, k, 0.0) for k in kv.k))


@pytest.mark.parametrize("operation", ["truncate", "release", "register", "reserve"])
def test_bookkeeping_never_touches_the_pool(operation):
    """Fails if an operation on the page table copies or rewrites keys or values."""
    function = getattr(allocator, operation)
    if operation in ("release", "register"):
        function = lambda kv, slot, _, f=function: f(kv, slot)
    assert_no_copy(compile_(function), allowed=PASSED_ON - {"while"})


def test_rounds_update_the_pool_in_place():
    """Fails if a loop of rounds copies the pool, once or in every round."""
    assert_no_copy(compile_(rounds), allowed=PASSED_ON | UPDATED)


multiplied = functools.partial(rounds, spoil=lambda pool: pool * 1.5)
rolled = functools.partial(rounds, spoil=lambda pool: jnp.roll(pool, 1))
FAULTS = {
    "not donated": (allocator.truncate, {"donate": False}, "are aliased"),
    "rewritten in place": (rewriting, {}, "whole pools are made by"),
    "multiplied in the loop": (multiplied, {}, "whole pools are made by"),
    "rolled in the loop": (rolled, {}, "bytes of temporaries"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_copies_are_caught(fault):
    """Negative control: the check fails where the pool is copied or rewritten."""
    function, options, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        assert_no_copy(compile_(function, **options), allowed=PASSED_ON | UPDATED)


def test_truncating_a_static_cache_costs_a_constant():
    """Fails if the cost grows with the positions dropped, or if a page is touched."""
    kv = jax.eval_shape(lambda: static.init(
        num_layers=1, num_slots=2, page_size=64, pages_per_slot=64, num_kv_heads=1,
        head_dim=32, dtype="float32",
    ))  # fmt: skip
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def touched(operation) -> float:
        jitted = jax.jit(operation, donate_argnums=0)
        compiled = jitted.lower(kv, number, number).compile()
        assert not re.search(r"\bwhile\(", compiled.as_text())
        return compiled.cost_analysis()["bytes accessed"]

    def clearing(kv, slot, new_len):
        kv = allocator.truncate(kv, slot, new_len)
        return kv.replace(k=tuple(k.at[slot * 64].set(0) for k in kv.k))

    # Negative control: `clearing` writes one page of keys.
    assert touched(allocator.truncate) <= 1024 < touched(clearing)
