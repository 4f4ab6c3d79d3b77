"""The row contract of trees: a node has the bits of its path, decoded row by row."""

import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_rows as rows_lib
from hypothesis import HealthCheck, given, settings, strategies as st
from slow_cases import slow
from test_rows import SLAB

from spec_jax import testing, tree
from spec_jax.paging import allocator


WIDTH = 6  # of a branch
PREFIXES = {5: 16, 31: 8, 126: 16, 133: 256}
"""Lengths around the blocks of keys, 32 and 128 positions, and sizes of their pages."""


@jax.jit
def _layout(parents, start):
    return tree.layout(parents, start=start, width=WIDTH)


class Oracle:
    """Oracle that decodes each path alone, as a chain, one row at a time."""

    def __init__(self, model, kv, prefix):
        self.model, self.prefix, self.found = model, prefix, {}
        self.kv = model.fill(kv, length=prefix)

    def row(self, path: tuple[int, ...]):
        """Returns the cache and the outputs of the last row of prefix and path."""
        if path not in self.found:
            kv = self.kv if len(path) == 1 else self.row(path[:-1])[0]
            at = self.prefix + len(path) - 1
            self.found[path] = self.model.run(kv, [(path[-1], 0, at)])
        return self.found[path]


@functools.cache
def oracle(impl, dtype, prefix):
    model, page_size = rows_lib.make_model(dtype, impl), PREFIXES[prefix]
    width = 320 // page_size + 1
    kv = rows_lib.make_cache(model.config, page_size=page_size, table_width=width)
    return Oracle(model, kv, prefix)


def tree_rows(found, tokens, parents, *, order=None):
    """Runs all columns of a tree after the oracle's prefix, in one call; padding rows
    carry NaN. Returns the cache and the outputs of each column."""
    order = np.arange(len(tokens)) if order is None else order
    # Padded to one shape, which is compiled once.
    padded = np.pad(np.asarray(parents, np.int32), (0, SLAB - len(parents)))
    positions, branch = map(np.asarray, _layout(padded, jnp.int32(found.prefix)))
    rows = [(int(tokens[column]), 0, int(positions[column])) for column in order]
    kv = allocator.reserve(found.kv, 0, found.prefix + len(tokens))
    kv, outputs = found.model.run(kv, rows, branch=branch[order])
    back = np.argsort(order)
    return kv, jax.tree.map(lambda x: x[back], outputs)


def path_of(parents, column):
    path = [column]
    while path[0]:
        path.insert(0, int(parents[path[0]]))
    return path


def assert_is_decoding(found, tokens, parents, **options):
    """Compares each column's logits, features and K/V with its path's, as integers."""
    kv, outputs = tree_rows(found, tokens, parents, **options)
    for column in range(len(tokens)):
        path = tuple(int(tokens[at]) for at in path_of(parents, column))
        alone, expected = found.row(path)
        what = f"column {column} of parents {list(parents)}"
        own = jax.tree.map(lambda x, column=column: x[[column]], outputs)
        testing.assert_same_bits(own, expected, what=what)
        at, position = found.prefix + column, found.prefix + len(path) - 1
        testing.assert_same_bits(
            [x[at] for x in decoding.held(kv, at + 1)],
            [x[position] for x in decoding.held(alone, position + 1)],
            what=what,
        )


@st.composite
def trees(draw):
    """Draws parents and tokens of a tree that fits a slab and a branch."""
    parents, depth = [0], [0]
    for column in range(1, draw(st.integers(1, SLAB))):
        open_ = [c for c in range(column) if depth[c] < WIDTH - 1]
        parent = draw(st.sampled_from(open_))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    tokens = draw(
        st.lists(st.integers(1, 9), min_size=len(parents), max_size=len(parents))
    )
    return np.array(parents, np.int32), tokens


BUSHY = np.array([0, 0, 0, 1, 1, 2, 4, 4], np.int32)
BUSHY_TOKENS = [3, 4, 5, 6, 7, 6, 8, 9]
IMPLS = ("native", "xla", slow("interpret"))  # bfloat16 only


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [("native", "float32"), slow("xla", "bfloat16"), slow("interpret", "bfloat16")],
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=trees(), prefix=st.sampled_from(list(PREFIXES)))
def test_nodes_are_their_paths(impl, dtype, drawn, prefix):
    """Fails if a node sees a cousin, or its sums depend on where keys are stored."""
    parents, tokens = drawn
    assert_is_decoding(oracle(impl, dtype, prefix), tokens, parents)


@pytest.mark.parametrize("impl", IMPLS)
def test_any_order_with_parents_first(impl):
    order = np.array([0, 2, 5, 1, 4, 7, 6, 3])
    found = oracle(impl, "bfloat16", 126)
    assert_is_decoding(found, BUSHY_TOKENS, BUSHY, order=order)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_cousin_of_nan_is_not_seen(impl):
    """Fails if a NaN reaches a node whose path does not contain its row: if masked
    keys are multiplied by zero."""
    found = oracle(impl, "bfloat16", 126)
    tokens = np.array(BUSHY_TOKENS)
    _, healthy = tree_rows(found, tokens, BUSHY)
    tokens[2] = rows_lib.NAN_TOKEN  # with column 5 below it
    _, outputs = tree_rows(found, tokens, BUSHY)
    of = lambda outputs, columns: jax.tree.map(lambda x: x[columns], outputs)
    rest = [0, 1, 3, 4, 6, 7]
    testing.assert_same_bits(of(outputs, rest), of(healthy, rest))
    assert np.isnan(outputs.logits[[2, 5]]).all()
