"""What one engine for a sequence and one for a batch had grown apart in, held together.

Each of these failed in the batch engine before there was one engine alone; and so did
`test_a_draft_of_another_vocabulary_is_refused` of `tests/drafters/test_each.py`.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import SMALL, Ask

from spec_jax.drafters import each
from spec_jax.engine import rows as rows_lib


DRAFT = decoding.draft_drafter(impl=SMALL.target.impl)
BOTH = pytest.mark.parametrize(
    "num_slots", [pytest.param(1, marks=pytest.mark.slow), 3]
)


@BOTH
def test_catch_up_rows_count_in_slots(num_slots, monkeypatch):
    """A draft model of slots caught up two rows a forward, whatever `catch_up_rows`."""
    drafter = dataclasses.replace(DRAFT, catch_up_rows=40)
    slots = each.lift(drafter, num_slots)
    memory, widths = slots.init(capacity=96, page_size=8), []
    forward, chains = rows_lib.SlotRows._run, rows_lib.SlotRows.run_chains

    def note(tokens, num_rows):
        one = lambda most: widths.append((tokens.shape[1], int(most)))
        jax.debug.callback(one, num_rows.max(), ordered=True)

    def counted(self, params, kv, window, **asked):
        note(window.tokens, window.num_active)
        return forward(self, params, kv, window, **asked)

    def counted_chains(self, params, kv, *, tokens, pending, **asked):
        note(tokens, pending)
        return chains(self, params, kv, tokens=tokens, pending=pending, **asked)

    monkeypatch.setattr(rows_lib.SlotRows, "_run", counted)
    monkeypatch.setattr(rows_lib.SlotRows, "run_chains", counted_chains)
    tokens = jnp.arange(num_slots * 97, dtype=jnp.int32).reshape(num_slots, 97) % 96
    propose = jax.jit(lambda *arguments: slots.propose(*arguments[:2], **arguments[2]))
    asked = {"length": 60, "gamma": 1}
    asked = {name: jnp.full((num_slots,), n, jnp.int32) for name, n in asked.items()}
    propose(SMALL.weights, memory, {"tokens": tokens, "sampling": None, **asked})
    jax.effects_barrier()
    # Of 60 tokens, 40 and 19 rows; the last is the one that drafts.
    assert widths == [(40, 40), (40, 19), (2, 1)]


@BOTH
def test_each_slot_has_stop_tokens_of_its_own(num_slots):
    """One array of stop tokens ended all slots, though each was to have its own."""
    text = decoding.text(decoding.decoded(SMALL, Ask()))[len(decoding.PROMPT) :]
    ends = [2, 9, 30]
    asks = [
        dataclasses.replace(Ask(), stop_ids=(text[end],) if end < 30 else ())
        for end in ends
    ]
    asks = asks[:num_slots]
    # The same prompt in every slot: what stops one is written by all of them.
    state = decoding.run(SMALL, asks)
    decoding.assert_as_decoded(SMALL, state, asks)
    assert len(set(np.asarray(state.slots.length).tolist())) == num_slots


@BOTH
def test_the_seed_lives_once(num_slots):
    """Settings of the draft were its parameters, those of the target the slot's.

    With the same weights and the same noise every draft is right: whatever seed is
    put into the slots, and with parameters that are weights and no more.
    """
    scheduler = SMALL.scheduler(DRAFT, num_slots=num_slots, draft_params=SMALL.weights)
    ask = Ask(max_tokens=24, sampling=decoding.HOT)
    texts = set()
    for seed in (11, 12):
        state = decoding.admit(scheduler, [ask.request()] * num_slots)
        seeds = seed + 100 * np.arange(num_slots, dtype=np.uint32)
        settings = state.slots.sampling.replace(seed=jnp.asarray(seeds))
        slots = state.slots.replace(sampling=settings)
        state = decoding.generate(scheduler, state.replace(slots=slots))
        for slot in range(num_slots):
            told = dict(ask.sampling) | {"seed": int(seeds[slot])}
            alone = dataclasses.replace(ask, sampling=tuple(told.items()))
            decoding.assert_as_decoded(SMALL, state, {slot: alone})
            texts.add(tuple(decoding.text(state, slot)))
        counted = jax.device_get(state.slots)
        assert (counted.num_accepted == counted.num_proposed).all()
        assert (counted.num_proposed > 0).all()
    assert len(texts) == 2 * num_slots
