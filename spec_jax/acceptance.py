"""Acceptance: which drafted tokens stay.

Functions here take ONE sequence and know arrays only: no batches, pages or models.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.typing import typed


PAD = 0
"""Fills token arrays past their end. It is a real token: lengths decide, not PAD."""


@flax.struct.dataclass(kw_only=True)
class Verdict:
    """The target's decision about one drafted chain.

    Attributes:
      num_accepted: how many leading draft tokens stay, in `0 .. num_drafted`.
      tokens: the tokens to commit are `tokens[: num_accepted + 1]`: the accepted
        drafts and one token of the target's own. The rest is `PAD`.
    """

    num_accepted: jax.Array  # [] int32
    tokens: jax.Array  # [gamma + 1] int32


@typed
def accept_exact(
    draft_tokens: Int[Array, " gamma"],
    target_tokens: Int[Array, " gamma+1"],
    num_drafted: Int[Array, ""],
) -> Verdict:
    """Keeps the leading run of drafts that equal the target's own choice.

    The committed tokens are those that the target alone would have chosen, one after
    the other: `target_tokens[i]` is its choice after the prefix and the first `i`
    drafts, and it is used only where those drafts were its own choices too.

    Args:
      num_drafted: how many of `draft_tokens` are real, in `0 .. gamma`.
    """
    (gamma,) = draft_tokens.shape
    is_real = jnp.arange(gamma) < num_drafted
    agrees = is_real & (draft_tokens == target_tokens[:-1])
    num_accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32)))
    kept = jnp.arange(gamma + 1) <= num_accepted
    # An accepted draft equals the target's token, so one array serves for both.
    return Verdict(
        num_accepted=num_accepted, tokens=jnp.where(kept, target_tokens, PAD)
    )
