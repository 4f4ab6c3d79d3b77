"""Rounds whose gamma a policy chooses, for each slot by the rounds of that slot.

The default policy has a budget for all slots: its costs change gamma, and no bit. A
schedule of the whole batch verifies only some drafts.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import GAMMA_MAX, MIXED, SMALL, Ask
from slow_cases import slow

from spec_jax import default_gamma, testing
from spec_jax.drafters import ngram, tree_shapes
from spec_jax.gamma import (
    costs as costs_lib,
    goodput,
    policy,
    schedule as schedule_lib,
    threshold,
)
from spec_jax.model import sequence


ROUND_S = np.array([1.0, 1.3, 1.45, 1.6, 1.75])
PROBING = policy.Probing(every=2, longest=8, bound=1.0)
LONG = Ask(max_tokens=60)
KINDS = pytest.mark.parametrize("name", ["goodput", slow("threshold")])


def make(name):
    """Returns a policy that changes gamma within a few rounds, and its first state."""
    if name == "threshold":
        made = threshold.Threshold(
            ladder=(0, 1, 2, 4), lower=0.35, upper=0.5, weight=0.5, probing=PROBING
        )
        return made, made.init(2)
    made = goodput.Goodput(gamma_max=4, decay=0.7, probing=PROBING)
    return made, made.init(ROUND_S)


def updated(name, slots):
    """Returns a policy's state after the rounds that one slot's counters report."""
    made, state = make(name)
    update, choose = jax.jit(made.update), jax.jit(made.choose)
    told, before = [], (0, 0)
    for after in slots:
        counts = int(after.num_proposed), int(after.num_accepted)
        told.append(tuple(a - b for a, b in zip(counts, before, strict=True)))
        before = counts
    for drafted, accepted in told:
        assert drafted <= int(choose(state))  # The limit of a text may leave less.
        numbers = dict.fromkeys(("gamma", "num_drafted"), jnp.int32(drafted))
        state = update(state, **numbers, num_accepted=jnp.int32(accepted))
    return jax.tree.map(np.asarray, state)


def assert_same_policy(found, expected) -> None:
    """Asserts equality but for rounding: the two programs fuse other operations."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, expected)


@KINDS
def test_a_policy_is_told_of_every_round_of_its_slot(name):
    """Compares tokens with decoding, and the policy's state of each slot with one that
    is made from the slot's counts.

    Calls of one round end with the bits of one long call.
    """
    asks = [dataclasses.replace(LONG, run=2), MIXED[1], MIXED[2]]
    made, first = make(name)
    scheduler = SMALL.scheduler(num_slots=3, gamma_policy=made, policy_state=first)
    requests = [decoding.scripted(SMALL, ask) for ask in asks]
    state, seen = decoding.admit(scheduler, requests, draws=True), []
    while bool(state.slots.running.any()):
        state = decoding.generate(scheduler, state, max_rounds=1)
        seen.append([decoding.slot_of(state, slot) for slot in range(3)])
    whole = decoding.checked(SMALL, asks, scheduler=scheduler, draws=True)
    testing.assert_same_bits(state, whole)
    for slot in range(3):
        rounds = [row[slot] for row in seen]
        # Rounds after the end of the slot are not its own.
        rounds = rounds[: int(rounds[-1].num_rounds)]
        assert_same_policy(rounds[-1].policy, updated(name, rounds))


RISES = {"free": 0.0, "cheap": 0.1, "dear": 0.4, "too dear": 3.0}
"""Time that each draft adds to a round, in steps, as it might have been measured."""


def planted(rise):
    """Returns the default policy for planted costs, which all share one program."""
    round_s = (1.0 + rise * np.arange(GAMMA_MAX + 1)).tolist()
    made, first = default_gamma.make(costs_lib.RoundCosts(round_s=(*round_s,)))
    return {"gamma_policy": made, "policy_state": first}


@pytest.mark.parametrize("rise", RISES)
def test_tokens_and_kv_do_not_depend_on_costs(rise):
    """Fails if costs change bits of a slot: with right or wrong drafts, or drawing."""
    asks = [LONG, dataclasses.replace(LONG, run=0), MIXED[1]]
    scheduler = SMALL.scheduler(num_slots=3, **planted(RISES[rise]))
    state = decoding.checked(SMALL, asks, scheduler=scheduler, draws=True)
    one = decoding.slot_of(state)
    # Negative control: the policy depends on these costs.
    assert one.num_proposed == 0 if rise == "too dear" else one.num_proposed >= 10
    balance = np.asarray(state.slots.policy.balance)
    assert (balance == balance[0]).all()  # All slots share one account.


def test_a_refilled_slot_begins_with_what_was_learnt():
    """Fails if a new request forgets what was learnt, or starts with tokens behind."""
    hopeless = dataclasses.replace(LONG, run=0)
    scheduler = SMALL.scheduler(num_slots=3, **planted(0.4))
    requests = [decoding.scripted(SMALL, hopeless)] * 6
    ended = {one.number: one.slot for one in scheduler.run(requests)}
    for number in range(3):
        assert ended[number + 3].num_proposed < ended[number].num_proposed
    state = decoding.run(SMALL, [hopeless], scheduler=scheduler)
    assert int(state.slots.policy.num_behind[0]) > 0
    again = scheduler.admit(state, 0, requests[0])
    assert int(again.slots.policy.num_behind[0]) == 0
    learnt = jax.device_get(again.slots.policy.asks)
    with pytest.raises(AssertionError):  # Negative control: it is not a first state.
        fresh = scheduler.begin(requests[0]).slots.policy.asks
        testing.assert_same_bits(learnt, jax.device_get(fresh))


