"""`init`, `step` and `run` write what autoregressive decoding and `generate` write."""

import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import SMALL

import spec_jax as sj
from spec_jax import algorithms
from spec_jax.debug import recorder
from spec_jax.engine import rows


PROMPTS = [[7, 3, 90, 7, 3, 41, 7, 3], [5], [1, 2, 3, 4] * 3]
DRAWS = [sj.Sampling(temperature=0.0), sj.Sampling(seed=4), sj.Sampling(top_k=9)]
HOW = {"max_tokens": 16, "sampling": DRAWS}

DRAFTER = decoding.draft_drafter(impl=SMALL.target.impl)
PARAMS = SMALL.weights, decoding.NEARLY_TARGET
ALGO = sj.speculative(SMALL.target, DRAFTER, rule=sj.rules.coupled)
BASE = sj.autoregressive(SMALL.target)


@functools.cache
def written() -> list[list[int]]:
    """Returns the tokens of `run`."""
    return ALGO.generated(ALGO.run(PARAMS, ALGO.init(PARAMS, PROMPTS, **HOW)))


def test_run_is_the_oracle_and_the_front_door():
    """Fails if a token, log-probability, logit, key or value is another integer."""
    lm = sj.LanguageModel(
        target=SMALL.target,
        params=PARAMS[0],
        drafter=DRAFTER,
        drafter_params=PARAMS[1],
        tokenizer=None,
    )
    # It records rounds of `Speculative.run`, and steps of `Autoregressive.run`.
    report = sj.check_lossless(lm, PROMPTS, gamma=DRAFTER.gamma_max, **HOW)
    assert report and len(report.comparisons) == 3
    outs = sj.generate(lm, PROMPTS, gamma=DRAFTER.gamma_max, **HOW)
    plain = BASE.run(PARAMS[0], BASE.init(PARAMS[0], PROMPTS, **HOW))
    assert written() == BASE.generated(plain) == [out.tokens for out in outs]
    assert [len(one) for one in written()] == [16] * 3
    assert len({tuple(one) for one in written()}) == 3


def test_steps_are_a_run_and_say_what_they_did():
    """Fails if a jitted step is compiled twice, is not donated, or counts wrongly."""
    step = jax.jit(ALGO.step, donate_argnums=1)
    state, infos = ALGO.init(PARAMS, PROMPTS, **HOW), []
    for _ in range(16):
        before = state
        state, info = step(PARAMS, state)
        infos.append(info)
        assert before.slots.tokens.is_deleted()
        if bool(state.done.all()):
            break
    assert step._cache_size() == 1
    assert ALGO.generated(state) == written()
    total = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *infos)
    slots = state.slots
    assert total.drafted.tolist() == slots.num_proposed.tolist()
    assert total.accepted.tolist() == slots.num_accepted.tolist()
    assert total.committed.tolist() == [16] * 3
    assert 0 < total.accepted.sum() < total.drafted.sum()
    assert total.finite.tolist() == [len(infos)] * 3


def test_steps_of_the_oracle_are_its_run():
    """Checks that a step commits one token a slot, and none where a slot has ended."""
    how = HOW | {"max_tokens": 3}
    step = jax.jit(BASE.step, donate_argnums=1)
    state = BASE.init(PARAMS[0], PROMPTS[:2], **how | {"sampling": DRAWS[:2]})
    for turn in range(4):
        state, info = step(PARAMS[0], state)
        assert info.committed.tolist() == [int(turn < 3)] * 2
        assert not info.drafted.any() and info.finite.all()
    assert state.done.all() and state.length.tolist() == [11, 4]
    assert BASE.generated(state) == [text[:3] for text in written()[:2]]


def test_a_run_goes_on_where_it_was():
    """Fails if `max_rounds` compiles again, or a pause changes a token."""
    state = ALGO.init(PARAMS, PROMPTS, **HOW)
    before = algorithms.round_lib.generate._cache_size()
    while not bool(state.done.all()):
        state = ALGO.run(PARAMS, state, max_rounds=3)
    assert algorithms.round_lib.generate._cache_size() <= before + 1
    assert ALGO.generated(state) == written()


TWO = recorder.Recorder(target=rows.SlotRows(model=SMALL.target, num_slots=2))
FITS = {"params": PARAMS, "prompts": PROMPTS, "max_tokens": 4}
PLAIN = FITS | {"params": PARAMS[0]}
REFUSED = [
    (ALGO, FITS | {"params": {}}, "params of type dict: give the target's and"),
    (ALGO, FITS | {"prompts": []}, "the list of prompts is empty"),
    (ALGO, FITS | {"max_tokens": 600}, "512 .max_position_embeddings.: shorten"),
    (ALGO, FITS | {"capacity": 0}, "capacity=0 must be a whole number of at least 1"),
    (BASE, PLAIN | {"capacity": 0}, "capacity=0 must be a whole number of at least 1"),
    (ALGO, FITS | {"stop_ids": 7}, r"stop_ids has shape \[\] .* give one row of token"),
    (BASE, PLAIN | {"stop_ids": 7}, r"stop_ids has shape \[\] .* give one row of toke"),
    (sj.autoregressive(TWO), PLAIN, "Recorder has 2 slots, and 1 are asked for"),
    (sj.speculative(TWO, DRAFTER), FITS, "Recorder has 2 slots, and 3 are asked for"),
]


@pytest.mark.parametrize(("algo", "given", "words"), REFUSED)
def test_what_cannot_be_used_is_said(algo, given, words):
    """Checks that arguments are refused before anything runs, with the remedy."""
    with pytest.raises(ValueError, match=words):
        algo.init(**given)


def test_more_requests_than_slots_are_refused():
    scheduler = ALGO.scheduler(PARAMS, num_slots=1, **SMALL.sizes)
    with pytest.raises(ValueError, match="2 requests for 1 slots"):
        scheduler.begin(*[decoding.Ask().request()] * 2)


def test_logits_that_are_not_finite_are_told():
    """Checks that a step's `finite` is False, and that `generated` raises."""
    bad = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), PARAMS[0])
    state = BASE.init(bad, PROMPTS[1:2], max_tokens=2)
    state, info = jax.jit(BASE.step)(bad, state)
    assert info.finite.tolist() == [False] and info.committed.tolist() == [1]
    with pytest.raises(FloatingPointError, match="1 tokens were chosen from logits"):
        BASE.generated(state)
