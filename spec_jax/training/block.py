"""The loss of DFlash, DSpark and DFlash2: blocks after many anchors of a text.

DSpark (https://arxiv.org/abs/2607.05147) has three terms, for the draft `i` of a block
of anchor `a`, with the text's tokens before it:

    cross-entropy    of the text's token at `a + i + 1`
    total variation  `L1 = sum_v |draft_probs - target_probs|`, target's row `a + i`
    confidence       binary cross-entropy towards `1 - L1 / 2`, which is not trained

DFlash (https://arxiv.org/abs/2602.06036) has the first alone, and DFlash2 that and the
cross-entropy of its selector among a slot's best tokens and the text's. A draft counts
`exp(-i / decay)`, until the first whose token cannot be learned: past the text's end,
masked, or none that can be drafted. As in DeepSpec, no draft is left out because one
before it would have been wrong: the tokens before a draft are the text's own, and that
later ones are rarely reached is what the decay says.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import (
    block_draft,
    block_heads,
    block_params,
    head_params,
    params as params_lib,
    sequence,
)
from spec_jax.ops import weights as weights_lib
from spec_jax.training import batches, heads, targets


ANCHORS, DECAY = 32, 4.0

Terms = tuple[float, float, float]
"""Weights of cross-entropy, L1 and confidence."""

DSPARK: Terms = (0.1, 0.9, 1.0)
DFLASH: Terms = (1.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anchors:
    """Adds the blocks of a step to a batch: a `batches.Draw`.

    They are `anchors [B, A] int32`, ascending, and `weights [B, A, W] float32` of their
    drafts, whose sum is `B`: a mean of the batch's parts is the batch's. A draft
    that does not count weighs 0, and so do all of an anchor that a short text lacks.
    """

    num_drafts: int
    seed: int
    count: int = ANCHORS
    decay: float = DECAY
    # [V] bool: tokens that can be drafted; None: all. A block ends before others.
    draftable: np.ndarray | None = None

    def __call__(
        self, batch: batches.Batch, rows: np.ndarray, step: int | None
    ) -> dict[str, np.ndarray]:
        """Returns the batch with the anchors of (seed, step, sequence).

        The anchors of held-out texts (`step` of None) follow each other from the first
        token that the target wrote, so that rounds can, too.
        """
        # Whether the token after each position counts in the loss.
        is_label = batch["mask"][:, :-1].copy()
        if self.draftable is not None:
            is_label &= self.draftable[batch["tokens"][:, 1:]]
        size, drafts = len(rows), np.arange(self.num_drafts)
        anchors = np.zeros((size, self.count), np.int32)
        counts = np.zeros((size, self.count, self.num_drafts), bool)
        for row, number in enumerate(rows):
            if step is None:
                first = int(batch["mask"][row].argmax())
                chosen = np.minimum(first + np.arange(self.count), len(is_label[row]))
            else:
                places = np.flatnonzero(is_label[row])
                random = np.random.default_rng((self.seed, step, int(number)))
                chosen = np.sort(random.permutation(places)[: self.count])
            anchors[row, : len(chosen)] = chosen
            padded = np.pad(is_label[row], (0, self.num_drafts))
            found = padded[chosen[:, None] + drafts]
            counts[row, : len(chosen)] = np.logical_and.accumulate(found, axis=1)
        weights = counts * np.exp(-drafts / self.decay)
        weights *= size / max(weights.sum(), 1.0)
        return batch | {"anchors": anchors, "weights": weights.astype(np.float32)}


def draftable(hot: jax.Array | None, vocab_size: int) -> np.ndarray | None:
    """Returns which of the target's tokens `hot` has `[V]`; None: all of them."""
    if hot is None:
        return None
    found = np.zeros(vocab_size, bool)
    found[np.asarray(hot)] = True
    return found


def init(
    key: jax.Array,
    config: block_params.BlockConfig,
    params: params_lib.Params,
    hot: jax.Array | None,
) -> block_params.BlockParams:
    """Returns what is trained: float32 weights, without what is the target's.

    The final norm begins as the target's. Consumes `key`.
    """
    made = head_params.init(
        key, config, embed=params.embed, lm_head=params.head, hot=hot
    )
    if config.conv_group:
        layers = [
            layer.replace(
                attention_conv=_identity(layer.attention_conv),
                mlp_conv=_identity(layer.mlp_conv),
            )
            for layer in made.layers
        ]
        made = made.replace(layers=tuple(layers))
    return heads.trained(config, made.replace(final_norm=targets.final_norm(params)))


def _identity(conv: Any) -> block_params.Convolution:
    """Returns a convolution that leaves rows as they are."""
    base = jnp.zeros_like(conv.base).at[:, 0].set(1)
    return conv.replace(base=base, kernels=jnp.zeros_like(conv.kernels))


