"""Whole steps of a model in one call, where an implementation has that.

The same bits as the operations one by one (`embedding`, `projection`,
`row_attention`, `gated_projection`): what is left out is the time between them.
"""

import jax

from spec_jax.native import block_steps, draws as draws_lib, head_steps, steps
from spec_jax.ops import weights


Layer = steps.LayerWeights
Model = steps.Model
"""What is read and updated: weights as `weights.prepare` makes them, and the pages."""

HeadModel = head_steps.HeadModel
"""The same of an EAGLE-3 head."""

BlockLayer = block_steps.LayerWeights
BlockModel = block_steps.BlockModel
"""The same of a block drafter."""

Mix = block_steps.Mix
"""Of a block drafter's head that mixes the token before with hidden states."""

Draws = draws_lib.Draws
"""How drafts are drawn."""

Pages = steps.Pages


def is_fused(impl: str) -> bool:
    """Whether a resolved implementation has steps in one call."""
    return impl == "native"


def step(
    tokens: jax.Array,  # [R] int32
    model: Model,
    *,
    angles: tuple[jax.Array, jax.Array],  # cosines and sines [R, H / 2]
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    branch: jax.Array | None = None,  # [R, A] int32, of rows of trees
    taps: tuple[int, ...],
    with_logits: bool,
    impl: str,
) -> tuple[jax.Array, jax.Array, Pages]:
    """Runs the active rows through all layers; padding rows are unspecified.

    Args:
      taps: boundaries of layers, 0 being the embeddings.
      with_logits: without them the head is not read.

    Returns:
      Logits `[R, V]` float32, or `[0, V]` without them; features `[R, taps, D]`; and
      the pages with the active rows written.
    """
    _check(impl)
    cos, sin = angles
    return steps.step(
        tokens, model, cos, sin,
        page_table=page_table, slots=slots, positions=positions, num_active=num_active,
        branch=branch, taps=taps, with_logits=with_logits,
    )  # fmt: skip


def chains(
    tokens: jax.Array,  # [S, W] int32
    model: Model,
    *,
    angles: tuple[jax.Array, jax.Array],  # cosines and sines [S, W + most - 1, H / 2]
    page_table: jax.Array,  # [S, M] int32
    starts: jax.Array,  # [S] int32
    pending: jax.Array,  # [S] int32
    counts: jax.Array,  # [S] int32
    most: int,
    impl: str,
) -> tuple[jax.Array, Pages]:
    """Continues texts greedily: as many steps as the longest of them takes.

    Args:
      tokens: the last tokens of each slot's text, whose K/V is not stored yet.
      angles: of the positions from `starts` on.
      starts: the position of each slot's first token.
      pending: how many of the tokens there are, at least one.
      counts: tokens to draft, `most` at most; 0: the slot sits out.

    Returns:
      Drafts `[S, most]`, 0 from `counts` on; and the pages, in which all but the last
      draft of each slot are written.
    """
    _check(impl)
    cos, sin = angles
    drafts, _, pages = steps.chains(
        tokens, model, cos, sin,
        page_table=page_table, starts=starts, pending=pending, counts=counts, most=most,
    )  # fmt: skip
    return drafts, pages


def head_step(
    tokens: jax.Array,  # [R] int32
    features: jax.Array,  # [R, D]
    model: HeadModel,
    *,
    angles: tuple[jax.Array, jax.Array],  # cosines and sines [R, H / 2]
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    branch: jax.Array | None = None,  # [R, A] int32, of rows of trees
    impl: str,
) -> tuple[jax.Array, jax.Array, Pages]:
    """Runs the active pairs through a head; padding rows are unspecified.

    Returns:
      Logits `[R, N]` float32 of the head's own tokens; the features `[R, D]` of the
      pairs that come next; and the pages with the active rows written.
    """
    _check(impl)
    return head_steps.step(
        tokens, features, model, *angles,
        page_table=page_table, slots=slots, positions=positions, num_active=num_active,
        branch=branch,
    )  # fmt: skip


