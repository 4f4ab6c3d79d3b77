"""Pages of positions, and the number of pages that a length needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.ops import page_write
from spec_jax.paging import index


PAGE_SIZE = 4
NOWHERE = np.iinfo(np.int32).max
TABLE = np.array([[7, 2, 5], [1, 9, 11]], np.int32)  # 11 is P: no page is owned

_locate = jax.jit(page_write.locate, static_argnames=("page_size",))


def locate(slots, positions):
    return _locate(
        TABLE,
        page_size=PAGE_SIZE,
        slots=np.asarray(slots, np.int32),
        positions=np.asarray(positions, np.int32),
    )


@pytest.mark.parametrize(
    ("slot", "position"),
    [(0, -1), (0, -5), (1, 12), (0, 10**6), (-1, 0), (-2, 3), (2, 0), (-1, -1)],
)
def test_outside_the_table_is_nowhere(slot, position):
    """Fails if an index outside the table finds a page; negative ones must not wrap."""
    pages, _ = locate([slot, 1], [position, 0])
    np.testing.assert_array_equal(pages, [NOWHERE, 1])


@pytest.mark.parametrize("page_size", [1, 4, 256])
def test_pages_for_covers_exactly(page_size):
    """Fails if a length near a page boundary takes one page too many or too few, or if
    the largest int32 overflows to a negative number of pages."""
    for length in (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size):
        pages = index.pages_for(length, page_size)
        assert (pages - 1) * page_size < length <= pages * page_size
    traced = index.pages_for(jnp.arange(9, dtype=jnp.int32), page_size)
    np.testing.assert_array_equal(
        traced, [index.pages_for(n, page_size) for n in range(9)]
    )
    largest = jnp.int32(2**31 - 1)
    assert int(index.pages_for(largest, page_size)) == -(-(2**31 - 1) // page_size)
