"""The search of suffix decoding as a JAX function, one foreign call.

Its meaning is `drafters.suffix.SuffixDecoding.look_up`, whose bits it has.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import calls


def look_up(
    tokens: jax.Array,  # [max_len] int32
    length: jax.Array,  # [] int32
    gamma: jax.Array,  # [] int32
    corpus: jax.Array,  # [size] int32
    *,
    budgets: np.ndarray,  # [match_max] int32
    gamma_max: int,
    min_probability: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Finds the continuation of the highest score.

    Args:
      tokens: the first `length` are the sequence.
      gamma: tokens to draft at most, not above `gamma_max`.
      corpus: texts, with `suffix_match.NONE` between them.
      budgets: tokens by the length of the match, from 1 on; none less than the one
        before.
      min_probability: no token has less.

    Returns:
      Tokens `[gamma_max]` int32; how many are drafted, int32; their probabilities
      `[gamma_max]` float32, zeros after them; and the sum of these.
    """
    given = {
        "tokens": tokens,
        "length": (length, ()),
        "gamma": (gamma, ()),
        "corpus": corpus,
        "budgets": jnp.asarray(budgets),
    }
    each, of_all = (gamma_max,), ()
    outputs = [(x, y) for y in (jnp.int32, jnp.float32) for x in (each, of_all)]
    drafts, num_drafted, survival, score = calls.call(
        "look_up", outputs, given, min_probability=min_probability
    )
    return drafts, num_drafted, survival, score
