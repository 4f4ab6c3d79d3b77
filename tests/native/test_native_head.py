"""`head_steps` and `block_steps`: calls of heads have the bits of their operations."""

import dataclasses

import block_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import head_layouts, test_eagle3_head as heads

from spec_jax import testing
from spec_jax.model import block_draft, decoder, eagle3, head_params
from spec_jax.native import block_steps
from spec_jax.ops import dispatch, projection, rms_norm, row_attention
from spec_jax.paging import cache


SLAB = 9


def make(variant, dtype, form=None, **sizes):
    """Returns a head's config, and its weights for the kernels."""
    config = head_layouts.with_dtype(heads.VARIANTS[variant], dtype)
    layer = dataclasses.replace(config.layer, **sizes)
    config = dataclasses.replace(config, layer=layer)
    params = head_layouts.make_params(config, dtype)
    return config, head_params.prepare(params, "native", form=form)


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
        params = head_params.prepare(operations, "native")
    monkeypatch.setattr(eagle3, "_row_norm", models.native_norm)  # before `fc`, in both
    expected = run(config, operations, live, operations=True)
    testing.assert_same_bits(run(config, params, live), expected)


def run_blocks(config, weights, live, append_context=None):
    """Appends context of two slots and runs blocks; returns outputs and both pools."""
    rng = np.random.default_rng(0)
    count = 11
    features = rng.standard_normal((count, config.features_size)).astype(np.float32)
    features[live:] = np.nan
    context = decoder.Rows(
        tokens=jnp.zeros((count,), jnp.int32),
        slots=jnp.arange(count, dtype=jnp.int32) // 7,
        positions=jnp.arange(count, dtype=jnp.int32) % 7,
        num_active=jnp.int32(live),
    )
    rows = models.SLOTS * models.SIZE
    own = jnp.arange(rows, dtype=jnp.int32)
    starts = jnp.array([7, 4, 0], jnp.int32)
    blocks = decoder.Rows(
        tokens=own * 5 % 96,
        slots=own // models.SIZE,
        positions=starts[own // models.SIZE] + own % models.SIZE,
        num_active=jnp.int32(min(live // models.SIZE + 1, models.SLOTS) * models.SIZE),
    )

    append = append_context or block_draft.append_context

    @jax.jit
    def forward(kv):
        kv = append(weights, config, context, jnp.asarray(features), kv, impl="native")
        return block_draft.forward_block(weights, config, blocks, kv, impl="native")

    kv, *outputs = forward(models.new_slots(config.layer))
    outputs = [x[: int(blocks.num_active)] for x in outputs]
    return jax.tree.map(np.asarray, (outputs, kv.k, kv.v))


def append_by_operations(weights, config, rows, features, kv, *, impl):
    """Appends context by single operations: attention, with queries that are zeros."""
    layer = config.layer
    shared = {"num_active": rows.num_active, "eps": layer.rms_norm_eps, "impl": impl}
    features = features.astype(weights.final_norm.dtype)
    fused = projection.project(features, weights.fc, **shared)
    how = {"dtype": features.dtype, "impl": impl}
    angles = decoder.row_angles(layer, rows.positions, **how)
    how = {"eps": layer.rms_norm_eps, "scale": 1.0, "impl": impl}
    for number, own in enumerate(weights.layers):
        made = projection.project(fused, own.kv, norm=weights.hidden_norm, **shared)
        queries = jnp.zeros((made.shape[0], layer.attention_size), made.dtype)
        heads = jnp.concatenate([queries, made], axis=1), own.q_norm, own.k_norm
        pages = kv.k[number], kv.v[number], kv.page_table
        _, k, v = row_attention.row_attention(*heads, pages, rows, angles, **how)
        kv = cache.replace_layer(kv, number, k=k, v=v)
    return kv


@pytest.mark.parametrize(
    ("dtype", "live", "form"),
    [("float32", 0, None), ("bfloat16", 3, None), ("float32", 11, "q8_0")],
)
def test_calls_are_their_operations(monkeypatch, dtype, live, form):
    """Fails if a call leaves out an operation, or rounds or sums otherwise."""
    config, weights = models.make(dtype=dtype, form=form)
    found = run_blocks(config, weights, live)
    monkeypatch.setattr(dispatch, "is_fused", lambda impl: False)
    monkeypatch.setattr(rms_norm, "rms_norm", models.native_norm)
    expected = run_blocks(config, weights, live, append_by_operations)
    testing.assert_same_bits(found, expected)


def test_what_a_call_cannot_take_is_refused():
    """Fails if the kernels take arrays that they would read or write outside of."""
    config, weights = models.make(models.PASSED)
    kv = models.new_slots(config.layer)
    model = block_steps.BlockModel(weights, config.layer, kv)
    own = jnp.zeros((models.SIZE + 1,), jnp.int32)
    rows = decoder.Rows(tokens=own, slots=own, positions=own, num_active=jnp.int32(1))
    angles = (jnp.zeros((models.SIZE + 1, config.layer.head_dim // 2)),) * 2
    with pytest.raises(ValueError, match=f"{models.SIZE + 1} rows are no whole blocks"):
        block_steps.blocks(rows, model, angles, block_size=models.SIZE)
    with pytest.raises(ValueError, match="fc has shape"):
        features = jnp.zeros((models.SIZE + 1, 7))
        block_steps.append_context(features, rows, model, angles)
    hidden = jnp.zeros((models.SLOTS, config.block_size, config.hidden_size))
    logits = jnp.zeros((models.SLOTS, config.num_drafts, config.draft_vocab_size))
    counts, markov = jnp.zeros((models.SLOTS,), jnp.int32), weights.markov
    given = {"names": None, "markov": markov, "hidden": hidden}
    fewer = markov.replace(mix_bias=markov.mix_bias[:8])
    for words, wrong in {
        "names has shape": {"names": own},
        "2 hidden states for 3 slots": {"hidden": hidden[:, :2]},
        "mix has shape": {"markov": fewer},
    }.items():
        with pytest.raises(ValueError, match=words):
            block_steps.slot_chains(logits, counts, counts, **(given | wrong))
