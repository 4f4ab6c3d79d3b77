"""Allocation of pages on a GPU (Pallas Triton): one launch.

Does what `paging.allocator` does with all slots, in scalar code: slot after slot and
page after page; a step moves at most one page. All threads of the one program do the
same. They change what they read, and so have a barrier before each change.

XLA would launch a kernel for each of these scalars, and ask the host after each slot.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.pallas import launch


class Tables(NamedTuple):
    """The tables of `cache.PagedKV`, int32 unless bool; in kernels, references."""

    page_table: Any  # [S, M]
    num_owned: Any  # [S]
    length: Any  # [S]
    free_pages: Any  # [P]
    num_free: Any  # [1]
    out_of_pages: Any  # [S] bool
    refused: Any  # [S] bool


class Pages(NamedTuple):
    """Numbers of pages, static but for the first slot."""

    number: int  # of pages; as an entry of a table, no page
    size: int  # positions of a page
    change_hands: bool  # else each slot has its pages for good
    first: jax.Array  # slot 0, after the next kernel may start

    def covering(self, length):
        """Returns `index.pages_for` of a length that is not negative."""
        # A sum before the division would overflow near 2**31.
        is_partial = jax.lax.rem(length, self.size) > 0
        return jax.lax.div(length, self.size) + is_partial.astype(jnp.int32)

    def move(self, count, source, last, target, first):
        """Moves `count` pages, from `last` of the source backwards, to `first` onwards.

        Source and target: a reference and, of the page table, the slot of the row.
        """
        (source, *of_source), (target, *of_target) = source, target

        def copy(number, carry):
            target[*of_target, first + number] = source[*of_source, last - number]
            return carry

        def clear(number, carry):
            source[*of_source, last - number] = jnp.int32(self.number)
            return carry

        jax.lax.fori_loop(0, count, copy, 0)
        launch.meet()
        jax.lax.fori_loop(0, count, clear, 0)


def append_each(
    kv: Any,  # `cache.PagedKV`
    up_to: jax.Array,  # [S]
    counts: jax.Array,  # [S]
    *,
    num_rows: int,
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """Implements `allocator.append_each`. The tables are updated in place."""
    shapes = counts.shape, (num_rows,), (num_rows,)
    kv, made = _run(_append_each, kv, up_to, counts, shapes=shapes)
    return kv, *made


def truncate_each(kv: Any, new_lens: jax.Array, asked: jax.Array):
    """Implements `allocator.truncate_each`, to `new_lens` `[S]` where `asked` `[S]`."""
    return _run(_truncate_each, kv, new_lens, asked)[0]


def _run(operation, kv, *inputs, shapes=()):
    """Returns the cache after an operation, and its int32 results of `shapes`."""
    tables = Tables(*(getattr(kv, field) for field in Tables._fields))
    tables = tables._replace(num_free=kv.num_free.reshape(1))
    # Not of weak types, between which and a constant Triton's lowering cannot choose.
    strong = [jax.lax.convert_element_type(x, x.dtype) for x in inputs]

    def kernel(tables, given, updated, made):
        del tables  # They are `updated`, by aliases.
        pages = Pages(
            number=kv.num_pages,
            size=kv.page_size,
            change_hands=kv.has_shared_pool,
            first=launch.program(0),
        )
        operation(updated, *given, *made, pages)

    updated, made = launch.run(
        kernel,
        (tables, strong),
        (tables, [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]),
        grid=(1,),
        num_warps=1,
        aliases={i: i for i in range(len(tables))},
        name=operation.__name__.lstrip("_"),
    )
    changed = updated._asdict() | {"num_free": updated.num_free.reshape(())}
    return kv.replace(**changed), made


def _append_each(
    tables: Tables,
    up_to,  # [S]
    counts,  # [S]
    num_active,  # [S]
    slots,  # [R]
    positions,  # [R]
    pages: Pages,
) -> None:
    """Gives each slot rows, and each row a place."""
    (S, M), (R,) = tables.page_table.shape, slots.shape

    def serve(slot, carry):
        """Serves one slot. `carry`: the numbers of free pages and of earlier rows."""
        num_free, num_rows = carry
        end, count, length = up_to[slot], counts[slot], tables.length[slot]
        owned, refused = tables.num_owned[slot], tables.refused[slot]
        lacks = tables.out_of_pages[slot]
        launch.meet()
        start, asked = end - count, count > 0
        valid = asked & (end >= 0)
        wanted = pages.covering(jnp.where(valid, end, 0))
        missing = jnp.maximum(wanted - owned, 0)
        fits = (missing <= num_free) & (wanted <= M)
        taken = jnp.where(fits, missing, 0)
        lacks = jnp.where(valid, ~fits, lacks)
        if pages.change_hands:
            stack, table = (tables.free_pages,), (tables.page_table, slot)
            pages.move(taken, stack, num_free - 1, table, owned)
            owned, num_free = owned + taken, num_free - taken
            tables.num_owned[slot] = owned
        active = jnp.where(lacks, 0, count)
        new_len, extends = start + active, active > 0
        grows = (new_len >= length) & (new_len <= owned * pages.size)
        refused |= asked & ~(valid & (start == length)) | (extends & ~grows)
        tables.length[slot] = jnp.where(extends & grows, new_len, length)
        tables.out_of_pages[slot], tables.refused[slot] = lacks, refused
        num_active[slot] = active

        def place(number, carry):
            slots[num_rows + number] = slot
            positions[num_rows + number] = start + number
            return carry

        jax.lax.fori_loop(0, jnp.minimum(active, R - num_rows), place, 0)
        return num_free, num_rows + jnp.maximum(active, 0)

    carry = tables.num_free[0], jnp.int32(0)
    num_free, num_rows = jax.lax.fori_loop(pages.first, S, serve, carry)
    tables.num_free[0] = num_free

    def pad(row, carry):
        slots[row] = positions[row] = jnp.int32(0)
        return carry

    jax.lax.fori_loop(num_rows, R, pad, 0)


def _truncate_each(tables: Tables, new_lens, asked, pages: Pages) -> None:
    def cut(slot, num_free):
        """Cuts one slot; returns the number of free pages, the slot's included."""
        new_len, is_asked = new_lens[slot], asked[slot]
        length, owned = tables.length[slot], tables.num_owned[slot]
        refused = tables.refused[slot]
        launch.meet()
        valid = is_asked & (new_len >= 0) & (new_len <= length)
        tables.length[slot] = jnp.where(valid, new_len, length)
        tables.refused[slot] = refused | (is_asked & ~valid)
        if pages.change_hands:
            kept = jnp.maximum(pages.covering(jnp.where(valid, new_len, 0)), 1)
            given = jnp.where(valid, jnp.maximum(owned - kept, 0), 0)
            stack, table = (tables.free_pages,), (tables.page_table, slot)
            pages.move(given, table, owned - 1, stack, num_free)
            tables.num_owned[slot] = owned - given
            num_free += given
        return num_free

    (S,) = asked.shape
    tables.num_free[0] = jax.lax.fori_loop(pages.first, S, cut, tables.num_free[0])
