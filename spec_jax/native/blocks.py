"""Weights of eight bits in blocks, GGUF's Q8_0, and products with them.

A row of a matrix stands in blocks of 32 values along `K`. A block is 32 integers and
one float16 scale `d`: its values are `d * q`, with `d` the largest magnitude / 127, as
llama.cpp makes them (`quantize_row_q8_0_ref`). A row that is multiplied by it is
rounded likewise, to integers from -127 to 127, ties to even, and one float32 scale a
block. Then

    y[n] = sum over blocks b of (sum_i x_q[b, i] * w_q[n, b, i]) * (x_d[b] * w_d[n, b])

The inner sum is one of integers. The outer one is of float32, in the order of blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pytree
from spec_jax.native import panels


BLOCK = 32
"""Values that share a scale."""

MOST = 127
"""The largest magnitude of an integer."""

LEAST = 1e-36
"""A block of a row is rounded to zeros where no magnitude is larger."""

OFFSET = 128
"""In panels integers are so much larger: bytes without a sign."""


class Blocks(pytree.Node):
    """A matrix of eight bits.

    Attributes:
      values: int8 `[N, B, 32]`, zeros past `K`.
      scales: float16 `[N, B]`.
      shape: `(N, K)` of the matrix.
      of: dtype of the rows that it multiplies, and of its own where they are looked up.
    """

    values: jax.Array
    scales: jax.Array
    shape: tuple[int, int] = pytree.static()
    of: str = pytree.static(default="bfloat16")

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrix's elements where they are unpacked."""
        return jnp.dtype(self.of)


def quantise(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds float32 `w [N, K]` to blocks as llama.cpp does, halves away from zero.

    Returns:
      int8 `[N, B, 32]` and float16 `[N, B]`; a scale beyond float16 is infinite.
    """
    N, K = w.shape
    padded = np.zeros((N, num_blocks(K) * BLOCK), np.float32)
    padded[:, :K] = w
    x = padded.reshape(N, -1, BLOCK)
    scales = np.abs(x).max(axis=-1, initial=0.0) / np.float32(MOST)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        x = x * inverse[..., None]
        whole = np.trunc(x)
        whole += np.copysign(np.abs(x - whole) >= 0.5, x)
        # NaN is in the scale; no integer is it.
        whole = np.where(np.isfinite(whole), whole, np.float32(0))
        return whole.astype(np.int8), scales.astype(np.float16)


def of_matrix(w: jax.Array) -> Blocks:
    """Rounds a matrix `[N, K]`, for rows of its dtype. Outside jit only."""
    values, scales = quantise(np.asarray(w).astype(np.float32))
    return Blocks(
        values=jnp.asarray(values),
        scales=jnp.asarray(scales),
        shape=(w.shape[0], w.shape[1]),
        of=str(w.dtype),
    )


def num_blocks(K: int) -> int:
    """Returns the blocks of a row of `K` values."""
    return -(-K // BLOCK)


def matrix(w: Blocks) -> jax.Array:
    """Returns the values `[N, K]`, rounded to the matrix's dtype."""
    values = w.values.astype(jnp.float32) * w.scales.astype(jnp.float32)[..., None]
    flat = values.reshape(w.shape[0], -1)[:, : w.shape[1]]
    return flat.astype(w.dtype)


def take_rows(w: Blocks, index: jax.Array) -> jax.Array:
    """Returns rows `index [...]` of the matrix, `[..., K]`."""
    flat = index.reshape(-1)
    taken = w.replace(
        values=w.values[flat], scales=w.scales[flat], shape=(flat.size, w.shape[1])
    )
    return matrix(taken).reshape(*index.shape, w.shape[1])


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds rows `x [..., K]` to blocks, as they are multiplied.

    Returns:
      The integers as float32 `[..., B, 32]`, and scales float32 `[..., B]`: NaN where a
      block has a value that is not finite.
    """
    K = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_blocks(K) * BLOCK - K)]
    x = jnp.pad(x.astype(jnp.float32), padding).reshape(*x.shape[:-1], -1, BLOCK)
    most = jnp.abs(x).max(axis=-1, initial=0.0)
    inverse = jnp.where(most > LEAST, MOST / most, 0.0)
    scales = jnp.where(jnp.isfinite(most), most / MOST, jnp.nan)
    return jnp.round(x * inverse[..., None]), scales


def product(x: jax.Array, w: Blocks) -> jax.Array:
    """Returns `x w^T` in float32, for `x [..., K]`."""
    values, scales = quantise_rows(x)

    def add(b: jax.Array, sums: jax.Array) -> jax.Array:
        """Adds a block's products, whose sum float32 holds exactly in any order."""
        block = jnp.einsum(
            "...i,ni->...n",
            values[..., b, :],
            w.values[:, b].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        of_weights = w.scales[:, b].astype(jnp.float32)
        return sums + block * jnp.einsum("...,n->...n", scales[..., b], of_weights)

    sums = jnp.zeros((*x.shape[:-1], w.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, w.values.shape[1], add, sums)


@jax.jit
def pack(w: Blocks) -> panels.Panels:
    """Copies blocks to panels, see `panels.h`."""
    (N, K), size = w.shape, panels.PANEL
    outputs, pairs = -(-N // size) * size, -(-w.values.shape[1] // 2)
    missing = (0, outputs - N), (0, 2 * pairs - w.values.shape[1])
    values = jnp.pad(w.values, (*missing, (0, 0)))
    values = jax.lax.bitcast_convert_type(values, jnp.uint8) ^ OFFSET
    values = values.reshape(-1, size, 2 * pairs, BLOCK // 4, 4).transpose(0, 2, 3, 1, 4)
    scales = jax.lax.bitcast_convert_type(w.scales, jnp.uint16)
    scales = jnp.pad(scales, missing).reshape(-1, size, 2 * pairs).transpose(0, 2, 1)
    scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    lines = values.reshape(-1, pairs, BLOCK // 2, 4 * size)
    line = scales.reshape(-1, pairs, 1, 4 * size)
    data = jnp.concatenate([lines, line], axis=2)
    return panels.Panels(data=data, shape=(N, K), of=w.of)


@jax.jit
def unpack(w: panels.Panels) -> Blocks:
    """Copies panels to the blocks that they were made of, bit for bit."""
    (N, K), size, data = w.shape, panels.PANEL, w.data
    pairs = data.shape[1]
    values = data[:, :, :-1].reshape(-1, 2 * pairs, BLOCK // 4, size, 4)
    values = values.transpose(0, 3, 1, 2, 4).reshape(-1, 2 * pairs, BLOCK) ^ OFFSET
    scales = data[:, :, -1].reshape(-1, 2 * pairs, size, 2)
    scales = jax.lax.bitcast_convert_type(scales, jnp.float16)
    scales = scales.transpose(0, 2, 1).reshape(-1, 2 * pairs)
    return Blocks(
        values=jax.lax.bitcast_convert_type(values, jnp.int8)[:N, : num_blocks(K)],
        scales=scales[:N, : num_blocks(K)],
        shape=(N, K),
        of=w.of or "bfloat16",
    )
