"""The most frequent continuation of a text's end, by kernels of our own.

Its meaning is `drafters.suffix.SuffixDecoding.look_up`, which finds it where an
implementation has no kernels for it.
"""

import jax
import numpy as np

from spec_jax.native import look_ups as native


def has_kernels(impl: str) -> bool:
    """Whether an implementation has kernels that look up."""
    return impl == "native"


def look_up(
    tokens: jax.Array,  # [max_len] int32
    length: jax.Array,  # [] int32
    gamma: jax.Array,  # [] int32
    corpus: jax.Array,  # [size] int32
    *,
    budgets: np.ndarray,  # [match_max] int32
    gamma_max: int,
    min_probability: float,
    impl: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Finds the continuation of the highest score.

    Args:
      tokens: of which the first `length` are the sequence.
      gamma: tokens, at most; at most `gamma_max`.
      corpus: `suffix_match.NONE` between texts.
      budgets: tokens by the length of the match, from 1 on; none less than the one
        before.
      min_probability: no token has less.

    Returns:
      Tokens `[gamma_max]` int32; how many are drafted, int32; their probabilities
      `[gamma_max]` float32, zeros after them; and the sum of these.

    Raises:
      NotImplementedError: an implementation without such kernels.
    """
    if not has_kernels(impl):
        raise NotImplementedError(f"impl={impl!r} has no kernels that look up")
    return native.look_up(
        tokens,
        length,
        gamma,
        corpus,
        budgets=budgets,
        gamma_max=gamma_max,
        min_probability=min_probability,
    )
