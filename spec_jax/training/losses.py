"""Losses of whole models: the next token, and a teacher's distribution."""

import jax
import jax.numpy as jnp

from spec_jax.model import config as config_lib, params as params_lib, sequence


def text_loss(
    config: config_lib.ModelConfig,
    params: params_lib.Params,
    tokens: jax.Array,
    teacher: None = None,
) -> jax.Array:
    """Returns the mean cross-entropy of the next token, nats. There is no teacher.

    `config.dtype` is the dtype of the forward pass: with "bfloat16" the float32
    parameters are rounded before they are used, and their gradients are float32.
    """
    del teacher
    labels = tokens[:, 1:, None]
    logits = _logits(config, params, tokens)
    # A comparison and a sum: the gradient of a gather is a serial scatter on a CPU.
    is_label = jnp.arange(logits.shape[-1], dtype=labels.dtype) == labels
    at_label = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_label)


def distillation_loss(
    config: config_lib.ModelConfig,
    params: params_lib.Params,
    batch: dict[str, jax.Array],
    head: jax.Array,
) -> jax.Array:
    """Returns the draft's cross-entropy against the target's distribution, nats.

    Up to the target's entropy, a constant, this is the forward KL divergence.

    Args:
      batch: `tokens [B, T + 1]`, and as `final [B, T + 1, D]` the target's last hidden
        states; see `training.targets`.
      head: the target's `[V, D]`.
    """
    final = batch["final"][:, :-1]
    targets = jax.nn.softmax(sequence.product(final, head.astype(final.dtype)))
    logits = _logits(config, params, batch["tokens"])
    # Both in one sum: `mean(logsumexp(logits) - sum(targets * logits))`.
    return jnp.mean(
        jax.nn.logsumexp(logits, axis=-1) - jnp.sum(targets * logits, axis=-1)
    )


def _logits(config, params, tokens):
    """Returns float32 logits of all but the last of `tokens [B, T + 1]`."""
    return sequence.logits(
        params_lib.cast(params, config.dtype), config, tokens[:, :-1]
    )
