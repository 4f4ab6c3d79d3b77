"""Where the end of a text has occurred before: integer compares at every position.

Functions here know token ids and nothing of drafters. `NONE` stands where there is no
token: it never matches, not even itself.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.typing import typed


NONE = -1


@typed
def suffix_of(
    tokens: Int[Array, " max_len"], length: Int[Array, ""], size: int
) -> Int[Array, " size"]:
    """Returns the last `size` of `tokens[:length]`, after `NONE` if there are fewer."""
    padded = jnp.pad(tokens, (size, 0), constant_values=NONE)
    return jax.lax.dynamic_slice_in_dim(padded, length, size)


@typed
def match_lengths(
    text: Int[Array, " size"], suffix: Int[Array, " n_max"]
) -> Int[Array, " size"]:
    """Counts the tokens in front of each position that equal the end of `suffix`.

    Position `j` has the largest `n <= n_max` with `text[j-n:j] == suffix[n_max-n:]`:
    `text[j:]` is what followed there.
    """
    (size,), (n_max,) = text.shape, suffix.shape
    before = jnp.pad(text, (n_max, 0), constant_values=NONE)
    matched = jnp.ones(text.shape, bool)
    lengths = jnp.zeros(text.shape, jnp.int32)
    for n in range(1, n_max + 1):
        token = suffix[n_max - n]
        matched &= (before[n_max - n :][:size] == token) & (token != NONE)
        lengths += matched.astype(jnp.int32)
    return lengths
