"""Random arrays, weights and caches, made where they are used: on the device.

Each shape is drawn by one small executable, so that a model of hundreds of arrays
compiles nothing as large as itself. Nothing here is zeros: an accelerator draws less
power for them, and so runs faster than it would on real numbers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.model import config as config_lib, params as params_lib, row_model
from spec_jax.paging import allocator, cache as paged


def normal(
    seed: int, shape: tuple[int, ...], dtype: Any = "bfloat16", *, stddev: float = 1.0
) -> jax.Array:
    """Normal numbers; the same for the same seed, in every process."""
    return _normal(
        jnp.int32(seed), jnp.float32(stddev), shape=tuple(shape), dtype=jnp.dtype(dtype)
    )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(seed, stddev, *, shape, dtype):
    noise = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return (noise * stddev).astype(dtype)


def bits(count: int) -> jax.Array:
    """Random words `[count]` uint32."""
    return jax.random.bits(jax.random.key(0), (count,), jnp.uint32)


def weights(config: config_lib.Qwen3Config, *, seed: int) -> params_lib.Params:
    """Random weights of a whole model, matrices normal with 0.02, norms near one."""
    leaves, structure = jax.tree.flatten(params_lib.shapes(config))
    drawn = []
    for number, leaf in enumerate(leaves):
        own_seed = 1000 * seed + number
        if len(leaf.shape) == 1:
            offset = normal(own_seed, leaf.shape, leaf.dtype, stddev=0.1)
            drawn.append(offset + jnp.ones((), leaf.dtype))
        else:
            drawn.append(normal(own_seed, leaf.shape, leaf.dtype, stddev=0.02))
    return jax.tree.unflatten(structure, drawn)


def tokens(count: int, vocab_size: int, *, seed: int = 0) -> jax.Array:
    """Random tokens `[count]` int32."""
    return jax.random.randint(
        jax.random.key(seed), (count,), 0, vocab_size, dtype=jnp.int32
    )


class CacheBox:
    """One cache whose buffers are handed on from call to call, full of noise.

    Every position holds keys and values from the start, so that any length can be
    declared valid: what a step costs depends on the length and not on who wrote it.

    Attributes:
      kv: the cache; whoever donates it puts its successor here.
    """

    def __init__(
        self, model: row_model.RowModel, *, capacity: int, page_size: int, seed: int = 0
    ):
        kv = model.new_cache(capacity=capacity, page_size=page_size)
        pools = (kv.k, kv.v)
        leaves, structure = jax.tree.flatten(pools)
        del pools
        # One after another: two full caches at once may not fit.
        kv = kv.replace(k=(), v=())
        for number, leaf in enumerate(leaves):
            shape, dtype = leaf.shape, leaf.dtype
            leaves[number] = leaf = None
            leaves[number] = normal(10_000 * (seed + 1) + number, shape, dtype)
        k, v = jax.tree.unflatten(structure, leaves)
        self.kv = kv.replace(k=k, v=v)

    def at(self, length: int) -> paged.PagedKV:
        """The cache with `[0, length)` valid, and as many pages as that takes.

        Raises:
          ValueError: more positions than the cache has.
        """
        if length > self.kv.slot_capacity:
            raise ValueError(
                f"{length} positions in a cache of {self.kv.slot_capacity}"
            )
        self.kv = _at_length(self.kv, jnp.int32(length))
        return self.kv


@functools.partial(jax.jit, donate_argnames=("kv",))
def _at_length(kv, length):
    slot = row_model.SLOT
    kv = allocator.truncate(kv, slot, jnp.minimum(length, kv.length[slot]))
    kv = allocator.reserve(kv, slot, length)
    return allocator.extend(kv, slot, length)
