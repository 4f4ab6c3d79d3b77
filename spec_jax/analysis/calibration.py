"""Calibration: which temperature makes a drafter's scores chances.

The score of a tree's node is `log_softmax(log_weights / tau)`, with the noise of the
target's draw among the log weights where it samples. With the tau that gives the
target's tokens the highest likelihood, scores are as close to chances as one number can
make them, and the best nodes by score are those most likely to be kept.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from spec_jax.typing import typed


TAUS = tuple(np.geomspace(0.1, 4.0, 75).round(4).tolist())
"""What is tried: steps of 5 %."""


@typed
def negative_log_likelihood(
    log_weights: Float[Array, "T V"],
    tokens: Int[Array, " T"],
    taus: Float32[Array, " G"],
) -> Float32[Array, " G"]:
    """Returns for each tau the sum of `-log_softmax(log_weights / tau)` at `tokens`."""
    rows = log_weights.astype(jnp.float32)
    rows = rows - jnp.max(rows, axis=-1, keepdims=True)
    at_token = jnp.take_along_axis(rows, tokens[:, None], axis=-1)[:, 0]

    def one(tau):
        return jnp.sum(jax.nn.logsumexp(rows / tau, axis=-1) - at_token / tau)

    return jax.lax.map(one, taus)


@typed
def ranks(
    log_weights: Float[Array, "T V"], tokens: Int[Array, " T"]
) -> Int[Array, " T"]:
    """Returns how many tokens come before each of `tokens`; equal ones by number."""
    at_token = jnp.take_along_axis(log_weights, tokens[:, None], axis=-1)
    numbers = jnp.arange(log_weights.shape[-1], dtype=tokens.dtype)[None]
    is_before = (log_weights > at_token) | (
        (log_weights == at_token) & (numbers < tokens[:, None])
    )
    return jnp.sum(is_before, axis=-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """The tau of highest likelihood.

    Attributes:
      tau: one of those that were tried.
      nats: mean negative log likelihood of a token with it.
      nats_at_one: the same with tau 1, the probabilities as they are.
      is_inside: whether a smaller and a larger tau were tried, and were worse.
    """

    tau: float
    nats: float
    nats_at_one: float
    is_inside: bool


def fit(sums: np.ndarray, taus: np.ndarray, *, num_tokens: int) -> Fit:
    """Returns the best tau.

    Args:
      sums: `[G]`, of `negative_log_likelihood` over all tokens.
      taus: `[G]`, increasing, 1 between the first and the last.

    Raises:
      ValueError: no token, or sums that are not finite: a token without any weight.
    """
    if not num_tokens or not np.isfinite(sums).all():
        raise ValueError(
            f"{num_tokens} tokens and sums up to {np.max(sums, initial=0)}: scores are "
            "fitted to tokens that the drafter gives some weight"
        )
    best = int(np.argmin(sums))
    return Fit(
        tau=float(taus[best]),
        nats=float(sums[best]) / num_tokens,
        nats_at_one=float(np.interp(1.0, taus, sums)) / num_tokens,
        is_inside=0 < best < len(taus) - 1,
    )
