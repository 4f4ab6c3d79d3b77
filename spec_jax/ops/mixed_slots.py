"""The slots of blocks whose sequential head mixes the token before with a hidden state.

As `step.slot_chains`, but that what is added to a slot's logits is the product of `out`
with what `model.block_draft.correct` makes of the two; the drafts need not be its bits.
"""

import jax

from spec_jax.native import block_steps
from spec_jax.ops import step, weights


def slot_chains(
    logits: jax.Array,  # [S, most, Vd] float32
    hidden: jax.Array,  # [S, passed + most, D]
    anchors: jax.Array,  # [S] int32
    counts: jax.Array,  # [S] int32
    *,
    names: jax.Array | None,  # [Vd] int32
    embed: jax.Array,  # [V, r]
    mix: weights.Weight,  # gated [r, D + r], recurrent [3r, 2r + D]
    mix_bias: jax.Array,  # [r] or [3r]
    out: weights.Weight,  # [Vd, r]
    draws: step.Draws | None,
    impl: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Goes over the slots of blocks, with a gated or a recurrent head.

    Args:
      hidden: first of `passed` slots that predict nothing, through which a recurrent
        state passes with the anchor.

    Returns:
      As `step.slot_chains`, which has the other arguments.

    Raises:
      NotImplementedError: an implementation that has no steps in one call.
    """
    if not step.is_fused(impl):
        raise NotImplementedError(f"impl={impl!r} goes over slots one by one")
    return block_steps.slot_chains(
        logits, anchors, counts, names=names, embed=embed, out=out, draws=draws,
        mix=block_steps.Mix(weight=mix, bias=mix_bias, hidden=hidden),
    )  # fmt: skip
