"""A block drafter's part of a round as JAX functions, three foreign calls.

See `steps`, and `model.block_draft` for what a drafter computes.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spec_jax.native import calls, draws as draws_lib, steps


@dataclasses.dataclass(frozen=True)
class BlockModel(steps.Model):
    """A drafter whose layers have queries apart from keys and values."""

    queries: ClassVar[str] = "q"
    has_own_tokens: ClassVar[bool] = True


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
    markov: Any = None,
    hidden: jax.Array | None = None,  # [S, passed + most, D]
    draws: draws_lib.Draws | None = None,
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Goes over the slots of blocks in one call: the token before corrects the logits.

    Args:
      anchors: the token before the first slot of each block.
      counts: slots of each block to go over.
      names: the token that each of the drafter's own stands for; None: the same.
      markov: a `model.block_params.Markov`, which is no selector: the product of its
        `out` and the embedding of the token before is added to the logits; None:
        nothing is.
      hidden: by which the `mix` of a gated or a recurrent head changes the embedding
        first, as `model.block_heads.correct` does, though not to the bit: the states of
        the anchor, of the slots that are passed through, and of the others.
      draws: None: the highest logits are taken.

    Returns:
      Tokens `[S, most]` int32, 0 from `counts` on; and of independent draws log weights
      `[S, most, Vd]`, unspecified from there on, otherwise None.
    """
    S, most, Vd = logits.shape
    embed = out = mix = bias = None
    entries = rank = places = D = size = 0
    if markov is not None:
        embed, out = markov.embed, markov.out
        entries, rank = embed.shape
        calls.check_dtypes(embed, out)
    if hidden is not None:
        mix, bias, (_, places, D) = markov.mix, markov.mix_bias, hidden.shape
        size = bias.size
        if places < most or size not in (rank, 3 * rank):
            raise ValueError(
                f"{places} hidden states for {most} slots, and {size} gates of a head "
                f"of rank {rank}: give as many states at least, and {rank} gates, or "
                f"{3 * rank} of a recurrent head"
            )
        calls.check_dtypes(mix, bias, hidden, embed)
    states = 1 if size == rank else 2  # beside the hidden one
    given = {
        "logits": logits,
        "anchors": (anchors, (S,)),
        "counts": (jnp.minimum(counts, most), (S,)),
        "names": (names, (Vd,), jnp.int32),
        "embed": (embed, (entries, rank)),
        "out": (calls.matrix(out, isa), (Vd, rank)),
        "mix": (calls.matrix(mix, isa), (size, D + states * rank)),
        "mix_bias": (bias, (size,)),
        "hidden": (hidden, (S, places, D)),
    }
    how, attributes = draws_lib.arguments(draws, S)
    outputs = draws_lib.chain_results(draws, (S, most, Vd))
    attributes |= {"entries": entries, "rank": rank}
    tokens, log_weights = calls.call(
        "slots", outputs, given | how, isa=isa, **attributes
    )
    return tokens, draws_lib.given(log_weights)
