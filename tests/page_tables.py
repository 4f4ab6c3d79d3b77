"""Page tables in tests: their invariant, by which no page is lost and none held twice;
a truncation of one slot; and free pages in random order."""

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
    """Raises `AssertionError` unless every page is free or owned by exactly one slot.

    In a cache that counts owners a page has as many as are counted; if these are
    several, all its positions are valid in each. In a static cache every slot owns its
    own stretch of pages, in order.
    """
    table, stack = np.asarray(kv.page_table), np.asarray(kv.free_pages)
    owned, length = np.asarray(kv.num_owned), np.asarray(kv.length)
    num_free, P, places = int(kv.num_free), kv.num_pages, np.arange(table.shape[1])
    if not kv.has_shared_pool:
        own = np.arange(P).reshape(kv.num_slots, -1)
        own = own[:, places % own.shape[1]]
        np.testing.assert_array_equal(table, own, "slots do not own their own pages")
        if P < own.size:
            return  # A ring, whose table repeats pages.
    is_owned = places < owned[:, None]
    least = int(kv.counts is None)  # A slot of these has a page, even if it is empty.
    assert 0 <= num_free <= P, f"num_free={num_free} of {P}"
    assert ((owned >= least) & (owned <= len(places))).all(), f"slots own {owned} pages"
    is_within = (length >= 0) & (length <= owned * kv.page_size)
    assert is_within.all(), f"lengths {length} of {owned} pages"
    assert (table[~is_owned] == P).all(), "stale entries of the table"
    assert (stack[num_free:] == P).all(), "stale entries of the stack"
    held = table[is_owned]
    if kv.counts is not None:
        counts = np.append(kv.counts, 0)  # An entry without a page has no owner.
        found = np.bincount(held, minlength=P + 1)
        np.testing.assert_array_equal(found, counts, "other owners are counted")
        is_full = (places + 1) * kv.page_size <= length[:, None]
        assert (is_full | (counts[table] <= 1)).all(), "a shared page is not full"
        for slot in table:
            assert len(set(slot[slot < P])) == np.sum(slot < P), (
                "a page twice in a slot"
            )
        held = np.unique(held)
    every = np.sort([*held, *stack[:num_free]])
    np.testing.assert_array_equal(every, np.arange(P), "pages are lost or held twice")
