"""With `JAX_ENABLE_X64` rounds can be traced, and their state keeps its widths."""

import contextlib
import dataclasses

import decoding
import jax
import pytest
import test_block as blocks
from decoding import GAMMA_MAX, SMALL

from spec_jax.drafters import ngram, suffix, tree_shapes
from spec_jax.engine import round as round_lib


TREE = tree_shapes.parse("2-2-1")
BLOCK = blocks.make(blocks.DSPARK)
DRAFT = decoding.draft_drafter(impl=SMALL.target.impl)
UNSURE = decoding.draft_drafter(impl=SMALL.target.impl, min_confidence=0.01)


@contextlib.contextmanager
def wide():
    """Enables 64-bit types and jax's standard promotion, as users may have them."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert jax.numpy.asarray(0).dtype == "int64"
        yield


def check_widths(state) -> None:
    """Raises if a leaf has more than the 32 bits that the loops are written for."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.dtype.itemsize > 4:
            raise TypeError(f"{jax.tree_util.keystr(path)} is {leaf.dtype}")


CASES = {
    "lookup": (ngram.PromptLookup(gamma_max=GAMMA_MAX), None, "coupled"),
    "a tree of lookup": (
        suffix.SuffixDecoding(gamma_max=6).for_tree(tree_shapes.parse("2x3:6")),
        suffix.empty_corpus(4),
        "coupled",
    ),
    "a tree drawn by a draft model": (DRAFT.for_tree(TREE), SMALL.weights, "rejection"),
    "a draft model that is not sure": (UNSURE, SMALL.weights, "block"),
    "a block that ends where it is not sure": (
        dataclasses.replace(BLOCK, min_confidence=0.3),
        blocks.PARAMS["dspark"],
        "coupled",
    ),
    "a drawn tree of a block": (
        BLOCK.for_tree(TREE),
        blocks.PARAMS["dspark"],
        "rejection",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * ("tree" not in name))
        for name in CASES
    ],
)
def test_rounds_are_traced_with_wide_defaults(name):
    """Fails if rounds of two slots write a value that is wider than its array."""
    drafter, params, rule = CASES[name]
    with wide():
        scheduler = SMALL.scheduler(
            drafter, num_slots=2, draft_params=params, rule=rule
        )
        state = scheduler.empty(draws=rule != "coupled")
        check_widths(state)
        round_lib.generate.trace(
            scheduler.speculator, state, max_rounds=decoding.FOREVER
        )
