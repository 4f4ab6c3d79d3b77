"""Theory: expected tokens, and tokens per second, from chances of drafts and times.

Functions here know numbers and arrays: no rounds, models or clocks. `conditional[i]` is
the chance that draft `i` is kept, given that those before it were (`metrics` calls it
`conditional_acceptance`), and times are measured.
"""

import jax
import numpy as np
from jaxtyping import Float

from spec_jax.typing import typed


AnyArray = jax.Array | np.ndarray | np.floating
"""Arrays of the device or of the host: the formulas are the same for both."""


@typed
def tokens_by_gamma(
    conditional: Float[AnyArray, " gamma_max"],
) -> Float[AnyArray, " gamma_max+1"]:
    """Predicts the tokens that a round commits; entry `gamma` is for `gamma` drafts.

    `1 + sum_{i=1..gamma} prod_{j=1..i} conditional[j-1]`: equation (1) of Leviathan et
    al. (2023), https://arxiv.org/abs/2211.17192v2, where each position has its own
    chance. Values are not checked, so it may be traced.
    """
    xp = conditional.__array_namespace__()
    kept = xp.cumsum(xp.cumprod(conditional))
    return xp.concat([xp.ones_like(conditional, shape=(1,)), 1 + kept])


@typed
def goodput(
    conditional: Float[AnyArray, " gamma_max"],
    round_s: Float[AnyArray, " gamma_max+1"],
) -> Float[AnyArray, " gamma_max+1"]:
    """Predicts tokens per second, by gamma; its argmax is the gamma to draft next.

    The goodput of Liu et al. (2024), https://arxiv.org/abs/2406.14066, for one
    sequence. Pure arithmetic on arrays of the host or of the device: a policy that
    adapts gamma inside a compiled loop calls this function.

    Args:
      conditional: in `0 .. 1`; not checked, so it may be traced.
      round_s: seconds of a round.
    """
    return tokens_by_gamma(conditional) / round_s
