"""`head_steps`: a head's step has the bits of its operations."""

import dataclasses

import block_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import test_eagle3_head as heads

from spec_jax import testing
from spec_jax.model import decoder, eagle3, eagle3_params


SLAB = 9


def make(variant, dtype, form=None, **sizes):
    """Returns a head's config, and its weights for the kernels."""
    config = heads.with_dtype(heads.VARIANTS[variant], dtype)
    layer = dataclasses.replace(config.layer, **sizes)
    config = dataclasses.replace(config, layer=layer)
    params = heads.make_params(config, dtype)
    return config, eagle3_params.prepare(params, "native", form=form)


def compile_(config, operations=False):
    """Returns a step, or its operations one by one, which is compiled once."""

    @jax.jit
    def forward(params, rows, features, kv):
        how = {"impl": "native"}
        if not operations:
            return eagle3.forward_rows(params, config, rows, features, kv, **how)
        fused = eagle3._fuse(
            params, config, features, num_active=rows.num_active, **how
        )
        return eagle3._run_operations(params, config, rows, fused, kv, **how)

    return forward


def run(config, params, live, *, operations=False, forward=None):
    """Runs a slab of features and one of hidden states; returns outputs and pools."""
    forward = forward or compile_(config, operations)
    kv, found = models.new_slots(config.layer, 2), []
    for start, width in ((0, config.features_size), (SLAB, config.hidden_size)):
        rng = np.random.default_rng(start)
        rows = decoder.Rows(
            tokens=start + jnp.arange(SLAB, dtype=jnp.int32),
            slots=jnp.arange(SLAB, dtype=jnp.int32) // 5,
            positions=start // 2 + jnp.arange(SLAB, dtype=jnp.int32) % 5,
            num_active=jnp.int32(live),
        )
        features = rng.standard_normal((SLAB, width)).astype(np.float32)
        features[live:] = np.nan
        kv, *outputs = forward(params, rows, jnp.asarray(features), kv)
        found += [output[:live] for output in outputs]
    return jax.tree.map(np.asarray, (found, kv.k, kv.v))


@pytest.mark.parametrize(
    ("dtype", "variant", "live", "form"),
    [
        ("float32", "plain", 1, None),
        ("bfloat16", "published variants", 6, "q8_0"),
        ("float32", "published variants", 9, None),
        ("bfloat16", "window", 9, None),
    ],
)
def test_a_step_is_its_operations(monkeypatch, dtype, variant, live, form):
    """Fails if the step leaves out an operation, or rounds or sums otherwise."""
    config, params = make(variant, dtype, form)
    monkeypatch.setattr(eagle3, "_row_norm", models.native_norm)  # before `fc`, in both
    expected = run(config, params, live, operations=True)
    testing.assert_same_bits(run(config, params, live), expected)


def test_a_norm_that_differs_is_caught(monkeypatch):
    """Negative control: a pair's norms that are one bit off."""
    config, params = make("plain", "float32")
    found = run(config, params, 3)
    planted = lambda *given: jnp.nextafter(models.native_norm(*given), jnp.float32(9))
    monkeypatch.setattr(eagle3, "_row_norm", planted)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(found, run(config, params, 3, operations=True))


def test_an_embedding_of_another_dtype(monkeypatch):
    """Fails if the step rounds an embedding otherwise than the operations do."""
    config, params = make("plain", "bfloat16")
    wide = jax.random.normal(jax.random.key(9), params.embed.shape, jnp.float32)
    found = run(config, eagle3_params.prepare(params.replace(embed=wide), "native"), 6)
    monkeypatch.setattr(eagle3, "_row_norm", models.native_norm)
    expected = run(config, params.replace(embed=wide), 6, operations=True)
    testing.assert_same_bits(found, expected)
