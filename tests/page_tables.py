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
    """Asserts that every page is free or owned by exactly one slot.

    In a cache that counts owners a page has as many as are counted; if these are
    several, all its positions are valid in each. In a static cache every slot owns its
    own stretch of pages, in order.
    """
    table, owned, length = map(np.asarray, (kv.page_table, kv.num_owned, kv.length))
    P, places = kv.num_pages, np.arange(table.shape[1])
    if not kv.has_shared_pool:
        own = np.arange(P).reshape(kv.num_slots, -1)
        own = own[:, places % own.shape[1]]
        assert (table == own).all(), "slots do not own their own pages in order"
        if P < own.size:
            return  # A ring, whose table repeats pages.
    num_free, stack = int(kv.num_free), np.asarray(kv.free_pages)
    assert 0 <= num_free <= P, f"{num_free=} of {P}"
    assert (stack[num_free:] == P).all(), "stale entries past the free pages"
    least = int(kv.counts is None)
    assert ((least <= owned) & (owned <= len(places))).all(), f"slots own {owned} pages"
    is_held = places < owned[:, None]
    assert (table[~is_held] == P).all(), "stale entries past a slot's pages"
    most = owned * kv.page_size
    assert ((length >= 0) & (length <= most)).all(), f"lengths {length} of {most}"
    held, free = (
        np.bincount(x, minlength=P + 1) for x in (table[is_held], stack[:num_free])
    )
    once = held if kv.counts is None else np.minimum(held, 1)
    expected = np.arange(P + 1) < P
    np.testing.assert_array_equal(once + free, expected, "pages lost, or held twice")
    if kv.counts is not None:
        np.testing.assert_array_equal(held[:P], kv.counts, "owners of pages")
        each = [row[own] for row, own in zip(table, is_held, strict=True)]
        assert all(len({*pages}) == len(pages) for pages in each), "a page twice"
        is_shared = is_held & (held[table] > 1)
        is_full = length[:, None] >= (places + 1) * kv.page_size
        assert (is_full | ~is_shared).all(), "a slot would write into another's page"