def loss(
    config: block_params.BlockConfig,
    params: block_params.BlockParams,
    batch: dict[str, jax.Array],
    teacher: targets.Teacher,
    *,
    terms: Terms = DSPARK,
) -> jax.Array:
    """Returns the sum of the terms, each the weighted mean over all drafts, nats.

    Args:
      batch: with what `Anchors` adds.
      terms: weights; the confidence's is not used where the drafter has none.
    """
    logits, bias, confidence = _slots(config, params, batch, teacher)
    of_head = logits if bias is None else logits + bias
    if config.head != "selector":  # A selector's uncorrected logits are trained, too.
        logits = of_head
    cross, total_variation, of_confidence = terms
    total = jnp.zeros(logits.shape[:-1], jnp.float32)
    if cross:
        labels = batch["tokens"][:, 1:]
        labels = at_drafts(labels, batch["anchors"], config.num_drafts)[..., None]
        # A comparison and a sum: the gradient of a gather is a serial scatter.
        ids = jnp.arange(logits.shape[-1], dtype=labels.dtype)
        ids = ids if teacher.hot is None else teacher.hot
        is_label = ids.reshape(1, 1, 1, -1) == labels
        total += cross * _nats(logits, is_label)
        if config.head == "selector":
            is_best = block_heads.candidates(config, logits) > -jnp.inf
            total += cross * _nats(
                jnp.where(is_best | is_label, of_head, -jnp.inf), is_label
            )
    if total_variation or confidence is not None:
        probs = _teacher_probs(config, batch, teacher)
        l1 = jnp.sum(jnp.abs(jax.nn.softmax(logits, axis=-1) - probs), axis=-1)
        if teacher.hot is not None:  # A token that it lacks is never drafted.
            l1 += 1.0 - jnp.sum(probs, axis=-1)
        total += total_variation * l1
        if confidence is not None:
            kept = jax.lax.stop_gradient(1.0 - l1 / 2)
            nats = jax.nn.softplus(confidence) - kept * confidence
            total += of_confidence * nats
    return jnp.sum(batch["weights"] * total) / len(batch["weights"])


def _nats(logits: jax.Array, is_label: jax.Array) -> jax.Array:
    """Returns the cross-entropy of labels, which some rows may not have."""
    at_label = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - at_label


def measure(
    config: block_params.BlockConfig,
    params: block_params.BlockParams,
    batch: dict[str, jax.Array],
    teacher: targets.Teacher,
) -> dict[str, jax.Array]:
    """Counts how often each draft is the target's most likely token, after the anchors
    of held-out texts; see `heads.agreements`."""
    return agreements(drafts(config, params, batch, teacher)[0], batch, teacher)


def agreements(
    logits: jax.Array, batch: dict[str, jax.Array], teacher: targets.Teacher
) -> dict[str, jax.Array]:
    """Returns what `measure` does, of the logits `[B, A, W, Vd]` of drafts."""
    # Whether the target wrote the token after each position.
    is_label = batch["mask"].at[:, -1].set(False)
    best, counted = (
        at_drafts(x, batch["anchors"], logits.shape[2])
        for x in (batch["best"], is_label)
    )
    return heads.agreements(jnp.argmax(logits, axis=-1), best, counted, batch, teacher)


def drafts(
    config: block_params.BlockConfig,
    params: block_params.BlockParams,
    batch: dict[str, jax.Array],
    teacher: targets.Teacher,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns what a block drafts if each draft is the text's own token.

    Returns:
      Logits `[B, A, W, Vd]`, and those of confidences `[B, A, W]`, of drafters that
      have them.
    """
    logits, bias, confidence = _slots(config, params, batch, teacher)
    logits = block_heads.candidates(config, logits)
    return logits if bias is None else logits + bias, confidence


def _slots(config, params, batch, teacher):
    """Returns the logits of slots, what the sequential head adds, and confidences."""
    whole = heads.computing(config, params, teacher)
    if params.markov is not None:
        # Rounded when it was looked up: rows of narrow tables have no gradient.
        whole = whole.replace(markov=whole.markov.replace(embed=params.markov.embed))
    tokens, anchors = batch["tokens"], batch["anchors"]
    hidden, logits = block_draft.forward_sequence(
        whole, config, tokens, batch["features"], anchors
    )

    def product(x, w):
        return sequence.product(x, weights_lib.matrix(w))

    def step(state, slot):
        token, hidden = slot
        state, bias, confidence = block_heads.correct(
            whole, config, state, token, hidden, product=product
        )
        return state, (bias, confidence)

    # A first slot that predicts nothing reads the anchor, as the slot after it does.
    before = at_drafts(tokens, anchors, config.num_drafts)
    before = jnp.concatenate([before[..., :1]] * config.first_slot + [before], axis=-1)
    by_slot = lambda x: jnp.moveaxis(x, 2, 0)
    _, found = jax.lax.scan(
        step,
        block_heads.first_state(config, anchors.shape),
        (by_slot(before), by_slot(hidden)),
    )
    found = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), found)
    (bias, confidence), logits = jax.tree.map(
        lambda x: x[:, :, config.first_slot :], (found, logits)
    )
    return logits, bias, confidence


def _teacher_probs(config, batch, teacher):
    """Returns the target's probabilities `[B, A, W, Vd]` of draft tokens.

    With the `normalizer` of each row no other logits are computed.
    """
    final = at_drafts(batch["final"], batch["anchors"], config.num_drafts)
    if "normalizer" in batch:
        total = at_drafts(batch["normalizer"], batch["anchors"], config.num_drafts)
        logits = sequence.product(final, teacher.draft_head)
        return jnp.exp(logits - total[..., None])
    probs = jax.nn.softmax(sequence.product(final, teacher.head), axis=-1)
    return probs if teacher.hot is None else probs[..., teacher.hot]


def at_drafts(x: jax.Array, anchors: jax.Array, count: int) -> jax.Array:
    """Returns rows `a + i` of `x [B, T, ..]`, and past its end the last one.

    Each anchor `a` has `count` drafts: `[B, A, count, ..]`.
    """
    drafts = jnp.arange(count, dtype=jnp.int32)
    places = jnp.minimum(anchors[..., None] + drafts[None, None], x.shape[1] - 1)
    flat = places.reshape(len(x), -1, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, flat, axis=1).reshape(*places.shape, *x.shape[2:])
