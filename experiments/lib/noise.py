"""Random arrays and weights, made where they are used: on the device.

Each shape is drawn by one small executable, so that a model of hundreds of arrays
compiles nothing as large as itself. Nothing here is zeros: an accelerator draws less
power for them, and so runs faster than it would on real numbers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.model import config as config_lib, params as params_lib


def normal(
    seed: int, shape: tuple[int, ...], dtype: Any = "bfloat16", *, stddev: float = 1.0
) -> jax.Array:
    """Returns normal numbers; the same for the same seed, in every process."""
    return _normal(
        jnp.int32(seed), jnp.float32(stddev), shape=tuple(shape), dtype=jnp.dtype(dtype)
    )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(seed, stddev, *, shape, dtype):
    noise = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return (noise * stddev).astype(dtype)


def words(count: int) -> jax.Array:
    """Returns random words `[count]` uint32."""
    return jax.random.bits(jax.random.key(0), (count,), jnp.uint32)


def tokens(count: int, vocab_size: int, *, seed: int = 0) -> jax.Array:
    """Returns random tokens `[count]` int32."""
    return jax.random.randint(
        jax.random.key(seed), (count,), 0, vocab_size, dtype=jnp.int32
    )


def weights(config: config_lib.Qwen3Config, *, seed: int) -> params_lib.Params:
    """Returns a model's weights: matrices normal with 0.02, norms near one."""
    leaves, structure = jax.tree.flatten(params_lib.shapes(config))
    drawn = []
    for number, leaf in enumerate(leaves):
        stddev = 0.1 if len(leaf.shape) == 1 else 0.02
        made = normal(1000 * seed + number, leaf.shape, leaf.dtype, stddev=stddev)
        drawn.append(made + jnp.ones((), leaf.dtype) if len(leaf.shape) == 1 else made)
    return jax.tree.unflatten(structure, drawn)
