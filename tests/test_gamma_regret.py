"""Adaptive gamma on whole texts: regret, overhead, recovery; and the simulator."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulation
from simulation import ADAPTIVE, GAMMA_MAX, ROUND_S, make

from spec_jax.gamma import policy, theory


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
