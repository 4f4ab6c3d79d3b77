"""Parts of the losses that all heads share: what is trained, and how well it drafts."""

from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.model import block_params
from spec_jax.training import targets


def trained(config: Any, head: Any) -> Any:
    """Returns what is trained of a head, in float32: not what is the target's.

    Copies: the optimiser's step donates what it is given.

    Args:
      config: a `HeadConfig`; so everywhere here.
    """
    is_block = isinstance(config, block_params.BlockConfig)
    own = head.replace(
        hot=None,
        embed=head.embed if config.has_own_embed else None,
        lm_head=None if is_block or config.shares_head else head.lm_head,
    )
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), own)


def complete(params: Any, teacher: targets.Teacher) -> Any:
    """Returns the head of trained weights, with what is the target's."""
    embed = teacher.embed if params.embed is None else params.embed
    head = teacher.draft_head if params.lm_head is None else params.lm_head
    return params.replace(embed=embed, lm_head=head, hot=teacher.hot)


def computing(config: Any, params: Any, teacher: targets.Teacher) -> Any:
    """Returns `complete` of trained weights in the dtype of the config."""
    dtype = config.layer.dtype
    return complete(jax.tree.map(lambda leaf: leaf.astype(dtype), params), teacher)


def agreements(
    drafts: jax.Array,
    best: jax.Array,
    counted: jax.Array,
    batch: dict[str, jax.Array],
    teacher: targets.Teacher,
) -> dict[str, jax.Array]:
    """Counts how often each draft is the target's most likely token.

    Each result is a sum and a count, `[2]`, whose quotient is the number.
    `agreement_I` is that of draft `I` after the text's own tokens, in rounds whose
    drafts all count. `accepted_length` is tokens a round, as greedy decoding of the
    greedy texts commits them: `tokens_and_rounds`.

    Args:
      drafts: of rounds from each place of a text, tokens that can be drafted
        `[B, P, W]`.
      best: the target's most likely tokens.
      counted: whether the target wrote a token there.
    """
    drafts = drafts if teacher.hot is None else teacher.hot[drafts]
    agrees, whole = (drafts == best) & counted, counted[..., 0] & counted[..., -1]
    found = {
        f"agreement_{i}": _share(agrees[..., i], whole) for i in range(drafts.shape[-1])
    }
    found["accepted_length"] = tokens_and_rounds(
        agrees, counted[..., 0], batch["greedy"]
    )
    return found


def _share(found: jax.Array, of: jax.Array) -> jax.Array:
    """Returns how many of some places are found, and how many there are, float32."""
    return jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in (found & of, of)])


def tokens_and_rounds(
    agrees: jax.Array, counted: jax.Array, greedy: jax.Array
) -> jax.Array:
    """Counts what greedy decoding of texts would: tokens, and the rounds they take.

    A round from column `i` that keeps `n` drafts is followed by one from column
    `i + n + 1`: unlike in a mean over all columns, a stretch that is easily drafted
    counts as the one round that it takes.

    Args:
      agrees: whether draft `j` of a round from column `i` counts and is the target's
        choice, `[B, P, W]`.
      counted: columns after which the target wrote a token, one stretch of a text
        `[B, P]`.
      greedy: texts that the target wrote greedily `[B]`; others are left out.

    Returns:
      Two numbers, float32.
    """
    counted = counted & greedy[:, None]
    kept = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=-1), axis=-1)

    def step(start, column):
        place, is_counted, kept = column
        begins = is_counted & (start == place)
        return jnp.where(begins, place + kept + 1, start), begins

    first = jnp.argmax(counted, axis=-1).astype(jnp.int32)
    places = jnp.arange(counted.shape[1], dtype=jnp.int32)
    _, begins = jax.lax.scan(step, first, (places, counted.T, kept.T))
    return _share(begins.T, counted)[::-1]
