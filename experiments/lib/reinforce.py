"""REINFORCE on a toy reward: draws from the newest weights, then a step of Adam.

The sampler's log-probabilities are the learner's own, to the last bit, so that there is
no importance ratio to correct for. Needs optax, of the extra `train`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import spec_jax as sj
from spec_jax.model import config as config_lib, params as params_lib, sequence


def reward(out: sj.Generation) -> float:
    """Returns the share of tokens whose text holds a blank."""
    return float(np.mean([" " in piece for piece in out.pieces]))


def learn(
    lm: sj.LanguageModel,
    ids: Sequence[list[int]],
    settings: Mapping[str, Any],
    *,
    steps: int,
    learning_rate: float,
    ratio: Callable[[Any, Any], float],
) -> Iterator[dict[str, Any]]:
    """Yields a row for each step: its samples' reward, and how many drafts are kept.

    Args:
      settings: arguments of `generate`: n samples of each prompt, without filters.
      ratio: returns the importance ratio of learner and sampler that is furthest from
        one among a text's tokens; the newest weights have drawn and scored the text.

    Raises:
      ValueError: a model without a tokenizer.
    """
    sampling: sj.Sampling = settings["sampling"]
    if lm.tokenizer is None:
        raise ValueError("the reward is of texts, and the model has no tokenizer")
    # In float32, since a lower precision would round steps away.
    params = params_lib.cast(lm.params, "float32")
    optimizer = optax.adam(learning_rate)
    state = optimizer.init(params)
    width = max(map(len, ids)) + settings["max_tokens"]
    for step in range(steps):
        drawn = dataclasses.replace(sampling, seed=(sampling.seed + step) % 2**32)
        how = dict(settings) | {"sampling": drawn, "log_probs": True}
        outs = sj.generate(lm, ids, **how)
        rewards = np.array([[reward(one) for one in samples] for samples in outs])
        # The baseline of a prompt's samples is their mean reward.
        gains = rewards - rewards.mean(axis=1, keepdims=True)
        texts = [one for samples in outs for one in samples]
        first = texts[0].prompt_tokens, texts[0].tokens
        learner = sj.score(lm, *first, sampling=drawn)
        yield _row(step, rewards, texts) | {"ratio": ratio(learner, texts[0])}
        params, state = _update(
            optimizer,
            dataclasses.replace(lm.target.config, dtype="float32"),
            params,
            state,
            *_padded(texts, width),
            jnp.asarray(gains.ravel(), jnp.float32),
            jnp.float32(sampling.temperature or 1.0),
        )
        newest = params_lib.cast(params, lm.target.config.dtype)
        newest = params_lib.prepare(newest, lm.target.impl)
        lm = dataclasses.replace(lm, params=newest)


def _row(step: int, rewards: np.ndarray, texts: list[sj.Generation]) -> dict[str, Any]:
    proposed, accepted, rounds = (
        sum(one.metrics[name] for one in texts)
        for name in ("proposed", "accepted", "rounds")
    )
    return {
        **{"kind": "reinforce", "step": step, "reward": float(rewards.mean())},
        "acceptance_rate": accepted / proposed if proposed else None,
        "mean_accepted_length": (accepted + rounds) / rounds,
    }


def _padded(texts: list[sj.Generation], width: int) -> tuple[Array, Array]:
    """Returns tokens `[B, width]` int32, and a mask of drawn ones, float32."""
    tokens = np.zeros((len(texts), width), np.int32)
    is_drawn = np.zeros((len(texts), width), np.float32)
    for row, one in enumerate(texts):
        begun, end = len(one.prompt_tokens), len(one.prompt_tokens) + len(one.tokens)
        tokens[row, :end] = [*one.prompt_tokens, *one.tokens]
        is_drawn[row, begun:end] = 1
    return jnp.asarray(tokens), jnp.asarray(is_drawn)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _update(
    optimizer: optax.GradientTransformation,
    config: config_lib.ModelConfig,
    params: Any,
    state: Any,
    tokens: Int[Array, "B T"],
    is_drawn: Float[Array, "B T"],
    gains: Float[Array, " B"],
    temperature: Float[Array, ""],
) -> tuple[Any, Any]:
    """Returns the weights and the optimizer's state after a step."""

    def loss(params):
        logits = sequence.logits(params, config, tokens)[:, :-1] / temperature
        drawn = jnp.take_along_axis(
            jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1
        )[..., 0]
        weight = gains[:, None] * is_drawn[:, 1:]
        return -jnp.sum(weight * drawn) / jnp.sum(is_drawn)

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state
