"""Weight matrices in the order in which the kernels multiply them, see `panels.h`.

A matrix `[N, K]` stands as panels of 16 outputs, each with its 32-bit words of `k` one
after the other: one float32, or two bfloat16. All instruction sets read this order.
`calls.pack` makes them; values are kept as they are, so that `unpack` gives back the
matrix, bit for bit.
"""

import jax
import jax.numpy as jnp

from spec_jax import pytree


PANEL = 16
"""Outputs of a panel."""

_WORD_BYTES = 4


class Panels(pytree.Node):
    """A matrix that the native kernels multiply by; made once, where it is loaded.

    Attributes:
      data: `[ceil(N / 16), ceil(K / word), 16, word]`, zeros past the matrix; of
        `Blocks` uint8 `[ceil(N / 16), ceil(K / 64), 17, 64]`, 10 for 17 with four bits.
      shape: `(N, K)` of the matrix.
      of: `Blocks.of`; None: of the matrix's elements as they are.
    """

    data: jax.Array
    shape: tuple[int, int] = pytree.static()
    of: str | None = pytree.static(default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrix's elements."""
        return jnp.dtype(self.of or self.data.dtype)


def packed_shape(shape: tuple[int, int], dtype: jnp.dtype) -> tuple[int, ...]:
    """Returns the shape of `Panels.data` for a matrix of `shape`."""
    (N, K), word = shape, word_of(dtype)
    return -(-N // PANEL), -(-K // word), PANEL, word


def word_of(dtype: jnp.dtype) -> int:
    """Returns how many elements of `k` a word has, of a dtype that the kernels take."""
    return _WORD_BYTES // jnp.dtype(dtype).itemsize


@jax.jit
def unpack(panels: Panels) -> jax.Array:
    """Copies the panels to a matrix `[N, K]`."""
    blocks, words, _, word = panels.data.shape
    data = _bits(panels.data).transpose(0, 2, 1, 3)
    w = data.reshape(blocks * PANEL, words * word)
    return _values(w[: panels.shape[0], : panels.shape[1]], panels.dtype)


def take_rows(panels: Panels, index: jax.Array) -> jax.Array:
    """Returns rows `index [...]` of the matrix, `[..., K]`."""
    data = _bits(panels.data)[index // PANEL, :, index % PANEL]
    rows = data.reshape(*index.shape, -1)[..., : panels.shape[1]]
    return _values(rows, panels.dtype)


def _bits(x: jax.Array) -> jax.Array:
    """Views elements as integers: XLA on CPU moves bfloat16 by way of float32."""
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _values(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype)
