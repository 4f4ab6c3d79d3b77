"""A target of your own: a small transformer as a forward function over rows.

    python examples/own_target.py

checks that its rows are batch-invariant, and decodes with it speculatively. A row is a
token at a position of a slot; a slab of rows always has one height, so that products
have one shape whether a step decodes one token or verifies eight. Keys and values are
written before they are read, and what a row may not see is set to 0.
"""

import dataclasses

import jax
import jax.numpy as jnp

import spec_jax as sj


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes: static, and so hashable."""

    vocab_size: int = 96
    max_position_embeddings: int = 256
    width: int = 32
    num_layers: int = 2


def init_params(key, config):
    """Returns random weights, a dict of float32 arrays."""
    D, V, L = config.width, config.vocab_size, config.num_layers
    shapes = {
        "embed": (V, D),
        "position": (config.max_position_embeddings, D),
        "qkv": (L, D, 3 * D),
        "out": (L, D, D),
        "up": (L, D, 4 * D),
        "down": (L, 4 * D, D),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * shape[-2] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def init_cache(config, num_slots, capacity):
    """Returns keys and values of every layer, slot and position."""
    shape = config.num_layers, num_slots, capacity, config.width
    return {"k": jnp.zeros(shape), "v": jnp.zeros(shape)}


def norm(x):
    """Scales each row to unit mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def forward_rows(params, config, rows, cache):
    """Runs a slab of rows: the cache with their keys and values, and their logits."""
    k_cache, v_cache = cache["k"], cache["v"]
    at = rows.slots, rows.positions
    places = jnp.arange(k_cache.shape[2])
    seen = places[None] <= rows.positions[:, None]  # [R, L]
    x = params["embed"][rows.tokens] + params["position"][rows.positions]
    for layer in range(config.num_layers):
        q, k, v = jnp.split(norm(x) @ params["qkv"][layer], 3, axis=-1)
        # Rows that are not real have a slot past the end: nothing of them is written.
        k_cache = k_cache.at[layer, *at].set(k, mode="drop")
        v_cache = v_cache.at[layer, *at].set(v, mode="drop")
        keys = jnp.where(seen[..., None], k_cache[layer, rows.slots], 0)
        values = jnp.where(seen[..., None], v_cache[layer, rows.slots], 0)
        scores = jnp.einsum("rd,rld->rl", q, keys) * config.width**-0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("rl,rld->rd", weights, values) @ params["out"][layer]
        x = x + jax.nn.silu(norm(x) @ params["up"][layer]) @ params["down"][layer]
    return {"k": k_cache, "v": v_cache}, norm(x) @ params["embed"].T


def make_target(config=None):
    """Returns the target: it decodes by `sj.autoregressive`, and `sj.speculative`."""
    return sj.ForwardTarget(
        forward_rows=forward_rows, init_cache=init_cache, config=config or Config()
    )


def main():
    """Checks the target, and decodes two prompts in both ways."""
    target, drafter = make_target(), sj.drafters.NGram(gamma_max=4)
    weights = init_params(jax.random.key(0), target.config)
    for reading in sj.testing.check_target(target, weights):
        print(f"same bits {reading}")

    algo, base = sj.speculative(target, drafter), sj.autoregressive(target)
    prompts, params = [[7, 3, 90, 7, 3], [1, 2, 3, 1, 2]], (weights, None)
    state = algo.run(params, algo.init(params, prompts, max_tokens=32))
    plain = base.run(weights, base.init(weights, prompts, max_tokens=32))
    print("tokens equal:", algo.generated(state) == base.generated(plain))
    print("rounds for 32 tokens:", state.slots.num_rounds)


if __name__ == "__main__":
    main()
