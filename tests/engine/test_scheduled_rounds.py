"""Rounds in which a schedule of the whole batch verifies only some drafts."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters import ngram, tree_shapes
from spec_jax.gamma import schedule as schedule_lib
from spec_jax.model import sequence


ASKS = (decoding.MIXED[1], decoding.MIXED[2], *decoding.MIXED[5:])
"""Four sequences that differ in every setting, two of them greedy."""

# Each row costs half an empty step more: only likely drafts are worth a row.
STEP_S = 1 + np.arange(4 * (decoding.GAMMA_MAX + 1) + 1) / 2
IMPL = decoding.SMALL.target.impl
SCALING = {
    "temperatures": np.linspace(0.5, 2, decoding.GAMMA_MAX),
    "shifts": np.linspace(-1, 0.5, decoding.GAMMA_MAX),
}


def make(*, stops_early=False, step_s=STEP_S, **changes):
    """Makes a scheduler of a draft model with a schedule of its drafts."""
    made = schedule_lib.Schedule(gamma_max=decoding.GAMMA_MAX, stops_early=stops_early)
    changes = {
        "drafter": decoding.draft_drafter(impl=IMPL),
        "draft_params": decoding.NEARLY_TARGET,
        "num_slots": 4,
    } | changes
    first = made.init(step_s, **SCALING)
    return decoding.SMALL.scheduler(gamma_policy=made, policy_state=first, **changes)


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
        state = run(make(stops_early=True, step_s=step_s))
        decoding.assert_as_decoded(decoding.SMALL, state, ASKS)
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
    made = schedule_lib.Schedule(gamma_max=decoding.GAMMA_MAX, savings=8.0)
    scheduler = decoding.SMALL.scheduler(
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
        written = decoding.text(decoding.decoded(decoding.SMALL, ask))
        assert [*ask.prompt, *one.tokens] == written
        rounds += int(one.slot.num_rounds)
        proposed += int(one.slot.num_proposed)
    assert 0 < proposed < 0.3 * rounds


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(ValueError, match="PromptLookup gives no `Proposal.survival`"):
        run(make(drafter=ngram.PromptLookup(gamma_max=decoding.GAMMA_MAX)))
    with pytest.raises(ValueError, match=r"survival of shape \[4, 2\] for .* \[4, 4\]"):
        run(make(drafter=TwoChances(gamma_max=decoding.GAMMA_MAX)))
    with pytest.raises(ValueError, match="1 .. 20 rows, and 5 slots"):
        make(num_slots=5)
    tree = decoding.draft_drafter(impl=IMPL).for_tree(tree_shapes.parse("2x2:3"))
    with pytest.raises(ValueError, match="Schedule chooses the length of a chain"):
        make(drafter=tree)


def test_survival_is_the_product_of_what_was_most_probable():
    """Compares survival with products of top probabilities; drawn tokens' differ."""
    scheduler = make(num_slots=1)
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
