"""A thousand generations take no more memory than fifty did."""

import dataclasses
import gc

import decoding
import jax
import numpy as np
import psutil
import pytest
from decoding import Ask

from spec_jax.engine import checks


pytestmark = pytest.mark.slow


GENERATIONS, WARM_UP = 1000, 50
RESIDENT_BYTES = 8 * 2**20  # what allocators keep, and other threads; not a leak
LEAK_BYTES = 2**22  # a generation's, in the planted leak of the host's memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What is held: live arrays of JAX, and the process's resident set."""

    num_arrays: int
    array_bytes: int
    resident_bytes: int


def usage() -> Usage:
    gc.collect()
    arrays = jax.live_arrays()
    return Usage(
        num_arrays=len(arrays),
        array_bytes=sum(array.nbytes for array in arrays),
        resident_bytes=psutil.Process().memory_info().rss,
    )


def assert_no_growth(generate_once, times: int) -> None:
    """Raises unless `times` more generations leave memory as the warm-up left it."""
    for number in range(WARM_UP):
        generate_once(number)
    before = usage()
    for number in range(times):
        generate_once(number)
    after = usage()
    for name in ("num_arrays", "array_bytes"):
        grown = getattr(after, name) - getattr(before, name)
        if grown:
            raise AssertionError(f"{name} grew by {grown} over {times} generations")
    grown = after.resident_bytes - before.resident_bytes
    if grown > RESIDENT_BYTES:
        raise AssertionError(f"resident_bytes grew by {grown} over {times} generations")


def generator(kind: str, num_slots: int):
    """A function that runs short generations, from fresh caches to the last round.

    The number that it takes makes the prompts; nothing compiles after the first call.
    """
    target = dataclasses.replace(decoding.quickest(), cache=kind)
    drafter = decoding.draft_drafter(target.config, impl=target.impl)
    scheduler = decoding.Setting(target=target, capacity=64).scheduler(
        drafter, num_slots=num_slots, draft_params=decoding.TARGET_PARAMS
    )

    def generate_once(number: int):
        ask = Ask(prompt=(7, 3, number % 96), max_tokens=6)
        state = decoding.admit(scheduler, [ask.request()] * num_slots)
        state = decoding.generate(scheduler, state)
        checks.check_refused([state.cache, state.memory])
        assert state.slots.length.tolist() == [9] * num_slots
        return state

    return generate_once


@pytest.mark.parametrize(("kind", "num_slots"), [("paged", 1), ("static", 3)])
def test_memory_does_not_grow(kind, num_slots):
    """Fails if anything is kept of a generation: an array, a page, an executable."""
    assert_no_growth(generator(kind, num_slots), GENERATIONS)


LEAKS = {
    "num_arrays": lambda state: state.cache,
    "resident_bytes": lambda state: np.full(
        LEAK_BYTES, int(state.slots.length[0]), np.uint8
    ),
}


@pytest.mark.parametrize("grown", LEAKS)
def test_leaks_are_caught(grown):
    """Negative control: a cache, or a copy on the host, kept of each generation."""
    generate_once, keep, kept = generator("static", 1), LEAKS[grown], []
    with pytest.raises(AssertionError, match=f"{grown} grew by"):
        assert_no_growth(lambda number: kept.append(keep(generate_once(number))), 60)
