"""A budget bounds the cost of trying drafts, whatever they are worth and cost; and the
default gamma: costs are measured once, are in provenance, change no token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulation
import tiny_pair

import spec_jax as sj
from spec_jax import default_gamma, run as run_lib, testing
from spec_jax.drafters import choice, ngram, suffix
from spec_jax.gamma import budget, costs as costs_lib, policy, schedule


GAMMA_MAX, NUM_TOKENS, NUM_TEXTS = 7, 256, 8
ROW = 0.03
DRAFTS = (0.0, 0.05, 0.2, 0.6)
CHANCES = {
    "0": (0.0,), "0.1": (0.1,), "0.3": (0.3,), "0.6": (0.6,), "0.9": (0.9,),
    "turns hard": (0.9, 0.0), "turns easy": (0.0, 0.9),
}  # fmt: skip
AFTER = (16, 40, 64, 120, NUM_TOKENS)
"""Rounds after which the time is checked; a text then has as many tokens or more."""


def costs_of(draft, catch_up_s=0.0):
    round_s = 1.0 + (draft + ROW) * np.arange(GAMMA_MAX + 1)
    return costs_lib.RoundCosts(round_s=(*round_s,), catch_up_s=catch_up_s)


def draw(chances):
    """Draws texts of equal stretches, each with one chance for all its drafts."""
    chance = np.repeat(chances, NUM_TOKENS // len(chances))[:, None]
    luck = np.random.default_rng(0).random((NUM_TEXTS, NUM_TOKENS, GAMMA_MAX))
    return jnp.asarray(luck < chance)


@functools.partial(jax.jit, static_argnames="made")
def simulate(made, state, texts):
    """Runs each text for each number of rounds in `AFTER`: `[AFTER, texts]`."""

    def one(most, text):
        return simulation.simulate(made, state, text, max_rounds=most)

    each = jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))
    return each(jnp.asarray(AFTER, jnp.int32), texts)


def losses(made, state, texts, costs):
    """Returns shares by which texts of 64 tokens or more are slower than plain ones."""
    runs = simulate(made, state, texts)
    seconds = runs.seconds(costs.round_s, catch_up_s=costs.catch_up_s)
    tokens = np.asarray(runs.position)
    return (seconds / tokens - 1)[tokens >= 64]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("chances", CHANCES)
def test_no_text_is_slower_by_more_than_the_bound(chances, draft):
    """Checks texts at all of `AFTER`, from a first state that knows nothing."""
    costs = costs_of(draft)
    made, first = default_gamma.make(costs)
    found = losses(made, first, draw(CHANCES[chances]), costs)
    assert found.size >= NUM_TEXTS and found.max() <= made.bound + 1e-6
    if CHANCES[chances][0] >= 0.6 and draft <= 0.2:
        assert found.mean() < -0.1  # Drafts are made where they pay.


def test_the_bounded_policy_begins_anew():
    """Fails if a leader under a bound takes one text's counts for the next text's."""
    asks, first = simulation.make("leader")
    numbers = {"gamma": 2, "num_drafted": 2, "num_accepted": 0}
    learnt = asks.update(first, **{name: jnp.int32(x) for name, x in numbers.items()})
    bounds = budget.Budget(asks=asks), schedule.Schedule(gamma_max=4, asks=asks)
    for made, costs in zip(bounds, (costs_of(0.2), (1.0,) * 8), strict=True):
        begun = policy.renewed(made, made.init(costs, asks=learnt)).asks
        testing.assert_same_bits(begun, asks.renew(learnt))
        assert begun.all_reached.any() and not begun.reached.any()


def test_a_bad_beginning_is_not_the_end():
    """Fails if the first rounds may lose so much that a drafter is never asked again.
    Negative control: a policy whose rounds may lose all of the account."""
    costs = costs_of(0.12, 0.02)
    made, first = default_gamma.make(costs)
    texts = draw((0.9,)).at[:, :2].set(False)
    assert losses(made, first, texts, costs).max() < -0.3
    bold = dataclasses.replace(made, stake=1.0)
    assert losses(bold, first, texts, costs).max() >= 0


@pytest.mark.parametrize("catch_up_s", [0.005, 0.03])
def test_catching_up_is_paid_for(catch_up_s):
    """Fails if a drafter's catching up, after rounds without it, is not in the account.
    Negative control: a state in which that costs nothing."""
    costs = costs_of(0.05, catch_up_s)
    made, first = default_gamma.make(costs)
    texts = draw((0.0,))
    assert losses(made, first, texts, costs).max() <= made.bound + 1e-6
    if catch_up_s > made.bound:
        free = first.replace(late=jnp.float32(0))
        assert losses(made, free, texts, costs).max() > made.bound


def test_a_budget_of_a_batch_is_shared():
    """Compares balances with some by hand: tokens kept, less the round's time."""
    costs = costs_lib.RoundCosts(round_s=(2.0, 2.5, 3.5), catch_up_s=0.2)
    made, first = default_gamma.make(costs)
    np.testing.assert_allclose(first.lost, [0, 0.25, 0.75])
    slots = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), first)
    slots = slots.replace(num_behind=jnp.array([4, 0, 9], jnp.int32))
    names = "num_active", "num_verified", "num_accepted"
    numbers = dict(zip(names, map(jnp.int32, (2, 3, 1)), strict=True))
    asked = jnp.array([2, 1, 0], jnp.int32)
    settled = made.settle(slots, asked=asked, **numbers)
    gain = 0.5 - (0.75 + 4 * 0.1) + made.bound / 2 * 1.5
    np.testing.assert_allclose(settled.balance, [made.credit + gain] * 3, rtol=1e-5)
    lookup, _ = default_gamma.make(costs, looks_up=True)
    slots = slots.replace(late=slots.late * 0)
    settled = lookup.settle(slots, asked=asked, **numbers)
    gain = 0.5 - 0.5 + made.bound / 2 * 1.5  # 1.5 drafts: between 0.25 and 0.75.
    np.testing.assert_allclose(settled.balance, [made.credit + gain] * 3, rtol=1e-5)
    none = dict.fromkeys(numbers, jnp.int32(0))
    testing.assert_same_bits(made.settle(slots, asked=asked * 0, **none), slots)


COSTS = costs_lib.RoundCosts
BUDGET = functools.partial(budget.Budget, asks=policy.Fixed(gamma_max=2))
UNTRIED = "drafting would never be tried"
REFUSED = [
    *((COSTS, {"round_s": bad}, "round_s=") for bad in [(1.0,), (1.0, 0.0)]),
    (COSTS, {"round_s": (1.0, np.nan)}, "round_s="),
    (costs_of, {"draft": 0.1, "catch_up_s": -1}, "catch_up_s=-1"),
    (costs_of(0.1).upto, {"gamma_max": 9}, r"0 \.\. 7 drafts, and up to 9"),
    *((BUDGET, {name: 0}, UNTRIED) for name in ("bound", "stake", "savings")),
    *((BUDGET, {name: 2.0}, UNTRIED) for name in ("bound", "stake")),
    (BUDGET, {"shortest": 0}, UNTRIED),
]


@pytest.mark.parametrize(("call", "given", "words"), REFUSED)
def test_costs_and_budgets_that_are_none_are_refused(call, given, words):
    with pytest.raises(ValueError, match=words):
        call(**given)


def test_falls_of_costs_are_noise():
    noisy = costs_lib.RoundCosts(round_s=(1.0, 1.2, 1.1))
    np.testing.assert_array_equal(noisy.rising_s(), [1.0, 1.2, 1.2])


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
