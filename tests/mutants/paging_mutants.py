"""Faults of the pages: who owns which, where a position lives, what is written."""

from mutant import Mutant


_ALLOCATOR = "spec_jax.paging.allocator:"
_CACHE = "spec_jax.paging.cache:"
_INDEX = "spec_jax.paging.index:"
_WRITE = "spec_jax.ops.page_write:page_write"

OWNERS = (
    Mutant(
        name="a stale page stays in the table after it was freed",
        where=_ALLOCATOR + "_give",
        old="jnp.arange(row.shape[0], dtype=jnp.int32) < left, row, nowhere",
        new="jnp.arange(row.shape[0], dtype=jnp.int32) <= left, row, nowhere",
        caught_by=("truncate to 1", "random walk"),
    ),
    Mutant(
        name="a freed page is lost",
        where=_ALLOCATOR + "_give",
        old="stack, num_free + count",
        new="stack, num_free",
        caught_by=("truncate to 1", "random walk"),
    ),
    Mutant(
        name="a page is handed out and stays free",
        where=_ALLOCATOR + "_take",
        old="stack, left",
        new="stack, num_free",
        caught_by=("truncate to 1",),
    ),
    Mutant(
        name="truncation keeps a page too many",
        where=_ALLOCATOR + "truncate",
        old="index.pages_for(new_len, kv.page_size)",
        new="new_len // kv.page_size + 1",
        caught_by=("truncate to 4", "random walk"),
    ),
    Mutant(
        name="truncation keeps a page too few",
        where=_ALLOCATOR + "truncate",
        old="index.pages_for(new_len, kv.page_size)",
        new="new_len // kv.page_size",
        caught_by=("truncate to 5",),
    ),
    Mutant(
        name="truncation to nothing gives up the first page",
        where=_ALLOCATOR + "truncate",
        old="jnp.maximum(index.pages_for(new_len, kv.page_size), 1)",
        new="index.pages_for(new_len, kv.page_size)",
        caught_by=("truncate to 0",),
    ),
    Mutant(
        name="truncation past the length is not refused",
        where=_ALLOCATOR + "truncate",
        old="(new_len <= kv.length[slot])",
        new="(new_len <= kv.length[slot] + 1)",
        caught_by=("refused truncation",),
    ),
    Mutant(
        name="a length past the slot's pages is not refused",
        where=_ALLOCATOR + "extend",
        old="(new_len <= capacity)",
        new="(new_len <= capacity + 1)",
        caught_by=("refused extension",),
    ),
    Mutant(
        name="a slot is opened twice",
        where=_ALLOCATOR + "register",
        old="valid = ~kv.registered[slot]",
        new="valid = jnp.ones((), bool)",
        caught_by=("refused registration",),
    ),
    Mutant(
        name="a slot that does not exist is taken for the last one",
        where=_ALLOCATOR + "_refuse_unless",
        old="valid = valid & exists",
        new="valid = valid & (slot < kv.num_slots)",
        caught_by=("no such slot",),
    ),
    Mutant(
        name="a release keeps a page",
        where=_ALLOCATOR + "release",
        old="_give_back(kv, slot, jnp.where(valid, 0,",
        new="_give_back(kv, slot, jnp.where(valid, 1,",
        caught_by=("random walk",),
    ),
    Mutant(
        name="a reservation wider than the page table is granted",
        where=_ALLOCATOR + "reserve",
        old="(missing <= kv.num_free) & (wanted <= kv.page_table.shape[1])",
        new="missing <= kv.num_free",
        caught_by=("wider than the table",),
    ),
    Mutant(
        name="a starved slot keeps half of what it asked for",
        where=_ALLOCATOR + "reserve",
        old="jnp.where(valid & fits, missing, 0)",
        new="jnp.where(valid, jnp.minimum(missing, kv.num_free), 0)",
        caught_by=("starved",),
    ),
    Mutant(
        name="a slot stays starved after another made room",
        where=_ALLOCATOR + "reserve",
        old="jnp.where(valid, ~fits, kv.out_of_pages[slot])",
        new="kv.out_of_pages[slot] | (valid & ~fits)",
        caught_by=("recovery",),
    ),
    Mutant(
        name="a page held twice makes up for a lost one",
        where=_CACHE + "check_integrity",
        old="held != list(range(P))",
        new="len(held) != P",
        caught_by=("broken books",),
    ),
)

PLACES = (
    Mutant(
        name="a position below zero is on the last page",
        where=_INDEX + "locate",
        old="wrap_negative_indices=False",
        new="wrap_negative_indices=True",
        caught_by=("outside the table",),
    ),
    Mutant(
        name="offsets are counted from the end of a page",
        where=_INDEX + "locate",
        old="return pages, positions % page_size",
        new="return pages, page_size - 1 - positions % page_size",
        caught_by=("pages and offsets", "written rows"),
    ),
    Mutant(
        name="a length on a page boundary takes one page more",
        where=_INDEX + "pages_for",
        old="-(-length // page_size)",
        new="length // page_size + 1",
        caught_by=("pages for a length",),
    ),
    Mutant(
        name="the largest length needs a negative number of pages",
        where=_INDEX + "pages_for",
        old="-(-length // page_size)",
        new="(length + page_size - 1) // page_size",
        caught_by=("pages for the largest length",),
    ),
)

BYTES = (
    Mutant(
        name="a dead row is written to page 0",
        where=_WRITE,
        old="< num_live, at, num_pages)",
        new="< num_live, at, 0)",
        caught_by=("written nowhere", "random walk"),
    ),
    Mutant(
        name="a dead row is written to the last page",
        where=_WRITE,
        old="< num_live, at, num_pages)",
        new="< num_live, at, -1)",
        caught_by=("written nowhere",),
    ),
    Mutant(
        name="one dead row is taken for a live one",
        where=_WRITE,
        old="< num_live, at",
        new="<= num_live, at",
        caught_by=("written nowhere",),
    ),
    Mutant(
        name="a row before position 0 is written to the last page",
        where=_WRITE,
        old="wrap_negative_indices=False",
        new="wrap_negative_indices=True",
        caught_by=("written nowhere",),
    ),
    Mutant(
        name="keys are stored as values",
        where=_CACHE + "write",
        old="page_write.page_write(kv.v[layer], v,",
        new="page_write.page_write(kv.v[layer], k,",
        caught_by=("written rows", "random walk"),
    ),
    Mutant(
        name="the rows of a layer are stored in all of them",
        where=_CACHE + "replace_layer",
        old="(*pools[:layer], pool, *pools[layer + 1 :])",
        new="(pool,) * len(pools)",
        caught_by=("written rows",),
    ),
    Mutant(
        name="what a slot does not own reads as zero",
        where=_CACHE + "gather",
        old="fill_value=jnp.nan",
        new="fill_value=0",
        caught_by=("unowned positions",),
    ),
)

MUTANTS = (*OWNERS, *PLACES, *BYTES)
