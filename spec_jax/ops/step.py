"""A whole step of a model in one call, where an implementation has that.

The same bits as the operations one by one (`embedding`, `projection`,
`row_attention`, `gated_projection`): what is left out is the time between them.
"""

from collections.abc import Sequence

import jax

from spec_jax.native import calls
from spec_jax.ops import weights


Layer = calls.LayerWeights


def is_fused(impl: str) -> bool:
    """Whether a resolved implementation has steps in one call."""
    return impl == "native"


def step(
    tokens: jax.Array,  # [R] int32
    embed: weights.Weight,  # [V, D]
    layers: Sequence[Layer],
    final_norm: jax.Array,  # [D]
    head: weights.Weight | None,  # [V, D]; None: `embed`
    pages: Sequence[tuple[jax.Array, jax.Array]],  # keys and values [P, C, K, H]
    *,
    angles: tuple[jax.Array, jax.Array],  # cosines and sines [R, H / 2]
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    branch: jax.Array | None = None,  # [R, A] int32, of rows of trees
    taps: tuple[int, ...],
    with_logits: bool,
    eps: float,
    scale: float,
    impl: str,
) -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Runs the active rows through all layers; padding rows are unspecified.

    Args:
      layers: weights as `weights.prepare` makes them.
      taps: boundaries of layers, 0 being the embeddings.
      with_logits: without them the head is not read.

    Returns:
      Logits `[R, V]` float32, or `[0, V]` without them; features `[R, taps, D]`; and
      the pages with the active rows written.
    """
    if not is_fused(impl):
        raise NotImplementedError(f"impl={impl!r} runs a step operation by operation")
    cos, sin = angles
    return calls.step(
        tokens, embed, layers, final_norm, head, pages, cos, sin,
        page_table=page_table, slots=slots, positions=positions, num_active=num_active,
        branch=branch, taps=taps, with_logits=with_logits, eps=eps, scale=scale,
    )  # fmt: skip
