"""Sums over the devices of a mesh whose bits do not depend on how many there are.

A sum over `K` is cut into a fixed number of segments; one device computes each in
float32. The partial sums are added in a balanced tree: a device adds those of its own
segments, which are neighbours, and then each device adds all devices' sums likewise.
If the number of segments is a power of two, and the devices divide it, the tree is the
same on any number of devices. No all-reduce: its order is the backend's.
"""

from collections.abc import Sequence

import jax


AXIS = "tensor"
"""The axis of a mesh over which a model is cut."""


def tree_sum(parts: Sequence[jax.Array]) -> jax.Array:
    """Adds pairs of neighbours, and pairs of these sums, until one is left."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def ordered_sum(partials: Sequence[jax.Array]) -> jax.Array:
    """Adds the partial sums of all devices, on each of them; called in a `shard_map`.

    Args:
      partials: sums of this device's segments, in order, float32.
    """
    every = jax.lax.all_gather(tree_sum(partials), AXIS)
    return tree_sum([every[device] for device in range(every.shape[0])])


def gather(x: jax.Array) -> jax.Array:
    """Joins the columns `[R, N / n]` of all devices, on each of them."""
    return jax.lax.all_gather(x, AXIS, axis=1, tiled=True)
