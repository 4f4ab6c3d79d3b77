"""Allocation of pages: reserve, extend, append, truncate, share.

Every operation takes a state value and returns a new one, works inside `jit` and
`while_loop`, and touches the page table only, never the pages (but for `share`, which
copies one): its cost is one pass over a few integers a page. In a static cache a slot
has its pages for good, and operations change lengths and flags alone.

An invalid request sets `refused[slot]` and changes nothing else; of a slot that does
not exist, every slot's is set.

In a cache that counts owners (`cache.init(shares=True)`) several slots may hold a page,
all of whose positions are then valid and are never written again. It is free when the
last of them gives it back. An empty slot need not have a page there.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from spec_jax.ops import dispatch
from spec_jax.paging import cache, index


Scalar = jax.Array | int


def reserve(kv: cache.PagedKV, slot: Scalar, up_to: Scalar) -> cache.PagedKV:
    """Does as `reserve_each` for one slot."""
    kv, asked = _only(kv, slot)
    return _reserve(kv, jnp.asarray(up_to, jnp.int32), asked, most=1)


def extend(kv: cache.PagedKV, slot: Scalar, new_len: Scalar) -> cache.PagedKV:
    """Does as `extend_each` for one slot."""
    kv, asked = _only(kv, slot)
    return extend_each(kv, jnp.asarray(new_len, jnp.int32), asked=asked)


def reserve_each(
    kv: cache.PagedKV, up_to: jax.Array, *, asked: jax.Array
) -> cache.PagedKV:
    """Makes slots own the pages that cover `[0, up_to)`; never gives pages back.

    It serves the slots that are asked in their order; all arrays are `[S]`. Where the
    pool or a slot's page table is too small, `out_of_pages[slot]` is set and the slot
    takes no page, which leaves them to those behind it. Costs the slots that need
    pages, not the slots there are.
    """
    return _reserve(kv, up_to, asked, most=kv.num_slots)


def _reserve(kv, up_to, asked, *, most):
    """Implements `reserve_each`, of at most `most` slots that are asked."""
    valid = asked & (up_to >= 0)
    up_to = jnp.broadcast_to(up_to, asked.shape)
    wanted = index.pages_for(up_to, kv.page_size)
    missing = jnp.where(valid, jnp.maximum(wanted - kv.num_owned, 0), 0)
    out_of_pages = jnp.where(valid, False, kv.out_of_pages)

    def serve(carry):
        """Gives the first slot that waits its pages, or flags that it lacks them."""
        tables, out_of_pages, missing = carry
        slot = _first(missing)
        num_free = tables[3]
        fits = (missing[slot] <= num_free) & (wanted[slot] <= kv.page_table.shape[1])
        tables = _take(tables, slot, jnp.where(fits, missing[slot], 0))
        out_of_pages = _put(
            out_of_pages, slot, jnp.where(missing[slot] > 0, ~fits, out_of_pages[slot])
        )
        return tables, out_of_pages, _put(missing, slot, 0)

    carry = _tables(kv), out_of_pages, missing
    tables, out_of_pages, _ = _in_turn(serve, carry, most=most)
    kv = kv.replace(out_of_pages=out_of_pages, refused=kv.refused | (asked & ~valid))
    return _with_tables(kv, tables)


def extend_each(
    kv: cache.PagedKV, new_len: jax.Array, *, asked: jax.Array
) -> cache.PagedKV:
    """Declares `[0, new_len)` valid, after its keys and values were written.

    It does so for slots that are asked; all arrays are `[S]`.
    """
    valid = (new_len >= kv.length) & (new_len <= kv.num_owned * kv.page_size)
    return kv.replace(
        length=jnp.where(asked & valid, new_len, kv.length),
        refused=kv.refused | (asked & ~valid),
    )


def append_each(
    kv: cache.PagedKV,
    up_to: jax.Array,
    counts: jax.Array,
    *,
    num_rows: int,
    impl: str = "xla",
) -> tuple[cache.PagedKV, jax.Array, jax.Array, jax.Array]:
    """Makes room for `counts` rows of each slot, and declares them valid: they are to
    be written before any is read. All arrays are `[S]`.

    The rows end before `up_to`, and must begin at the slot's length: others are a fault
    of the caller, and flagged as refused. A slot without room for all of its rows has
    none, and stays as long as it is.

    Args:
      num_rows: of all slots together, at least.
      impl: of `dispatch`; those with kernels have one for all of this.

    Returns:
      The cache; how many rows there is room for `[S]`; and the slot and the position of
      each `[num_rows]`, slot after slot. Later entries are unspecified.
    """
    if impl in dispatch.PALLAS and kv.counts is None:
        kernel = dispatch.kernel("allocation", impl, "append_each")
        return kernel(kv, up_to, counts, num_rows=num_rows)
    starts, asked = up_to - counts, counts > 0
    kv = kv.replace(refused=kv.refused | (asked & (starts != kv.length)))
    kv = reserve_each(kv, up_to, asked=asked)
    counts = jnp.where(kv.out_of_pages, 0, counts)
    kv = extend_each(kv, starts + counts, asked=counts > 0)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    if kv.num_slots == 1:
        return kv, counts, jnp.zeros_like(rows), starts[0] + rows
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    slots = jnp.sum(rows[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    slots = jnp.minimum(slots, kv.num_slots - 1)
    positions = rows + (starts + counts - ends).at[slots].get(mode="clip")
    return kv, counts, slots, positions


def truncate_each(
    kv: cache.PagedKV, new_len: jax.Array, *, asked: jax.Array, impl: str = "xla"
) -> cache.PagedKV:
    """Keeps `[0, new_len)` and frees the pages to the right of it.

    It does so for slots that are asked; all arrays are `[S]`. A slot keeps its first
    page even at `new_len = 0`, unless the cache counts owners. A page of several owners
    cannot be cut in two. No bytes are cleared or moved. Costs the slots that give pages
    back, not the slots there are, and for each a pass over the page table; where slots
    have their pages for good, nothing but the write of lengths.

    Args:
      impl: of `dispatch`; those with kernels have one for all of this.
    """
    if impl in dispatch.PALLAS and kv.counts is None:
        return dispatch.kernel("allocation", impl, "truncate_each")(kv, new_len, asked)
    valid = asked & (new_len >= 0) & (new_len <= kv.length)
    if kv.counts is not None:
        valid &= ~jax.vmap(_cuts_shared, (None, 0, 0))(kv, kv.page_table, new_len)
    least = 1 if kv.counts is None else 0
    kept = jnp.maximum(index.pages_for(new_len, kv.page_size), least)
    kv = kv.replace(
        length=jnp.where(valid, new_len, kv.length),
        refused=kv.refused | (asked & ~valid),
    )
    if not kv.has_shared_pool:
        return kv

    def free(carry):
        tables, surplus = carry
        slot = _first(surplus)
        return _give(tables, slot, surplus[slot]), _put(surplus, slot, 0)

    surplus = jnp.where(valid, jnp.maximum(kv.num_owned - kept, 0), 0)
    tables, _ = _in_turn(free, (_tables(kv), surplus), most=kv.num_slots)
    return _with_tables(kv, tables)


def share(
    kv: cache.PagedKV, source: Scalar, slot: Scalar, length: Scalar
) -> cache.PagedKV:
    """Begins an empty slot with `[0, length)` of another, if the cache counts owners.

    Both hold the full pages. If the last one is not full, the slot gets a copy: without
    a free page for it `out_of_pages[slot]` is set, and the slot stays empty.

    Raises:
      ValueError: a cache that counts no owners.
    """
    if kv.counts is None:
        raise ValueError("the cache counts no owners: make it with shares=True")
    kv, asked = _only(kv, slot)
    source, slot, length = (jnp.asarray(x, jnp.int32) for x in (source, slot, length))
    valid = jnp.any(asked) & (source != slot) & (kv.length[slot] == 0)
    valid &= (source >= 0) & (source < kv.num_slots)
    valid &= (length >= 0) & (length <= kv.length[source])
    kv = kv.replace(refused=kv.refused | (asked & ~valid))
    full = jax.lax.div(length, jnp.int32(kv.page_size))
    is_cut = jax.lax.rem(length, jnp.int32(kv.page_size)) > 0
    owned = kv.num_owned[slot]
    kv = _with_tables(kv, _give(_tables(kv), slot, jnp.where(valid, owned, 0)))
    counts = cast(jax.Array, kv.counts)  # Without those of the page that it gave back.
    fits = valid & (~is_cut | (kv.num_free > 0))
    own, theirs, nowhere = kv.page_table[slot], kv.page_table[source], kv.num_pages
    held = jnp.where(jnp.arange(own.shape[0], dtype=jnp.int32) < full, theirs, nowhere)
    added = jnp.where(fits, held, nowhere)
    put = lambda field, value: _put(field, slot, jnp.where(fits, value, field[slot]))
    kv = kv.replace(
        page_table=_put(kv.page_table, slot, jnp.where(fits, held, own)),
        num_owned=put(kv.num_owned, full),
        length=put(kv.length, length),
        counts=counts.at[added].add(1, mode="drop"),
        out_of_pages=jnp.where(asked & valid, ~fits, kv.out_of_pages),
    )
    copies = fits & is_cut
    kv = _with_tables(kv, _take(_tables(kv), slot, copies.astype(jnp.int32)))
    copy = kv.page_table[slot].at[full].get(mode="fill", fill_value=nowhere)
    return cache.copy_page(
        kv,
        theirs.at[full].get(mode="fill", fill_value=nowhere),
        jnp.where(copies, copy, nowhere),
    )


def _only(kv: cache.PagedKV, slot: Scalar) -> tuple[cache.PagedKV, jax.Array]:
    """Returns the cache, and a mask of one slot, `[S]`; none is a refused request."""
    asked = jnp.arange(kv.num_slots, dtype=jnp.int32) == slot
    return kv.replace(refused=kv.refused | ~jnp.any(asked)), asked


def _first(numbers: jax.Array) -> jax.Array:
    """Returns the first slot whose number is above 0."""
    if numbers.shape[0] == 1:
        return jnp.int32(0)
    return jnp.argmax(numbers > 0).astype(jnp.int32)


def _in_turn(serve: Callable[[Any], Any], carry: Any, *, most: int) -> Any:
    """Calls `serve`, which sets one of the last part of `carry` to 0, until all are:
    `most` times at the most."""
    if most == 1:
        return serve(carry)  # No loop to compile and to start.
    return jax.lax.while_loop(lambda carry: jnp.any(carry[-1] > 0), serve, carry)


def _cuts_shared(kv: cache.PagedKV, row: jax.Array, new_len: jax.Array) -> jax.Array:
    """Returns whether a text would end within a page of `row` that others hold, too.
    The cache counts owners."""
    counts = cast(jax.Array, kv.counts)
    place = jax.lax.div(new_len, jnp.int32(kv.page_size))
    page = row.at[place].get(mode="fill", fill_value=kv.num_pages)
    count = counts.at[page].get(mode="fill", fill_value=0)
    return (jax.lax.rem(new_len, jnp.int32(kv.page_size)) > 0) & (count > 1)


def _tables(kv: cache.PagedKV) -> tuple[jax.Array, ...]:
    counts = () if kv.counts is None else (kv.counts,)
    return kv.page_table, kv.num_owned, kv.free_pages, kv.num_free, *counts


def _with_tables(kv: cache.PagedKV, tables: tuple[jax.Array, ...]) -> cache.PagedKV:
    names = "page_table", "num_owned", "free_pages", "num_free", "counts"
    return kv.replace(**dict(zip(names, tables, strict=False)))


# One pass over the page table, however many pages move: a loop would take as many
# turns, and on a GPU ask the host at each.
def _take(tables, slot, count):
    """Moves `count` pages from the top of the free stack to the slot's table."""
    table, owned, stack, num_free, *counts = tables
    nowhere, row = stack.shape[0], table[slot]
    # The page on top of the stack becomes the slot's next.
    turn = jnp.arange(row.shape[0], dtype=jnp.int32) - owned[slot]
    moves = (turn >= 0) & (turn < count)
    row = jnp.where(moves, stack.at[num_free - 1 - turn].get(mode="clip"), row)
    left = num_free - count
    stack = jnp.where(jnp.arange(nowhere, dtype=jnp.int32) < left, stack, nowhere)
    # Only in a cache that counts owners.
    counts = [x.at[jnp.where(moves, row, nowhere)].set(1, mode="drop") for x in counts]
    table, owned = _put(table, slot, row), _put(owned, slot, owned[slot] + count)
    return table, owned, stack, left, *counts


