"""Rounds are traced with `JAX_ENABLE_X64`, in seconds; `test_x64` runs some of them."""

import dataclasses

import decoding
import jax
import pytest
import test_block as blocks
import x64_texts
from decoding import SMALL

from spec_jax.drafters import ngram, suffix, tree_shapes


TREE = tree_shapes.parse("2-2-1")
BLOCK = blocks.make(blocks.DSPARK)
DRAFT = decoding.draft_drafter(impl=SMALL.target.impl)
DRAFTERS = {
    "lookup": (ngram.PromptLookup(gamma_max=decoding.GAMMA_MAX), None, {}),
    "a tree of lookup": (
        suffix.SuffixDecoding(gamma_max=6).for_tree(tree_shapes.parse("2x3:6")),
        suffix.empty_corpus(4),
        {},
    ),
    "a tree drawn by a draft model": (
        DRAFT.for_tree(TREE),
        SMALL.weights,
        {"rule": "rejection", "draws": True},
    ),
    "a block that ends where it is not sure": (
        dataclasses.replace(BLOCK, min_confidence=0.3),
        blocks.PARAMS["dspark"],
        {},
    ),
    "a drawn tree of a block": (
        BLOCK.for_tree(TREE),
        blocks.PARAMS["dspark"],
        {"rule": "rejection", "draws": True},
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_are_traced_with_wide_defaults(name):
    """Fails if a write of the rounds of two slots is wider than what it writes to."""
    drafter, params, how = DRAFTERS[name]
    rule, draws = how.get("rule", "coupled"), how.get("draws", False)
    # Promotion as users have it: there are sums of both widths, whose dtype is said.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert jax.numpy.asarray(0).dtype == "int64"
        scheduler = SMALL.scheduler(
            drafter, num_slots=2, draft_params=params, rule=rule
        )
        x64_texts.trace(scheduler, draws=draws)
