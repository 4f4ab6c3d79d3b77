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

from typing import Any, ClassVar

import jax.numpy as jnp

from spec_jax.paging import cache


class StaticKV(cache.PagedKV):
    """Pages that never change hands: no page is free, each slot owns `M` of them.

    For a slot of length `n` the interval `[0, n)` holds valid keys and values, `[n, T)`
    bytes that mean nothing.
    """

    has_shared_pool: ClassVar[bool] = False


def init(
    *, num_slots: int, pages_per_slot: int, kept: int | None = None, **sizes: Any
) -> cache.PagedKV:
    """Makes an empty `StaticKV` of `pages_per_slot * page_size` positions a slot.

    Args:
      kept: pages that a slot of a ring owns; None: `pages_per_slot`, and no ring.
      **sizes: the other sizes of `cache.init`.

    Raises:
      ValueError: a size below one.
    """
    kept = pages_per_slot if kept is None else min(kept, pages_per_slot)
    num_pages = num_slots * kept
    firsts = kept * jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    columns = jnp.arange(pages_per_slot, dtype=jnp.int32)[None]
    kv = cache.init(
        kind=StaticKV,
        num_slots=num_slots,
        num_pages=num_pages,
        pages_per_slot=kept,
        **sizes,
    )
    return kv.replace(
        page_table=firsts + columns % kept,
        num_owned=jnp.full((num_slots,), pages_per_slot, jnp.int32),
        free_pages=jnp.full((num_pages,), num_pages, jnp.int32),
        num_free=jnp.int32(0),
    )
