"""Whole steps of an EAGLE-3 head as JAX functions, each one foreign call.

A row is a pair of a token and a feature; see `steps`, and `model.eagle3` for what a
head computes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import calls, steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadModel(steps.Model):
    """A head of one layer, whose `qkv` is `[.., 2D]`, the token's columns first.

    Its `head` has a row for each token of its own, `embed` for each of the target's.

    Raises:
      ValueError: as a `steps.Model`; other than one layer, or no `head`.
    """

    hidden_norm: jax.Array  # [D], of features
    norm_before_residual: bool
    norm_output: bool
    window: int = 0  # keys that a row sees, its own the last; 0: all

    def __post_init__(self) -> None:
        if len(self.layers) != 1 or self.head is None:
            raise ValueError(
                f"{len(self.layers)} layers, and head={self.head}: a head has one "
                "layer, and logits of its own tokens"
            )
        super().__post_init__()
        calls.check_shapes(hidden_norm=(self.hidden_norm, (self.size,)))
        calls.check_dtypes(self.hidden_norm, self.final_norm)

    @property
    def row_size(self) -> int:
        """The values that the layer reads of a row."""
        return 2 * self.size

    @property
    def num_logits(self) -> int:
        """The logits of a row: the head's own tokens, `N`."""
        assert self.head is not None
        return self.head.shape[0]

    def call(self, target: str, outputs: list, *own: jax.Array, **how: Any):
        """Implements `steps.Model.call` by a kernel of heads."""
        return super().call(
            target,
            outputs,
            *own,
            self.hidden_norm,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
            window=np.int64(self.window),
            **how,
        )


def step(
    tokens: jax.Array,  # [R] int32
    features: jax.Array,  # [R, D]
    model: HeadModel,
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    branch: jax.Array | None = None,  # [R, A] int32
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array, steps.Pages]:
    """Runs the active pairs through a head in one call; padding is unspecified.

    The bits are those of the operations one by one.

    Returns:
      Logits `[R, N]` float32 of the head's own tokens, the features `[R, D]` of the
      pairs that come next, and the pages, which are updated in place.
    """
    calls.check_shapes(features=(features, (*tokens.shape, model.size)))
    calls.check_dtypes(features, model.final_norm)
    outputs = [
        jax.ShapeDtypeStruct((tokens.size, model.num_logits), jnp.float32),
        jax.ShapeDtypeStruct(features.shape, features.dtype),
    ]
    (logits, following), pages = model.run(
        "spec_jax_head_step",
        outputs,
        features,
        rows=(tokens, slots, positions, num_active, branch),
        at=(page_table, cos, sin),
        isa=isa,
    )
    return logits, following, pages


def chains(
    tokens: jax.Array,  # [S, W] int32
    features: jax.Array,  # [S, W, D]
    model: HeadModel,
    cos: jax.Array,  # [S, W + most - 1, H / 2]
    sin: jax.Array,  # [S, W + most - 1, H / 2]
    *,
    names: jax.Array | None,  # [N] int32
    **how: Any,
) -> tuple[jax.Array, jax.Array | None, steps.Pages]:
    """Continues texts in one call, as `steps.chains` does with a model.

    Args:
      tokens: of the pairs whose K/V is not stored yet.
      features: of these pairs; that of a draft is what the pair before leaves behind.
      names: the token that each of the head's own stands for; None: the same.
      how: as `steps.chains` takes it.

    Returns:
      As `steps.chains`.
    """
    calls.check_shapes(features=(features, (*tokens.shape, model.size)))
    calls.check_dtypes(features, model.final_norm)
    if names is None:
        names = jnp.zeros((0,), jnp.int32)
    else:
        calls.check_shapes(names=(names, (model.num_logits,)))
    return steps.chains(
        tokens,
        model,
        cos,
        sin,
        target="spec_jax_head_chains",
        own=(features, names),
        **how,
    )
