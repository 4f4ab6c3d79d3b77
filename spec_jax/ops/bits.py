"""Arrays whose elements are moved and not computed with.

XLA on CPU has no bfloat16 gather or scatter: it converts the whole operand, be it a
vocabulary or a pool of pages, to float32 and back, at each call. As integers of the
same size the elements that are asked for move, and no others.
"""

import jax
import jax.numpy as jnp
from jax.experimental import layout


def to_bits(x: jax.Array) -> jax.Array:
    """Views a bfloat16 array as uint16; returns any other array as it is."""
    if x.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(x, jnp.uint16)
    return x


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Undoes `to_bits` for an array of `dtype`."""
    if bits.dtype == dtype:
        return bits
    return jax.lax.bitcast_convert_type(bits, dtype)


def take_rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `table[index]`, whole rows of a matrix."""
    return from_bits(to_bits(table)[index], table.dtype)


def row_major(x: jax.Array) -> jax.Array:
    """Pins `x` to its own order of axes in memory.

    XLA makes a transposition a view where it can, and on a CPU reads the view in place:
    a product of bfloat16 matrices over it takes five times as long as the product and
    the copy together.
    """
    pinned = layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(pinned)
