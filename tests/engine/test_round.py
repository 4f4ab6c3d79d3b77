"""Speculative rounds commit what decoding would have committed, alone and in slots.

Drafts are always right, always wrong or in between, with every gamma. Stop tokens,
limits and full caches fall in the middle of a window. Mutants (`ROUNDS`) are negative
controls.
"""

import dataclasses
import functools
import gc

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import ALWAYS, GAMMA_MAX, PROMPT, SMALL, Ask, Status

from spec_jax import testing
from spec_jax.engine import round as round_lib
from spec_jax.engine.state import Origin
from spec_jax.rules import acceptance


SLOTS = pytest.mark.parametrize("num_slots", [1, 3])
NEIGHBOURS = (
    Ask(prompt=(9, 9), max_tokens=30, gamma=3, run=2),
    Ask(prompt=tuple(range(30, 60)), max_tokens=18, gamma=2, run=1),
)


def beside(ask: Ask, num_slots: int) -> list[Ask]:
    """Returns the sequence for the first slot, and others for the other slots."""
    return [ask, *NEIGHBOURS][:num_slots]


@pytest.mark.parametrize(
    ("impl", "cache", "num_slots"),
    [("native", "paged", 1), ("native", "static", 3), ("xla", "paged", 3)],
)
def test_tokens_and_kv_are_those_of_decoding(impl, cache, num_slots):
    """Fails if a rejected draft is kept, the target's own token is lost, or a slot sees
    another's draft, limit or pages. The oracle decodes on pages in all cases."""
    config = decoding.make_config(
        # With XLA there is one layer, as its programs grow with the layers.
        num_layers=1 if impl == "xla" else 2,
        dtype="bfloat16" if cache == "static" else "float32",
    )
    setting = decoding.setting_of(impl, cache=cache, config=config)
    for run in (0, 2, ALWAYS):
        for gamma in range(GAMMA_MAX + 1):
            asks = beside(Ask(run=run, gamma=gamma), num_slots)
            state = decoding.checked(setting, asks)
            one = decoding.slot_of(state)
            if run == ALWAYS:
                assert one.num_accepted == one.num_proposed
                assert one.num_rounds == -(-40 // (gamma + 1))
            if run == 0 or gamma == 0:
                assert one.num_rounds == 40


@SLOTS
def test_stop_tokens_anywhere_in_the_window(num_slots):
    """Fails if a token after a stop token is kept, or it ends another slot."""
    # Each slot has a stop token of its own; other slots may write it and go on.
    texts = [decoding.text(decoding.decoded(SMALL, ask)) for ask in beside(Ask(), 3)]
    ended = set()
    for end in range(len(PROMPT), len(PROMPT) + 10):
        for gamma in (0, 4):
            asks = beside(Ask(gamma=gamma), num_slots)
            asks = [
                dataclasses.replace(ask, stop_ids=(text[end - len(PROMPT) + start],))
                for ask, text, start in zip(asks, texts, (11, 3, 31), strict=False)
            ]
            state = decoding.checked(SMALL, asks)
            assert decoding.slot_of(state).status == Status.STOP
            ended.add(tuple(np.asarray(state.slots.length).tolist()))
    assert len(ended) > 5


def test_padding_is_no_stop_token():
    """Fails if the padding after the tokens of an outcome ends the sequence. The
    padding is a token of the vocabulary, and may be the stop token."""
    text = decoding.text(decoding.decoded(SMALL, Ask()))
    assert acceptance.PAD not in text[len(PROMPT) :]
    state = decoding.run(SMALL, [Ask(run=1, stop_ids=(acceptance.PAD,))])
    one = decoding.slot_of(state)
    assert one.num_accepted < one.num_proposed  # There was padding.
    assert decoding.text(state) == text


@SLOTS
def test_max_tokens_is_met_exactly(num_slots):
    """Fails if a window runs past the limit, or stops before it."""
    for few in (1, 2, 4, 5, 6, 11):
        asks = [
            dataclasses.replace(ask, max_tokens=few + number)
            for number, ask in enumerate(beside(Ask(), num_slots))
        ]
        state = decoding.checked(SMALL, asks)
        assert decoding.slot_of(state).length == len(PROMPT) + few


@SLOTS
def test_a_full_cache_ends_the_sequence_in_the_middle_of_a_window(num_slots):
    """Fails if a row is written past the capacity, or room is left."""
    for run in (1, ALWAYS):
        asks = beside(Ask(run=run, max_tokens=200), num_slots)
        state = decoding.checked(SMALL, asks)
        one = decoding.slot_of(state)
        # Every position has K/V but the last token's, which is pending.
        assert one.length == decoding.CAPACITY + 1
        assert one.status == Status.CAPACITY
    # A request that fills the cache exactly ends by its own limit.
    exact = Ask(max_tokens=decoding.CAPACITY + 1 - len(PROMPT))
    state = decoding.run(SMALL, beside(exact, num_slots))
    assert decoding.slot_of(state).status == Status.LENGTH


@SLOTS
def test_a_slot_that_finds_no_page_ends_and_the_others_go_on(num_slots):
    """Fails if a slot without a page commits or counts a round, or spoils another."""
    asks = beside(Ask(), num_slots)
    scheduler = SMALL.scheduler(num_slots=num_slots)
    requests = [decoding.scripted(SMALL, ask) for ask in asks]
    state = decoding.admit(scheduler, requests)
    # The pool has one page less than all slots together will need.
    needed = sum(
        -(-(len(ask.prompt) + ask.max_tokens - 1) // decoding.PAGE_SIZE) for ask in asks
    )
    held = int(state.cache.num_owned.sum())
    few = jnp.int32(needed - held - 1)
    state = state.replace(cache=state.cache.replace(num_free=few))
    state = decoding.generate(scheduler, state)
    failed = np.asarray(state.slots.status) == Status.OUT_OF_PAGES
    assert failed.sum() == 1
    (slot,) = np.flatnonzero(failed).tolist()
    others = {n: ask for n, ask in enumerate(asks) if n != slot}
    decoding.assert_as_decoded(SMALL, state, others, pages=False)
    one, committed = decoding.slot_of(state, slot), decoding.text(state, slot)
    whole = decoding.text(decoding.decoded(SMALL, asks[slot]))
    assert len(asks[slot].prompt) < len(committed) < len(whole)
    assert committed == whole[: len(committed)]
    assert int(state.cache.length[slot]) == len(committed) - 1
    assert one.accepted_hist.sum() == one.num_rounds
    assert len(committed) - len(asks[slot].prompt) == one.num_accepted + one.num_rounds


def test_a_slot_that_ended_stays_as_it_is():
    """Fails if rounds of other slots write, count or move data of one that ended."""
    asks = (dataclasses.replace(NEIGHBOURS[1], max_tokens=3), Ask(run=1), NEIGHBOURS[0])
    scheduler = SMALL.scheduler(num_slots=3)
    state = decoding.admit(scheduler, [decoding.scripted(SMALL, ask) for ask in asks])
    state = decoding.generate(scheduler, state, until_one_ends=True)
    assert state.slots.running.tolist() == [False, True, True]
    # With a higher limit only its status keeps the ended slot from drafting.
    state = state.replace(slots=state.slots.replace(limit=state.slots.limit + 4))
    before = decoding.slot_of(state), decoding.held(state.cache, 32)
    state = decoding.generate(scheduler, state, max_rounds=3)
    after = decoding.slot_of(state), decoding.held(state.cache, 32)
    testing.assert_same_bits(after, before)


def test_origins_are_those_of_the_tokens():
    """Fails if a kept draft and the target's own token get the wrong origin."""
    prompt = "P" * len(PROMPT)
    # The last of every three drafts is wrong, the first time for the first new token.
    for run, origins in ((2, "C" + 3 * "AAC" + "AB"), (ALWAYS, 3 * "AAAB")):
        ask = Ask(run=run, gamma=3, max_tokens=12)
        one = decoding.slot_of(decoding.run(SMALL, [ask]))
        names = [Origin(o).name for o in one.origins[: one.length]]
        assert "".join(name[0] for name in names) == prompt + origins


def test_slots_may_lie_anywhere_and_be_empty():
    """Fails if an empty slot is run, or the place of a slot changes its sequence."""
    for asks in ({2: decoding.GREEDY[1]}, {2: decoding.GREEDY[5], 0: Ask(run=1)}):
        state = decoding.checked(SMALL, asks, num_slots=3)
        empty = decoding.slot_of(state, 1)
        assert Status(int(empty.status)) is Status.EMPTY and not empty.num_rounds


def test_no_transfers_inside_generate():
    """Fails if a round transfers data from or to the host."""
    scheduler = SMALL.scheduler(num_slots=3)
    asks = beside(Ask(run=2), 3)
    requests = [decoding.scripted(SMALL, ask) for ask in asks]
    state = decoding.admit(scheduler, requests)
    until, most = jnp.bool_(False), decoding.FOREVER
    generate = functools.partial(round_lib.generate, scheduler.speculator)
    with jax.transfer_guard("disallow"):
        state = generate(state, max_rounds=most, until_one_ends=until)
    decoding.assert_as_decoded(SMALL, state, asks)
    # Negative control: the guard notices a number that is on the host.
    state = decoding.admit(scheduler, requests)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="transfer"):
        generate(state, max_rounds=4, until_one_ends=until)


def test_the_cache_is_donated_and_aliased():
    """Fails if the loop copies the pool: temporary memory must be far smaller."""
    setting = dataclasses.replace(SMALL, capacity=8 * 4096)
    scheduler = setting.scheduler(num_slots=3)
    state = scheduler.empty(draws=False)
    arguments = {"max_rounds": decoding.FOREVER, "until_one_ends": jnp.bool_(False)}
    lowered = round_lib.generate.lower(scheduler.speculator, state, **arguments)
    compiled = lowered.compile()
    assert "input_output_alias" in compiled.as_text()
    assert "callback" not in compiled.as_text()  # Nor is the host called.
    decoding.assert_in_place(compiled, state.cache)
    # Negative control: without donation there is nothing to alias.
    kept = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    copying = kept.lower(state).compile()
    with pytest.raises(AssertionError):
        decoding.assert_in_place(copying, state.cache)


def test_a_state_that_was_used_up_is_named():
    """Fails if the error is the runtime's, about a buffer, and names no remedy."""
    scheduler = SMALL.scheduler()
    kept = decoding.admit(scheduler, [decoding.scripted(SMALL, Ask())])
    decoding.generate(scheduler, kept)
    message = "the state was used up by an earlier call.* give generate the state that"
    with pytest.raises(ValueError, match=message):
        decoding.generate(scheduler, kept)


def test_generations_keep_no_array():
    """Fails if a cache, a page table or an output outlives its generation. Negative
    control: one output that is kept."""
    scheduler, drafts = SMALL.scheduler(), jnp.arange(30, dtype=jnp.int32)

    def once(number):
        request = Ask(prompt=(7, 3, number), max_tokens=6).request(draft_params=drafts)
        return decoding.generate(scheduler, decoding.admit(scheduler, [request]))

    def held(*numbers):
        for number in numbers:
            once(number)
        gc.collect()
        return len(jax.live_arrays())

    before = held(0, 1, 2)
    assert held(*range(3, 20)) == before
    kept = once(40)
    assert held(41) > before and kept
