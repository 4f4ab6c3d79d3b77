"""StaticKV: each slot's keys and values in one contiguous stretch, allocated once.

A `PagedKV` in which slot `s` owns the pages `[s * M, (s + 1) * M)` for good, in that
order: a pool `[S * M, C, K, H]` read as `[S, T, K, H]`, `T = M * C`, is a plain cache
by slot and position. Code that reads or writes pages finds these by the page table, as
any others. The operations are in `allocator`; they move no page, and so truncation
moves a length and nothing else.

The price is memory for `T` positions of every slot, used or not. A ring has memory for
the last positions alone: its table repeats `kept` pages, so that a position overwrites
the one that lies `kept` pages before it, which must not be read from then on.
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from spec_jax.paging import cache


class StaticKV(cache.PagedKV):
    """Pages that never change hands: no page is free, each slot owns `M` of them.

    A closed slot keeps its pages too. For a slot of length `n` the interval `[0, n)`
    holds valid keys and values, `[n, T)` bytes that mean nothing.
    """

    has_shared_pool: ClassVar[bool] = False


class RingKV(StaticKV):
    """Pages of which each slot owns a few; its page table repeats them."""


def init(
    *,
    num_layers: int,
    num_slots: int,
    page_size: int,
    pages_per_slot: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    kept: int | None = None,
) -> StaticKV:
    """Makes an empty cache of `pages_per_slot * page_size` positions a slot.

    Args:
      kept: pages that a slot of a ring owns; None: `pages_per_slot`, and no ring.

    Raises:
      ValueError: a size below one.
    """
    kind = StaticKV if kept is None else RingKV
    kept = pages_per_slot if kept is None else min(kept, pages_per_slot)
    num_pages = num_slots * kept
    firsts = kept * jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    columns = jnp.arange(pages_per_slot, dtype=jnp.int32)[None]
    empty = cache.init(
        num_layers=num_layers,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_slot=kept,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    return kind(
        k=empty.k,
        v=empty.v,
        page_table=firsts + columns % kept,
        num_owned=jnp.full((num_slots,), pages_per_slot, jnp.int32),
        length=empty.length,
        registered=empty.registered,
        free_pages=jnp.full((num_pages,), num_pages, jnp.int32),
        num_free=jnp.int32(0),
        out_of_pages=empty.out_of_pages,
        refused=empty.refused,
    )


def check_integrity(kv: StaticKV) -> None:
    """Raises `ValueError` unless every slot owns its own stretch of pages, in order.

    Outside jit only; a debug aid and the invariant of the tests.
    """
    own = np.arange(kv.num_pages).reshape(kv.num_slots, -1)
    own = own[:, np.arange(kv.page_table.shape[1]) % own.shape[1]]
    moved = np.flatnonzero((np.asarray(kv.page_table) != own).any(axis=1))
    if moved.size:
        raise ValueError(f"slots {moved.tolist()} do not own their own pages in order")
    if not isinstance(kv, RingKV):
        cache.check_integrity(kv)
