"""How large a page is, and how many of them a sequence has."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from spec_jax.typing import check_whole


_Count = TypeVar("_Count", int, jax.Array)


def check_page_size(page_size: int, *, num_positions: int | None) -> None:
    """Raises `ValueError` unless a page has 1 .. `num_positions` positions.

    Args:
      num_positions: of the model, the most of a sequence; None: no bound.
    """
    check_whole(page_size=page_size)
    if num_positions is not None and page_size > num_positions:
        raise ValueError(
            f"{page_size=} is above {num_positions}, the positions of the model "
            "(max_position_embeddings): ask for smaller pages"
        )


def pages_for(length: _Count, page_size: int) -> _Count:
    """Returns the number of pages that cover `[0, length)`."""
    # Not `(length + page_size - 1) // page_size`: that overflows near 2**31.
    if not isinstance(length, jax.Array):
        return -(-length // page_size)
    # Not `//`, which takes a dozen operations for the signs of integers.
    size = jnp.asarray(page_size, length.dtype)
    size = jnp.broadcast_to(size, length.shape)
    is_partial = jax.lax.rem(length, size) > 0
    return jax.lax.div(length, size) + is_partial.astype(length.dtype)
