"""Rounds whose gamma a budget bounds: costs change counts of rounds, and no bit."""

import dataclasses

import decoding
import jax
import numpy as np
import pytest
from decoding import GAMMA_MAX, MIXED, SMALL, Ask

from spec_jax import default_gamma, testing
from spec_jax.gamma import costs as costs_lib


LONG = Ask(max_tokens=60)
RISES = {"free": 0.0, "cheap": 0.1, "dear": 0.4, "too dear": 3.0}
"""Steps that a draft takes: costs as they might have been measured."""


def planted(rise, gamma_max, **how):
    """The default policy by planted costs; the same program for all of them."""
    round_s = (1.0 + rise * np.arange(gamma_max + 1)).tolist()
    made, first = default_gamma.make(costs_lib.RoundCosts(round_s=(*round_s,)), **how)
    return {"gamma_policy": made, "policy_state": first}


@pytest.mark.parametrize("rise", RISES)
def test_tokens_and_kv_do_not_depend_on_costs(rise, num_slots=3):
    """Of a slot whose drafts are kept, of one whose are not, and of one that draws."""
    asks = [LONG, dataclasses.replace(LONG, run=0), MIXED[1]][:num_slots]
    scheduler = SMALL.scheduler(num_slots=num_slots, **planted(RISES[rise], GAMMA_MAX))
    state = decoding.run(SMALL, asks, scheduler=scheduler, draws=True)
    decoding.assert_as_decoded(SMALL, state, asks)
    one = decoding.slot_of(state)
    # Negative control: these costs are not all one to the policy.
    assert one.num_proposed == 0 if rise == "too dear" else one.num_proposed >= 10
    balance = np.asarray(state.slots.policy.balance)
    assert (balance == balance[0]).all()  # One account.


def test_a_refilled_slot_begins_with_what_was_learnt():
    """But owes nothing for tokens of the text before it."""
    hopeless = dataclasses.replace(LONG, run=0)
    scheduler = SMALL.scheduler(**planted(0.4, GAMMA_MAX))
    requests = [decoding.scripted(SMALL, hopeless)] * 2
    first, second = (one.slot for one in scheduler.run(requests))
    assert second.num_proposed < first.num_proposed
    state = decoding.run(SMALL, [hopeless], scheduler=scheduler)
    assert int(state.slots.policy.num_behind[0]) > 0
    again = scheduler.admit(state, 0, requests[0])
    assert int(again.slots.policy.num_behind[0]) == 0
    learnt = jax.device_get(again.slots.policy.asks)
    with pytest.raises(AssertionError):  # Negative control: it is no first state.
        fresh = scheduler.begin(requests[0]).slots.policy.asks
        testing.assert_same_bits(learnt, jax.device_get(fresh))
