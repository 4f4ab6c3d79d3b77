"""The default gamma: costs are measured once, are in provenance, change no token."""

import dataclasses

import numpy as np
import pytest
import tiny_pair

import spec_jax as sj
from spec_jax import default_gamma, run as run_lib
from spec_jax.drafters import choice, ngram, suffix


TEXT = tiny_pair.CYCLE
CHEAP = sj.gamma.RoundCosts(round_s=(1.0, 1.01, 1.02, 1.03, 1.04))
FEW = sj.gamma.RoundCosts(round_s=(1.0, 1.01))
DEAR = sj.gamma.RoundCosts(round_s=(1.0, 4.0, 7.0, 10.0, 13.0))


@pytest.fixture
def counted(monkeypatch):
    """Plants costs, by default `CHEAP`; returns `measure` and a list of its calls."""
    calls = []

    def measure(scheduler, requests):
        calls.append((scheduler.target.num_slots, requests[0].sampling is not None))
        return measure.planted

    measure.planted = CHEAP
    monkeypatch.setattr(default_gamma, "measure", measure)
    monkeypatch.setattr(default_gamma, "_known", type(default_gamma._known)())
    return measure, calls


def test_costs_are_measured_once_for_slots_and_draws(cycle, counted):
    """Fails if costs are measured twice, or for a given gamma, block rule or decode, or
    if rounds do not go by what was measured."""
    measure, calls = counted
    measure.planted = DEAR
    out = sj.generate(cycle, TEXT, max_tokens=20, gamma=CHEAP)
    assert "round_costs" in out.provenance and out.metrics["rounds"] < 20
    run = run_lib.Run.make(cycle, "a", max_tokens=6, rule="block")
    assert run.adapted().costs is None
    sj.decode(cycle, "a", max_tokens=6)
    assert calls == []
    for _ in range(2):
        out = sj.generate(cycle, TEXT, max_tokens=20)
        assert out.provenance["round_costs"] == dataclasses.asdict(DEAR)
        assert out.metrics["rounds"] == 20
        stream = sj.stream(cycle, TEXT, max_tokens=20)
        assert calls == [(1, False)]
        assert [token for piece in stream for token in piece.tokens] == out.tokens
    other = cycle.with_drafter(ngram.PromptLookup(gamma_max=4, n_max=2))
    drawn = {"sampling": sj.Sampling(seed=1)}
    for lm, prompt, how in (
        (cycle, ["a", TEXT], {}),
        (cycle, "a", drawn),
        (other, "a", {}),
    ):
        run = run_lib.Run.make(lm, prompt, max_tokens=6, **how)
        assert run.adapted().costs == DEAR
    assert calls == [(1, False), (2, False), (1, True), (1, False)]


def test_costs_decide_rounds_and_no_token(cycle):
    """Fails if a time decides a token, or does not bound gamma by the drafts that have
    one. Negative control: it does decide the number of rounds."""
    settings = {"max_tokens": 40, "sampling": sj.Sampling(temperature=0.5, seed=3)}
    expected = sj.decode(cycle, TEXT, **settings).tokens
    outs = [sj.generate(cycle, TEXT, gamma=x, **settings) for x in (CHEAP, FEW, DEAR)]
    assert all(out.tokens == expected for out in outs)
    cheap, few, dear = (out.metrics["rounds"] for out in outs)
    assert cheap < 20 <= few < dear == 40
    with pytest.raises(ValueError, match=r"0 \.\. 1 drafts, and up to 3 are drafted"):
        sj.generate(cycle.with_tree("2x2:3"), TEXT, gamma=FEW)


@pytest.mark.slow
def test_a_tree_by_costs_writes_the_same(cycle):
    trees = cycle.with_tree("2x2:3")
    out = sj.generate(trees, TEXT, max_tokens=12, gamma=CHEAP)
    assert out.tokens == sj.decode(cycle, TEXT, max_tokens=12).tokens


def test_what_is_measured_are_times(cycle):
    """Checks that each gamma has a time, and that lookups never need to catch up."""
    run = run_lib.Run.make(cycle, [TEXT, "a"], max_tokens=6)
    adapted = run.adapted()
    assert adapted.costs.gamma_max == 4 and adapted.costs.catch_up_s == 0.0
    assert (np.diff(adapted.costs.round_s) >= 0).all()
    assert adapted.scheduler.speculator.gamma_policy.empty_is_free
    assert run.costs is None and run.scheduler.speculator.gamma_policy is None


@pytest.fixture
def of_two():
    """Returns a drafter that chooses between two, and its parameters."""
    members = ngram.PromptLookup(gamma_max=4), suffix.SuffixDecoding(gamma_max=4)
    drafter = choice.Choice(members=members)
    return drafter, choice.params_of(drafter, (None, suffix.empty_corpus(8)))


def test_a_choice_is_told_what_rounds_of_each_member_cost(cycle, counted, of_two):
    """Fails if a member is chosen or measured by the costs of another one, or if the
    budget does not go by the dearest member."""
    measure, calls = counted
    lm = cycle.with_drafter(*of_two)
    dearer = sj.gamma.RoundCosts(round_s=(1.0, 1.2, 1.4, 1.6, 1.8))
    pinned = []

    def measure_one(scheduler, requests):
        cheapest = np.asarray(scheduler.speculator.params[1].round_s).min(axis=1)
        pinned.append(int(cheapest.argmin()))
        return dearer if pinned[-1] else measure(scheduler, requests)

    default_gamma.measure = measure_one  # `counted` puts the real one back.
    run = run_lib.Run.make(lm, TEXT, max_tokens=6)
    adapted = run.adapted()
    assert pinned == [0, 1] and len(calls) == 1
    told = adapted.scheduler.speculator.params[1].round_s
    expected = np.float32([CHEAP.round_s, dearer.round_s])
    np.testing.assert_array_equal(told, expected)
    assert adapted.costs == dearer
    assert int(adapted.scheduler.policy_state.asks) == 4
    out = sj.generate(lm, TEXT * 3, max_tokens=30)
    assert out.tokens == sj.decode(lm, TEXT * 3, max_tokens=30).tokens
    assert out.metrics["accepted"] > 15


def test_a_member_is_timed_by_itself(cycle, of_two):
    """Fails if a member that is not pinned drafts, or fewer tokens than asked."""
    drafter, params = of_two
    algo = sj.speculative(cycle.target, drafter)
    prompt = cycle.tokenizer.encode(TEXT * 3)
    for number in range(2):
        both = cycle.params, choice.pinned(params, number)
        state = algo.run(both, algo.init(both, [prompt], max_tokens=30))
        rounds = np.asarray(state.memory.known.rounds[0])
        assert rounds[number].sum() == rounds.sum() > 0
        assert rounds[number, 4] > 0.5 * rounds.sum()
    with pytest.raises(ValueError, match="costs of 1 members, and the choice has 2"):
        choice.with_costs(params, [CHEAP])
