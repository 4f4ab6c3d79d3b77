"""A block drafter's part of a round as JAX functions, three foreign calls.

See `steps`, and `model.block_draft` for what a drafter computes.
"""

import dataclasses
import typing
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spec_jax.native import calls, draws as draws_lib, steps


@dataclasses.dataclass(frozen=True)
class BlockModel(steps.Model):
    """A drafter whose layers have queries apart from keys and values."""

    queries: ClassVar[str] = "q"
    has_own_tokens: ClassVar[bool] = True


class Mix(typing.NamedTuple):
    """Weights by which a gated or recurrent head mixes the token before in.

    There are more hidden states than logits: those of the anchor and of the slots that
    are passed through before the first one that predicts.
    """

    weight: calls.Weight  # gated [r, D + r], recurrent [3r, 2r + D]
    bias: jax.Array  # [r] or [3r]
    hidden: jax.Array  # [S, passed + most, D]


def append_context(
    features: jax.Array,  # [R, taps * D]
    rows: Any,
    model: BlockModel,
    angles: steps.Angles,
) -> Any:
    """Writes the keys and values of the active rows' context in one call.

    Args:
      rows: a `model.decoder.Rows`, whose tokens are not read.

    Returns:
      The cache, whose pages are updated in place.
    """
    width, D, params = features.shape[1], model.size, model.params
    calls.check_dtypes(features, params.fc, params.hidden_norm, params.final_norm)
    given = {
        "features": (features, (*rows.tokens.shape, width)),
        "fc": (calls.matrix(params.fc), (D, width)),
        "hidden_norm": (params.hidden_norm, (D,)),
    }
    (kv,) = model.run("append_context", [], given, rows=rows, angles=angles)
    return kv


def blocks(
    rows: Any, model: BlockModel, angles: steps.Angles, *, block_size: int
) -> tuple[Any, jax.Array, jax.Array]:
    """Runs whole blocks, whose rows see their context and each other, in one call.

    Args:
      rows: a `model.decoder.Rows`.

    Returns:
      The cache, its pages updated in place; hidden states `[R, D]` after the final
      norm; and logits `[R, Vd]` float32.
    """
    (R,) = rows.tokens.shape
    if R % block_size:
        raise ValueError(f"{R} rows are no whole blocks of {block_size}")
    outputs = [
        ((R, model.size), model.dtype),
        ((R, model.num_logits), jnp.float32),
    ]
    return model.run(
        "blocks", outputs, {}, rows=rows, angles=angles, block_size=block_size
    )


def slot_chains(
    logits: jax.Array,  # [S, most, Vd] float32
    anchors: jax.Array,  # [S] int32
    counts: jax.Array,  # [S] int32
    *,
    names: jax.Array | None,  # [Vd] int32
    embed: jax.Array | None,  # [V, r]
    out: calls.Weight | None,  # [Vd, r]
    mix: Mix | None = None,
    draws: draws_lib.Draws | None = None,
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Goes over the slots of blocks in one call: the token before corrects the logits.

    Args:
      anchors: the token before the first slot of each block.
      counts: slots of each block to go over.
      names: the token that each of the drafter's own stands for; None: the same.
      embed, out: of the token before, and what its product with the embedding adds to
        the logits; None: nothing.
      mix: what a gated or a recurrent head, which has an `embed` and an `out` too,
        makes of the embedding first, by the hidden state of the slot, as
        `model.block_heads.correct` does, though not to the bit; None: nothing.
      draws: None: the highest logits are taken.

    Returns:
      Tokens `[S, most]` int32, 0 from `counts` on; and of independent draws log weights
      `[S, most, Vd]`, unspecified from there on, otherwise None.
    """
    S, most, Vd = logits.shape
    if embed is None or out is None:
        embed = out = None
    else:
        calls.check_dtypes(embed, out)
    entries, rank = (0, 0) if embed is None else embed.shape
    given = {
        "logits": logits,
        "anchors": (anchors, (S,)),
        "counts": (jnp.minimum(counts, most), (S,)),
        "names": (names, (Vd,), jnp.int32),
        "embed": (embed, (entries, rank)),
        "out": (calls.matrix(out, isa), (Vd, rank)),
    }
    given |= _mix_arguments(mix, (S, most, rank), embed, isa)
    how, attributes = draws_lib.arguments(draws, S)
    tokens, log_weights = calls.call(
        "slots",
        draws_lib.chain_results(draws, (S, most, Vd)),
        given | how,
        isa=isa,
        entries=entries,
        rank=rank,
        **attributes,
    )
    return tokens, draws_lib.given(log_weights)


def _mix_arguments(mix: Mix | None, shape: tuple[int, int, int], embed, isa) -> dict:
    """Returns the arrays of a mix.

    Args:
      shape: blocks, slots of each that predict, and the rank of the head.
    """
    (S, most, rank), D, places, size = shape, 0, 0, 0
    weight = bias = hidden = None
    if mix is not None:
        weight, bias, hidden = mix
        (_, places, D), size = hidden.shape, bias.size
        if places < most or size not in (rank, 3 * rank):
            raise ValueError(
                f"{places} hidden states for {most} slots, and {size} gates of a head "
                f"of rank {rank}: give as many states at least, and {rank} gates, or "
                f"{3 * rank} of a recurrent head"
            )
        calls.check_dtypes(weight, bias, hidden, embed)
    return {
        "weight": (
            calls.matrix(weight, isa),
            (size, D + rank * (1 if size == rank else 2)),
        ),
        "bias": (bias, (size,)),
        "hidden": (hidden, (S, places, D)),
    }
