"""A weight matrix `[N, K]`: an array, or what an implementation's kernels made of it.

The native kernels read panels (`native/panels.py`). Weights of eight bits, or of four,
are blocks (`native/blocks.py`), panels of them, or on a GPU tiles (`native/tiles.py`).
Ops take each form; other operations take a matrix, which is unpacked on demand.

A device of a mesh (`parallel`) has a part of a weight, `Split`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.native import blocks, calls, panels, tiles
from spec_jax.ops import bits, dispatch


Blocks = blocks.Blocks
Panels = panels.Panels
Tiles = tiles.Tiles
Form = calls.Form
Weight = calls.Weight

Cut = Literal["outputs", "inputs"]
"""The axis of a weight that is shared out."""


class Split(pytree.Node):
    """The part of a weight, or of its bias, that a device of a mesh has.

    The pieces have one shape; a bias, whose outputs are cut, is a single piece.

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
    if impl in dispatch.PALLAS and is_bytes(w):
        if form(w) == "q4_1":
            raise NotImplementedError("weights of four bits have no kernels on a GPU")
        return w if isinstance(w, Tiles) else tiles.pack(unpacked(w))
    if impl != "native":
        return unpacked(w)
    return w if isinstance(w, panels.Panels) else calls.pack(w)


def of_kernels(w: Weight, impl: str) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the arrays that kernels of `spec_jax.pallas` take: two for eight bits."""
    made: Any = prepare(w, impl)
    return (made.values, made.scales) if isinstance(made, Tiles) else made


def is_weight(w: Any) -> bool:
    """Returns whether `w` is a `Form`, to be one leaf of a tree."""
    return isinstance(w, Form)


def is_bytes(w: Any) -> bool:
    """Returns whether a weight is of eight bits, or of four."""
    return isinstance(w, Blocks | Tiles) or isinstance(w, Panels) and w.of is not None


def form(w: Weight) -> str:
    """Returns the form of a weight, as `weights=` names it."""
    if not is_bytes(w):
        return "dense"
    made: Any = jax.eval_shape(unpacked, w)
    return "q8_0" if made.minima is None else "q4_1"


def unpacked(w: Weight) -> jax.Array | Blocks:
    """Returns what a weight was before it was prepared."""
    if isinstance(w, panels.Panels):
        return panels.unpack(w) if w.of is None else blocks.unpack(w)
    return tiles.unpack(w) if isinstance(w, Tiles) else w


def matrix(w: Weight) -> jax.Array:
    """Returns the weight as an array `[N, K]`; of eight bits rounded to its dtype."""
    w = unpacked(w)
    return blocks.matrix(w) if isinstance(w, Blocks) else w


def byte_product(x: jax.Array, w: Weight) -> jax.Array:
    """Returns `x w^T` in float32 of a weight of blocks, for `x [..., K]`."""
    w = unpacked(w)
    if not isinstance(w, Blocks):
        raise ValueError(f"a weight of {w.dtype} is not one of blocks")
    return blocks.product(x, w)


def to_bytes(w: Weight, form: str) -> Blocks:
    """Rounds a matrix to blocks of a form, outside jit."""
    return blocks.of_matrix(matrix(w), form=form)


def byte_shapes(leaf: jax.ShapeDtypeStruct, form: str) -> Blocks:
    """Returns the blocks of a matrix as shapes and dtypes alone."""
    N, K = leaf.shape
    made = blocks.of_matrix(jnp.zeros((1, K), jnp.float32), form=form)
    shape_of = lambda x: jax.ShapeDtypeStruct((N, *x.shape[1:]), x.dtype)
    return jax.tree.map(shape_of, made).replace(shape=leaf.shape, of=str(leaf.dtype))


def cast(w: Weight, dtype: str) -> jax.Array | Blocks:
    """Returns the weight for rows of another dtype."""
    w = unpacked(w)
    return w.replace(of=dtype) if isinstance(w, Blocks) else w.astype(dtype)


def take_rows(w: Weight, index: jax.Array) -> jax.Array:
    """Returns rows `index [...]` of the weight, `[..., K]`."""
    if isinstance(w, Tiles):
        return tiles.take_rows(w, index)
    if is_bytes(w):
        w = unpacked(w)
    if isinstance(w, Blocks):
        return blocks.take_rows(w, index)
    if isinstance(w, Panels):
        return panels.take_rows(w, index)
    return bits.take_rows(w, index)
