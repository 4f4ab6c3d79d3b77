"""Adaptive gamma on whole texts: regret, overhead, recovery; and the simulator."""

import math

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

from spec_jax.gamma import policy, theory


EVEN = policy.Probing(every=16, longest=16)
"""Probing without back-off."""

TEXTS = {
    # Chances of a draft by stretch, and the regret that is allowed.
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
    """Against the best constant gamma in hindsight, which mixed texts leave behind."""
    stretches, allowed = TEXTS[text]
    for seed in range(2):
        found = measure(name, draw_text(stretches, seed))
        assert found.regret <= allowed, found
        assert found.overhead <= 0.01, found  # not to draft is never much better


@pytest.mark.parametrize(
    "text, gamma",
    [("easy", 1), ("middling", 4), ("hard", 4), ("adversarial", 1), ("mixed", 4)],
)
def test_regret_catches_a_gamma_that_does_not_adapt(text, gamma):
    """Negative control: the constant gamma that suits another text."""
    stretches, allowed = TEXTS[text]
    found = measure("fixed", draw_text(stretches), gamma=gamma)
    assert found.regret > allowed
    assert found.seconds == found.fixed_s[gamma]


def test_regret_catches_bad_thresholds():
    """Negative control: one that leaves what pays, one that clings to what does not."""
    easy, hard = draw_text([0.9]), draw_text([0.2])
    assert measure("threshold", easy, lower=0.97, upper=0.98).regret > 0.05
    assert measure("threshold", hard, lower=0.01, upper=0.02).regret > 0.05


@ADAPTIVE
def test_adversarial_text_costs_what_the_docstrings_say(name):
    """Fails if probes come too early, do not back off, or a rung is left too late."""
    made, state = make(name, first=GAMMA_MAX)
    text = np.zeros((NUM_TOKENS, GAMMA_MAX), bool)
    run = simulate(made, simulation.begin(made, state), text)
    rounds_at = np.asarray(run.rounds_at)
    assert rounds_at.sum() == NUM_TOKENS  # every round commits one token
    intervals = [16, 32, 64]
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
    """Negative control of adversarial texts: the same check, the same costs."""
    adversarial = draw_text([0.0])
    always = policy.Probing(every=1, longest=1, bound=1.0)
    assert measure(name, adversarial).overhead <= 0.03
    assert measure(name, adversarial, probing=always).overhead > 0.03
    # Without back-off, what `every` alone allows is met, and not passed.
    share = (ROUND_S[1] - ROUND_S[0]) / (EVEN.every * ROUND_S[0])
    found = measure(name, adversarial, probing=EVEN)
    until_off_s = 15 * (ROUND_S[4] - ROUND_S[0])
    assert 0.95 * share < found.overhead < share + until_off_s / found.fixed_s[0]


def rounds_by_hand(text, gamma):
    """Rounds of a constant gamma, token by token."""
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
    assert int(run.position) == NUM_TOKENS  # met exactly: the last window is cut
    expected = theory.tokens_by_gamma(conditional)
    assert NUM_TOKENS / num_rounds == pytest.approx(expected[gamma], rel=0.03)
    assert run.seconds(ROUND_S) >= num_rounds * ROUND_S[0]
    # Negative control: draws of another chance are told apart.
    other = theory.tokens_by_gamma(conditional * 0.9)
    if gamma:
        assert NUM_TOKENS / num_rounds != pytest.approx(other[gamma], rel=0.03)