def head_chains(
    tokens: jax.Array,  # [S, W] int32
    features: jax.Array,  # [S, W, D]
    model: HeadModel,
    *,
    names: jax.Array | None,  # [N] int32
    angles: tuple[jax.Array, jax.Array],  # cosines and sines [S, W + most - 1, H / 2]
    page_table: jax.Array,  # [S, M] int32
    starts: jax.Array,  # [S] int32
    pending: jax.Array,  # [S] int32
    counts: jax.Array,  # [S] int32
    most: int,
    draws: Draws | None,
    impl: str,
) -> tuple[jax.Array, jax.Array | None, Pages]:
    """Continues texts with a head, as `chains` does with a model.

    Args:
      tokens: of the pairs whose K/V is not stored yet, and their features; the feature
        of a draft is what the pair before it leaves behind.
      names: the token that each of the head's own stands for; None: the same.
      draws: None: greedily.

    Returns:
      Drafts and pages as `chains`, and between them what independent drafts were drawn
      from: float32 log weights `[S, most, N]`, unspecified from `counts` on. None of
      others.
    """
    _check(impl)
    return head_steps.chains(
        tokens, features, model, *angles, names=names, draws=draws,
        page_table=page_table, starts=starts, pending=pending, counts=counts, most=most,
    )  # fmt: skip


def append_context(
    features: jax.Array,  # [R, taps * D]
    model: BlockModel,
    *,
    fc: weights.Weight,  # [D, taps * D]
    hidden_norm: jax.Array,  # [D]
    angles: tuple[jax.Array, jax.Array],  # cosines and sines [R, H / 2]
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    impl: str,
) -> Pages:
    """Returns the pages with the keys and values of the active rows' context."""
    _check(impl)
    return block_steps.append_context(
        features, model, fc=fc, hidden_norm=hidden_norm, at=(page_table, *angles),
        slots=slots, positions=positions, num_active=num_active,
    )  # fmt: skip


def blocks(
    tokens: jax.Array,  # [R] int32
    model: BlockModel,
    *,
    block_size: int,
    angles: tuple[jax.Array, jax.Array],  # cosines and sines [R, H / 2]
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    impl: str,
) -> tuple[jax.Array, jax.Array, Pages]:
    """Runs whole blocks, whose rows see their context and each other.

    Returns:
      Hidden states `[R, D]` after the final norm, float32 logits `[R, Vd]`, and the
      pages with the active rows written.
    """
    _check(impl)
    return block_steps.blocks(
        tokens, model, block_size=block_size, at=(page_table, *angles),
        slots=slots, positions=positions, num_active=num_active,
    )  # fmt: skip


def slot_chains(
    logits: jax.Array,  # [S, most, Vd] float32
    anchors: jax.Array,  # [S] int32
    counts: jax.Array,  # [S] int32
    *,
    names: jax.Array | None,  # [Vd] int32
    embed: jax.Array | None,  # [V, r]
    out: weights.Weight | None,  # [Vd, r]
    mix: Mix | None,
    draws: Draws | None,
    impl: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Goes over the slots of blocks, whose logits the token before corrects.

    Args:
      anchors: the token before the first slot of each block.
      counts: slots of each block to go over.
      names: the token that each of the drafter's own stands for; None: the same.
      embed, out: of the token before, and what its product with the embedding adds to
        the logits; None: nothing.
      mix: what a gated or a recurrent head makes of the embedding first, by the hidden
        state of the slot, as `model.block_heads.correct` does, though not to the bit;
        None: nothing.
      draws: None: the highest logits are taken.

    Returns:
      Tokens `[S, most]` int32, 0 from `counts` on; and log weights `[S, most, Vd]` as
      those of `head_chains`.
    """
    _check(impl)
    return block_steps.slot_chains(
        logits,
        anchors,
        counts,
        names=names,
        embed=embed,
        out=out,
        mix=mix,
        draws=draws,
    )


def _check(impl: str) -> None:
    if not is_fused(impl):
        raise NotImplementedError(f"impl={impl!r} runs a step operation by operation")
