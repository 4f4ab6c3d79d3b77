"""The row contract of families beside Qwen3, as `test_rows` has it."""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_weights

from spec_jax import testing
from spec_jax.model import (
    config as config_lib,
    decoder,
    families,
    gpt_neox,
    llama,
    params as params_lib,
    qwen2,
    row_model,
)
from spec_jax.ops import dispatch, layer_norm
from spec_jax.paging import allocator


SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_heads": 3,
    "num_kv_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
PREFIX, WINDOW, SLAB = 21, 4, 8


GATED = {"llama": llama.LlamaConfig, "qwen2": qwen2.Qwen2Config}


def make_config(family: str, dtype: str, **changes) -> config_lib.ModelConfig:
    if family in GATED:
        return GATED[family](**SIZES | {"dtype": dtype} | changes)
    sizes = SIZES | {"rotary_size": 4, "dtype": dtype} | changes
    return gpt_neox.GPTNeoXConfig(**sizes)


def make_params(config: config_lib.ModelConfig) -> params_lib.Params:
    """Random biases too; the embedding of token 0 is NaN."""
    params = params_lib.init(jax.random.key(0), config, stddev=0.2)
    leaves, structure = jax.tree.flatten(params)
    keys = random_weights.split(jax.random.key(1), len(leaves))
    noise = lambda key, shape: np.float32(0.1) * random_weights.normal(key, shape)
    noisy = [
        np.asarray(leaf) + noise(key, leaf.shape).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    params = jax.tree.unflatten(structure, map(jnp.asarray, noisy))
    return params.replace(embed=params.embed.at[0].set(jnp.nan))


def rows_of(slot: int, count: int = WINDOW) -> list[tuple[int, int, int]]:
    """Rows `(token, slot, position)` after the prefix; each slot has its own."""
    tokens = np.random.default_rng(slot).integers(1, 64, count)
    return [(int(token), slot, PREFIX + i) for i, token in enumerate(tokens)]


class Rows:
    """Runs rows of two slots whose prefixes are written, in pages full of NaN."""

    def __init__(self, config, impl: str):
        self.config, self.params = config, make_params(config)
        self.family = families.of(config)
        self.slab = dispatch.slab_rows(impl) or SLAB
        model = row_model.RowModel(config=config, impl=impl, slab=self.slab)
        kv = model.new_slots(2, capacity=64, page_size=16)
        poison = lambda pools: tuple(jnp.full_like(pool, jnp.nan) for pool in pools)
        kv = kv.replace(k=poison(kv.k), v=poison(kv.v))

        def run(params, rows, kv):
            return self.family.forward_rows(
                params, config, rows, kv, impl=impl, taps=(0, 2)
            )

        self._run = jax.jit(run)
        for slot in range(2):
            tokens = np.random.default_rng(9 + slot).integers(1, 64, 64)
            known = tokens[:PREFIX].tolist()
            kv, _ = model.prefill(self.params, kv, known, by_rows=True, slot=slot)
            kv = allocator.reserve(kv, slot, PREFIX + WINDOW)
        self.kv = kv

    def __call__(self, rows, kv=None, slab=None):
        """Outputs of the rows, and the cache after them; padding rows are NaN."""
        padding = [(0, 0, PREFIX + 30)] * ((slab or self.slab) - len(rows))
        tokens, slots, positions = np.asarray(rows + padding, np.int32).T
        given = decoder.Rows(
            tokens=tokens, slots=slots, positions=positions, num_active=len(rows)
        )
        kv, outputs = self._run(self.params, given, self.kv if kv is None else kv)
        return jax.tree.map(lambda x: np.asarray(x[: len(rows)]), outputs), kv

    def one_by_one(self, slot: int):
        """The oracle: each row decoded alone."""
        kv, outputs = self.kv, []
        for row in rows_of(slot):
            one, kv = self([row], kv)
            outputs.append(one)
        return jax.tree.map(lambda *rows: np.concatenate(rows), *outputs), kv


CONTRACT = [
    ("gpt_neox", "float32", "xla"),
    ("gpt_neox", "bfloat16", "native"),
    ("qwen2", "bfloat16", "native"),
]
"""Kernels that are interpreted: `pallas/test_triton_model`."""


@pytest.mark.parametrize(("family", "dtype", "impl"), CONTRACT)
def test_rows_are_what_each_is_alone(family, dtype, impl):
    """Fails if a row's bits depend on its place, its neighbours or padding rows."""
    heads = {"head_dim": 64, "num_kv_heads": 1} if family in GATED else {}
    run = Rows(make_config(family, dtype, **heads), impl)
    alone, alone_kv = run.one_by_one(1)
    assert np.isfinite(alone.logits).all()
    mine, other = rows_of(1), rows_of(0)
    for packed in (mine, other + mine, mine[:1] + other[:3] + mine[1:]):
        outputs, kv = run(packed)
        at = np.array([row[1] == 1 for row in packed])
        testing.assert_same_bits(jax.tree.map(lambda x, at=at: x[at], outputs), alone)
        length = PREFIX + WINDOW
        testing.assert_same_bits(
            decoding.held(kv, length, slot=1), decoding.held(alone_kv, length, slot=1)
        )


def test_a_norm_over_neighbours_is_caught(monkeypatch):
    """Negative control: the mean of a LayerNorm is that of the slab."""
    real = layer_norm.layer_norm

    def leaky(x, *weights, eps):
        spread = jnp.broadcast_to(jnp.nanmean(x, axis=0, keepdims=True), x.shape)
        return real(x + 1e-3 * spread, *weights, eps=eps)

    monkeypatch.setattr(layer_norm, "layer_norm", leaky)
    run = Rows(make_config("gpt_neox", "float32"), "xla")
    alone, _ = run.one_by_one(1)
    outputs, _ = run(rows_of(1))
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(outputs, alone)
