"""Helpers of tests: bits compared, values against an oracle, and the kits of drafters,
processors and targets."""

from spec_jax.testing.bench import TINY, Bench, tiny
from spec_jax.testing.compare import (
    assert_rows_close,
    assert_same_bits,
    bits,
    tolerance,
)
from spec_jax.testing.drafter_kit import CLAUSES, check_drafter
from spec_jax.testing.processor_kit import check_processor
from spec_jax.testing.target_kit import check_target


__all__ = [
    "CLAUSES",
    "TINY",
    "Bench",
    "assert_rows_close",
    "assert_same_bits",
    "bits",
    "check_drafter",
    "check_processor",
    "check_target",
    "tiny",
    "tolerance",
]
