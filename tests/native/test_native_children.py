"""`native.children` finds the children that XLA finds, with the target's own noise; and
`block_steps.slot_chains`: one call over a block's slots equals going one by one."""

import dataclasses
import functools

import block_models as models
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.drafters import draw as draw_lib, tree_shapes
from spec_jax.model import block_heads
from spec_jax.native import block_steps, build, children as native, draws as draws_lib
from spec_jax.rules import sampling


SLOTS, ROWS, V = 3, 4, 2500
TREE = tree_shapes.parse("4x3:9@0.6")
FIXED = tree_shapes.parse("3-2-2")
HOT = jnp.asarray(np.random.default_rng(7).permutation(V)[:1100].astype(np.int32))
COUNTS = jnp.array([ROWS, 0, 2], jnp.int32)

WARM = {"temperature": 1.3}
KINDS = {
    "greedy": None,
    "warm": (WARM, WARM, WARM),
    "mixed": (WARM, {"temperature": 0.0}, {"temperature": 0.4, "top_k": 50}),
    "independent": (WARM, {"temperature": 0.0}, {"temperature": 0.4, "top_k": 50}),
    "filtered": (
        {"temperature": 0.9, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.3},
        {"temperature": 1.1, "top_p": 0.95, "min_p": 0.05},
    ),
}


