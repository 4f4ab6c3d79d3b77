"""Page tables in tests: their invariant, by which no page is lost and none held twice;
a truncation of one slot; and free pages in random order."""

import collections

import jax.numpy as jnp
import numpy as np

from spec_jax.paging import allocator, cache


def truncate(kv: cache.PagedKV, slot, new_len) -> cache.PagedKV:
    """Does as `allocator.truncate_each` for one slot."""
    kv, asked = allocator._only(kv, slot)
    return allocator.truncate_each(kv, jnp.full_like(kv.length, new_len), asked=asked)


def shuffled(kv: cache.PagedKV, rng: np.random.Generator) -> cache.PagedKV:
    """Returns the cache with its free pages in random order."""
    stack = np.array(kv.free_pages)
    stack[: int(kv.num_free)] = rng.permutation(stack[: int(kv.num_free)])
    return kv.replace(free_pages=jnp.asarray(stack))


def check_integrity(kv: cache.PagedKV) -> None:
    """Raises `ValueError` unless every page is free or owned by exactly one slot.

    In a cache that counts owners a page has as many as are counted; if these are
    several, all its positions are valid in each. In a static cache every slot owns its
    own stretch of pages, in order.
    """
    if not kv.has_shared_pool:
        own = np.arange(kv.num_pages).reshape(kv.num_slots, -1)
        own = own[:, np.arange(kv.page_table.shape[1]) % own.shape[1]]
        moved = np.flatnonzero((np.asarray(kv.page_table) != own).any(axis=1))
        if moved.size:
            raise ValueError(
                f"slots {moved.tolist()} do not own their own pages in order"
            )
        if kv.num_pages < own.size:
            return  # A ring, whose table repeats pages.
    table, owned = np.asarray(kv.page_table), np.asarray(kv.num_owned)
    length = np.asarray(kv.length)
    num_free, stack = int(kv.num_free), np.asarray(kv.free_pages)
    P = kv.num_pages
    if not 0 <= num_free <= P:
        raise ValueError(f"num_free={num_free} is outside [0, {P}]")
    holders = [list(stack[:num_free])]
    for slot in range(kv.num_slots):
        count = int(owned[slot])
        if not 0 <= count <= table.shape[1]:
            raise ValueError(f"slot {slot} owns {count} of {table.shape[1]} pages")
        holders.append(list(table[slot, :count]))
        if (table[slot, count:] != P).any():
            raise ValueError(f"slot {slot}: stale entries past its {count} pages")
        if not count and kv.counts is None:
            raise ValueError(f"slot {slot} holds no page")
        if not 0 <= length[slot] <= count * kv.page_size:
            raise ValueError(
                f"slot {slot}: length {length[slot]} exceeds its "
                f"{count} pages of {kv.page_size}"
            )
    if (stack[num_free:] != P).any():
        raise ValueError(f"stale entries past the {num_free} free pages")
    if kv.counts is not None:
        _check_counts(kv, holders[1:])
        holders = [holders[0], sorted(set().union(*map(set, holders[1:])))]
    held = sorted(int(page) for pages in holders for page in pages)
    if held != list(range(P)):
        lost = sorted(set(range(P)) - set(held))
        twice = sorted({page for page in held if held.count(page) > 1})
        raise ValueError(f"pages lost: {lost}; pages held twice: {twice}")


def _check_counts(kv: cache.PagedKV, holders: list[list[int]]) -> None:
    """Raises `ValueError` unless pages have as many owners as are counted, and those of
    several are valid in full.

    Args:
      holders: the pages of each slot, in order.
    """
    counts, length = np.asarray(kv.counts), np.asarray(kv.length)
    found = collections.Counter(int(page) for pages in holders for page in pages)
    wrong = [page for page in range(kv.num_pages) if found[page] != counts[page]]
    if wrong:
        raise ValueError(
            f"pages {wrong} have {[found[page] for page in wrong]} owners, and "
            f"{counts[wrong].tolist()} are counted"
        )
    for slot, pages in enumerate(holders):
        if len(set(pages)) < len(pages):
            raise ValueError(f"slot {slot} holds a page twice")
        for place, page in enumerate(pages):
            if found[int(page)] > 1 and length[slot] < (place + 1) * kv.page_size:
                raise ValueError(
                    f"slot {slot} of length {length[slot]} would write into page "
                    f"{page}, which {found[int(page)]} slots hold"
                )
