"""Requests in a queue: each gets the tokens that it gets alone, in any slot."""

import contextlib
import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import MIXED, SMALL, Ask, Status

from spec_jax import testing
from spec_jax.engine import scheduler as scheduler_lib


NUM_SLOTS = 3
DRAFT = decoding.draft_drafter(impl=SMALL.target.impl)
"""A draft model with a pool of its own; its weights are the target's plus noise."""

LONGEST = Ask(prompt=(1, 2, 3, 4) * 5, max_tokens=200, sampling=decoding.HOT)
ASKS = (*MIXED, LONGEST)
NEEDED = 12
"""Pages of the longest request: a whole slot."""

TIGHT = NEEDED + NUM_SLOTS - 1
EVENT = "/jax/core/compile/backend_compile_duration"


def make(num_slots=NUM_SLOTS, **changes) -> scheduler_lib.Scheduler:
    changes = {"draft_params": decoding.NEARLY_TARGET} | changes
    return SMALL.scheduler(DRAFT, num_slots=num_slots, **changes)


def finish(asks=ASKS, *, scheduler=None, **arguments):
    """Returns the queue's results, in the order of the requests."""
    scheduler = scheduler or make()
    finished = list(scheduler.run([ask.request() for ask in asks], **arguments))
    assert sorted(one.number for one in finished) == list(range(len(asks)))
    return sorted(finished, key=lambda one: one.number)


def assert_as_decoded(finished, asks=ASKS) -> None:
    """Raises unless each request has the tokens and status of decoding it alone."""
    for one, ask in zip(finished, asks, strict=True):
        expected = decoding.decoded(SMALL, ask)
        assert one.tokens == decoding.text(expected)[len(ask.prompt) :], ask
        assert one.status == Status(int(expected.status))


def with_free_pages(state, num_free):
    """Returns the state with so many free pages; the others are held back."""
    replaced = {
        name: getattr(state, name).replace(num_free=jnp.int32(num_free))
        for name in ("cache", "memory")
    }
    return state.replace(**replaced)


@contextlib.contextmanager
def admissions():
    """Yields a list that notes, at each admission, which slots were running."""
    noted, real = [], scheduler_lib.Scheduler.admit

    def admit(self, state, slot, request, **rest):
        noted.append(np.flatnonzero(np.asarray(state.slots.running)).tolist())
        return real(self, state, slot, request, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_lib.Scheduler, "admit", admit)
        yield noted


def test_more_requests_than_slots():
    """Fails if a slot keeps data of its last request, waits for all slots to end, or if
    a token or a counter depends on where the host looks."""
    with admissions() as running:
        finished = finish()
    assert_as_decoded(finished)
    assert len(running) == len(ASKS)
    assert all(running[NUM_SLOTS:]), running
    # The rounds are not vacuous: some drafts are kept, and some are not.
    kept, proposed = (
        sum(int(getattr(one.slot, name)) for one in finished)
        for name in ("num_accepted", "num_proposed")
    )
    assert 0 < kept < proposed
    for one, other in zip(finished, finish(ends=lambda *_: None), strict=True):
        testing.assert_same_bits(one.slot, other.slot)
    # Negative control: the results of two requests, exchanged.
    with pytest.raises(AssertionError):
        assert_as_decoded([finished[1], finished[0], *finished[2:]])


def test_refilling_compiles_nothing():
    """Fails if a prompt, a gamma, a seed or a setting is part of an executable.
    Negative control: another number of slots compiles, and is counted."""
    finish()  # Compiles prompts of all buckets.
    compiled = []

    def note(event, duration, **_):
        if event == EVENT:
            compiled.append(duration)

    strange = [
        dataclasses.replace(
            ask,
            prompt=tuple(token + 1 for token in ask.prompt[:-1]) or (3,),
            max_tokens=ask.max_tokens + 1,
            gamma=number % 5,
            stop_ids=(number,),
            sampling=(("temperature", 0.1 + number), ("seed", number)),
        ).request()
        for number, ask in enumerate(ASKS)
    ]
    scheduler, other = make(), make(7)  # 7 slots: not compiled yet
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        assert len(list(scheduler.run(strange))) == len(strange)
        assert not compiled
        jax.block_until_ready(other.empty(draws=True))
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_requests_wait_for_pages():
    """Fails if too few pages end a slot, change a token, or block for ever."""
    # Pages are held back as data, so that the executable is that of all pages.
    state = with_free_pages(make().empty(draws=True), TIGHT - NUM_SLOTS)
    with admissions() as running:
        finished = finish(scheduler=make(num_pages=TIGHT), state=state)
    assert_as_decoded(finished)
    # Some run alone, and some beside others.
    assert [] in running[1:] and any(running)


def test_a_slot_that_finds_no_page():
    """Checks that finished requests are yielded before the error names the slot."""
    # Six pages are left, for a request of one page and one of twelve.
    scheduler = make()
    state, finished = with_free_pages(scheduler.empty(draws=True), 6), []
    message = r"in slots \[1\] after .* tokens: . of 36 pages of 8 tokens are free"
    with pytest.raises(MemoryError, match=message):
        requests = [MIXED[3].request(), LONGEST.request()]
        for one in scheduler.run(requests, state=state):
            finished.append(one)
    assert [one.number for one in finished] == [0]
    assert_as_decoded(finished, (MIXED[3],))


def test_a_refusal_is_not_overlooked():
    """Fails if tokens are returned although a cache refused an operation."""
    scheduler = make()
    state = scheduler.empty(draws=True)
    refused = state.memory.refused.at[2].set(True)
    state = state.replace(memory=state.memory.replace(refused=refused))
    with pytest.raises(RuntimeError, match="a cache refused an operation"):
        list(scheduler.run([MIXED[0].request()], state=state))


def test_stop_tokens_of_the_scheduler_are_the_default():
    """Checks that requests without `stop_ids` get the scheduler's, and () gets none."""
    texts = decoding.text(decoding.decoded(SMALL, Ask()))
    stop = texts[len(decoding.PROMPT) + 5]
    scheduler = make(stop_ids=(stop,), num_stop=2)
    default, none, own = (
        dataclasses.replace(Ask().request(), stop_ids=ids)
        for ids in (None, (), (texts[len(decoding.PROMPT) + 2], 95))
    )
    ended = {one.number: one for one in scheduler.run([default, none, own])}
    stopped = dataclasses.replace(Ask(), stop_ids=(stop,))
    early = dataclasses.replace(Ask(), stop_ids=own.stop_ids[:1])
    assert_as_decoded([ended[n] for n in range(3)], [stopped, Ask(), early])
    with pytest.raises(ValueError, match="3 stop tokens, .* room for 2: .* num_stop=3"):
        scheduler.check(dataclasses.replace(default, stop_ids=(1, 2, 3)))


def test_a_request_that_no_slot_can_ever_take():
    """Fails if a request that would wait for pages for ever is accepted. Each other
    slot owns a page, even if it is empty. One page more is enough."""
    message = (
        "20 \\+ 200 tokens needs 12 pages of 8, and there are 13, of which empty slots "
        "have 2: allow more pages or generate fewer tokens"
    )
    with pytest.raises(ValueError, match=message):
        make(num_pages=TIGHT - 1).check(LONGEST.request())
    make(num_pages=TIGHT).check(LONGEST.request())
