"""Acceptance of drafted tokens, and how tokens are drawn: pure functions of arrays."""

from typing import TYPE_CHECKING

import spec_jax


_NAMES = {
    "Outcome": "spec_jax.rules.acceptance",
    "Rule": "spec_jax.rules.rule",
    "SamplingSettings": "spec_jax.rules.sampling",
    "Stream": "spec_jax.rules.sampling",
    "accept_block": "spec_jax.rules.acceptance",
    "accept_exact": "spec_jax.rules.acceptance",
    "accept_multi_path": "spec_jax.rules.multi_path",
    "accept_rejection": "spec_jax.rules.acceptance",
    "accept_traversal": "spec_jax.rules.traversal",
    "accept_tree": "spec_jax.rules.tree_acceptance",
    "block": "spec_jax.rules.rule",
    "coupled": "spec_jax.rules.rule",
    "make_settings": "spec_jax.rules.sampling",
    "multipath": "spec_jax.rules.rule",
    "rejection": "spec_jax.rules.rule",
}

__all__ = [
    "Outcome",
    "Rule",
    "SamplingSettings",
    "Stream",
    "accept_block",
    "accept_exact",
    "accept_multi_path",
    "accept_rejection",
    "accept_traversal",
    "accept_tree",
    "acceptance",
    "block",
    "coupled",
    "make_settings",
    "multi_path",
    "multipath",
    "rejection",
    "rule",
    "sampling",
    "traversal",
    "tree_acceptance",
]

if TYPE_CHECKING:
    from spec_jax.rules import (
        acceptance,
        multi_path,
        rule,
        sampling,
        traversal,
        tree_acceptance,
    )
    from spec_jax.rules.acceptance import (
        Outcome,
        accept_block,
        accept_exact,
        accept_rejection,
    )
    from spec_jax.rules.multi_path import accept_multi_path
    from spec_jax.rules.rule import Rule, block, coupled, multipath, rejection
    from spec_jax.rules.sampling import SamplingSettings, Stream, make_settings
    from spec_jax.rules.traversal import accept_traversal
    from spec_jax.rules.tree_acceptance import accept_tree

__getattr__, __dir__ = spec_jax.exports(__name__, _NAMES, __all__)