def _give(tables, slot, count):
    """Moves the slot's last `count` pages to the free stack."""
    if len(tables) > 4:
        return _let_go(tables, slot, count)
    table, owned, stack, num_free = tables
    nowhere, row = stack.shape[0], table[slot]
    # Pages are pushed in reverse order, so that the last one lies deepest.
    turn = jnp.arange(nowhere, dtype=jnp.int32) - num_free
    moves = (turn >= 0) & (turn < count)
    stack = jnp.where(moves, row.at[owned[slot] - 1 - turn].get(mode="clip"), stack)
    left = owned[slot] - count
    row = jnp.where(jnp.arange(row.shape[0], dtype=jnp.int32) < left, row, nowhere)
    return _put(table, slot, row), _put(owned, slot, left), stack, num_free + count


def _let_go(tables, slot, count):
    """Does as `_give` in a cache that counts owners: a page of others is not free."""
    table, owned, stack, num_free, counts = tables
    nowhere, row = stack.shape[0], table[slot]
    places = jnp.arange(row.shape[0], dtype=jnp.int32)
    left = owned[slot] - count
    leaves = (places >= left) & (places < owned[slot])
    counts = counts.at[jnp.where(leaves, row, nowhere)].add(-1, mode="drop")
    is_free = leaves & (counts.at[row].get(mode="fill", fill_value=1) == 0)
    # In reverse order, too: the last page lies deepest.
    after = jnp.cumsum(is_free[::-1], dtype=jnp.int32)[::-1]
    to = jnp.where(is_free, num_free + after - 1, nowhere)
    stack = stack.at[to].set(row, mode="drop")
    row = jnp.where(places < left, row, nowhere)
    num_free = num_free + jnp.sum(is_free, dtype=jnp.int32)
    return _put(table, slot, row), _put(owned, slot, left), stack, num_free, counts


def _put(values: jax.Array, slot: jax.Array, value: jax.Array | int) -> jax.Array:
    """Returns the values with one slot's changed; no scatter, which is slower."""
    value = jnp.asarray(value, values.dtype)  # An int is wider with wide defaults.
    return jax.lax.dynamic_update_index_in_dim(values, value, slot, axis=0)
