"""Which drafted tokens stay, and how tokens are drawn: pure functions of arrays."""

from typing import TYPE_CHECKING, Final

import spec_jax


coupled: Final = "coupled"
"""A draft stays if it is what the target draws itself: `acceptance.accept_exact`."""

rejection: Final = "rejection"
"""The rule of `acceptance.accept_rejection`, which keeps the distribution."""

block: Final = "block"
"""The rule of `acceptance.accept_block`, which keeps the distribution."""

_NAMES = {
    "Outcome": "spec_jax.rules.acceptance",
    "SamplingSettings": "spec_jax.rules.sampling",
    "Stream": "spec_jax.rules.sampling",
    "accept_block": "spec_jax.rules.acceptance",
    "accept_exact": "spec_jax.rules.acceptance",
    "accept_rejection": "spec_jax.rules.acceptance",
    "accept_tree": "spec_jax.rules.tree_acceptance",
    "make_settings": "spec_jax.rules.sampling",
}

__all__ = [
    "Outcome",
    "SamplingSettings",
    "Stream",
    "accept_block",
    "accept_exact",
    "accept_rejection",
    "accept_tree",
    "acceptance",
    "block",
    "coupled",
    "make_settings",
    "rejection",
    "sampling",
    "tree_acceptance",
]

if TYPE_CHECKING:
    from spec_jax.rules import (
        acceptance,
        sampling,
        tree_acceptance,
    )
    from spec_jax.rules.acceptance import (
        Outcome,
        accept_block,
        accept_exact,
        accept_rejection,
    )
    from spec_jax.rules.sampling import SamplingSettings, Stream, make_settings
    from spec_jax.rules.tree_acceptance import accept_tree

__getattr__, __dir__ = spec_jax.exports(__name__, _NAMES, __all__)
