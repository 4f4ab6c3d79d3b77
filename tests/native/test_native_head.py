"""`head_steps`: a head's step has the bits of its operations."""

import dataclasses

import block_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import head_layouts, test_eagle3_head as heads

from spec_jax import testing
from spec_jax.model import eagle3, eagle3_params


SLAB = 9


def make(variant, dtype, form=None, **sizes):
    """Returns a head's config, and its weights for the kernels."""
    config = head_layouts.with_dtype(heads.VARIANTS[variant], dtype)
    layer = dataclasses.replace(config.layer, **sizes)
    config = dataclasses.replace(config, layer=layer)
    params = head_layouts.make_params(config, dtype)
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
    widths = config.features_size, config.hidden_size
    for seed, rows in enumerate(models.two_slabs(live, SLAB)):
        rng = np.random.default_rng(seed)
        features = rng.standard_normal((SLAB, widths[seed])).astype(np.float32)
        features[live:] = np.nan
        kv, *outputs = forward(params, rows, jnp.asarray(features), kv)
        found += [output[:live] for output in outputs]
    return jax.tree.map(np.asarray, (found, kv.k, kv.v))


@pytest.mark.parametrize(
    ("dtype", "variant", "live", "form", "embed"),
    [
        ("float32", "plain", 1, None, "float32"),
        ("bfloat16", "published variants", 6, "q8_0", "bfloat16"),
        ("float32", "published variants", 9, None, "float32"),
        ("bfloat16", "window", 9, None, "bfloat16"),
        ("bfloat16", "plain", 6, None, "float32"),
    ],
)
def test_a_step_is_its_operations(monkeypatch, dtype, variant, live, form, embed):
    """Fails if the step leaves out an operation, or rounds or sums otherwise, an
    embedding of another dtype, too."""
    config, params = make(variant, dtype, form)
    operations = params
    if embed != dtype:
        wide = jax.random.normal(jax.random.key(9), params.embed.shape, embed)
        operations = params.replace(embed=wide)
        params = eagle3_params.prepare(operations, "native")
    monkeypatch.setattr(eagle3, "_row_norm", models.native_norm)  # before `fc`, in both
    expected = run(config, operations, live, operations=True)
    testing.assert_same_bits(run(config, params, live), expected)
