"""The loss of P-EAGLE: all drafts after a pair are one pass (`model.eagle3`).

The paper (https://arxiv.org/abs/2602.01469) trains masks after ever fewer pairs, the
deeper they are ("COD sampling"): it drops rows to save memory, and so weighs deep ones
less. Here masks follow a fixed number of pairs, anchors as `training.block` draws them,
and the draft `i` counts `exp(-i / decay)`; 4 is a rate of 0.78, and 0.7 and 0.8 were
published. As there, the first draft is trained after every pair, and each towards the
target's distribution on the draft vocabulary, by cross-entropy.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import (
    eagle3 as eagle3_lib,
    eagle3_params,
    params as params_lib,
    sequence,
)
from spec_jax.ops import weights as weights_lib
from spec_jax.training import batches, block, eagle3, heads, targets


STEPS = eagle3.STEPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anchors(block.Anchors):
    """Adds anchors to a batch, as `block.Anchors`, and weights of all pairs' drafts.

    These are `pair_weights [B, T - 1]`, whose sum is that of the anchors' first drafts,
    in whose place they count.
    """

    def __call__(
        self, batch: batches.Batch, rows: np.ndarray, step: int | None
    ) -> dict[str, np.ndarray]:
        """Returns the batch with anchors and weights."""
        mask = batch["mask"].copy()
        mask[:, 0] = False  # The first token has no pair.
        made = super().__call__(batch | {"mask": mask}, rows, step)
        counts = mask[:, 1:].copy()
        counts[:, -1] = False
        if self.draftable is not None:
            counts[:, :-1] &= self.draftable[batch["tokens"][:, 2:]]
        share = made["weights"][..., 0].sum() / max(counts.sum(), 1)
        return made | {"pair_weights": (counts * share).astype(np.float32)}


def init(
    key: jax.Array,
    config: eagle3_params.Eagle3Config,
    params: params_lib.Params,
    hot: jax.Array | None,
) -> eagle3_params.Eagle3Params:
    """Returns what `eagle3.init` does, with a `mask_hidden` of root mean square one."""
    made = eagle3.init(key, config, params, hot)
    mask: Any = made.mask_hidden
    return made.replace(mask_hidden=mask / jnp.sqrt(jnp.mean(mask**2)))


def loss(
    config: eagle3_params.Eagle3Config,
    params: eagle3_params.Eagle3Params,
    batch: dict[str, jax.Array],
    teacher: targets.Teacher,
    *,
    steps: int = STEPS,
) -> jax.Array:
    """Returns the weighted mean over all drafts, nats.

    Args:
      batch: with what `Anchors` adds.
      steps: drafts after an anchor.
    """
    pairs, masks, head = _hidden(config, params, batch, teacher, steps)
    wanted = jax.nn.softmax(
        sequence.product(batch["final"], teacher.draft_head), axis=-1
    )
    total = jnp.float32(0)
    for hidden, probs, share in (
        (pairs, wanted[:, 1:], batch["pair_weights"]),
        (
            masks,
            block.at_drafts(wanted[:, 1:], batch["anchors"], steps - 1),
            batch["weights"][..., 1:],
        ),
    ):
        logits = sequence.product(hidden, head)
        nats = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(probs * logits, axis=-1)
        total += jnp.sum(share * nats)
    return total / len(batch["weights"])


def measure(
    config: eagle3_params.Eagle3Config,
    params: eagle3_params.Eagle3Params,
    batch: dict[str, jax.Array],
    teacher: targets.Teacher,
    *,
    steps: int = STEPS,
) -> dict[str, jax.Array]:
    """Counts how often each draft is the target's most likely token, as
    `block.measure`."""
    logits = drafts(config, params, batch, teacher, steps=steps)
    return block.agreements(logits, batch, teacher)


def drafts(
    config: eagle3_params.Eagle3Config,
    params: eagle3_params.Eagle3Params,
    batch: dict[str, jax.Array],
    teacher: targets.Teacher,
    *,
    steps: int,
) -> jax.Array:
    """Returns the logits `[B, A, W, Vd]` of what is drafted after anchors."""
    pairs, masks, head = _hidden(config, params, batch, teacher, steps)
    at = jnp.maximum(batch["anchors"] - 1, 0)[..., None]
    first = jnp.take_along_axis(pairs, at, axis=1)[:, :, None]
    return sequence.product(jnp.concatenate([first, masks], axis=2), head)


def _hidden(config, params, batch, teacher, steps):
    """Returns what the output projection reads of all pairs, and of the masks after
    the pair of each anchor and the token before it; and the output projection."""
    whole = heads.computing(config, params, teacher)
    pairs, masks = eagle3_lib.forward_parallel(
        whole,
        config,
        batch["tokens"][:, 1:],
        batch["features"][:, :-1],
        jnp.maximum(batch["anchors"] - 1, 0),
        num_masks=steps - 1,
    )
    return pairs, masks, weights_lib.matrix(whole.lm_head).astype(pairs.dtype)
