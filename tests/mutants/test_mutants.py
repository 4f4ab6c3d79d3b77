"""Planted faults, one at a time: each is caught by a test of the ordinary suite."""

import dataclasses
import functools

import core_mutants
import engine_mutants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutant import Mutant, OutOfDateError, failure, is_outcome

from spec_jax.ops import page_write
from spec_jax.paging import index
from spec_jax.rules import acceptance


MUTANTS = (*core_mutants.MUTANTS, *engine_mutants.MUTANTS)
CHECKS = sorted({mutant.caught_by for mutant in MUTANTS})

# In place of the branch for whole numbers of the host: for arrays too.
_ON_THE_HOST = "if not isinstance(length, jax.Array):"
HARMLESS = Mutant(
    name="the same in other words",
    where="paging.index:pages_for",
    old=f"{_ON_THE_HOST}\n        return -(-length // page_size)",
    new="if True:\n        return -((0 - length) // page_size)",
    caught_by="paging/test_index.py::test_pages_for_covers_exactly[4]",
)
FAULTY = dataclasses.replace(
    HARMLESS, new="if True:\n        return length // page_size + 1"
)
CRASHING = dataclasses.replace(HARMLESS, new="return length // page_size.nothing")
_pages_for = jax.jit(index.pages_for, static_argnames=("page_size",))


@functools.cache
def _kept(length: int) -> int:
    """What a helper of the tests works out once."""
    return index.pages_for(length, 4)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant):
    """Fails if a test passes in spite of the fault that it is there to catch."""
    with mutant.planted():
        assert failure(mutant.caught_by) is not None


@pytest.mark.slow
@pytest.mark.parametrize("test", CHECKS)
def test_checks_pass_without_a_mutant(test):
    """The control: what failed above failed because of its mutant, and none is left."""
    assert failure(test) is None


def test_mutants_are_up_to_date():
    """Fails if a fault can no longer be planted, or is there twice."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.where, mutant.old, mutant.new) for mutant in MUTANTS}) == len(
        MUTANTS
    )
    for mutant in MUTANTS:
        mutant.check()


@pytest.mark.slow
def test_whoever_holds_the_function_has_the_fault():
    """Fails if an executable, what a test has cached, or a function held elsewhere,
    escapes the fault or keeps it."""
    held, eight = index.pages_for, jnp.int32(8)
    assert int(_pages_for(eight, page_size=4)) == held(8, 4) == _kept(8) == 2
    with pytest.raises(KeyboardInterrupt), FAULTY.planted():
        assert int(_pages_for(eight, page_size=4)) == held(8, 4) == _kept(8) == 3
        raise KeyboardInterrupt
    assert int(_pages_for(eight, page_size=4)) == held(8, 4) == _kept(8) == 2


@pytest.mark.slow
def test_what_a_fault_gives():
    """A fault fails its test; a harmless change does not, and a crash tells nothing."""
    with FAULTY.planted():
        assert isinstance(failure(FAULTY.caught_by), AssertionError)
    with HARMLESS.planted():
        assert failure(HARMLESS.caught_by) is None
    with CRASHING.planted(), pytest.raises(AttributeError, match="nothing"):
        failure(CRASHING.caught_by)
    for gone in ("paging/test_index.py::test_gone", "paging/test_gone.py"):
        with pytest.raises(OutOfDateError, match="pytest finds no test paging/test_"):
            failure(gone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"where": "paging.index:gone"}, "there is no paging.index:gone"),
        ({"where": "gone:locate"}, "there is no gone:locate"),
        (
            {"old": "length * page_size"},
            r"says 'length \* page_size' 0 times, not once",
        ),
        ({"old": "page_size"}, r"says 'page_size' \d+ times, not once"),
    ],
)
def test_mutants_that_are_out_of_date(changes, message):
    """Fails if a fault that can no longer be planted passes for a caught one."""
    mutant = dataclasses.replace(HARMLESS, **changes)
    with pytest.raises(OutOfDateError, match=message):
        mutant.check()
    with pytest.raises(OutOfDateError, match=message), mutant.planted():
        pass


def _nothing_raised():
    with pytest.raises(ValueError):
        acceptance.PAD.bit_length()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: np.testing.assert_array_equal(1, 2), True),
        (_nothing_raised, True),
        (lambda: jnp.zeros((2,)) + jnp.zeros((3,)), False),
        (lambda: page_write.locate(None, 1, None, None), False),
    ],
)
def test_what_is_an_outcome(function, expected):
    """Fails if a crash counts as one, or an assertion does not."""
    try:
        function()
    except (Exception, pytest.fail.Exception) as error:
        found = is_outcome(error)
    assert found == expected