def settings_of(kinds) -> sampling.SamplingSettings:
    """Returns settings of slots, each with a seed of its own."""
    made = [sampling.make_settings(seed=i, **kind) for i, kind in enumerate(kinds)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def draw_of(kinds, *, has_probs=False) -> draw_lib.Draw:
    settings = settings_of(kinds) if kinds else None
    lengths = 50 + 10 * jnp.arange(SLOTS, dtype=jnp.int32)
    how = {"impl": "xla", "has_probs": has_probs, "vocab_size": V}
    return draw_lib.Draw(sampling=settings, length=lengths, **how)


def logits_of(size=V):
    made = np.random.default_rng(0).standard_normal((SLOTS, ROWS, size)) * 3
    return jnp.asarray(made, jnp.float32)


@functools.partial(jax.jit, static_argnames=("tree",))
def _children(draw, logits, *, tree, **told):
    return draw.children(logits, tree=tree, **told)


def found(impl, draw, logits, *, tree=TREE, hot=None, level=2, counts=COUNTS):
    """Returns the scores and tokens of children, only of rows within `counts`."""
    if impl == "native":
        decoding.needs("native")
    draw = dataclasses.replace(draw, impl=impl, hot=hot)
    told = {"level": jnp.int32(level), "counts": counts}
    scores, tokens = _children(draw, logits, tree=tree, **told)
    is_row = np.arange(logits.shape[1])[None] < np.asarray(counts)[:, None]
    return np.asarray(scores)[is_row], np.asarray(tokens)[is_row]


def assert_same(one, other, *, has_names=False):
    """Asserts that tokens are equal, and scores but for the rounding of sums. With
    names, tokens without a weight are left out: they come in the order of their
    numbers, which differ between the two implementations."""
    is_draft = (other[0] > -np.inf) | (not has_names)
    np.testing.assert_array_equal(one[1][is_draft], other[1][is_draft])
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hot", [None, HOT], ids=["all", "few"])
@pytest.mark.parametrize("kind", KINDS)
def test_children_are_those_of_xla(kind, hot):
    """Fails if a child is drawn with other noise, filtered otherwise, or misnamed; if
    an independent one has the noise of another node of the round."""
    is_independent = kind == "independent"
    draw = draw_of(KINDS[kind], has_probs=is_independent)
    logits = logits_of(size=V if hot is None else hot.size)
    tokens = []
    for level in (0, 2):
        told = {"hot": hot, "level": level, "tree": FIXED if is_independent else TREE}
        one, other = (found(x, draw, logits, **told) for x in ("native", "xla"))
        assert_same(one, other, has_names=hot is not None)
        tokens.append(one[1])
    # Negative control: another level has other noise, where it has any.
    assert np.any(tokens[0] != tokens[1]) == (kind != "greedy")


def test_the_best_child_is_the_targets_own_draw():
    """Fails if the noise is not that of the position, by which a child is accepted."""
    level, counts = 3, jnp.full((SLOTS,), ROWS, jnp.int32)
    draw, logits = draw_of(KINDS["warm"]), logits_of()
    how = {"positions": draw.length + level, "draws": jnp.ones((SLOTS,), bool)}
    drawn = sampling.sample_each(logits[:, 0], draw.sampling, **how)
    told = {"level": level, "counts": counts}
    best = found("native", draw, logits, **told)[1][::ROWS, 0]
    np.testing.assert_array_equal(best, drawn)
    # Negative control: noise of the next position.
    moved = dataclasses.replace(draw, length=draw.length + 1)
    assert np.any(found("native", moved, logits, **told)[1][::ROWS, 0] != drawn)


@pytest.mark.parametrize("kind", ["greedy", "filtered"])
def test_rows_are_alike_beside_others(kind):
    """Fails if a child's score depends on which other rows and slots are asked for."""
    draw, logits = draw_of(KINDS[kind]), logits_of()
    all_ = jnp.full((SLOTS,), ROWS, jnp.int32)
    together = found("native", draw, logits, counts=all_)
    for slot in range(SLOTS):
        alone = found("native", draw, logits, counts=all_.at[:].set(0).at[slot].set(2))
        rows = slice(slot * ROWS, slot * ROWS + 2)
        testing.assert_same_bits(alone, tuple(each[rows] for each in together))
    # Negative control: another row has other scores.
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(together[0][:1], together[0][1:2])


SPOILT = {
    "NaN": lambda row: row.at[1030].set(jnp.nan),
    "NaN among nothing": lambda row: jnp.full_like(row, -jnp.inf).at[1030].set(jnp.nan),
    "infinite": lambda row: row.at[2000].set(jnp.inf),
    "two infinite": lambda row: row.at[jnp.array([3, 2000])].set(jnp.inf),
    "three tokens": lambda row: (
        jnp.full_like(row, -jnp.inf).at[jnp.array([7, 1024, 2499])].set(2.0)
    ),
    "a piece of nothing": lambda row: row.at[1024:2048].set(-jnp.inf),
    "equal pieces": lambda row: jnp.round(row),
    "denormal": lambda row: row * 1e-40,
}


@pytest.mark.parametrize("kind", ["greedy", "warm"])
@pytest.mark.parametrize("fault", SPOILT)
def test_rows_of_no_use_are_those_of_xla(fault, kind):
    """Fails if a logit of NaN or infinity is drafted or spoils another row, or if ties
    are decided otherwise than by XLA."""
    if fault == "denormal" and kind == "greedy":
        pytest.skip("whether denormals are equal is the processor's mode")
    logits = logits_of()
    spoilt = logits.at[0, 1].set(SPOILT[fault](logits[0, 1]))
    draw = draw_of(KINDS[kind])
    one, other = found("native", draw, spoilt), found("xla", draw, spoilt)
    assert_same(one, other)
    clean = found("native", draw, logits)
    others = [[each[[0, 2, 3, 4, 5]] for each in found_] for found_ in (one, clean)]
    testing.assert_same_bits(*others)
    is_useless = fault.split()[0] in ("NaN", "infinite", "two")
    assert (one[0][1] == -np.inf).all() == is_useless


def test_what_the_kernels_cannot_take_is_refused():
    decoding.needs("native")
    logits, numbers = logits_of(), jnp.zeros((ROWS,), jnp.int32)
    told = {"tau": 1.0, "draws": None}
    for message, (*arrays, most, names) in {
        "0 children of 2500 tokens": (logits, COUNTS, numbers, 0, None),
        "2501 children of 2500 tokens": (logits, COUNTS, numbers, V + 1, None),
        "counts has shape": (logits, COUNTS[:2], numbers, 2, None),
        "numbers has shape": (logits, COUNTS, numbers[:2], 2, None),
        "names has shape": (logits, COUNTS, numbers, 2, HOT),
        "take float32": (logits.astype(jnp.bfloat16), COUNTS, numbers, 2, None),
    }.items():
        with pytest.raises((ValueError, NotImplementedError), match=message):
            native.children(*arrays, most=most, names=names, **told)


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
    noisy = functools.partial(sampling.noisy_weights, stream=stream, offset=offset)
    weights = jax.vmap(sampling.log_weights)(logits, settings)
    tokens = jax.vmap(noisy)(logits, settings, positions).argmax(axis=-1)
    return tokens.astype(jnp.int32), weights


def drawing(*kinds, independent=False):
    """Returns the draws of each slot, with settings as `kinds` say."""
    settings = settings_of(kinds)
    positions = jnp.arange(models.SLOTS, dtype=jnp.int32) * 1000 + 7
    return draws_lib.Draws(settings, positions, 96, independent)


RANDOM, COLD = {"temperature": 1.5}, {"temperature": 0.0}
FILTERED = (
    {"temperature": 0.9, "top_k": 9},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.6},
    {"temperature": 1.1, "top_p": 0.95, "min_p": 0.1},
)


@pytest.mark.parametrize("head", ["gated", "passed"])
def test_a_block_is_gone_over_alike_beside_others(head):
    """Fails if a gate, a product or a draw depends on how many blocks there are."""
    config, weights = models.make(models.HEADS[head], "bfloat16")
    draws, most = (
        drawing(RANDOM, FILTERED[1], RANDOM, independent=True),
        config.num_drafts,
    )
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


BLOCK_KINDS = {"greedy": None, "hot": (RANDOM, COLD, RANDOM), "filtered": FILTERED}
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
    kinds, independent = BLOCK_KINDS[kind], kind == "filtered"
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
    draws = drawing(RANDOM, RANDOM, {"temperature": 0.7, "top_k": 300})
    draws = draws._replace(vocab_size=V, independent=True)
    run = functools.partial(block_steps.slot_chains, logits, number, number, names=None)
    found = {isa: run(draws=draws, isa=isa) for isa in build.available_isas()}
    first, *others = found.values()
    for other in others:
        testing.assert_same_bits(first, other)
    # Negative control: other seeds give other tokens.
    seeds = draws.settings.seed + 1
    other = draws._replace(settings=draws.settings.replace(seed=seeds))
    assert np.any(np.asarray(run(draws=other)[0]) != np.asarray(first[0]))
