"""Where a position lives: page numbers and offsets from a page table."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.typing import typed


_Count = TypeVar("_Count", int, jax.Array)


@typed
def locate(
    page_table: Int[Array, "S M"],
    page_size: int,
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Page and offset of each `(slot, position)`.

    A slot or position outside the table gives a page number that is out of range of
    every pool: a write there is dropped, a read there is filled.
    """
    # Without `wrap_negative_indices` slot or position -1 would mean the last one.
    pages = page_table.at[slots, positions // page_size].get(
        mode="fill", fill_value=jnp.iinfo(jnp.int32).max, wrap_negative_indices=False
    )
    return pages, positions % page_size


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
