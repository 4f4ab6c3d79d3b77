"""Requests in a queue: each gets what it gets alone, in whatever slot it lands."""

import contextlib
import dataclasses

import batch_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_cases import REQUESTS, SLOTS, Case
from spec_jax.batch import queue

from spec_jax.drafters import ngram, oracle
from spec_jax.gamma import policy
from spec_jax.rules import sampling


ALL = tuple(range(len(REQUESTS)))
CASE = Case(name="hybrid")
TIGHT = 9
"""Pages for one request of a whole slot, and one for each of three empty slots."""

EVENT = "/jax/core/compile/backend_compile_duration"


def finish(case, numbers=ALL, *, batch=None, **arguments):
    """The queue's results, in the order of the requests."""
    batch = batch or case.batch()
    requests = [case.request(number) for number in numbers]
    finished = list(batch.run(requests, **arguments))
    assert sorted(one.number for one in finished) == list(range(len(numbers)))
    return sorted(finished, key=lambda one: one.number)


def assert_alone(case, finished, numbers=ALL) -> None:
    """Raises unless each request came to what it comes to alone."""
    for one, number in zip(finished, numbers, strict=True):
        expected = batch_cases.alone(case, number)
        batch_cases.assert_same_states(one.state, expected)
        prompt = len(case.request(number).prompt)
        text = np.asarray(expected.tokens)[prompt : int(expected.length)]
        assert one.tokens == text.tolist()


def with_free_pages(state, num_free):
    """The state, with so many pages free: somebody else holds the rest."""
    replaced = {
        name: getattr(state, name).replace(num_free=jnp.int32(num_free))
        for name in ("cache", "memory")
    }
    return state.replace(**replaced)


def tight():
    """A queue of `TIGHT` pages, and the state that it begins with.

    The pages of others, held back: the executable is that of all pages.
    """
    state = with_free_pages(CASE.batch().empty(draws=True), TIGHT - SLOTS)
    return CASE.batch(num_pages=TIGHT), state


@contextlib.contextmanager
def admissions():
    """Notes, of each admission, the slots in which others were running."""
    noted, real = [], queue.Batch.admit

    def admit(self, state, slot, request):
        noted.append(np.flatnonzero(~np.asarray(state.slots.done)).tolist())
        return real(self, state, slot, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue.Batch, "admit", admit)
        yield noted


@pytest.fixture(autouse=True)
def _native():
    batch_cases.skip_without("native")


@pytest.mark.parametrize("name", ["hybrid", "oracle"])
def test_more_requests_than_slots(name):
    """Fails if a slot keeps anything of whoever was in it before."""
    case = Case(name=name, adaptive="goodput" if name == "oracle" else "")
    with admissions() as running:
        finished = finish(case)
    assert_alone(case, finished)
    # They did not wait for all slots to come free.
    assert len(running) == len(ALL)
    assert all(running[SLOTS:]), running


def test_results_of_others_are_caught():
    """Negative control: the results of two requests, exchanged."""
    finished = finish(CASE)
    with pytest.raises(AssertionError):
        assert_alone(CASE, [finished[1], finished[0], *finished[2:]])


def test_the_order_does_not_matter():
    numbers = (5, 3, 7, 1, 0, 2, 6, 4, 3, 3, 0)
    assert_alone(CASE, finish(CASE, numbers), numbers)


@pytest.mark.parametrize("rounds_per_call", [1, 3])
def test_a_few_rounds_at_a_time(rounds_per_call):
    """Fails if a look of the host's changes a token or a counter."""
    assert_alone(CASE, finish(CASE, rounds_per_call=rounds_per_call))


def test_refilling_compiles_nothing():
    """Fails if a prompt, a gamma, a seed or a setting is part of an executable.

    Negative control: another number of slots compiles, and is counted.
    """
    finish(CASE)  # Prompts of all buckets.
    compiled = []

    def note(event, duration, **_):
        if event == EVENT:
            compiled.append(duration)

    strange = [
        dataclasses.replace(
            request,
            prompt=[token + 1 for token in request.prompt[:-1]] or [3],
            max_tokens=request.max_tokens + 1,
            gamma=number % 5,
            settings=sampling.make_settings(temperature=0.1 + number, seed=number),
        )
        for number, request in enumerate(REQUESTS)
    ]
    batch, other = CASE.batch(), CASE.batch(num_slots=2)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        assert len(list(batch.run(strange))) == len(strange)
        assert not compiled
        jax.block_until_ready(other.empty(draws=True))
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_requests_wait_for_pages():
    """Fails if too few pages starve a slot, change a token, or block for ever."""
    batch, state = tight()
    with admissions() as running:
        finished = finish(CASE, batch=batch, state=state)
    assert_alone(CASE, finished)
    # Some have nobody beside them, and some do.
    assert [] in running[1:]
    assert any(running)


def test_pages_of_all_that_ended_are_free_again():
    """Two end in the same round; the next takes the slot of one and both's pages."""
    numbers = (6, 6, 2)
    batch, state = tight()
    assert_alone(CASE, finish(CASE, numbers, batch=batch, state=state), numbers)


