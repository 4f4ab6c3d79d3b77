"""Allocation of pages: register, reserve, extend, truncate, release, share.

Every operation takes a state value and returns a new one, works inside `jit` and
`while_loop`, and touches the page table only, never the pages (but for `share`, which
copies one): its cost is one pass over a few integers a page. In a `static.StaticKV` a
slot has its pages for good, and operations change lengths and flags alone.

An invalid request raises `ValueError` where its arguments are concrete. Under a
trace it sets `refused[slot]` (of a slot that does not exist: every slot's) and
changes nothing else; `check` raises at the edge.

In a cache that counts owners (`cache.init(shares=True)`) several slots may hold a page,
all of whose positions are then valid and are never written again. It is free when the
last of them gives it back. An empty slot need not have a page there.
"""

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from spec_jax import compilation
from spec_jax.ops import dispatch
from spec_jax.paging import cache, index


Scalar = jax.Array | int


def register(kv: cache.PagedKV, slot: Scalar) -> cache.PagedKV:
    """Opens an empty slot and gives it its first page, unless it has pages for good.

    Without a free page `out_of_pages[slot]` is set and the slot stays closed.
    """
    slot = _slot(kv, slot)
    valid = ~kv.registered[slot]
    kv, valid = _refuse_unless(
        kv, slot, valid, lambda: f"slot {int(slot)} is already registered"
    )
    opens = valid & ((kv.num_free > 0) | (not kv.has_shared_pool))
    kv = _take_pages(kv, slot, opens.astype(jnp.int32))
    out_of_pages = jnp.where(valid, ~opens, kv.out_of_pages[slot])
    return kv.replace(
        registered=kv.registered.at[slot].set(kv.registered[slot] | opens),
        out_of_pages=kv.out_of_pages.at[slot].set(out_of_pages),
    )


def reserve(kv: cache.PagedKV, slot: Scalar, up_to: Scalar) -> cache.PagedKV:
    """Makes the slot own the pages that cover `[0, up_to)`; never gives pages back.

    Where the pool or the slot's page table is too small, `out_of_pages[slot]` is set
    and nothing else changes: what is committed stays.
    """
    slot, up_to = _slot(kv, slot), jnp.asarray(up_to, jnp.int32)
    valid = kv.registered[slot] & (up_to >= 0)
    kv, valid = _refuse_unless(
        kv,
        slot,
        valid,
        lambda: (
            f"cannot reserve up to {int(up_to)} in slot {int(slot)} "
            f"(registered: {bool(kv.registered[slot])})"
        ),
    )
    wanted = index.pages_for(up_to, kv.page_size)
    missing = jnp.maximum(wanted - kv.num_owned[slot], 0)
    fits = (missing <= kv.num_free) & (wanted <= kv.page_table.shape[1])
    kv = kv.replace(
        out_of_pages=kv.out_of_pages.at[slot].set(
            jnp.where(valid, ~fits, kv.out_of_pages[slot])
        )
    )
    return _take_pages(kv, slot, jnp.where(valid & fits, missing, 0))


def extend(kv: cache.PagedKV, slot: Scalar, new_len: Scalar) -> cache.PagedKV:
    """Declares `[0, new_len)` valid, after its keys and values were written."""
    slot, new_len = _slot(kv, slot), jnp.asarray(new_len, jnp.int32)
    capacity = kv.num_owned[slot] * kv.page_size
    valid = kv.registered[slot] & (new_len >= kv.length[slot]) & (new_len <= capacity)
    kv, valid = _refuse_unless(
        kv,
        slot,
        valid,
        lambda: (
            f"cannot extend slot {int(slot)} from {int(kv.length[slot])} to "
            f"{int(new_len)}: it owns {int(capacity)} positions"
        ),
    )
    new_len = jnp.where(valid, new_len, kv.length[slot])
    return kv.replace(length=kv.length.at[slot].set(new_len))


def truncate(kv: cache.PagedKV, slot: Scalar, new_len: Scalar) -> cache.PagedKV:
    """Keeps `[0, new_len)` and frees the pages to the right of it.

    The slot stays registered and keeps its first page even at `new_len = 0`, unless the
    cache counts owners. A page of several owners cannot be cut in two. No bytes are
    cleared or moved. Costs a pass over the page table, whatever the length; where a
    slot has its pages for good, nothing but the write of one length.
    """
    slot, new_len = _slot(kv, slot), jnp.asarray(new_len, jnp.int32)
    valid = kv.registered[slot] & (new_len >= 0) & (new_len <= kv.length[slot])
    if kv.counts is not None:
        valid &= ~_cuts_shared(kv, kv.page_table[slot], new_len)
    kv, valid = _refuse_unless(
        kv,
        slot,
        valid,
        lambda: (
            f"cannot truncate slot {int(slot)} to {int(new_len)}: its length is "
            f"{int(kv.length[slot])} (registered: {bool(kv.registered[slot])}), or "
            "others hold the page there"
        ),
    )
    new_len = jnp.where(valid, new_len, kv.length[slot])
    kept = _kept(kv, new_len)
    kv = kv.replace(length=kv.length.at[slot].set(new_len))
    return _give_back(kv, slot, jnp.where(valid, kept, kv.num_owned[slot]))


