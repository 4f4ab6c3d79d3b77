"""A loss for training: the cross-entropy of the next token, of a whole model."""

import jax
import jax.numpy as jnp

from spec_jax.model import params as params_lib, sequence


def text_loss(config, params, tokens, teacher=None):
    """Returns the mean over `tokens [B, T]`, nats, `config.dtype`; has no teacher."""
    weights = params_lib.cast(params, config.dtype)
    logits = sequence.logits(weights, config, tokens[:, :-1])
    chances = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1))
