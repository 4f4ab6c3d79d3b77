"""Logits processors, which hold in chains, trees and batches."""

from typing import TYPE_CHECKING

import spec_jax


_NAMES = {
    "Processor": "spec_jax.processors.processor",
    "bad_words": "spec_jax.processors.built_in",
    "chain": "spec_jax.processors.processor",
    "json_schema": "spec_jax.processors.grammar",
    "logit_bias": "spec_jax.processors.built_in",
    "min_tokens": "spec_jax.processors.built_in",
    "penalties": "spec_jax.processors.built_in",
    "regex": "spec_jax.processors.grammar",
}

__all__ = [
    "Processor",
    "bad_words",
    "built_in",
    "chain",
    "grammar",
    "json_schema",
    "logit_bias",
    "min_tokens",
    "penalties",
    "processor",
    "regex",
]

if TYPE_CHECKING:
    from spec_jax.processors import built_in, grammar, processor
    from spec_jax.processors.built_in import (
        bad_words,
        logit_bias,
        min_tokens,
        penalties,
    )
    from spec_jax.processors.grammar import json_schema, regex
    from spec_jax.processors.processor import Processor, chain

__getattr__, __dir__ = spec_jax.exports(__name__, _NAMES, __all__)
