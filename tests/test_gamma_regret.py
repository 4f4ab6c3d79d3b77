"""Adaptive gamma on whole texts: regret, overhead, recovery; and the simulator."""

import math

import numpy as np
import pytest
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
from spec_jax.gamma import policy, simulation, theory


EVEN = policy.Probing(every=16, longest=16)
"""Probing without back-off."""

TEXTS = {
    # Chances of a draft by stretch, and the regret that is allowed.
    "easy": ([0.9], 0.01),
    "good": ([0.7], 0.04),
    "middling": ([0.5], 0.05),
    "weak": ([0.4], 0.08),
    "break-even": ([0.3], 0.02),
    "hard": ([0.2], 0.02),
    "adversarial": ([0.0], 0.005),
    "mixed": ([0.9, 0.1] * 15, 0.0),
    "mixed, long": ([0.8, 0.3, 0.0] * 4, 0.0),
}


@pytest.mark.few(6)
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
def test_a_short_adversarial_text_is_not_much_slower_either(name):
    """From the first state on, which knows nothing; 3 % from 128 tokens on."""
    made, state = make(name)
    text = np.zeros((NUM_TOKENS, GAMMA_MAX), bool)

    def overhead(state, num_tokens):
        run = simulate(made, simulation.begin(made, state), text, num_tokens)
        return run.seconds(ROUND_S) / (num_tokens * ROUND_S[0]) - 1

    assert overhead(state, 64) <= 0.035
    assert all(overhead(state, n) <= 0.03 for n in (128, 256, 512, 1_024))
    # A state that is handed on has no descent to pay for.
    for num_tokens in range(300, 400, 9):
        run = simulate(made, simulation.begin(made, state), text, num_tokens)
        assert overhead(run.state, 64) <= 0.005
    # Negative control: a start on the last rung.
    if name == "threshold":
        assert overhead(made.init(GAMMA_MAX), 64) > 0.1


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


@ADAPTIVE
@pytest.mark.parametrize("probing", [policy.Probing(), EVEN])
def test_catching_up_costs_a_share_whatever_the_interval(name, probing):
    """A drafter takes in all that it sat out: rarer probes do not help, tall slabs do.

    A draft step of 0.1 ms: two rows a step break the bound, eight do not.
    """
    adversarial = draw_text([0.0])
    found = measure(name, adversarial, catch_up_s=1e-4 / 2, probing=probing)
    assert found.overhead > 0.03
    found = measure(name, adversarial, catch_up_s=1e-4 / 8, probing=probing)
    assert found.overhead < 0.03
    made, state = make(name, probing=probing)
    run = simulate(made, simulation.begin(made, state), adversarial)
    assert int(run.num_caught_up) + int(run.num_behind) == int(run.rounds_at[0])
    assert int(run.num_behind) < probing.longest


@ADAPTIVE
def test_it_recovers_after_an_adversarial_stretch(name):
    """At the largest gamma within `longest` rounds and 24, whenever the text turns."""
    made, state = make(name)
    climb = made.probing.longest + 24
    for turn in (500, 1_000, 1_337, 5_000):
        text = np.repeat(np.arange(NUM_TOKENS)[:, None] >= turn, GAMMA_MAX, axis=1)
        run = simulate(made, simulation.begin(made, state), text, turn)
        assert int(run.position) == turn
        assert int(made.choose(run.state)) <= 1
        run = simulate(made, run, text, climb)
        assert int(made.choose(run.state)) == GAMMA_MAX

    # Negative control: a policy that never probes stays where it is.
    made, state = make(name, probing=policy.Probing(every=2**31 - 1, longest=2**31 - 1))
    run = simulate(made, simulation.begin(made, state), text)
    assert int(made.choose(run.state)) == 0


@ADAPTIVE
def test_it_recovers_from_most_first_probes_of_an_easy_text(name):
    """A rejected probe delays it by `longest` rounds more: 2 in 20 at chance 0.9."""
    made, state = make(name)
    turn = NUM_TOKENS // 2
    num_recovered = 0
    for seed in range(20):
        text = draw_text([0.0, 0.9], seed)
        run = simulate(made, simulation.begin(made, state), text, turn)
        run = simulate(made, run, text, made.probing.longest + 24)
        num_recovered += int(made.choose(run.state)) >= 2
    assert num_recovered >= 14


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


@ADAPTIVE
def test_a_few_rounds_at_a_time_give_the_same_bits(name):
    """Also the same executable: chunks and texts are data."""
    made, state = make(name)
    text = draw_text([0.9, 0.2, 0.0, 0.6], seed=1)
    whole = simulate(made, simulation.begin(made, state), text)
    num_executables = simulation.simulate._cache_size()
    run = simulation.begin(made, state)
    for max_rounds in (0, 1, 7, 500, 1_001, NUM_TOKENS):
        run = simulate(made, run, text, max_rounds)
    testing.assert_same_bits(run, whole)
    assert simulation.simulate._cache_size() == num_executables
    # Negative control: a state that is made anew between two chunks.
    half = simulate(made, simulation.begin(made, state), text, 1_500)
    run = simulate(made, half.replace(state=state), text)
    with pytest.raises(AssertionError):
        testing.assert_same_bits(run, whole)
