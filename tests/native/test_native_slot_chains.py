"""`block_steps.slot_chains`: one call over a block's slots equals going one by one."""

import functools

import block_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.drafters import draw as draw_lib
from spec_jax.model import block_heads
from spec_jax.native import block_steps, build, draws as draws_lib
from spec_jax.rules import sampling


def go_over(config, weights, counts, *, draws=None):
    """Returns the results of one call for random slots, and their tokens, confidences
    and log weights one by one."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    most, width, first = config.num_drafts, config.hidden_size, config.first_slot
    hidden = draw(models.SLOTS, first + most, width).astype(weights.final_norm.dtype)
    logits = draw(models.SLOTS, most, config.draft_vocab_size)
    anchor = jnp.asarray(rng.integers(0, 96, models.SLOTS), jnp.int32)
    found = block_heads.run_slots(
        weights, config, anchor, hidden, logits, counts=counts, draws=draws
    )
    widen = draw_lib.widened(weights.hot, 96)
    state, before = block_heads.first_state(config, (models.SLOTS,)), anchor
    correct = functools.partial(
        block_heads.correct, weights, config, product=block_heads.row_product("native")
    )
    if first:
        state, _, _ = correct(state, before, hidden[:, 0])
    tokens, chances, weighed = [], [], []
    for slot in range(most):
        state, bias, chance = correct(state, before, hidden[:, first + slot])
        corrected = logits[:, slot] if bias is None else logits[:, slot] + bias
        before, drawn_from = one_by_one(widen(corrected), draws, slot)
        tokens.append(np.asarray(before))
        chances.append(None if chance is None else np.asarray(chance))
        weighed.append(drawn_from)
    return found, np.stack(tokens, axis=1), chances, np.stack(weighed, axis=1)


def one_by_one(logits, draws, slot):
    """Returns the tokens of one slot of all blocks, and their log weights `[S, V]`."""
    if draws is None:
        nowhere = jnp.zeros((models.SLOTS,), jnp.int32)
        draws = draws_lib.Draws(sampling.greedy(models.SLOTS), nowhere, 96, True)
    if draws.independent:
        how = {"stream": sampling.Stream.DRAFT, "offset": jnp.int32(slot)}
        return _drawn(logits, draws.settings, draws.positions, **how)
    how = {"stream": sampling.Stream.SAMPLE, "offset": jnp.int32(0)}
    return _drawn(logits, draws.settings, draws.positions + slot, **how)


@functools.partial(jax.jit, static_argnames=("stream",))
def _drawn(logits, settings, positions, *, offset, stream):
    """Returns a token and the log weights of each row."""
    draw = functools.partial(sampling.sample, stream=stream, offset=offset)
    weights = jax.vmap(sampling.log_weights)(logits, settings)
    return jax.vmap(draw)(logits, settings, positions), weights


def drawing(*kinds, independent=False):
    """Returns the draws of each slot, with settings as `kinds` say."""
    made = [sampling.make_settings(seed=i, **kind) for i, kind in enumerate(kinds)]
    settings = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)
    positions = jnp.arange(models.SLOTS, dtype=jnp.int32) * 1000 + 7
    return draws_lib.Draws(settings, positions, 96, independent)


HOT, COLD = {"temperature": 1.5}, {"temperature": 0.0}
FILTERED = (
    {"temperature": 0.9, "top_k": 9},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.6},
    {"temperature": 1.1, "top_p": 0.95, "min_p": 0.1},
)


def test_hidden_states_of_another_block_are_caught(monkeypatch):
    """Negative control: a recurrent head reads those of the last block first."""
    config, weights = models.make(models.PASSED)
    counts = jnp.full((models.SLOTS,), config.num_drafts, jnp.int32)
    real = block_steps.slot_chains

    def planted(logits, anchors, *given, mix=None, **more):
        mix = mix._replace(hidden=mix.hidden[::-1])
        return real(logits, anchors, *given, mix=mix, **more)

    monkeypatch.setattr(block_steps, "slot_chains", planted)
    draws = drawing(HOT, HOT, HOT, independent=True)
    (_, _, given), _, _, log_weights = go_over(config, weights, counts, draws=draws)
    assert np.abs(np.asarray(given) - log_weights).max() > 1e-2


@pytest.mark.parametrize("head", ["gated", "passed"])
def test_a_block_is_gone_over_alike_beside_others(head):
    """Fails if a gate, a product or a draw depends on how many blocks there are."""
    config, weights = models.make(models.HEADS[head], "bfloat16")
    draws, most = drawing(HOT, FILTERED[1], HOT, independent=True), config.num_drafts
    all_ = jnp.full((models.SLOTS,), most, jnp.int32)
    (_, _, together), *_ = go_over(config, weights, all_, draws=draws)
    for slot in range(models.SLOTS):
        alone = jnp.zeros((models.SLOTS,), jnp.int32).at[slot].set(most)
        (tokens, _, given), *_ = go_over(config, weights, alone, draws=draws)
        testing.assert_same_bits(given[slot], together[slot])
        assert not np.delete(np.asarray(tokens), slot, axis=0).any()
    # Negative control: two blocks differ.
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(together[0], together[2])


KINDS = {"greedy": None, "hot": (HOT, COLD, HOT), "filtered": FILTERED}
CASES = {head: (head, "greedy") for head in ("none", "all", "gated", "rnn")} | {
    f"{head}, {kind}": (head, kind)
    for head in ("none", "few", "passed")
    for kind in ("hot", "filtered")
}


@pytest.mark.parametrize(("head", "kind"), CASES.values(), ids=CASES)
def test_slots_are_gone_over_as_one_by_one(head, kind):
    """Fails if a slot is corrected by another token than the one before it; or if noise
    is of another stream, position or token, or a filter keeps more or less than the
    reference; one slot is greedy, or all slots draw."""
    config, weights = models.make(models.HEADS[head])
    counts = jnp.array([config.num_drafts, 0, 2], jnp.int32)
    kinds, independent = KINDS[kind], kind == "filtered"
    draws = drawing(*kinds, independent=independent) if kinds else None
    (tokens, confidence, given), expected, chances, log_weights = go_over(
        config, weights, counts, draws=draws
    )
    is_asked = np.arange(config.num_drafts) < np.asarray(counts)[:, None]
    np.testing.assert_array_equal(tokens, np.where(is_asked, expected, 0))
    assert (confidence is None) == (config.head == "none")
    if confidence is not None:
        chances = np.stack(chances, axis=1)
        np.testing.assert_allclose(confidence[is_asked], chances[is_asked], rtol=1e-5)
    assert (given is None) == (not independent)
    if given is not None:
        wide = np.asarray(draw_lib.widened(weights.hot, 96)(given))
        # Gates are within a few units of the last place of XLA's.
        own, expected = wide[is_asked], log_weights[is_asked]
        np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-5)
        assert (wide[is_asked].max(axis=1) == 0).all()


def test_noise_is_the_same_on_every_instruction_set():
    """Fails if a set has other random bits or logarithms. Nothing is summed here."""
    rng = np.random.default_rng(0)
    V, most = 1500, 4
    logits = jnp.asarray(rng.standard_normal((models.SLOTS, most, V)) * 3, jnp.float32)
    number = jnp.full((models.SLOTS,), most, jnp.int32)
    draws = drawing(HOT, HOT, {"temperature": 0.7, "top_k": 300})
    draws = draws._replace(vocab_size=V, independent=True)
    how = {"names": None, "embed": None, "out": None}
    run = functools.partial(block_steps.slot_chains, logits, number, number, **how)
    found = {isa: run(draws=draws, isa=isa) for isa in build.available_isas()}
    first, *others = found.values()
    for other in others:
        testing.assert_same_bits(first, other)
    # Negative control: other seeds give other tokens.
    seeds = draws.settings.seed + 1
    other = draws._replace(settings=draws.settings.replace(seed=seeds))
    assert np.any(np.asarray(run(draws=other)[0]) != np.asarray(first[0]))
