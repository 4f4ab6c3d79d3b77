"""`block_steps`: a block drafter's calls have the bits of their operations."""

import block_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.model import block_draft, decoder
from spec_jax.native import block_steps
from spec_jax.ops import dispatch, projection, rms_norm, row_attention
from spec_jax.paging import cache


def run(config, weights, live, append_context=None):
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
    cos, sin = decoder.row_angles(layer, rows.positions, **how)
    where = {"page_table": kv.page_table, "slots": rows.slots}
    where |= {"positions": rows.positions, "cos": cos, "sin": sin, "scale": 1.0}
    for number, own in enumerate(weights.layers):
        made = projection.project(fused, own.kv, norm=weights.hidden_norm, **shared)
        queries = jnp.zeros((made.shape[0], layer.attention_size), made.dtype)
        heads, pools = jnp.concatenate([queries, made], axis=1), (kv.k, kv.v)
        _, k, v = row_attention.row_attention(
            heads, own.q_norm, own.k_norm, *(x[number] for x in pools),
            **where, **shared,
        )  # fmt: skip
        kv = cache.replace_layer(kv, number, k=k, v=v)
    return kv


@pytest.mark.parametrize(
    ("dtype", "live", "form"),
    [("float32", 0, None), ("bfloat16", 3, None), ("float32", 11, "q8_0")],
)
def test_calls_are_their_operations(monkeypatch, dtype, live, form):
    """Fails if a call leaves out an operation, or rounds or sums otherwise."""
    config, weights = models.make(dtype=dtype, form=form)
    found = run(config, weights, live)
    monkeypatch.setattr(dispatch, "is_fused", lambda impl: False)
    monkeypatch.setattr(rms_norm, "rms_norm", models.native_norm)
    expected = run(config, weights, live, append_by_operations)
    testing.assert_same_bits(found, expected)


def test_what_a_call_cannot_take_is_refused():
    """Fails if the kernels take arrays that they would read or write outside of."""
    config, weights = models.make(models.PASSED)
    kv, layers = models.new_slots(config.layer), weights.layers
    model = block_steps.BlockModel.of(weights, layers, config.layer, kv)
    own = jnp.zeros((models.SIZE + 1,), jnp.int32)
    rows = decoder.Rows(tokens=own, slots=own, positions=own, num_active=jnp.int32(1))
    angles = (jnp.zeros((models.SIZE + 1, config.layer.head_dim // 2)),) * 2
    with pytest.raises(ValueError, match=f"{models.SIZE + 1} rows are no whole blocks"):
        block_steps.blocks(rows, model, angles, block_size=models.SIZE)
    with pytest.raises(ValueError, match="fc has shape"):
        features, norm = jnp.zeros((models.SIZE + 1, 7)), weights.hidden_norm
        how = {"fc": weights.fc, "hidden_norm": norm, "rows": rows, "angles": angles}
        block_steps.append_context(features, model, **how)
    hidden = jnp.zeros((models.SLOTS, config.block_size, config.hidden_size))
    logits = jnp.zeros((models.SLOTS, config.num_drafts, config.draft_vocab_size))
    counts, markov = jnp.zeros((models.SLOTS,), jnp.int32), weights.markov
    mix = block_steps.Mix(markov.mix, markov.mix_bias, hidden)
    given = {"names": None, "embed": markov.embed, "out": markov.out}
    for words, wrong in {
        "names has shape": {"names": own},
        "2 hidden states for 3 slots": {"mix": mix._replace(hidden=hidden[:, :2])},
        "weight has shape": {"mix": mix._replace(bias=markov.mix_bias[:8])},
    }.items():
        with pytest.raises(ValueError, match=words):
            block_steps.slot_chains(logits, counts, counts, **(given | wrong))
