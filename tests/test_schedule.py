"""The drafts that a schedule verifies, by the algorithm in Python, and bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.gamma import confidence, schedule as schedule_lib
from spec_jax.rules import rule as rule_lib


B, W = 3, 4
STEP_S = np.array([8, 8, 8, 8, 9, 9, 10, 11, 12, 12, 12, 16, 16, 16, 17, 18]) / 8
"""Seconds by rows: stairs, on which a row may cost nothing; eighths add up exactly."""


def run(survival, num_drafted, active, *, stops_early, step_s=STEP_S, draft_s=0):
    survival, step_s = (jnp.asarray(x, jnp.float32) for x in (survival, step_s))
    asked = survival, jnp.asarray(num_drafted, jnp.int32), jnp.asarray(active)
    how = {"stops_early": stops_early}
    return np.asarray(schedule_lib.schedule(*asked, step_s, float(draft_s), **how))


def algorithm(survival, num_drafted, active, *, stops_early):
    """Runs Algorithm 1, draft by draft; tries all drafts unless it stops early."""
    drafts = [
        (-survival[b, i], i, b)
        for b in range(B)
        for i in range(num_drafted[b] if active[b] else 0)
    ]
    rows = kept = sum(active)
    best, lengths, taken = kept / STEP_S[rows], np.zeros(B, int), np.zeros(B, int)
    for chance, draft, slot in sorted(drafts):
        lengths[slot], rows, kept = draft + 1, rows + 1, kept - chance
        if kept / STEP_S[rows] > best:
            best, taken = kept / STEP_S[rows], lengths.copy()
        elif stops_early:
            break
    return taken


@pytest.mark.parametrize("stops_early", [True, False])
def test_it_is_the_algorithm(stops_early, rng):
    """Draws survival in eighths, many of them equal, counts of drafts, active slots.
    NaN counts as 0, and a chance above the one before it as that one."""
    seen = set()
    for _ in range(300):
        chances = np.minimum.accumulate(rng.integers(0, 9, (B, W)) / 8, axis=1)
        wrong = rng.choice([0, np.nan, 7], (B, W), p=[0.9, 0.05, 0.05])
        held = np.clip(np.nan_to_num(chances + wrong), 0, 1)
        held = np.minimum.accumulate(held, axis=1)
        drawn = rng.integers(0, W + 1, B), rng.random(B) < 0.8
        found = run(chances + wrong, *drawn, stops_early=stops_early)
        expected = algorithm(held, *drawn, stops_early=stops_early)
        np.testing.assert_array_equal(found, expected)
        seen.add(tuple(found))
    assert len(seen) > 30  # The lengths of each slot vary: no constant would do.


def test_the_logit_of_each_drafts_own_chance_is_scaled():
    own = np.array([[0.9, 0.6, 0.2]])
    temperatures, shifts = np.array([2.0, 1.0, 0.5]), np.array([-0.5, 0.3, 0.0])
    logits = np.log(own / (1 - own)) / temperatures + shifts
    survival = jnp.asarray(np.cumprod(own, axis=1), jnp.float32)
    scaling = [jnp.asarray(each, jnp.float32) for each in (temperatures, shifts)]
    found = confidence.recalibrated(survival, *scaling)
    np.testing.assert_allclose(found, np.cumprod(1 / (1 + np.exp(-logits)), 1), 1e-5)
    ends = jnp.array([[1.0, 0.0, 0.0]])
    ends = confidence.recalibrated(ends, jnp.ones(3), jnp.zeros(3))
    np.testing.assert_allclose(ends, [[1, 0, 0]], atol=1e-6)


@pytest.mark.parametrize(
    ("step_s", "reason"),
    [
        ([[1.0, 1.0], [1.0, 1.0]], "shape .2, 2.: give one row"),
        ([1.0, 1.0], "shape .2."),
        ([1.0, np.nan, 2.0], r"step_s\[1\]=nan"),
        ([1.0, 1.0, 0.0], r"step_s\[2\]=0"),
        ([1.0, 2.0, 1.5], "falls from 2 s at 1 rows to 1.5 s at 2"),
    ],
)
def test_times_that_were_not_measured_so_are_refused(step_s, reason):
    with pytest.raises(ValueError, match=reason):
        schedule_lib.times(step_s)
    schedule_lib.times([1.0, 1.0, 1.5])  # Negative control.


def test_the_global_maximum_is_refused_where_it_would_bias():
    state, how = ACCOUNT.init(STEP_S), {"num_slots": 1, "rule": rule_lib.block}
    with pytest.raises(ValueError, match="biased under rule=.*stops_early=True"):
        ACCOUNT.check(state, **how)
    dataclasses.replace(ACCOUNT, stops_early=True).check(state, **how)


DRAFT_S = 0.25
ACCOUNT = schedule_lib.Schedule(gamma_max=W)


def played(made, kept, *, rounds):
    """Plays rounds of `B` slots and drafts that keep `kept`; returns their seconds, the
    seconds of plain steps for as many tokens, and how many rounds drafted."""
    state = made.init(STEP_S, draft_s=DRAFT_S)
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * B), state)
    settle = jax.jit(made.settle)
    choose = jax.jit(lambda state: made.choose(jax.tree.map(lambda x: x[0], state)))
    seconds, tokens, drafted = 0.0, 0, 0
    for number in range(rounds):
        asked = int(choose(state)) > 0
        verified, accepted = B * asked, kept(number) * asked
        told = {"asked": asked, "num_active": B}
        told |= {"num_verified": verified, "num_accepted": accepted}
        state = settle(state, **{name: jnp.int32(x) for name, x in told.items()})
        seconds += STEP_S[B + verified] + DRAFT_S * asked
        tokens, drafted = tokens + B + accepted, drafted + asked
    assert len({*np.asarray(state.balance).tolist()}) == 1  # It is equal in all slots.
    return seconds, tokens / B * STEP_S[B], drafted


def test_drafts_that_are_never_kept_cost_what_the_docstring_says():
    """Compares costs with a bound. Negative control: an account that is never empty."""
    for rounds in (50, 400, 1500):
        seconds, plain_s, drafted = played(ACCOUNT, lambda _: 0, rounds=rounds)
        lost = STEP_S[2 * B] + DRAFT_S - STEP_S[B]  # One round loses this.
        spent = ACCOUNT.credit / B * STEP_S[B] + lost
        assert 0 < drafted and seconds <= (1 + ACCOUNT.allowance) * plain_s + spent
    assert seconds > (1 + 0.9 * ACCOUNT.allowance) * plain_s  # The allowance is used.
    always = dataclasses.replace(ACCOUNT, credit=np.inf)
    seconds, plain_s, drafted = played(always, lambda _: 0, rounds=400)
    assert drafted == 400 and seconds > 1.2 * plain_s


def test_drafts_that_pay_are_always_made_and_again_where_they_come_to_pay():
    """Checks that two kept drafts of three pay for their round, and one does not."""
    _, _, drafted = played(ACCOUNT, lambda _: 2, rounds=300)
    assert drafted == 300
    for kept in (1, 0):
        _, _, drafted = played(ACCOUNT, lambda _, kept=kept: kept, rounds=300)
        assert 0 < drafted < 60
    turns = lambda number: 2 if number >= 300 else 0
    _, _, found = played(ACCOUNT, turns, rounds=600)
    # Drafting resumes as soon as the loss of the last try is earned again.
    assert found - drafted > 200
    # Savings from good times are small: they do not last through hard ones.
    fails = lambda number: 2 if number < 300 else 0
    _, _, found = played(ACCOUNT, fails, rounds=600)
    lost_tokens = B * (STEP_S[2 * B] + DRAFT_S) / STEP_S[B] - B
    assert 300 < found < 300 + drafted + ACCOUNT.savings / lost_tokens


def test_drafting_is_weighed_once_it_is_paid():
    """Checks that the time of drafting, once spent, makes more drafts worth a row."""
    chances = [[0.75, 0.4, 0.2, 0.1], [0.0] * 4, [0.0] * 4]
    asked = [chances, [W] * B, [True, False, False]]
    how = {"stops_early": True, "step_s": 1 + np.arange(16) / 2}
    found = [run(*asked, **how, draft_s=x) for x in (0, 1, 10)]
    assert [counts[0] for counts in found] == [1, 2, 4]