ASKS = (MIXED[1], MIXED[2], *MIXED[5:])
"""Four sequences that differ in every setting, two of them greedy."""

# Each row costs half an empty step more: only likely drafts are worth a row.
STEP_S = 1 + np.arange(4 * (GAMMA_MAX + 1) + 1) / 2
IMPL = SMALL.target.impl
SCALING = {
    "temperatures": np.linspace(0.5, 2, GAMMA_MAX),
    "shifts": np.linspace(-1, 0.5, GAMMA_MAX),
}


def scheduled(*, stops_early=False, step_s=STEP_S, **changes):
    """Makes a scheduler of a draft model with a schedule of its drafts."""
    made = schedule_lib.Schedule(gamma_max=GAMMA_MAX, stops_early=stops_early)
    changes = {
        "drafter": decoding.draft_drafter(impl=IMPL),
        "draft_params": decoding.NEARLY_TARGET,
        "num_slots": 4,
    } | changes
    first = made.init(step_s, **SCALING)
    return SMALL.scheduler(gamma_policy=made, policy_state=first, **changes)


class TwoChances(ngram.PromptLookup):
    """Gives the survival of two drafts alone."""

    def propose(self, *args, **kwargs):
        memory, proposal = super().propose(*args, **kwargs)
        return memory, proposal.replace(survival=jnp.ones(2))


def run(scheduler, asks=ASKS):
    asks = [dataclasses.replace(ask, gamma=None) for ask in asks]
    return decoding.rounds(scheduler, asks)


def test_a_scheduled_batch_is_as_decoded():
    """Compares tokens and K/V of drawn and greedy slots with decoding each alone. The
    same program verifies all drafts where rows are free, and none where they cost more
    than they bring: a schedule is data."""
    proposed, rounds = [], []
    for step_s in (np.ones_like(STEP_S), STEP_S, 1 + 100 * (STEP_S - 1)):
        state = run(scheduled(stops_early=True, step_s=step_s))
        decoding.assert_as_decoded(SMALL, state, ASKS)
        proposed.append(np.asarray(state.slots.num_proposed))
        rounds.append(np.asarray(state.slots.num_rounds))
    all_, some, none = (counts.sum() for counts in proposed)
    assert all_ > 1.2 * some > 0 and none == 0
    assert rounds[0].sum() <= rounds[1].sum() < rounds[2].sum()
    # Slots verify different numbers of drafts per round.
    assert len(set((proposed[1] / rounds[1]).tolist())) == len(ASKS)


@pytest.mark.slow
def test_slots_that_are_refilled_know_that_drafting_does_not_pay():
    """Fails if more than a few useless drafts are verified in all."""
    made = schedule_lib.Schedule(gamma_max=GAMMA_MAX, savings=8.0)
    scheduler = SMALL.scheduler(
        drafter=decoding.draft_drafter(impl=IMPL),
        draft_params=decoding.perturbed(decoding.TARGET_PARAMS, 2.0),
        num_slots=2,
        gamma_policy=made,
        policy_state=made.init(STEP_S[:11], draft_s=0.5),
    )
    asks = [dataclasses.replace(ask, gamma=None) for ask in (*ASKS, *ASKS)]
    rounds = proposed = 0
    for one in scheduler.run([ask.request() for ask in asks]):
        ask = asks[one.number]
        written = decoding.text(decoding.decoded(SMALL, ask))
        assert [*ask.prompt, *one.tokens] == written
        rounds += int(one.slot.num_rounds)
        proposed += int(one.slot.num_proposed)
    assert 0 < proposed < 0.3 * rounds


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(ValueError, match="PromptLookup gives no `Proposal.survival`"):
        run(scheduled(drafter=ngram.PromptLookup(gamma_max=GAMMA_MAX)))
    with pytest.raises(ValueError, match=r"survival of shape \[4, 2\] for .* \[4, 4\]"):
        run(scheduled(drafter=TwoChances(gamma_max=GAMMA_MAX)))
    with pytest.raises(ValueError, match="1 .. 20 rows, and 5 slots"):
        scheduled(num_slots=5)
    tree = decoding.draft_drafter(impl=IMPL).for_tree(tree_shapes.parse("2x2:3"))
    with pytest.raises(ValueError, match="Schedule chooses the length of a chain"):
        scheduled(drafter=tree)


def test_survival_is_the_product_of_what_was_most_probable():
    """Compares survival with products of top probabilities; drawn tokens' differ."""
    scheduler = scheduled(num_slots=1)
    request = dataclasses.replace(ASKS[0], gamma=None).request()
    state = decoding.admit(scheduler, [request])
    drafter, slots = scheduler.drafter, state.slots
    asked = {name: getattr(slots, name) for name in ("tokens", "length", "sampling")}
    asked["gamma"] = jnp.array([3], jnp.int32)
    _, proposal = decoding.propose(
        drafter, decoding.NEARLY_TARGET, state.memory, **asked
    )
    drafts = np.asarray(proposal.tokens[0, :3])
    text = jnp.asarray([*request.prompt, *drafts], jnp.int32)[None]
    config = scheduler.drafter.drafter.model.config
    logits_of = jax.jit(sequence.logits, static_argnums=1)
    logits = logits_of(decoding.NEARLY_TARGET, config, text)[0, -4:-1]
    probs = np.asarray(jax.nn.softmax(logits))
    survival = np.asarray(proposal.survival[0])
    np.testing.assert_allclose(survival[:3], np.cumprod(probs.max(axis=1)), rtol=1e-4)
    of_tokens = np.cumprod(probs[np.arange(3), drafts])
    assert np.abs(survival[:3] - of_tokens).max() > 0.01
