"""Allocation of pages on a GPU (Pallas Triton): one launch.

What `paging.allocator` does with all slots, number by number: slot after slot and page
after page, of which a step moves one at most. All threads of the one program do the
same. They change what they read, and so meet before whatever is changed.

XLA makes a launch of each of these numbers, and asks the host after each slot.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan, early_launch


class Tables(NamedTuple):
    """The page table and its like, see `cache.PagedKV`; of kernels, references."""

    page_table: Any  # [S, M]
    num_owned: Any  # [S]
    length: Any  # [S]
    registered: Any  # [S] bool
    free_pages: Any  # [P]
    num_free: Any  # [1]
    out_of_pages: Any  # [S] bool
    refused: Any  # [S] bool


class Pages(NamedTuple):
    """Static sizes of pages, and how the threads of the program meet."""

    number: int  # of pages, which is that of no page
    size: int
    change_hands: bool
    meet: Callable[[], Any] = lambda: None
    first: Any = 0  # slot: what stands for 0 there

    def covering(self, length):
        """Does as `index.pages_for` of a length that is not negative."""
        # Not with a sum before the division: that overflows near 2**31.
        is_partial = jax.lax.rem(length, self.size) > 0
        return jax.lax.div(length, self.size) + is_partial.astype(jnp.int32)

    def move(self, count, source, last, target, first):
        """Moves pages, those from `last` of the source backwards, to `first` onwards.

        Source and target are references with the slot whose line of it is meant.
        """
        (source, *of_source), (target, *of_target) = source, target

        def copy(number, carry):
            target[*of_target, first + number] = source[*of_source, last - number]
            return carry

        def clear(number, carry):
            source[*of_source, last - number] = jnp.int32(self.number)
            return carry

        jax.lax.fori_loop(0, count, copy, 0)
        self.meet()
        jax.lax.fori_loop(0, count, clear, 0)


def run(
    operation: Callable[..., None],
    tables: Tables,
    *inputs: jax.Array,
    shapes: Sequence[tuple[int, ...]],
    pages: Pages,
    interpret: bool,
) -> tuple[Tables, list[jax.Array]]:
    """Returns the tables, in place, and the int32 arrays of an operation."""
    fields = len(tables)
    outputs = [
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tables),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
    ]

    def kernel(*refs):
        # A field that changes has a second reference, as an output.
        given, made = refs[fields : -len(outputs)], refs[-len(outputs) :]
        how = pages._replace(
            meet=(lambda: None) if interpret else plt.debug_barrier,
            first=early_launch.program(0, interpret=interpret),
        )
        operation(Tables(*made[:fields]), *given, *made[fields:], how)

    inputs = *tables, *inputs
    made = pl.pallas_call(
        kernel,
        grid=(1,),
        in_specs=[plan.whole(x) for x in inputs],
        out_specs=[plan.whole(x) for x in outputs],
        out_shape=outputs,
        input_output_aliases={i: i for i in range(fields)},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name=operation.__name__,
    )(*inputs)
    return Tables(*made[:fields]), made[fields:]


def append_each(
    tables: Tables,
    up_to,  # [S]
    counts,  # [S]
    num_active,  # [S]
    slots,  # [R]
    positions,  # [R]
    pages: Pages,
) -> None:
    """Implements `allocator.append_each`: each slot gets rows, and each row a place."""
    (S, M), (R,) = tables.page_table.shape, slots.shape

    def serve(slot, carry):
        """Serves one slot. `carry`: free pages, and rows before."""
        num_free, num_rows = carry
        end, count, length = up_to[slot], counts[slot], tables.length[slot]
        owned, registered = tables.num_owned[slot], tables.registered[slot]
        lacks, refused = tables.out_of_pages[slot], tables.refused[slot]
        pages.meet()
        start, asked = end - count, count > 0
        valid = asked & registered & (end >= 0)
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
        grows = registered & (new_len >= length) & (new_len <= owned * pages.size)
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


def truncate_each(tables: Tables, new_lens, asked, pages: Pages) -> None:
    """Implements `allocator.truncate_each`, to `new_lens` `[S]` where `asked` `[S]`."""

    def cut(slot, num_free):
        """Cuts one slot. Returns the free pages, including the slot's freed ones."""
        new_len, is_asked = new_lens[slot], asked[slot]
        length, owned = tables.length[slot], tables.num_owned[slot]
        registered, refused = tables.registered[slot], tables.refused[slot]
        pages.meet()
        valid = is_asked & registered & (new_len >= 0) & (new_len <= length)
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
