"""A weight matrix `[N, K]`: an array, or what an implementation's kernels made of it.

The native kernels read panels (`native/panels.py`). Ops take either form of a weight;
other operations take a matrix, which is unpacked on demand.

A device of a mesh (`parallel`) has a part of a weight, `Split`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.native import calls, panels
from spec_jax.ops import bits


Panels = panels.Panels
Weight = calls.Weight

Cut = Literal["outputs", "inputs"]
"""The axis of a weight that is shared out."""


class Split(pytree.Node):
    """The part of a weight, or of its bias, that a device of a mesh has.

    In pieces of one shape; a bias, which is added to outputs that are cut, is one.

    Outside of a `shard_map` a piece has a leading axis of devices.

    Attributes:
      pieces: consecutive rows of the weight, or columns where `inputs` are cut: one for
        each segment of a sum. The same pieces on any number of devices, since what XLA
        makes of a product depends on its shape.
      sizes: of the matrices that are fused by rows in each piece, such as queries, keys
        and values; the outputs are put in their order.
      num_outputs: of the whole weight, where each device is to have all outputs; None:
        each has its own.
    """

    pieces: tuple[Weight, ...]
    cut: Cut = pytree.static()
    sizes: tuple[int, ...] = pytree.static()
    num_outputs: int | None = pytree.static(default=None)

    def local(self) -> "Split":
        """Returns the pieces without the axis of devices: within a `shard_map`."""
        return self.replace(pieces=jax.tree.map(lambda leaf: leaf[0], self.pieces))

    def fuse(self, outputs: list[jax.Array]) -> jax.Array:
        """Joins the outputs of all pieces, matrix after matrix."""
        if len(outputs) == 1:
            return outputs[0]
        ends = [sum(self.sizes[:count]) for count in range(1, len(self.sizes))]
        by_matrix = zip(*(jnp.split(y, ends, axis=1) for y in outputs), strict=True)
        return jnp.concatenate([y for ys in by_matrix for y in ys], axis=1)


def prepare(w: Weight, impl: str) -> Weight:
    """Copies the weight to the layout that kernels of a resolved `impl` read.

    A weight that is in that form already is returned as it is.
    """
    if isinstance(w, panels.Panels):
        return w if impl == "native" else panels.unpack(w)
    return calls.pack(w) if impl == "native" else w


def matrix(w: Weight) -> jax.Array:
    """Returns the weight as an array `[N, K]`."""
    return panels.unpack(w) if isinstance(w, panels.Panels) else w


def take_rows(w: Weight, index: jax.Array) -> jax.Array:
    """Returns rows `index [...]` of the weight, `[..., K]`."""
    if isinstance(w, panels.Panels):
        return panels.take_rows(w, index)
    return bits.take_rows(w, index)
