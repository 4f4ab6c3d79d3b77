"""A thousand generations take no more memory than fifty did."""

import dataclasses
import gc

import decoding
import jax
import numpy as np
import psutil
import pytest

from spec_jax import session
from spec_jax.drafters import draft_model
from spec_jax.ops import dispatch


pytestmark = pytest.mark.slow


GENERATIONS, WARM_UP = 1000, 50
RESIDENT_BYTES = 8 * 2**20  # what allocators keep, and other threads; not a leak
LEAK_BYTES = 2**22  # a generation's, in the planted leak of the host's memory
PARAMS = (decoding.TARGET_PARAMS, decoding.TARGET_PARAMS)


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


def generator(kind: str, draft_cache: str):
    """A function that runs one short generation, from fresh caches to the last round.

    The number that it takes makes the prompt; nothing compiles after the first call.
    """
    try:
        impl = dispatch.resolve("native")
    except NotImplementedError:
        impl = "xla"
    target = dataclasses.replace(decoding.TARGET, impl=impl, cache=kind)
    model = dataclasses.replace(target, slab=2)
    drafter = draft_model.DraftModel(
        model=model, gamma_max=decoding.GAMMA_MAX, draft_cache=draft_cache
    )
    sizes = {"capacity": 64, "page_size": decoding.PAGE_SIZE}
    fresh = jax.jit(lambda: (target.new_cache(**sizes), model.new_cache(**sizes)))

    def generate_once(number: int):
        prompt = [7, 3, number % target.config.vocab_size]
        state = session.begin(target, drafter, PARAMS, *fresh(), prompt, max_tokens=6)
        state = decoding.generate(drafter, state, draft_params=PARAMS[1], target=target)
        session.check_state(state)
        assert int(state.length) == len(prompt) + 6
        return state

    return generate_once


@pytest.mark.parametrize(
    ("kind", "draft_cache"), [("paged", "persistent"), ("static", "round")]
)
def test_memory_does_not_grow(kind, draft_cache):
    """Fails if anything is kept of a generation: an array, a page, an executable."""
    assert_no_growth(generator(kind, draft_cache), GENERATIONS)


LEAKS = {
    "num_arrays": lambda state: state.cache,
    "resident_bytes": lambda state: np.full(LEAK_BYTES, int(state.length), np.uint8),
}


@pytest.mark.parametrize("grown", LEAKS)
def test_leaks_are_caught(grown):
    """Negative control: a cache, or a copy on the host, kept of each generation."""
    generate_once, keep, kept = generator("static", "round"), LEAKS[grown], []
    with pytest.raises(AssertionError, match=f"{grown} grew by"):
        assert_no_growth(lambda number: kept.append(keep(generate_once(number))), 60)