def release(kv: cache.PagedKV, slot: Scalar) -> cache.PagedKV:
    """Closes the slot and frees all its pages, unless it has them for good."""
    slot = _slot(kv, slot)
    kv, valid = _refuse_unless(
        kv,
        slot,
        kv.registered[slot],
        lambda: f"slot {int(slot)} is not registered",
    )
    kv = _give_back(kv, slot, jnp.where(valid, 0, kv.num_owned[slot]))
    length = jnp.where(valid, 0, kv.length[slot])
    return kv.replace(
        length=kv.length.at[slot].set(length),
        registered=kv.registered.at[slot].set(kv.registered[slot] & ~valid),
    )


@compilation.one_kernel
def reserve_each(
    kv: cache.PagedKV, up_to: jax.Array, *, asked: jax.Array
) -> cache.PagedKV:
    """Does as `reserve` for slots that are asked, in their order; all arrays `[S]`.

    A slot that finds too few pages takes none, and leaves them to those behind it.
    Costs the slots that need pages, not the slots there are.
    """
    valid = asked & kv.registered & (up_to >= 0)
    wanted = index.pages_for(up_to, kv.page_size)
    missing = jnp.where(valid, jnp.maximum(wanted - kv.num_owned, 0), 0)
    out_of_pages = jnp.where(valid, False, kv.out_of_pages)

    def serve(carry):
        """Gives the first slot that waits its pages, or flags that it lacks them."""
        tables, out_of_pages, missing = carry
        slot = jnp.argmax(missing > 0).astype(jnp.int32)
        num_free = tables[3]
        fits = (missing[slot] <= num_free) & (wanted[slot] <= kv.page_table.shape[1])
        tables = _take(tables, slot, jnp.where(fits, missing[slot], 0))
        out_of_pages = _put(
            out_of_pages, slot, jnp.where(missing[slot] > 0, ~fits, out_of_pages[slot])
        )
        return tables, out_of_pages, _put(missing, slot, 0)

    carry = _tables(kv), out_of_pages, missing
    if kv.num_slots == 1:
        carry = serve(carry)  # One turn at most: no loop to compile and to start.
    else:
        carry = jax.lax.while_loop(lambda carry: jnp.any(carry[2] > 0), serve, carry)
    tables, out_of_pages, _ = carry
    kv = kv.replace(out_of_pages=out_of_pages, refused=kv.refused | (asked & ~valid))
    return _with_tables(kv, tables)


@compilation.one_kernel
def extend_each(
    kv: cache.PagedKV, new_len: jax.Array, *, asked: jax.Array
) -> cache.PagedKV:
    """Does as `extend` for slots that are asked; all arrays `[S]`."""
    fits = new_len <= kv.num_owned * kv.page_size
    valid = kv.registered & (new_len >= kv.length) & fits
    return kv.replace(
        length=jnp.where(asked & valid, new_len, kv.length),
        refused=kv.refused | (asked & ~valid),
    )


@compilation.one_kernel
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


@compilation.one_kernel
def truncate_each(
    kv: cache.PagedKV, new_len: jax.Array, *, asked: jax.Array, impl: str = "xla"
) -> cache.PagedKV:
    """Does as `truncate` for slots that are asked; all arrays `[S]`.

    Costs the slots that give pages back, not the slots there are.

    Args:
      impl: of `dispatch`; those with kernels have one for all of this.
    """
    if impl in dispatch.PALLAS and kv.counts is None:
        return dispatch.kernel("allocation", impl, "truncate_each")(kv, new_len, asked)
    valid = asked & kv.registered & (new_len >= 0) & (new_len <= kv.length)
    if kv.counts is not None:
        valid &= ~jax.vmap(_cuts_shared, (None, 0, 0))(kv, kv.page_table, new_len)
    kept = _kept(kv, new_len)
    kv = kv.replace(
        length=jnp.where(valid, new_len, kv.length),
        refused=kv.refused | (asked & ~valid),
    )
    if not kv.has_shared_pool:
        return kv
    surplus = jnp.where(valid, jnp.maximum(kv.num_owned - kept, 0), 0)
    if kv.num_slots == 1:
        return _with_tables(kv, _give(_tables(kv), jnp.int32(0), surplus[0]))

    def free(carry):
        tables, surplus = carry
        slot = jnp.argmax(surplus > 0).astype(jnp.int32)
        return _give(tables, slot, surplus[slot]), _put(surplus, slot, 0)

    tables, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1] > 0), free, (_tables(kv), surplus)
    )
    return _with_tables(kv, tables)


