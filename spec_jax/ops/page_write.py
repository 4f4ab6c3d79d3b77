"""Locates positions in pages and stores rows there; padding rows are dropped."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.ops import bits
from spec_jax.typing import typed


@typed
def page_write(
    pages: Float[Array, "P C K H"],
    rows: Float[Array, "R K H"],
    *,
    page_table: Int[Array, "S M"],
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    num_active: Int[Array, ""],
) -> Float[Array, "P C K H"]:
    """Stores the active rows in `pages`, at their slots' positions.

    Padding rows, and positions whose page the table does not name, write nowhere.
    """
    num_pages, page_size = pages.shape[:2]
    at, offsets = locate(page_table, page_size, slots, positions)
    # Positive and out of range, and so dropped; -1 would be the last page.
    at = jnp.where(
        jnp.arange(rows.shape[0], dtype=jnp.int32) < num_active, at, num_pages
    )
    rows = bits.to_bits(rows.astype(pages.dtype))
    written = bits.to_bits(pages).at[at, offsets].set(rows, mode="drop")
    return bits.from_bits(written, pages.dtype)


@typed
def locate(
    page_table: Int[Array, "S M"],
    page_size: int,
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Returns page and offset of each `(slot, position)`.

    A slot or position outside the table gives a page number that is out of range of
    every pool: a write there is dropped, a read there is filled.
    """
    # Without `wrap_negative_indices` slot or position -1 would mean the last one.
    pages = page_table.at[slots, positions // page_size].get(
        mode="fill", fill_value=jnp.iinfo(jnp.int32).max, wrap_negative_indices=False
    )
    return pages, positions % page_size
