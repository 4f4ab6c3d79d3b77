"""Adaptive gamma on whole texts: regret, overhead, recovery; and the simulator."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulation
from gamma_cases import (
    ADAPTIVE,
    GAMMA_MAX,
    NUM_TOKENS,
    ROUND_S,
    draw_text,
    make,
    measure,
    simulate,
)

from spec_jax import testing
from spec_jax.gamma import leader, policy, theory


EVEN = policy.Probing(every=16, longest=16)
"""Probing without back-off."""

TEXTS = {
    # The chances of drafts by stretch, and the regret that is allowed.
    "easy": ([0.9], 0.01),
    "middling": ([0.5], 0.05),
    "break-even": ([0.3], 0.02),
    "hard": ([0.2], 0.02),
    "adversarial": ([0.0], 0.005),
    "mixed": ([0.9, 0.1] * 15, 0.0),
}


@ADAPTIVE
@pytest.mark.parametrize("text", TEXTS)
def test_regret_is_bounded(name, text):
    """Compares with the best constant gamma in hindsight; mixed texts must reach it."""
    stretches, allowed = TEXTS[text]
    found = measure(name, draw_text(stretches))
    assert found.regret <= allowed, found
    assert found.overhead <= 0.01, found  # gamma 0 is never much better


@pytest.mark.parametrize(
    "text, gamma",
    [("easy", 1), ("middling", 4), ("hard", 4), ("adversarial", 1), ("mixed", 4)],
)
def test_regret_catches_a_gamma_that_does_not_adapt(text, gamma):
    """Negative control: a constant gamma, which suits another text."""
    stretches, allowed = TEXTS[text]
    found = measure("fixed", draw_text(stretches), gamma=gamma)
    assert found.regret > allowed
    assert found.seconds == found.fixed_s[gamma]


@ADAPTIVE
def test_adversarial_text_costs_what_the_docstrings_say(name):
    """Fails if probes come too early, do not back off, or a rung is left too late."""
    made, state = make(name, first=GAMMA_MAX)
    text = np.zeros((NUM_TOKENS, GAMMA_MAX), bool)
    run = simulate(made, simulation.begin(made, state), text)
    rounds_at = np.asarray(run.rounds_at)
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


@ADAPTIVE
def test_probing_every_round_breaks_the_bound(name):
    """Negative control: probing in every round costs an adversarial text too much."""
    adversarial = draw_text([0.0])
    always = policy.Probing(every=1, longest=1, bound=1.0)
    assert measure(name, adversarial).overhead <= 0.03
    assert measure(name, adversarial, probing=always).overhead > 0.03
    # Without back-off the overhead is the share that `every` allows, and not more.
    share = (ROUND_S[1] - ROUND_S[0]) / (EVEN.every * ROUND_S[0])
    found = measure(name, adversarial, probing=EVEN)
    until_off_s = 15 * (ROUND_S[4] - ROUND_S[0])
    assert 0.95 * share < found.overhead < share + until_off_s / found.fixed_s[0]


def rounds_by_hand(text, gamma):
    """Counts the rounds of a constant gamma, token by token."""
    position = num_rounds = 0
    while position < len(text):
        num_drafted = min(gamma, len(text) - position - 1)
        num_accepted = 0
        while (
            num_accepted < num_drafted and text[position + num_accepted, num_accepted]
        ):
            num_accepted += 1
        position += num_accepted + 1
        num_rounds += 1
    return num_rounds


@pytest.mark.parametrize("gamma", range(GAMMA_MAX + 1))
def test_simulated_rounds_are_those_of_theory(gamma):
    conditional = np.array([0.9, 0.5, 0.7, 0.3])
    text = draw_text([conditional], seed=gamma)
    made, state = make("fixed", gamma=gamma)
    run = simulate(made, simulation.begin(made, state), text)
    num_rounds = int(run.rounds_at.sum())
    assert num_rounds == rounds_by_hand(text, gamma)
    assert int(run.position) == NUM_TOKENS  # exactly: the last window is cut
    expected = theory.tokens_by_gamma(conditional)
    assert NUM_TOKENS / num_rounds == pytest.approx(expected[gamma], rel=0.03)
    assert run.seconds(ROUND_S) >= num_rounds * ROUND_S[0]
    # Negative control: other chances give another number.
    other = theory.tokens_by_gamma(conditional * 0.9)
    if gamma:
        assert NUM_TOKENS / num_rounds != pytest.approx(other[gamma], rel=0.03)


SHORT = 64
"""Tokens of a short text, on which a policy that knows nothing does worst."""


@functools.partial(jax.jit, static_argnames=("made", "anew"))
def rounds_of_texts(made, first, texts, anew):
    """Counts rounds by gamma of texts `[N, SHORT, gamma_max]`, one after the other."""

    def one(state, text):
        begun = simulation.begin(made, first if anew else policy.renewed(made, state))
        run = simulation.simulate(made, begun, text, max_rounds=jnp.int32(SHORT))
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
    fixed = policy.Fixed(gamma_max=GAMMA_MAX)
    best = min(seconds(fixed, fixed.init(gamma)) for gamma in range(GAMMA_MAX + 1))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peeks(leader.Leader):
    """Planted: chooses gamma by the end of the text, which is not committed yet."""

    text: tuple[tuple[bool, ...], ...]

    def choose(self, state):
        seen = jnp.sum(state.all_reached > 0, dtype=jnp.int32)
        return jnp.where(jnp.asarray(self.text)[-1, 0], 1, jnp.minimum(seen, 2))


@pytest.mark.parametrize("name", ["threshold", "goodput", "leader", "planted"])
def test_a_choice_depends_on_the_rounds_before_it_alone(name):
    """Fails if the rounds of two texts differ before the texts do."""
    first = draw_text([0.9, 0.3, 0.6])
    other = first.copy()
    other[NUM_TOKENS // 2 :] = ~other[NUM_TOKENS // 2 :]
    states = []
    for text in (first, other):
        made, state = make("leader" if name == "planted" else name)
        if name == "planted":
            ends = tuple(map(tuple, text[-1:].tolist()))
            made = Peeks(gamma_max=GAMMA_MAX, text=ends)
        run = simulate(made, simulation.begin(made, state), text, max_rounds=800)
        assert int(run.position) < NUM_TOKENS // 2
        states.append(run)
    if name == "planted":  # Negative control.
        with pytest.raises(AssertionError):
            testing.assert_same_bits(*states)
    else:
        testing.assert_same_bits(*states)


SIGMAS = 4.5
"""Standard errors that a simulated mean may be off: 7 of a million are, by chance."""


def assert_mean(samples, expected):
    """Asserts that `expected` is the samples' mean, within `SIGMAS` standard errors."""
    samples = np.asarray(samples, np.float64)
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) <= SIGMAS * error + 1e-12


