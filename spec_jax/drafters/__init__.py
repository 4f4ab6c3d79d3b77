"""Drafters: what proposes the tokens that the target verifies.

Frozen configs, of one sequence or with a form for slots; `registry` has them by name.
"""

from typing import TYPE_CHECKING

import spec_jax


_NAMES = {
    "BlockDrafter": "spec_jax.drafters.block",
    "Choice": "spec_jax.drafters.choice",
    "DraftModel": "spec_jax.drafters.draft_model",
    "Eagle3": "spec_jax.drafters.eagle3",
    "FixedTree": "spec_jax.drafters.tree_shapes",
    "Hybrid": "spec_jax.drafters.hybrid",
    "NGram": "spec_jax.drafters.ngram",
    "Oracle": "spec_jax.drafters.oracle",
    "PromptLookup": "spec_jax.drafters.ngram",
    "SuffixDecoding": "spec_jax.drafters.suffix",
    "Tree": "spec_jax.drafters.tree_shapes",
}

__all__ = [
    "BlockDrafter",
    "Choice",
    "DraftModel",
    "Eagle3",
    "FixedTree",
    "Hybrid",
    "NGram",
    "Oracle",
    "PromptLookup",
    "SuffixDecoding",
    "Tree",
    "block",
    "choice",
    "draft_model",
    "eagle3",
    "hybrid",
    "ngram",
    "oracle",
    "registry",
    "suffix",
    "tree_shapes",
]

if TYPE_CHECKING:
    from spec_jax.drafters import (
        block,
        choice,
        draft_model,
        eagle3,
        hybrid,
        ngram,
        oracle,
        registry,
        suffix,
        tree_shapes,
    )
    from spec_jax.drafters.block import BlockDrafter
    from spec_jax.drafters.choice import Choice
    from spec_jax.drafters.draft_model import DraftModel
    from spec_jax.drafters.eagle3 import Eagle3
    from spec_jax.drafters.hybrid import Hybrid
    from spec_jax.drafters.ngram import NGram, PromptLookup
    from spec_jax.drafters.oracle import Oracle
    from spec_jax.drafters.suffix import SuffixDecoding
    from spec_jax.drafters.tree_shapes import FixedTree, Tree

__getattr__, __dir__ = spec_jax.exports(__name__, _NAMES, __all__)