def share(
    kv: cache.PagedKV, source: Scalar, slot: Scalar, length: Scalar
) -> cache.PagedKV:
    """Begins an empty slot with `[0, length)` of another, if the cache counts owners.

    Both hold the full pages. If the last one is not full, the slot gets a copy: without
    a free page for it `out_of_pages[slot]` is set, and the slot stays empty.

    Raises:
      ValueError: a cache that counts no owners; or as any operation.
    """
    if kv.counts is None:
        raise ValueError("the cache counts no owners: make it with shares=True")
    source, slot = _slot(kv, source), _slot(kv, slot)
    length = jnp.asarray(length, jnp.int32)
    is_begun = (source == slot) | (kv.length[slot] > 0)
    valid = kv.registered[source] & kv.registered[slot] & ~is_begun
    valid &= (source >= 0) & (source < kv.num_slots)
    valid &= (length >= 0) & (length <= kv.length[source])
    kv, valid = _refuse_unless(
        kv,
        slot,
        valid,
        lambda: (
            f"cannot begin slot {int(slot)} with {int(length)} positions of slot "
            f"{int(source)}, which has {int(kv.length[source])}: another, empty one can"
        ),
    )
    full = jax.lax.div(length, jnp.int32(kv.page_size))
    is_cut = jax.lax.rem(length, jnp.int32(kv.page_size)) > 0
    kv = _give_back(kv, slot, jnp.where(valid, 0, kv.num_owned[slot]))
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
        out_of_pages=_put(
            kv.out_of_pages, slot, jnp.where(valid, ~fits, kv.out_of_pages[slot])
        ),
    )
    copies = fits & is_cut
    kv = _take_pages(kv, slot, copies.astype(jnp.int32))
    copy = kv.page_table[slot].at[full].get(mode="fill", fill_value=nowhere)
    return cache.copy_page(
        kv,
        theirs.at[full].get(mode="fill", fill_value=nowhere),
        jnp.where(copies, copy, nowhere),
    )


def check(kv: cache.PagedKV) -> None:
    """Raises what a traced operation could only flag. Outside jit only.

    Raises:
      ValueError: an operation was refused.
      MemoryError: a reservation found no page; the message has the numbers.
    """
    refused = [slot for slot in range(kv.num_slots) if bool(kv.refused[slot])]
    if refused:
        raise ValueError(f"an operation on slots {refused} was invalid and refused")
    out_of_pages = [slot for slot in range(kv.num_slots) if bool(kv.out_of_pages[slot])]
    if out_of_pages:
        raise MemoryError(
            f"out of pages in slots {out_of_pages}: {int(kv.num_free)} of "
            f"{kv.num_pages} pages of {kv.page_size} tokens are free, and a slot holds "
            f"at most {kv.slot_capacity} tokens"
        )


def _slot(kv: cache.PagedKV, slot: Scalar) -> jax.Array:
    if not _is_traced(slot) and not 0 <= int(slot) < kv.num_slots:
        raise ValueError(f"slot {int(slot)} is outside [0, {kv.num_slots})")
    return jnp.asarray(slot, jnp.int32)


def _is_traced(*values) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def _refuse_unless(
    kv: cache.PagedKV, slot: jax.Array, valid: jax.Array, message: Callable[[], str]
) -> tuple[cache.PagedKV, jax.Array]:
    if not _is_traced(valid) and not bool(valid):
        raise ValueError(message())
    exists = (slot >= 0) & (slot < kv.num_slots)
    valid = valid & exists
    refused = kv.refused.at[slot].set(kv.refused[slot] | ~valid)
    return kv.replace(refused=refused | ~exists), valid


def _take_pages(kv: cache.PagedKV, slot: jax.Array, count: jax.Array) -> cache.PagedKV:
    """Moves `count` pages from the top of the free stack to the slot's table."""
    if not kv.has_shared_pool:
        return kv
    return _with_tables(kv, _take(_tables(kv), slot, count))


def _give_back(kv: cache.PagedKV, slot: jax.Array, kept: jax.Array) -> cache.PagedKV:
    """Moves the slot's pages past the first `kept` to the free stack."""
    if not kv.has_shared_pool:
        return kv
    count = jnp.maximum(kv.num_owned[slot] - kept, 0)
    return _with_tables(kv, _give(_tables(kv), slot, count))


def _kept(kv: cache.PagedKV, new_len: jax.Array) -> jax.Array:
    """Returns the pages that a slot of so many positions keeps."""
    least = 1 if kv.counts is None else 0
    return jnp.maximum(index.pages_for(new_len, kv.page_size), least)


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


# `inline`: compiled once for calls outside a trace, inlined within one. One pass
# over the page table, however many pages move: a loop would take as many turns,
# and on a GPU ask the host at each.
@functools.partial(jax.jit, inline=True)
def _take(tables, slot, count):
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


@functools.partial(jax.jit, inline=True)
def _give(tables, slot, count):
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


@functools.partial(jax.jit, inline=True)
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
    """Returns the values with one slot's changed; no scatter, for `one_kernel`."""
    value = jnp.asarray(value, values.dtype)  # An int is wider with wide defaults.
    return jax.lax.dynamic_update_index_in_dim(values, value, slot, axis=0)
