"""Weights of eight bits in the order in which the GPU's kernels read them.

Block by block, the 32 values of every output are adjacent: for each block a program
reads one contiguous run of memory, 32 bytes for each of its outputs. Two float16 scales
share a word, since asynchronous copies take at least four bytes.
"""

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.native import blocks


class Tiles(pytree.Node):
    """The contents of `blocks.Blocks`, made once, where they are loaded.

    Attributes:
      values: int8 `[2 P, N, 32]`, zeros past `K`.
      scales: int32 `[P, N]`, of blocks `2 p` and, in the upper half, `2 p + 1`.
      shape: `(N, K)` of the matrix.
      of: `Blocks.of`.
    """

    values: jax.Array
    scales: jax.Array
    shape: tuple[int, int] = pytree.static()
    of: str = pytree.static(default="bfloat16")

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrix's elements where they are unpacked."""
        return jnp.dtype(self.of)


@jax.jit
def pack(w: blocks.Blocks) -> Tiles:
    """Copies blocks to tiles."""
    N, count = w.scales.shape
    missing = (0, 0), (0, count % 2)
    halves = jax.lax.bitcast_convert_type(jnp.pad(w.scales, missing), jnp.uint16)
    words = jax.lax.bitcast_convert_type(halves.reshape(N, -1, 2), jnp.int32)
    values = jnp.pad(w.values, (*missing, (0, 0))).transpose(1, 0, 2)
    return Tiles(values=values, scales=words.T, shape=w.shape, of=w.of)


@jax.jit
def unpack(w: Tiles) -> blocks.Blocks:
    """Copies tiles to the blocks that they were made of, bit for bit."""
    (N, K), count = w.shape, blocks.num_blocks(w.shape[1])
    halves = jax.lax.bitcast_convert_type(w.scales.T, jnp.uint16).reshape(N, -1)
    scales = jax.lax.bitcast_convert_type(halves, jnp.float16)[:, :count]
    values = w.values.transpose(1, 0, 2)[:, :count]
    return blocks.Blocks(values=values, scales=scales, shape=(N, K), of=w.of)


def take_rows(w: Tiles, index: jax.Array) -> jax.Array:
    """Returns rows `index [...]` of the matrix, `[..., K]`."""
    flat, K = index.reshape(-1), w.shape[1]
    taken = w.replace(
        values=w.values[:, flat], scales=w.scales[:, flat], shape=(flat.size, K)
    )
    return blocks.matrix(unpack(taken)).reshape(*index.shape, K)
