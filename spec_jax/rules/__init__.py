"""Acceptance of drafted tokens, and how tokens are drawn: pure functions of arrays."""

from typing import TYPE_CHECKING

import spec_jax


_NAMES = {
    "acceptance": ["Outcome", "accept_block", "accept_exact", "accept_rejection"],
    "multi_path": ["accept_multi_path"],
    "rule": ["Rule", "block", "coupled", "multipath", "rejection"],
    "sampling": ["SamplingSettings", "Stream", "make_settings"],
    "traversal": ["accept_traversal"],
    "tree_acceptance": ["accept_tree"],
}

if TYPE_CHECKING:
    from spec_jax.rules.acceptance import (
        Outcome as Outcome,
        accept_block as accept_block,
        accept_exact as accept_exact,
        accept_rejection as accept_rejection,
    )
    from spec_jax.rules.multi_path import accept_multi_path as accept_multi_path
    from spec_jax.rules.rule import (
        Rule as Rule,
        block as block,
        coupled as coupled,
        multipath as multipath,
        rejection as rejection,
    )
    from spec_jax.rules.sampling import (
        SamplingSettings as SamplingSettings,
        Stream as Stream,
        make_settings as make_settings,
    )
    from spec_jax.rules.traversal import accept_traversal as accept_traversal
    from spec_jax.rules.tree_acceptance import accept_tree as accept_tree

__getattr__, __dir__, __all__ = spec_jax.exports(__name__, _NAMES, _NAMES)
