"""Policies of gamma: what they learn round by round, and how they do on whole texts."""

import dataclasses
import functools
import math

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulation
from hypothesis import strategies as st
from simulation import ADAPTIVE, GAMMA_MAX, ROUND_S, make

from spec_jax import testing
from spec_jax.gamma import confidence, goodput, leader, policy, theory, threshold


BRIEF = policy.Probing(every=3, longest=10, bound=1.0)
"""Probing with intervals that are short enough for histories of some dozen rounds."""


class Played:
    """A policy that is told of rounds; its update is compiled once."""

    def __init__(self, made, state):
        def step(state, **numbers):
            state = made.update(state, **numbers)
            return state, made.choose(state)

        self.policy, self.first, self.step = made, state, jax.jit(step)
        self.restart()

    def restart(self):
        self.state = self.first
        self.gamma = int(self.policy.choose(self.state))

    def tell(self, num_accepted, *, gamma=None, num_drafted=None):
        """Tells of a round of the chosen gamma, unless given; returns its numbers."""
        gamma = self.gamma if gamma is None else gamma
        num_drafted = gamma if num_drafted is None else num_drafted
        numbers = (gamma, num_drafted, min(num_accepted, num_drafted))
        names = "gamma", "num_drafted", "num_accepted"
        told = dict(zip(names, map(jnp.int32, numbers), strict=True))
        self.state, chosen = self.step(self.state, **told)
        self.gamma = int(chosen)
        return numbers


PLAYED = {
    "threshold": Played(*make("threshold", first=GAMMA_MAX, probing=BRIEF)),
    "goodput": Played(*make("goodput", probing=BRIEF)),
    "leader": Played(*make("leader", probing=BRIEF)),
}


def played(name):
    PLAYED[name].restart()
    return PLAYED[name]


def until_off(game, most=60):
    """Tells of rejections until nothing is drafted; returns how many there were."""
    for num_rounds in range(most):
        if game.gamma == 0:
            return num_rounds
        game.tell(0)
    raise AssertionError(f"still drafts {game.gamma} after {most} rejections")


ROUNDS = st.lists(
    # Drafts asked for, made and accepted; `play` has each bound the next.
    st.tuples(*[st.integers(0, GAMMA_MAX)] * 3),
    max_size=40,
)
QUICK = hypothesis.settings(
    max_examples=40, derandomize=True, database=None, deadline=None
)


@ADAPTIVE
def test_it_climbs_while_drafts_are_kept_and_stops_when_they_are_not(name):
    game = played(name)
    assert until_off(game) <= 15
    # Two plain rounds, then a probe; a rejection doubles the interval, up to `longest`.
    for plain_rounds in (2, 5, 9, 9):
        for _ in range(plain_rounds):
            assert game.gamma == 0
            game.tell(0)
        assert game.gamma == 1
        game.tell(0)
    for _ in range(9):
        game.tell(0)
    # After a probe that is kept gamma rises at once, up to the largest.
    for num_rounds in range(30):
        assert game.gamma >= 1, num_rounds
        game.tell(GAMMA_MAX)
    assert game.gamma == GAMMA_MAX
    # After the next descent the interval is short again.
    until_off(game)
    assert [game.tell(0)[0] for _ in range(3)] == [0, 0, 1]


@ADAPTIVE
def test_a_round_that_asked_for_nothing_updates_nothing(name):
    """Fails if such a round, at a text's end or out of pages, changes the state."""
    game = played(name)
    for _ in range(3):
        game.tell(1)
    before = game.state
    game.tell(0, gamma=0)
    testing.assert_same_bits(game.state, before)
    # A probe that the end of the text cut away stays due.
    until_off(game)
    while game.gamma == 0:
        game.tell(0)
    game.tell(0, gamma=0)
    assert game.gamma == 1


@ADAPTIVE
def test_silence_is_a_rejection_unless_it_is_free(name):
    """Fails if a drafter that gives nothing, at a cost, is asked again and again."""
    game = played(name)
    for _ in range(20):
        game.tell(0, num_drafted=0)
    assert game.gamma == 0 or int(game.state.probe.interval) > BRIEF.every
    free = dataclasses.replace(BRIEF, empty_is_free=True)
    game = Played(*make(name, probing=free))
    before = game.state
    for _ in range(20):
        game.tell(0, num_drafted=0)
    testing.assert_same_bits(game.state, before)
    # While drafting is off, a free probe is repeated until it drafts something.
    until_off(game)
    game.tell(0)
    game.tell(0)
    assert [game.tell(0, num_drafted=0)[0] for _ in range(5)] == [1] * 5
    game.tell(0)
    assert game.gamma == 0


