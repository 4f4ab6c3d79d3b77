"""How many pages a sequence has."""

from typing import TypeVar

import jax
import jax.numpy as jnp


_Count = TypeVar("_Count", int, jax.Array)


def pages_for(length: _Count, page_size: int) -> _Count:
    """Returns the number of pages that cover `[0, length)`."""
    # Not `(length + page_size - 1) // page_size`: that overflows near 2**31.
    if not isinstance(length, jax.Array):
        return -(-length // page_size)
    # Of whole numbers, without the sign that `//` looks after in a dozen operations.
    size = jnp.asarray(page_size, length.dtype)
    size = jnp.broadcast_to(size, length.shape)
    is_partial = jax.lax.rem(length, size) > 0
    return jax.lax.div(length, size) + is_partial.astype(length.dtype)
