"""Whole steps of an EAGLE-3 head as JAX functions, each one foreign call.

A row is a pair of a token and a feature; see `steps`, and `model.eagle3` for what a
head computes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spec_jax.native import calls, steps


@dataclasses.dataclass(frozen=True)
class HeadModel(steps.Model):
    """A head of one layer, whose `qkv` is `[.., 2D]`, the token's columns first.

    Its `lm_head` has a row for each token of its own, `embed` for each of the target's.

    Attributes:
      params: a `model.eagle3_params.Eagle3Params`, and `head` its config.
    """

    head: Any
    has_own_tokens: ClassVar[bool] = True

    @property
    def layers(self) -> Sequence[Any]:
        """The only layer."""
        return [self.params]

    @property
    def row_size(self) -> int:
        """The values that the layer reads of a row."""
        return 2 * self.size

    def call(self, target: str, outputs: list, given: dict[str, Any], **how: Any):
        """Implements `steps.Model.call` by a kernel of heads."""
        for name in ("norm_before_residual", "norm_output", "window"):
            how[name] = getattr(self.head, name)
        norm = self.params.hidden_norm
        calls.check_dtypes(norm, self.params.final_norm)
        given |= {"hidden_norm": (norm, (self.size,))}
        return super().call(target, outputs, given, **how)


def step(
    rows: Any,
    features: jax.Array,  # [R, D]
    model: HeadModel,
    angles: steps.Angles,
) -> tuple[Any, jax.Array, jax.Array]:
    """Runs the active pairs through a head in one call; padding is unspecified.

    The bits are those of the operations one by one.

    Args:
      rows: a `model.decoder.Rows`.

    Returns:
      The cache, whose pages are updated in place; the features `[R, D]` of the pairs
      that come next; and logits `[R, N]` float32 of the head's own tokens.
    """
    calls.check_dtypes(features, model.params.final_norm)
    outputs = [
        ((rows.tokens.size, model.num_logits), jnp.float32),
        (features.shape, features.dtype),
    ]
    given = {"features": (features, (*rows.tokens.shape, model.size))}
    kv, logits, following = model.run(
        "head_step", outputs, given, rows=rows, angles=angles
    )
    return kv, following, logits


def chains(
    tokens: jax.Array,  # [S, W] int32
    features: jax.Array,  # [S, W, D]
    model: HeadModel,
    angles: steps.Angles,  # [S * (W + most - 1), H / 2]
    *,
    names: jax.Array | None,  # [N] int32
    **how: Any,
) -> tuple[Any, jax.Array, jax.Array | None]:
    """Continues texts in one call, as `steps.chains` does with a model.

    Args:
      tokens: of the pairs whose K/V is not stored yet.
      features: of these pairs; that of a draft is what the pair before leaves behind.
      names: the token that each of the head's own stands for; None: the same.
      how: as `steps.chains` takes it.

    Returns:
      As `steps.chains`.
    """
    calls.check_dtypes(features, model.params.final_norm)
    own = {
        "features": (features, (*tokens.shape, model.size)),
        "names": (names, (model.num_logits,), jnp.int32),
    }
    return steps.chains(tokens, model, angles, target="head_chains", own=own, **how)