def chances_by_hand(made, rounds_):
    """Returns the conditional acceptance of a history, in float64, by definition."""
    chances, before = [], made.prior
    for draft in range(made.gamma_max):
        reached = kept = 0.0
        for age, (num_verified, num_accepted) in enumerate(reversed(rounds_)):
            weight = made.decay**age
            reached += weight * (draft < num_verified and draft <= num_accepted)
            kept += weight * (draft < num_accepted)
        before = (kept + made.prior_weight * before) / (reached + made.prior_weight)
        chances.append(before)
    return np.array(chances)


conditional = jax.jit(PLAYED["goodput"].policy.chances)


def play(name, history):
    """Plays rounds; raises if a gamma or a state leaves its range, or if an estimate or
    a choice of `Goodput` is not that of a plain count."""
    game, verified = played(name), []
    ladder = (0, 1, 2, 4) if name == "threshold" else range(GAMMA_MAX + 1)
    for asked, drafted, accepted in history:
        before, gamma = game.state, min(asked, game.gamma)
        numbers = game.tell(accepted, gamma=gamma, num_drafted=min(drafted, gamma))
        chex.assert_trees_all_equal_shapes_and_dtypes(game.state, game.first)
        assert game.gamma in ladder
        probe = game.state.probe
        assert 0 <= int(probe.wait) < int(probe.interval) <= BRIEF.longest
        assert int(probe.interval) >= BRIEF.every
        if name == "threshold":
            assert abs(int(game.state.level - before.level)) <= 1
            assert 0 <= float(game.state.average) <= 1
        if name == "goodput":
            gamma, num_drafted, num_accepted = numbers
            if gamma > 0:
                if int(before.gamma) == 0 and num_accepted:
                    verified = []
                verified.append((max(num_drafted, 1), num_accepted))
            chances = chances_by_hand(game.policy, verified)
            found = np.asarray(conditional(game.state))
            np.testing.assert_allclose(found, chances, rtol=1e-5)
            goodput_ = theory.goodput(chances, ROUND_S)
            if chosen := int(game.state.gamma):
                assert goodput_[chosen] >= 0.9999 * goodput_.max()
    assert game.step._cache_size() <= 1  # Nothing is compiled anew.


@ADAPTIVE
@QUICK
@hypothesis.given(history=ROUNDS)
def test_whatever_happens_choices_and_states_stay_in_range(name, history):
    play(name, history)


def test_threshold_average_is_an_exponential_one():
    game = played("threshold")
    average, weight = 0.4, 0.0625
    for num_drafted, num_accepted in ((4, 2), (4, 1), (2, 1), (4, 4), (3, 1)):
        game.tell(num_accepted, num_drafted=num_drafted)
        average += weight * (num_accepted / num_drafted - average)
        assert float(game.state.average) == pytest.approx(average, rel=1e-6)
    assert game.gamma == 4
    while game.gamma == 4:
        game.tell(0)
    assert game.gamma == 2
    assert float(game.state.average) == pytest.approx(0.4)  # the average begins anew
    # On the last rung it does not, however often it would climb.
    for _ in range(40):
        game.tell(GAMMA_MAX)
    assert int(game.state.level) == 3
    assert float(game.state.average) > 0.8


