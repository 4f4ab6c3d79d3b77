"""`block_steps`: a block drafter's calls have the bits of their operations."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import block_cases

from spec_jax import testing
from spec_jax.drafters import draft_slots
from spec_jax.model import (
    block_draft,
    block_heads,
    block_params,
    decoder,
    params,
    row_model,
)
from spec_jax.native import block_steps, build, draws as draws_lib
from spec_jax.ops import projection, rms_norm, row_attention, step
from spec_jax.paging import allocator, cache
from spec_jax.rules import sampling


CAPACITY, SLOTS = 40, 3
SIZE = block_cases.DFLASH.block_size
PLAIN = block_cases.DFLASH
MARKOV = block_cases.with_heads("vanilla")
SMALL = block_cases.with_heads("vanilla", draft_vocab_size=32, slots="fill-in")
GATED = block_cases.with_heads("gated", draft_vocab_size=32)
RNN = block_cases.with_heads("rnn", markov_rank=19)  # of no whole lanes
PASSED = block_cases.with_heads("rnn", slots="fill-in")
HEADS = {
    "none": PLAIN,
    "all": MARKOV,
    "few": SMALL,
    "gated": GATED,
    "rnn": RNN,
    "passed": PASSED,
}
each_head = pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)


def make(config=PLAIN, dtype="float32"):
    """A drafter's config, and its weights for the kernels."""
    decoding.needs("native")
    is_small = config.draft_vocab_size == 32
    hot = jnp.arange(3, 96, 2, dtype=jnp.int32)[:32] if is_small else None
    config = dataclasses.replace(
        config, layer=dataclasses.replace(config.layer, dtype=dtype)
    )
    target = params.init(jax.random.key(9), block_cases.TARGET, stddev=0.3)
    target = params.cast(target, dtype)
    weights = block_params.init(
        jax.random.key(5),
        config,
        embed=target.embed,
        lm_head=target.head,
        hot=hot,
        stddev=0.3,
    )
    if (markov := weights.markov) is not None:
        markov = markov.replace(out=8 * markov.out)  # So that the token before decides.
        if markov.mix_bias is not None:
            bias = jax.random.normal(jax.random.key(6), markov.mix_bias.shape)
            markov = markov.replace(mix_bias=bias.astype(dtype))
        weights = weights.replace(markov=markov)
    return config, block_params.prepare(weights, "native")


def new_slots(config):
    """A cache with pages for all positions of its slots."""
    model = row_model.RowModel(config=config.layer, impl="native", slab=SIZE)
    kv = model.new_slots(SLOTS, capacity=CAPACITY, page_size=8)
    for slot in range(SLOTS):
        kv = allocator.reserve(kv, slot, jnp.int32(CAPACITY))
    return kv


def native_norm(x, weight, *, eps):
    """The kernels' own norm: what their product with the identity reads."""
    flat = x.reshape(-1, x.shape[-1])
    eye, count = jnp.eye(flat.shape[1], dtype=x.dtype), jnp.int32(flat.shape[0])
    normed = projection.project(
        flat, eye, norm=weight, num_active=count, eps=eps, impl="native"
    )
    return normed.reshape(x.shape)


