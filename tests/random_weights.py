"""Random weights of tests, drawn by NumPy: the numbers of `jax.random`, up to rounding.

With XLA each shape needs a program of its own, whose compilation takes a quarter of a
second: the weights of a small model would take longer than the test that needs them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from spec_jax.model import params as params_lib


DRAWN_BY_XLA = params_lib.draw
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(key: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns both words, uint32, of the first `count` blocks of a key's stream."""
    first, second = np.asarray(jax.random.key_data(key), np.uint32)
    keys = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    high = np.full(count, keys[0], np.uint32)
    low = np.arange(count, dtype=np.uint32) + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high += low
            low = (low << rotation) | (low >> (32 - rotation))
            low ^= high
        high += keys[(group + 1) % 3]
        low += keys[(group + 2) % 3] + np.uint32(group + 1)
    return high, low


def split(key: jax.Array, num: int) -> list[jax.Array]:
    """Returns the keys of `jax.random.split`."""
    words = np.stack(_threefry(key, num), axis=-1)
    return [jax.random.wrap_key_data(jnp.asarray(word)) for word in words]


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = np.float32):
    """Returns the numbers of `jax.random.normal`, drawn in float32, by NumPy."""
    high, low = _threefry(key, int(np.prod(shape)))
    ones = ((high ^ low) >> 9) | np.uint32(0x3F800000)
    least = np.nextafter(np.float32(-1), np.float32(0))
    x = (ones.view(np.float32) - np.float32(1)) * (np.float32(1) - least) + least
    normals = np.float32(np.sqrt(2)) * special.erfinv(x)
    return normals.reshape(shape).astype(dtype)


def draw(key: jax.Array, tree: Any, *, stddev: float) -> Any:
    """Draws as `spec_jax.model.params.draw` does; `install` puts this in its place."""
    if isinstance(key, jax.core.Tracer):
        return DRAWN_BY_XLA(key, tree, stddev=stddev)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    drawn = []
    for one, (path, leaf) in zip(split(key, len(leaves)), leaves, strict=True):
        if jax.tree_util.keystr(path).endswith("bias"):
            values = np.zeros(leaf.shape, leaf.dtype)
        elif len(leaf.shape) == 1:
            values = np.ones(leaf.shape, leaf.dtype)
        else:
            values = (normal(one, leaf.shape) * np.float32(stddev)).astype(leaf.dtype)
        drawn.append(jnp.asarray(values))
    return jax.tree.unflatten(structure, drawn)


def install() -> None:
    """Makes this process draw all its random weights with `draw`."""
    params_lib.draw = draw