def test_a_slot_that_starves():
    """What was finished is yielded first; then the error says where it was."""
    batch = CASE.batch()
    # Four pages are left, for a request of one page and one of six.
    state = with_free_pages(batch.empty(draws=True), 4)
    finished = []
    with pytest.raises(MemoryError, match=r"in slots \[1\]: . of 24 pages of 8 tokens"):
        for one in batch.run([CASE.request(3), CASE.request(2)], state=state):
            finished.append(one)
    assert [one.number for one in finished] == [0]
    assert_alone(CASE, finished, (3,))


def test_greedy_requests_beside_others():
    """A request without settings is greedy, in a program that draws for the others."""
    case = Case(name="ngram")
    greedy = dataclasses.replace(case.request(0), settings=None)
    requests = [greedy, case.request(2), greedy]
    finished = {one.number: one for one in case.batch().run(requests)}
    for number in (0, 2):
        batch_cases.assert_same_states(
            finished[number].state, batch_cases.alone(case, 0)
        )


def test_a_state_made_before():
    """Fails if a state that is handed in is another than the one made inside."""
    batch = CASE.batch()
    state = batch.empty(draws=True)
    assert_alone(CASE, finish(CASE, batch=batch, state=state))
    with pytest.raises(ValueError, match=r"make it by empty\(draws=True\)"):
        next(batch.run([CASE.request(1)], state=batch.empty(draws=False)))


def test_a_refusal_is_not_overlooked():
    """Fails if an operation that a cache refused ends in tokens."""
    batch = CASE.batch()
    state = batch.empty(draws=True)
    refused = state.memory.refused.at[2].set(True)
    state = state.replace(memory=state.memory.replace(refused=refused))
    with pytest.raises(RuntimeError, match="a cache refused an operation"):
        list(batch.run([CASE.request(0)], state=state))


def test_no_requests():
    assert list(CASE.batch().run([])) == []


def changed(**changes) -> queue.Request:
    return dataclasses.replace(CASE.request(0), **changes)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (changed(prompt=[]), "prompt is empty"),
        (changed(prompt=[1] * 49), "prompt has 49 tokens but the cache holds 48"),
        (changed(prompt=[3, 96]), r"token 96, outside \[0, 96\)"),
        (changed(prompt=[-1, 3]), r"token -1, outside \[0, 96\)"),
        (changed(gamma=5), r"gamma=5 is outside \[0, 4\]"),
        (changed(gamma=-1), r"gamma=-1 is outside \[0, 4\]"),
        (changed(max_tokens=0), "max_tokens=0 must be a whole number of at least 1"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(request_, message, monkeypatch):
    monkeypatch.setattr(queue.Batch, "empty", _nothing_runs)
    with pytest.raises(ValueError, match=message):
        next(CASE.batch().run([CASE.request(1), request_]))


def _nothing_runs(*_, **__):
    raise RuntimeError("something ran")


def test_a_request_that_no_slot_can_ever_take():
    """Fails if it would wait for ever: other slots, empty ones too, have a page each.

    One page more is enough.
    """
    batch = CASE.batch(num_pages=TIGHT - 1)
    with pytest.raises(
        ValueError,
        match="20 \\+ 60 tokens needs 6 pages of 8, and there are 8, of which empty "
        "slots have 3",
    ):
        batch.check(CASE.request(2))
    CASE.batch(num_pages=TIGHT).check(CASE.request(2))


def test_calls_of_no_round():
    with pytest.raises(ValueError, match="rounds_per_call=0 must be at least 1"):
        next(CASE.batch().run([CASE.request(0)], rounds_per_call=0))


def test_batches_that_make_no_sense():
    batch, fixed = CASE.batch(), policy.Fixed(gamma_max=4)
    lookup = ngram.PromptLookup(gamma_max=4)
    narrow = Case(name="oracle").batch().drafter
    narrow = dataclasses.replace(
        narrow, drafter=oracle.Oracle(gamma_max=4, vocab_size=95)
    )
    wide = dataclasses.replace(
        Case(name="ngram").batch().drafter,
        drafter=dataclasses.replace(lookup, gamma_max=5),
    )
    for changes, message in (
        ({"drafter": CASE.batch(num_slots=3).drafter}, "4 slots and the drafter 3"),
        ({"drafter": narrow}, "different vocabularies: 95 and 96"),
        ({"drafter": wide}, "gamma_max=5 needs a slab of 6"),
        ({"gamma_policy": fixed}, "a gamma policy and its first state go together"),
        ({"policy_state": jnp.int32(2)}, "a gamma policy and its first state go"),
        ({"capacity": 0}, "capacity=0 and page_size=8 must be at least 1"),
        ({"page_size": 0}, "capacity=48 and page_size=0 must be at least 1"),
        ({"num_pages": 3}, "num_pages=3 is fewer than 4 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(batch, **changes)
