"""A target of your own in Flax: an `nnx` module of whole texts, wrapped as it is.

    python examples/nnx_target.py

The module knows neither rows nor caches: it takes tokens `[1, T]` and gives logits
`[1, T, V]`. So the "cache" is the text itself, and each slab runs the module over all
positions of every slot, slot after slot and always of one shape, which is what makes
rows batch-invariant. That is the price: a round costs a forward over the whole text,
where a target with keys and values (`own_target.py`) costs a few rows. A round verifies
all drafts in one such forward, so speculation still saves what it saves. Needs flax.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import spec_jax as sj


class CausalModel(nnx.Module):
    """A transformer of one layer, over whole texts."""

    def __init__(self, vocab_size: int, width: int, num_positions: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(num_positions, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, rngs=rngs
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, vocab_size, rngs=rngs)

    def __call__(self, tokens):
        """Returns logits `[B, T, V]`."""
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.out(self.norm(x))


@dataclasses.dataclass(frozen=True)
class Config:
    """The module without its weights, and its sizes."""

    graphdef: Any
    vocab_size: int
    max_position_embeddings: int


def init_cache(config, num_slots, capacity):
    """Returns the texts of all slots."""
    return jnp.zeros((num_slots, capacity), jnp.int32)


def forward_rows(params, config, rows, texts):
    """Writes the rows' tokens, and reads their logits off whole texts."""
    model = nnx.merge(config.graphdef, params)
    texts = texts.at[rows.slots, rows.positions].set(rows.tokens, mode="drop")
    logits = jax.lax.map(lambda text: model(text[None])[0], texts)  # [slots, T, V]
    return texts, logits[rows.slots, rows.positions]


def wrap(model, *, vocab_size, num_positions):
    """Returns a target and its parameters."""
    graphdef, params = nnx.split(model)
    target = sj.ForwardTarget(
        forward_rows=forward_rows,
        init_cache=init_cache,
        config=Config(graphdef, vocab_size, num_positions),
    )
    return target, params


def main():
    """Checks a random model, and decodes with it in both ways."""
    model = CausalModel(96, 32, num_positions=128, rngs=nnx.Rngs(0))
    target, weights = wrap(model, vocab_size=96, num_positions=128)
    print(*sj.testing.check_target(target, weights), sep="\n")

    algo = sj.speculative(target, sj.drafters.NGram(gamma_max=4))
    base, params = sj.autoregressive(target), (weights, None)
    prompts = [[7, 3, 90, 7, 3], [1, 2, 3, 1, 2]]
    state = algo.run(params, algo.init(params, prompts, max_tokens=32))
    plain = base.run(weights, base.init(weights, prompts, max_tokens=32))
    print("tokens equal:", algo.generated(state) == base.generated(plain))
    print("rounds for 32 tokens:", state.slots.num_rounds)


if __name__ == "__main__":
    main()