def simulate_chain(conditional, rounds, seed):
    """Draws tokens of each round; draft `i` is kept with chance `conditional[i]`."""
    kept = np.random.default_rng(seed).random((rounds, len(conditional))) < conditional
    return 1 + np.cumprod(kept, axis=1).sum(axis=1)


def test_each_position_has_its_own_chance():
    conditional = np.array([0.9, 0.5, 0.7, 0.0, 1.0])
    tokens = theory.tokens_by_gamma(conditional)
    assert tokens.tolist() == pytest.approx([1, 1.9, 2.35, 2.665, 2.665, 2.665])
    for gamma in range(6):
        assert_mean(simulate_chain(conditional[:gamma], 20_000, gamma), tokens[gamma])
    # Negative control: one chance for all, of the same mean, gives another mean.
    with pytest.raises(AssertionError):
        mean = conditional[:3].mean()
        simulated = simulate_chain(conditional[:3], 20_000, 3)
        assert_mean(simulated, theory.tokens_by_gamma(np.full(3, mean))[-1])


def test_device_and_host_share_the_formulas():
    conditional = np.array([0.9, 0.8, 0.8, 0.1], np.float32)
    round_s = np.array([1.75, 2.125, 2.5, 3.25, 4.0], np.float32)
    on_device = jax.jit(theory.goodput)(jnp.asarray(conditional), jnp.asarray(round_s))
    np.testing.assert_allclose(
        on_device, theory.goodput(conditional, round_s), rtol=1e-6
    )
    assert on_device.dtype == jnp.float32
