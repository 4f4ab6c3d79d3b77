"""A drafter of your own in Flax: an `nnx` model that learns what the target writes.

    python experiments/spec_round.py --drafter examples.nnx_drafter:trained

`trained` lets the target write a few texts, trains a small model on them in seconds,
and returns a drafter and its parameters, as `--drafter module:Name` asks for. No
drafter can make the output wrong: a bad one is rejected more often. Needs flax, optax.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spec_jax as sj


CONTEXT = 8
"""Tokens that a draft depends on."""


class NextToken(nnx.Module):
    """Guesses the next token from the last `CONTEXT`."""

    def __init__(self, vocab_size: int, width: int = 64, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.hidden = nnx.Linear(CONTEXT * width, 2 * width, rngs=rngs)
        self.out = nnx.Linear(2 * width, vocab_size, rngs=rngs)

    def __call__(self, context):
        """Returns logits `[.., V]` of contexts `[.., CONTEXT]`."""
        x = self.embed(context)
        return self.out(nnx.gelu(self.hidden(x.reshape(*context.shape[:-1], -1))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxDrafter:
    """Drafts what the model guesses; its parameters are the model's `nnx.State`."""

    graphdef: Any  # static: what kind of module it is
    gamma_max: int
    vocab_size: int

    def init(self, *, capacity, page_size):
        return jnp.int32(0)  # it remembers nothing but the text

    def prefill(self, params, memory, prompt):
        return memory

    def propose(self, params, memory, *, tokens, length, gamma):
        model = nnx.merge(self.graphdef, params)
        at = length - CONTEXT + jnp.arange(CONTEXT)
        context = jnp.where(at >= 0, tokens[jnp.maximum(at, 0)], 0)

        def step(context, _):
            token = jnp.argmax(model(context)).astype(jnp.int32)
            return jnp.append(context[1:], token), token

        _, drafts = jax.lax.scan(step, context, length=self.gamma_max)
        return memory, sj.Proposal(tokens=drafts, num_drafted=gamma)

    def commit(self, params, memory, length):
        return memory


def written_by(parts, *, num_texts=8, num_tokens, seed=0):
    """Returns texts that the target writes of itself, `[num_texts, num_tokens + 1]`."""
    drafter = sj.drafters.NGram(gamma_max=parts.gamma_max)
    algo, params = sj.speculative(parts.target, drafter), (parts.target_params, None)
    rng = np.random.default_rng(seed)
    firsts = rng.integers(parts.vocab_size, size=(num_texts, 1))
    draws = [sj.Sampling(temperature=0.7, seed=seed + n) for n in range(num_texts)]
    state = algo.init(params, firsts.tolist(), max_tokens=num_tokens, sampling=draws)
    state = algo.run(params, state)
    return np.asarray(state.tokens)[:, : num_tokens + 1]


def train(model, texts, *, steps, batch=256, learning_rate=3e-3, seed=0):
    """Trains the model to guess each next token of texts; returns the last loss."""
    padded = np.pad(texts, ((0, 0), (CONTEXT, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + 1, axis=1)
    windows = windows.reshape(-1, CONTEXT + 1)
    optimizer = nnx.Optimizer(model, optax.adam(learning_rate), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, rows):
        def loss_of(model):
            logits = model(rows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, rows[:, -1]
            ).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    rng, loss = np.random.default_rng(seed), None
    for _ in range(steps):
        rows = windows[rng.integers(len(windows), size=batch)]
        loss = step(model, optimizer, jnp.asarray(rows))
    return float(loss)


def build(parts, *, num_tokens, steps):
    """Returns a drafter for a target, and its parameters, trained for so many steps."""
    texts = written_by(parts, num_tokens=num_tokens)
    model = NextToken(parts.vocab_size, rngs=nnx.Rngs(0))
    loss = train(model, texts, steps=steps)
    print(f"nnx drafter: trained on {texts.size} tokens, loss {loss:.2f}")
    graphdef, params = nnx.split(model)
    drafter = NnxDrafter(
        graphdef=graphdef, gamma_max=parts.gamma_max, vocab_size=parts.vocab_size
    )
    return drafter, params


def trained(parts):
    """Builds the drafter from `drafters.registry.Parts`: what `--drafter` calls."""
    return build(parts, num_tokens=256, steps=300)
