"""Logits processors, which hold in chains, trees and batches."""

from typing import TYPE_CHECKING

import spec_jax


_NAMES = {
    "built_in": ["bad_words", "logit_bias", "min_tokens", "penalties"],
    "grammar": ["json_schema", "regex"],
    "processor": ["Processor", "chain"],
}

if TYPE_CHECKING:
    from spec_jax.processors.built_in import (
        bad_words as bad_words,
        logit_bias as logit_bias,
        min_tokens as min_tokens,
        penalties as penalties,
    )
    from spec_jax.processors.grammar import json_schema as json_schema, regex as regex
    from spec_jax.processors.processor import Processor as Processor, chain as chain

__getattr__, __dir__, __all__ = spec_jax.exports(__name__, _NAMES, _NAMES)