def run(config, weights, live, append_context=None):
    """What context of two slots, and blocks of all of them, leave behind."""
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
    rows = SLOTS * SIZE
    own = jnp.arange(rows, dtype=jnp.int32)
    starts = jnp.array([7, 4, 0], jnp.int32)
    blocks = decoder.Rows(
        tokens=own * 5 % 96,
        slots=own // SIZE,
        positions=starts[own // SIZE] + own % SIZE,
        num_active=jnp.int32(min(live // SIZE + 1, SLOTS) * SIZE),
    )

    @jax.jit
    def forward(kv):
        append = (
            block_draft.append_context if append_context is None else append_context
        )
        kv = append(weights, config, context, jnp.asarray(features), kv, impl="native")
        return block_draft.forward_block(weights, config, blocks, kv, impl="native")

    kv, *outputs = forward(new_slots(config))
    outputs = [x[: int(blocks.num_active)] for x in outputs]
    return jax.tree.map(np.asarray, (outputs, kv.k, kv.v))


def append_by_operations(weights, config, rows, features, kv, *, impl):
    """Context one operation after the other: attention of queries that mean nothing."""
    layer = config.layer
    shared = {"num_active": rows.num_active, "eps": layer.rms_norm_eps, "impl": impl}
    features = features.astype(weights.final_norm.dtype)
    fused = projection.project(features, weights.fc, **shared)
    cos, sin = decoder.row_angles(
        layer, rows.positions, dtype=features.dtype, impl=impl
    )
    for number, own in enumerate(weights.layers):
        made = projection.project(fused, own.kv, norm=weights.hidden_norm, **shared)
        queries = jnp.zeros((made.shape[0], layer.attention_size), made.dtype)
        _, k, v = row_attention.row_attention(
            jnp.concatenate([queries, made], axis=1),
            own.q_norm,
            own.k_norm,
            kv.k[number],
            kv.v[number],
            page_table=kv.page_table,
            slots=rows.slots,
            positions=rows.positions,
            cos=cos,
            sin=sin,
            scale=1.0,
            **shared,
        )
        kv = cache.replace_layer(kv, number, k=k, v=v)
    return kv


def by_operations(patch, config, weights, live, norm=native_norm):
    """The same by operations one by one, with the kernels' norms."""
    patch.setattr(step, "is_fused", lambda impl: False)
    patch.setattr(rms_norm, "rms_norm", norm)
    return run(config, weights, live, append_by_operations)


@pytest.mark.parametrize("live", [0, 3, 11])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_are_their_operations(monkeypatch, dtype, live):
    """Fails if a call leaves out an operation, or rounds or sums otherwise."""
    config, weights = make(dtype=dtype)
    found = run(config, weights, live)
    expected = by_operations(monkeypatch, config, weights, live)
    testing.assert_same_bits(found, expected)


def test_a_norm_that_differs_is_caught(monkeypatch):
    """Negative control: norms that are one bit off."""
    config, weights = make()
    found = run(config, weights, 11)
    planted = lambda *given, **eps: jnp.nextafter(
        native_norm(*given, **eps), jnp.float32(9)
    )
    expected = by_operations(monkeypatch, config, weights, 11, planted)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(found, expected)


def go_over(config, weights, counts, *, draws=None, seed=0, change=lambda x: x):
    """What random slots give in one call, and their tokens, confidences and log weights
    one by one; `change`: of the hidden states of both."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    most, width, first = config.num_drafts, config.hidden_size, config.first_slot
    hidden = change(draw(SLOTS, first + most, width))
    hidden = hidden.astype(weights.final_norm.dtype)
    logits = draw(SLOTS, most, config.draft_vocab_size)
    anchor = jnp.asarray(rng.integers(0, 96, SLOTS), jnp.int32)
    found = block_heads.run_slots(
        weights, config, anchor, hidden, logits,
        counts=counts, draws=draws, impl="native",
    )  # fmt: skip
    widen = draft_slots.widened(weights.hot, 96)
    state, before = block_heads.first_state(config, (SLOTS,)), anchor
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
    """The tokens of a slot of all blocks, and the log weights `[S, V]` of them."""
    if draws is None:
        draws = draws_lib.Draws(
            draft_slots.greedy(SLOTS), jnp.zeros((SLOTS,), jnp.int32), 96, True
        )
    stream, at = sampling.Stream.SAMPLE, (slot, 0)
    if draws.independent:
        stream, at = sampling.Stream.DRAFT, (0, slot)
    made = [
        _one(
            logits[s],
            jax.tree.map(lambda leaf, s=s: leaf[s], draws.settings),
            draws.positions[s] + at[0],
            jnp.int32(at[1]),
            stream=stream,
        )
        for s in range(SLOTS)
    ]
    tokens, weighed = zip(*made, strict=True)
    return jnp.stack(tokens), np.stack(weighed)


# One program for all: a process has room for some ten thousand.
@functools.partial(jax.jit, static_argnames=("stream",))
def _one(logits, settings, position, offset, *, stream):
    drawn = sampling.sample(logits, settings, position, stream=stream, offset=offset)
    return drawn, sampling.log_weights(logits, settings)


def drawing(*kinds, independent=False):
    """Draws of each slot, of settings as `kinds` say."""
    made = [sampling.make_settings(seed=i, **kind) for i, kind in enumerate(kinds)]
    settings = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)
    positions = jnp.arange(SLOTS, dtype=jnp.int32) * 1000 + 7
    return draws_lib.Draws(settings, positions, 96, independent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_head
def test_slots_are_gone_over_as_one_by_one(config, dtype):
    """Fails if a slot is corrected by another token than the one before it."""
    config, weights = make(config, dtype)
    counts = jnp.array([config.num_drafts, 0, 2], jnp.int32)
    (tokens, confidence, _), expected, chances, _ = go_over(config, weights, counts)
    is_asked = np.arange(config.num_drafts) < np.asarray(counts)[:, None]
    np.testing.assert_array_equal(tokens, np.where(is_asked, expected, 0))
    assert (confidence is None) == (config.head == "none")
    if confidence is not None:
        chances = np.stack(chances, axis=1)
        np.testing.assert_allclose(confidence[is_asked], chances[is_asked], rtol=1e-5)


HOT, COLD = {"temperature": 1.5}, {"temperature": 0.0}
FILTERED = (
    {"temperature": 0.9, "top_k": 9},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.6},
    {"temperature": 1.1, "top_p": 0.95, "min_p": 0.1},
)


def plant(monkeypatch, change):
    """Makes the call take what `change(anchors, mix)` gives in the place of these."""
    real = block_steps.slot_chains

    def planted(logits, anchors, *given, mix=None, **more):
        anchors, mix = change(anchors, mix)
        return real(logits, anchors, *given, mix=mix, **more)

    monkeypatch.setattr(block_steps, "slot_chains", planted)


@pytest.mark.parametrize("config", [MARKOV, GATED, RNN], ids=["all", "gated", "rnn"])
def test_a_slot_that_overlooks_the_token_before_is_caught(monkeypatch, config):
    """Negative control: each slot is corrected by the token after the anchor's."""
    config, weights = make(config)
    counts = jnp.full((SLOTS,), config.num_drafts, jnp.int32)
    plant(monkeypatch, lambda anchors, mix: ((anchors + 1) % 96, mix))
    (tokens, *_), expected, *_ = go_over(config, weights, counts)
    assert np.any(np.asarray(tokens) != expected)


FAULTS = {
    "a bias is left out": lambda mix: mix._replace(bias=0 * mix.bias),
    "hidden states are of the slot before": lambda mix: mix._replace(
        hidden=jnp.roll(mix.hidden, 1, axis=1)
    ),
    "hidden states are of another block": lambda mix: mix._replace(
        hidden=mix.hidden[::-1]
    ),
    "no slot is passed through": lambda mix: mix._replace(hidden=mix.hidden[:, 1:]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_mix_is_caught(monkeypatch, fault):
    """Negative control: what a recurrent head reads is not what it should."""
    config, weights = make(PASSED)
    counts = jnp.full((SLOTS,), config.num_drafts, jnp.int32)
    plant(monkeypatch, lambda anchors, mix: (anchors, FAULTS[fault](mix)))
    draws = drawing(HOT, HOT, HOT, independent=True)
    (_, _, given), _, _, log_weights = go_over(config, weights, counts, draws=draws)
    assert np.abs(np.asarray(given) - log_weights).max() > 1e-2


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_head
def test_a_block_is_gone_over_alike_beside_others(config, dtype):
    """Fails if a gate, a product or a draw depends on how many blocks there are."""
    config, weights = make(config, dtype)
    draws = drawing(HOT, FILTERED[1], HOT, independent=True)
    most = config.num_drafts
    (_, _, together), *_ = go_over(
        config, weights, jnp.full((SLOTS,), most, jnp.int32), draws=draws
    )
    for slot in range(SLOTS):
        alone = jnp.zeros((SLOTS,), jnp.int32).at[slot].set(most)
        (tokens, _, given), *_ = go_over(config, weights, alone, draws=draws)
        testing.assert_same_bits(given[slot], together[slot])
        assert not np.delete(np.asarray(tokens), slot, axis=0).any()
    # Negative control: blocks differ.
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(together[0], together[2])


@pytest.mark.few(3)
@pytest.mark.parametrize("spoilt", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("config", [GATED, PASSED], ids=["gated", "passed"])
def test_what_is_no_number_stays_in_its_block(config, spoilt):
    """Fails if a hidden state that is none spoils another block, or names a token that
    does not exist."""
    config, weights = make(config)
    counts = jnp.full((SLOTS,), config.num_drafts, jnp.int32)
    (clean, *_), *_ = go_over(config, weights, counts)
    change = lambda hidden: hidden.at[1].set(spoilt)
    (tokens, *_), expected, *_ = go_over(config, weights, counts, change=change)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(tokens[::2], clean[::2])
    assert np.any(np.asarray(tokens[1]) != np.asarray(clean[1]))


@pytest.mark.few(8)
@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("kinds", [(HOT, COLD, HOT), FILTERED], ids=["hot", "filtered"])
@each_head
def test_slots_are_drawn_as_one_by_one(config, kinds, independent):
    """Fails if noise is of another stream, position or token, or a filter keeps more or
    less than in the reference; of one slot, all slots or none."""
    config, weights = make(config)
    counts = jnp.array([config.num_drafts, 2, config.num_drafts - 1], jnp.int32)
    draws = drawing(*kinds, independent=independent)
    (tokens, _, given), expected, _, log_weights = go_over(
        config, weights, counts, draws=draws
    )
    is_asked = np.arange(config.num_drafts) < np.asarray(counts)[:, None]
    np.testing.assert_array_equal(tokens, np.where(is_asked, expected, 0))
    assert (given is None) == (not independent)
    if given is not None:
        wide = np.asarray(draft_slots.widened(weights.hot, 96)(given))
        # Gates are within a few units of the last place of XLA's.
        own, expected = wide[is_asked], log_weights[is_asked]
        np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-5)
        assert (wide[is_asked].max(axis=1) == 0).all()


def test_draws_of_another_position_are_caught():
    """Negative control: a round whose first position is one further."""
    config, weights = make(MARKOV)
    counts = jnp.full((SLOTS,), config.num_drafts, jnp.int32)
    for independent in (False, True):
        draws = drawing(HOT, HOT, HOT, independent=independent)
        _, expected, *_ = go_over(config, weights, counts, draws=draws)
        moved = draws._replace(positions=draws.positions + 1)
        (tokens, *_), *_ = go_over(config, weights, counts, draws=moved)
        assert np.any(np.asarray(tokens) != expected)


def test_noise_is_the_same_on_every_instruction_set():
    """Fails if a set has other random bits or logarithms. Nothing is summed here."""
    rng = np.random.default_rng(0)
    V, most = 1500, 4
    logits = jnp.asarray(rng.standard_normal((SLOTS, most, V)) * 3, jnp.float32)
    number = jnp.full((SLOTS,), most, jnp.int32)
    draws = drawing(HOT, HOT, {"temperature": 0.7, "top_k": 300})
    draws = draws._replace(vocab_size=V, independent=True)
    run = functools.partial(
        block_steps.slot_chains,
        logits,
        number,
        number,
        names=None,
        embed=None,
        out=None,
    )
    found = {isa: run(draws=draws, isa=isa) for isa in build.available_isas()}
    first, *others = found.values()
    for other in others:
        testing.assert_same_bits(first, other)
    # Negative control: other seeds are other tokens.
    seeds = draws.settings.seed + 1
    other = draws._replace(settings=draws.settings.replace(seed=seeds))
    assert np.any(np.asarray(run(draws=other)[0]) != np.asarray(first[0]))


def test_what_a_call_cannot_take_is_refused():
    """Fails if the kernels are handed what they would read or write outside of."""
    config, weights = make(MARKOV)
    kv = new_slots(config)
    model = block_draft._model(weights, config, kv)
    half = config.layer.head_dim // 2
    where = {
        "slots": jnp.zeros((SIZE + 1,), jnp.int32),
        "positions": jnp.zeros((SIZE + 1,), jnp.int32),
        "num_active": jnp.int32(1),
        "at": (kv.page_table, *(jnp.zeros((SIZE + 1, half)),) * 2),
    }
    tokens = jnp.zeros((SIZE + 1,), jnp.int32)
    run_blocks = functools.partial(block_steps.blocks, model=model, block_size=SIZE)
    with pytest.raises(ValueError, match=f"{SIZE + 1} rows are no whole blocks"):
        run_blocks(tokens, **where)
    with pytest.raises(ValueError, match="slots has shape"):
        run_blocks(tokens[1:], **where)
    with pytest.raises(ValueError, match="fc has shape"):
        block_steps.append_context(
            jnp.zeros((SIZE + 1, 7)),
            model,
            fc=weights.fc,
            hidden_norm=weights.hidden_norm,
            **where,
        )
    logits = jnp.zeros((2, 3, config.draft_vocab_size))
    with pytest.raises(ValueError, match="names has shape"):
        block_steps.slot_chains(
            logits,
            jnp.zeros((2,), jnp.int32),
            jnp.zeros((2,), jnp.int32),
            names=jnp.zeros((5,), jnp.int32),
            embed=None,
            out=None,
        )
    config, weights = make(PASSED)
    hidden = jnp.zeros((SLOTS, config.block_size, config.hidden_size))
    logits = jnp.zeros((SLOTS, config.num_drafts, config.draft_vocab_size))
    counts, markov = jnp.zeros((SLOTS,), jnp.int32), weights.markov
    mix = block_steps.Mix(markov.mix, markov.mix_bias, hidden)
    refused = {
        "2 hidden states for 3 slots": mix._replace(hidden=hidden[:, :2]),
        "and 9 gates of a head of rank 8": mix._replace(bias=markov.mix_bias[:9]),
        "weight has shape": mix._replace(bias=markov.mix_bias[:8]),
        "hidden has shape": mix._replace(hidden=hidden[:1]),
    }
    for message, wrong in refused.items():
        with pytest.raises(ValueError, match=message):
            block_steps.slot_chains(
                logits,
                counts,
                counts,
                names=None,
                embed=markov.embed,
                out=markov.out,
                mix=wrong,
            )
    layer = model.layers[0]._replace(q=model.layers[0].kv)
    with pytest.raises(ValueError, match="q has shape|attention_out has shape"):
        dataclasses.replace(model, layers=[layer] * len(model.layers))
