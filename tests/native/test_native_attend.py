"""Ranges of keys and infinite scores in `calls.attend`.

The promises of every implementation are tested in `ops/test_row_attention`.
"""

import functools

import numpy as np
import pytest
from native import native_oracle as oracle
from ops import row_slabs as slabs

from spec_jax import testing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranges_of_long_texts(rng, isa, dtype):
    """Fails if sums of ranges are combined wrongly, or have keys that a row cannot see.

    Rows lie on both sides of the bounds of ranges, 1,024 and 2,048 keys.
    """
    rows = slabs.window((1022, 1026), (2046, 2049))
    slab = oracle.make_slab(
        rng, rows, dtype=dtype, N=4, K=2, H=40, page_size=64, prefix=(1022, 2046)
    )
    attend = functools.partial(slabs.run, isa)
    out, *_ = slabs.assert_row_contract(slab, attend)
    expected, *_ = oracle.attend(slab, **slabs.numbers(slab))
    testing.assert_rows_close(out, expected, dtype=dtype, reduction=40 + 2049)


@pytest.mark.parametrize("position", [1018, 1024])
def test_ranges_of_trees(rng, isa, position):
    """Fails if rows of a tree begin their ranges elsewhere than rows of a chain."""
    rows, width = [(0, position + i) for i in range(5)], 8
    slab = oracle.make_slab(
        rng, rows, dtype="bfloat16", N=4, K=2, H=16, page_size=64, prefix=(position,)
    )
    chain = slabs.run(isa, slab, 5)
    # This branch is the chain itself: the last keys of each row are where they were.
    branch = slab.positions[:, None] + np.arange(1 - width, 1, dtype=np.int32)
    testing.assert_same_bits(slabs.run(isa, slab, 5, branch=branch), chain)
    branch[3, -2] -= 1  # Negative control: one key taken twice.
    tree = slabs.run(isa, slab, 5, branch=branch)
    assert [*map(bool, (tree[0] != chain[0]).any(axis=1))] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_infinite_scores(rng, isa, sign):
    """Fails if a score of -inf gets any weight, or one of inf does not give NaN.

    The first `count` keys of the slot are infinite along the query's first element.
    """
    for count in (1, 32, 33, 40):
        slab = oracle.make_slab(
            rng, [(0, 40)], dtype="float32", N=1, K=1, H=16, page_size=8, prefix=(40,)
        )
        slab.heads[0, 1:16] = 0  # The query keeps one element, and its sign.
        slab.cos[:], slab.sin[:] = 1, 0
        # The query's zeros meet zeros, as 0 * inf would be NaN.
        for at in (slab.locate(0, position) for position in range(count)):
            slab.k_pages[at] = 0
            slab.k_pages[at][0, 0] = sign * np.sign(slab.heads[0, 0]) * np.inf
        out, *_ = slabs.run(isa, slab, 1)
        with np.errstate(invalid="ignore"):
            expected, *_ = oracle.attend(slab, **slabs.numbers(slab))
        assert np.isnan(expected).all() == (sign > 0)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
