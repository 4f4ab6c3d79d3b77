"""Trees: a row on a branch against the plain row of that branch, as bits."""

import dataclasses

import numpy as np
import pytest
import row_slabs as slabs

from spec_jax import testing


@dataclasses.dataclass(frozen=True)
class Tree:
    """Nodes of slot 1 after 62 positions: node `i` lies at position `62 + i`."""

    parents: tuple[int, ...]

    def path(self, node: int) -> list[int]:
        """From the root to the node."""
        parent = self.parents[node]
        return [node] if parent < 0 else [*self.path(parent), node]

    def positions(self) -> list[int]:
        return [61 + len(self.path(node)) for node in range(len(self.parents))]

    def branch(self, width: int) -> np.ndarray:
        """Where the last `width` positions of each node's branch lie."""
        lies_at = []
        for node, position in enumerate(self.positions()):
            branch = [*range(62), *(62 + step for step in self.path(node))]
            assert len(branch) == position + 1
            lies_at.append(branch[-width:])
        return np.asarray(lies_at, np.int32)


TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 3, 6))
BRANCH = 6


def tree_slab(rng):
    """The tree's rows, and a chain of slot 0 among them; and where all of them lie.

    Rows of one position have one rotation. Slot 1 has a page for every node.
    """
    nodes = len(TREE.parents)
    rows = [(1, 62 + node) for node in range(nodes)] + [(0, 10), (0, 11)]
    slab = slabs.small_slab(rng, rows=rows)
    positions = np.asarray([*TREE.positions(), 10, 11], np.int32)
    first = [list(positions).index(position) for position in positions]
    slab = dataclasses.replace(
        slab, positions=positions, cos=slab.cos[first], sin=slab.sin[first]
    )
    chain = positions[nodes:, None] + np.arange(1 - BRANCH, 1, dtype=np.int32)
    lies_at = np.concatenate([TREE.branch(BRANCH), chain])
    assert slab.num_rows == 11
    return slab, lies_at


def padded(lies_at):
    return np.pad(
        lies_at, ((0, slabs.HEIGHT - len(lies_at)), (0, 0)), constant_values=2**30
    )


def attend_tree(slab, lies_at, order):
    """Rows of the tree, each with the branch that goes with it."""
    order = np.asarray(order)
    return slabs.run(
        slabs.in_slab(slab, order), len(order), branch=padded(lies_at[order])
    )


def test_a_tree_row_is_the_plain_row_of_its_branch(rng):
    """Fails if a branch is seen in another order, or in other blocks, than a chain."""
    slab, lies_at = tree_slab(rng)
    out, *pools = attend_tree(slab, lies_at, range(slab.num_rows))
    turned = np.random.default_rng(2).permutation(slab.num_rows)
    again, *pools_again = attend_tree(slab, lies_at, turned)
    testing.assert_same_bits(again[:11], out[turned])
    testing.assert_same_bits(pools_again, pools)
    for leaf in (4, 5, 7, 8):
        path = TREE.path(leaf)
        plain, *chain = slabs.rows_alone(slab.rows(path))
        testing.assert_same_bits(out[path], plain, what=f"leaf {leaf}")
        for pool, chained in zip(pools, chain, strict=True):
            for step, node in enumerate(path):
                written = pool[slab.locate(1, 62 + node)]
                testing.assert_same_bits(written, chained[slab.locate(1, 62 + step)])
    chain, *_ = slabs.run(slabs.in_slab(slab, [9, 10]), 2)
    testing.assert_same_bits(out[[9, 10]], chain[:2])


def test_a_tree_in_order_of_storage_is_caught(rng):
    """Negative control: the right keys of a branch, two of them in turned order."""
    slab, lies_at = tree_slab(rng)
    rows = range(slab.num_rows)
    out, *_ = attend_tree(slab, lies_at, rows)
    swapped = lies_at.copy()
    swapped[8, [2, 3]] = swapped[8, [3, 2]]
    wrong, *_ = attend_tree(slab, swapped, rows)
    testing.assert_rows_close(wrong[:11], out[:11], dtype="bfloat16", reduction=83)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(wrong, out)


def test_a_branch_without_a_page(rng):
    """Fails if a tree row reads or writes where no page is."""
    slab, lies_at = tree_slab(rng)
    rows = range(slab.num_rows)
    out, *pools = attend_tree(slab, lies_at, rows)
    for place in (-1, 72, 2**31 - 1):
        broken = lies_at.copy()
        broken[8, -1] = place
        lost, *after = attend_tree(slab, broken, rows)
        assert np.isnan(lost[8].astype(np.float32)).all()
        kept = [r for r in rows if r != 8]
        testing.assert_same_bits(lost[kept], out[kept])
        _, *without = attend_tree(slab, lies_at, kept)
        testing.assert_same_bits(after, without)


def test_a_chain_as_a_branch_is_the_chain(rng):
    """Fails if what a row shares is looked for on a branch, its own or another's.

    The row that leads a split is shorter than its branch leaves room for.
    """
    rows = [(1, 40), (1, 63), (1, 64), (1, 71), (0, 12)]
    slab = slabs.small_slab(rng, rows=rows, prefix=(12, 71))
    plain = slabs.run(slabs.in_slab(slab, range(5)), 5)
    assert np.isfinite(plain[0][:5].astype(np.float32)).all()
    lies_at = slab.positions[:, None] + np.arange(1 - BRANCH, 1, dtype=np.int32)
    testing.assert_same_bits(attend_tree(slab, lies_at, range(5)), plain)
