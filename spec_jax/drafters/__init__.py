"""Drafters: what proposes the tokens that the target verifies.

Frozen configs, of one sequence or with a form for slots; `registry` has them by name.
"""

from typing import TYPE_CHECKING

import spec_jax


_NAMES = {
    "block": ["BlockDrafter"],
    "choice": ["Choice"],
    "draft_model": ["DraftModel"],
    "eagle3": ["Eagle3"],
    "hybrid": ["Hybrid"],
    "ngram": ["NGram", "PromptLookup"],
    "oracle": ["Oracle"],
    "registry": [],
    "suffix": ["SuffixDecoding"],
    "tree_shapes": ["FixedTree", "Tree"],
}

if TYPE_CHECKING:
    from spec_jax.drafters.block import BlockDrafter as BlockDrafter
    from spec_jax.drafters.choice import Choice as Choice
    from spec_jax.drafters.draft_model import DraftModel as DraftModel
    from spec_jax.drafters.eagle3 import Eagle3 as Eagle3
    from spec_jax.drafters.hybrid import Hybrid as Hybrid
    from spec_jax.drafters.ngram import NGram as NGram, PromptLookup as PromptLookup
    from spec_jax.drafters.oracle import Oracle as Oracle
    from spec_jax.drafters.suffix import SuffixDecoding as SuffixDecoding
    from spec_jax.drafters.tree_shapes import FixedTree as FixedTree, Tree as Tree

__getattr__, __dir__, __all__ = spec_jax.exports(__name__, _NAMES, _NAMES)