def test_confident_is_a_bound_on_the_largest_probability():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(4 * rng.standard_normal((200, 30)), jnp.float32)
    largest = jax.nn.softmax(logits, axis=-1).max(axis=-1)
    assert 0.1 < float(largest.min()) < 0.4 < 0.9 < float(largest.max())
    for bound in (0.0, 0.3, 0.6, 0.9):
        found = confidence.confident(logits, threshold=jnp.float32(bound))
        np.testing.assert_array_equal(found, largest >= bound)
    one = jnp.array([-jnp.inf, 3.0, -jnp.inf])
    assert bool(confidence.confident(one, threshold=jnp.float32(1.0)))
    for threshold_ in (0.0, 0.5):
        nan = jnp.array([1.0, jnp.nan])
        assert not bool(confidence.confident(nan, threshold=jnp.float32(threshold_)))


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: policy.Probing(every=0), "every=0 and longest=128 are not 1 <="),
        (lambda: policy.Probing(bound=0.0), "bound=0.0 of probing"),
        (lambda: threshold.Threshold(ladder=(0,)), "at least one gamma above"),
        (lambda: threshold.Threshold(ladder=(1, 2)), r"ladder=\(1, 2\) must rise"),
        (lambda: threshold.Threshold(upper=float("nan")), "upper=nan are not"),
        (lambda: threshold.Threshold(weight=1.0), "weight=1.0 must lie between"),
        (lambda: threshold.Threshold().init(3), "gamma=3 is no rung of ladder"),
        (lambda: goodput.Goodput(gamma_max=0), "gamma_max=0 must be at least 1"),
        (lambda: goodput.Goodput(gamma_max=2, decay=1.0), "decay=1.0 must lie"),
        (lambda: goodput.Goodput(gamma_max=2, prior_weight=0.0), "must be above 0"),
        (lambda: make("leader", text_weight=0.0), "text_weight=0.0 must be above 0"),
        (lambda: make("leader", all_decay=1.0), "all_decay=1.0 must lie between"),
        (lambda: make("goodput")[0].init(ROUND_S[1:]), r"shape \(4,\), .* need \(5,\)"),
        (lambda: make("goodput")[0].init(ROUND_S * np.nan), "finite and above 0"),
    ],
)
def test_bad_input_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def play_ranks(kind, read):
    """Plays rounds that keep each rank by a chance of its own; returns the tokens per
    second of the last budget, over those of the best one.

    Args:
      read: maps the ranks that were kept to the ranks that the policy is told.
    """
    chances = np.array([0.6, 0.05, 0.5, 0.4, 0.02, 0.01, 0.01, 0.01])
    round_s = 1.0 + 0.08 * np.arange(len(chances) + 1)
    made = kind(gamma_max=len(chances))
    state = made.init(round_s)
    choose, update = jax.jit(made.choose), jax.jit(made.update)
    rng = np.random.default_rng(7)
    for _ in range(300):
        budget = int(choose(state))
        kept = (rng.random(len(chances)) < chances) & (np.arange(len(chances)) < budget)
        told = {"num_accepted": jnp.int32(kept.sum()), "kept": jnp.asarray(read(kept))}
        told |= dict.fromkeys(("gamma", "num_drafted"), jnp.int32(budget))
        state = update(state, **told)
    speeds = np.cumsum([1.0, *chances]) / round_s
    return speeds[int(state.gamma)] / speeds.max()


@pytest.mark.parametrize("kind", [goodput.RankGoodput, leader.RankLeader])
def test_ranks_find_the_budget_of_a_tree(kind):
    """Fails if nodes are counted by depth: rank 1 is hardly ever kept, 2 and 3 are."""
    assert play_ranks(kind, lambda kept: kept) > 0.97
    by_depth = lambda kept: np.arange(len(kept)) < kept.sum()
    assert play_ranks(kind, by_depth) < 0.97


FIXED = policy.Fixed(gamma_max=GAMMA_MAX)
NUM_TOKENS = 9_000
"""Tokens of every long text, so that all share an executable: 2,000 rounds and more."""

TEXTS = {
    # The chances of drafts by stretch, and the regret that is allowed.
    "easy": ([0.9], 0.01),
    "middling": ([0.5], 0.05),
    "break-even": ([0.3], 0.02),
    "hard": ([0.2], 0.02),
    "adversarial": ([0.0], 0.005),
    "mixed": ([0.9, 0.1] * 15, 0.0),
}


