"""Random arrays, weights and caches, made on the device that uses them.

Each shape is drawn by one small executable, so that a model of hundreds of arrays
compiles nothing as large as itself. No array is all zeros: an accelerator needs less
power for zeros, and so runs faster than it would on real numbers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.drafters import each
from spec_jax.engine import protocols
from spec_jax.model import row_model
from spec_jax.paging import allocator, cache as paged


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(
    seed: int, shape: tuple[int, ...], dtype: Any = "bfloat16", *, stddev: float = 1.0
) -> jax.Array:
    """Returns normal numbers; the same for the same seed, in every process."""
    noise = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return (noise * stddev).astype(dtype)


def tokens(count: int, vocab_size: int, *, seed: int = 0) -> jax.Array:
    """Returns random tokens `[count]` int32."""
    return jax.random.randint(
        jax.random.key(seed), (count,), 0, vocab_size, dtype=jnp.int32
    )


def of_shapes(shapes: Any, *, seed: int) -> Any:
    """Returns weights of these shapes: normal matrices (0.02), and norms near one."""
    leaves, structure = jax.tree.flatten(shapes)
    drawn = []
    for number, leaf in enumerate(leaves):
        stddev = 0.1 if len(leaf.shape) == 1 else 0.02
        made = normal(1000 * seed + number, leaf.shape, leaf.dtype, stddev=stddev)
        drawn.append(made + jnp.ones((), leaf.dtype) if len(leaf.shape) == 1 else made)
    return jax.tree.unflatten(structure, drawn)


def noisy_cache(
    model: row_model.RowModel, *, capacity: int, page_size: int
) -> paged.PagedKV:
    """Returns a cache with keys and values in every position, none of them valid."""
    kv = model.new_cache(capacity=capacity, page_size=page_size)
    leaves, structure = jax.tree.flatten((kv.k, kv.v))
    # One after another: two full caches at once may not fit.
    kv = kv.replace(k=(), v=())
    for number, leaf in enumerate(leaves):
        shape, dtype = leaf.shape, leaf.dtype
        leaves[number] = leaf = None
        leaves[number] = normal(number, shape, dtype)
    k, v = jax.tree.unflatten(structure, leaves)
    return kv.replace(k=k, v=v)


def noisy_memory(drafter: Any, *, capacity: int, page_size: int) -> Any:
    """Returns the memory of a draft model or a head, with a cache of `noisy_cache`."""
    sizes = {"capacity": capacity, "page_size": page_size}
    kv = noisy_cache(drafter.model, **sizes)
    if not protocols.taps_of(drafter):
        return kv
    return each.lift(drafter, 1).init(**sizes).replace(kv=kv)


def memory_at(memory: Any, length: int) -> Any:
    """Returns a copy of such a memory as a round finds it after `length` tokens.

    A head has not taken in the last pair yet: the ring holds its feature.
    """
    if isinstance(memory, paged.PagedKV):
        return at_length(memory, length - 1)
    ring = jax.tree.map(jnp.copy, memory.ring)
    ring = ring.replace(
        first=jnp.full((1,), length - 2, jnp.int32),
        end=jnp.full((1,), length - 1, jnp.int32),
    )
    return memory.replace(kv=at_length(memory.kv, length - 2), ring=ring)


@jax.jit
def at_length(kv: paged.PagedKV, length: int) -> paged.PagedKV:
    """Returns a copy of the cache with `[0, length)` valid, and pages for them."""
    slot, one = row_model.SLOT, jnp.array([True])
    kv = allocator.truncate_each(kv, jnp.minimum(length, kv.length), asked=one)
    kv = allocator.reserve(kv, slot, length)
    return allocator.extend(kv, slot, length)
