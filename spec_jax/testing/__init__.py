"""Helpers of tests: bits compared, values against an oracle, and the drafter kit."""

from spec_jax.testing.bench import TINY, Bench, tiny
from spec_jax.testing.compare import (
    assert_rows_close,
    assert_same_bits,
    bits,
    tolerance,
)
from spec_jax.testing.drafter_kit import CLAUSES, check_drafter


__all__ = [
    "CLAUSES",
    "TINY",
    "Bench",
    "assert_rows_close",
    "assert_same_bits",
    "bits",
    "check_drafter",
    "tiny",
    "tolerance",
]