def draw_text(stretches, seed=0):
    """Draws a text of equal stretches, each with one chance for all its drafts.

    A stretch may give a chance for each draft: that it is kept if all before it were.
    The luck of a position is drawn once for all its drafts: a token that is hard to
    guess is so for every policy.
    """
    chances = np.repeat(np.array(stretches), NUM_TOKENS // len(stretches), axis=0)
    luck = np.random.default_rng(seed).random((NUM_TOKENS, 1))
    shape = NUM_TOKENS, GAMMA_MAX
    return luck < np.broadcast_to(chances.reshape(NUM_TOKENS, -1), shape)


@ADAPTIVE
@pytest.mark.parametrize("text", TEXTS)
def test_regret_is_bounded(name, text):
    """Compares with the best constant gamma in hindsight; mixed texts must reach it."""
    stretches, allowed = TEXTS[text]
    drawn = draw_text(stretches)

    def seconds(made, state):
        return simulation.simulate(made, state, drawn).seconds(ROUND_S)

    found = seconds(*make(name))
    constant = [seconds(FIXED, FIXED.init(gamma)) for gamma in range(GAMMA_MAX + 1)]
    best = min(constant)
    assert found <= (1 + allowed) * best
    assert found <= 1.01 * constant[0]  # gamma 0 is never much better
    # Negative control: a constant gamma, which suits another text.
    assert max(constant) > (1 + allowed) * best


@ADAPTIVE
def test_adversarial_text_costs_what_the_docstrings_say(name):
    """Fails if probes come too early, do not back off, or a rung is left too late."""
    made, state = make(name, first=GAMMA_MAX)
    text = np.zeros((NUM_TOKENS, GAMMA_MAX), bool)
    rounds_at = np.asarray(simulation.simulate(made, state, text).rounds_at)
    assert rounds_at.sum() == NUM_TOKENS  # every round commits one token
    every, longest = made.probing.every, made.probing.longest
    intervals = [every * 2**n for n in range(8) if every * 2**n < longest]
    rest = NUM_TOKENS - sum(intervals)
    most_at_one = len(intervals) + rest / made.probing.longest
    if name == "threshold":
        rung = math.log(2 * made.lower / (made.lower + made.upper))
        rung = 1 + math.floor(rung / math.log(1 - made.weight))
        assert rounds_at[4] == rounds_at[2] == rung == 5
        most_at_one += rung
    assert 0.9 * most_at_one < rounds_at[1] <= most_at_one + 2


@pytest.mark.parametrize("gamma", range(GAMMA_MAX + 1))
def test_simulated_rounds_are_those_of_theory(gamma):
    conditional = np.array([0.9, 0.5, 0.7, 0.3])
    text = draw_text([conditional], seed=gamma)
    run = simulation.simulate(FIXED, FIXED.init(gamma), text)
    assert int(run.position) == NUM_TOKENS  # exactly: the last window is cut
    expected = theory.tokens_by_gamma(conditional)
    found = NUM_TOKENS / run.rounds_at.sum()
    assert float(found) == pytest.approx(expected[gamma], rel=0.03)


SHORT = 64
"""Tokens of a short text, on which a policy that knows nothing does worst."""


@functools.partial(jax.jit, static_argnames=("made", "anew"))
def rounds_of_texts(made, first, texts, anew):
    """Counts rounds by gamma of texts `[N, SHORT, gamma_max]`, one after the other."""

    def one(state, text):
        begun = first if anew else policy.renewed(made, state)
        run = simulation.simulate(made, begun, text)
        return run.state, run.rounds_at

    return jnp.sum(jax.lax.scan(one, first, texts)[1], axis=0)


ROUND_DEAR = np.array([1.0, 1.69, 1.85, 1.95, 2.06])
"""Seconds of a round by gamma: the first draft costs most of what four do."""


def regret_of_texts(name, chances, *, anew=False):
    """Returns a policy's regret on 50 short texts of such chances."""
    luck = np.random.default_rng(0).random((50, SHORT, 1))
    each = np.resize(chances, 50)[:, None, None]
    texts = jnp.asarray(np.repeat(luck < each, GAMMA_MAX, axis=2))

    def seconds(made, state):
        return np.asarray(rounds_of_texts(made, state, texts, anew)) @ ROUND_DEAR

    made = make(name)[0]
    state = made.init(ROUND_DEAR)
    best = min(seconds(FIXED, FIXED.init(gamma)) for gamma in range(GAMMA_MAX + 1))
    return seconds(made, state) / best - 1


def test_a_text_begins_with_what_those_before_it_taught():
    """Fails if short texts pay again for what the first of them taught, or if a text is
    not soon judged by itself."""
    for chance, allowed in ((0.75, 0.02), (0.55, 0.05), (0.25, 0.02), (0.0, 0.02)):
        assert regret_of_texts("leader", (chance,)) < allowed
    # Texts that differ get different gammas: no constant gamma does as well.
    assert regret_of_texts("leader", (0.9, 0.1)) < -0.1
    # Negative control: each text begins with nothing known.
    assert regret_of_texts("goodput", (0.75,), anew=True) > 0.1


def test_tokens_by_gamma_by_hand():
    """Fails if chances of positions are mixed up, on the host or on the device."""
    conditional = np.array([0.9, 0.5, 0.7, 0.0, 1.0])
    tokens = theory.tokens_by_gamma(conditional)
    assert tokens.tolist() == pytest.approx([1, 1.9, 2.35, 2.665, 2.665, 2.665])
    numbers = jnp.float32(conditional), jnp.array([1.75, 2, 2.5, 3.25, 4, 5])
    on_device = jax.jit(theory.goodput)(*numbers)
    np.testing.assert_allclose(on_device, tokens / numbers[1], rtol=1e-6)
    assert on_device.dtype == jnp.float32
