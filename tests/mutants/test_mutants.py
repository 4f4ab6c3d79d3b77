"""Planted faults, one at a time: each is caught by a test of the ordinary suite."""

import dataclasses

import core_mutants
import engine_mutants
import pytest
from mutant import Fault, Mutant, OutOfDateError, failure, gives, takes
from slow_cases import slow_but


MUTANTS = (*core_mutants.MUTANTS, *engine_mutants.MUTANTS)
CHECKS = sorted({mutant.caught_by for mutant in MUTANTS})

# The branch for Python integers, which these mutants take for arrays, too.
HARMLESS = Mutant(
    "the same in other words",
    "paging.index:pages_for",
    "if not isinstance(length, jax.Array):\n        return -(-length // page_size)",
    "if True:\n        return -((0 - length) // page_size)",
    "paging/test_cache.py::test_pages_for_covers_exactly[4]",
)
FAULTY, CRASHING = (
    dataclasses.replace(
        HARMLESS, new=f"if True:\n        return length // page_size{x}"
    )
    for x in (" + 1", ".nothing")
)
AROUND = [
    Fault(name, HARMLESS.where, gives(change), HARMLESS.caught_by)
    for name, change in {
        "nothing else": lambda pages: pages + 0,
        "a page too many": lambda pages: pages + 1,
        "no such attribute": lambda pages: pages.nothing,
    }.items()
]


QUICK = (
    "rows are one position late",
    "a draft more than was accepted is committed",
    "in a tree the residual is not subtracted: multipath",
    "a page is handed out twice",
)
"""A fault of rows, of rounds, of rules and of pages."""
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.parametrize("name", slow_but(BY_NAME, *QUICK))
def test_mutants_are_caught(name):
    """Fails if a test passes in spite of the fault that it must catch."""
    mutant = BY_NAME[name]
    with mutant.planted():
        assert failure(mutant.caught_by) is not None


@pytest.mark.slow
@pytest.mark.parametrize("test", CHECKS)
def test_checks_pass_without_a_mutant(test):
    """Fails if a test fails without its mutant, or a fault was left in the package."""
    assert failure(test) is None


def test_mutants_are_up_to_date():
    """Fails if a fault can no longer be planted, or is listed twice."""
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(set(MUTANTS)) == len(MUTANTS)
    for mutant in MUTANTS:
        with mutant.planted(forgets=False):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[HARMLESS, FAULTY, CRASHING], AROUND])
def test_what_a_fault_gives(faults):
    """Fails if a fault passes, a harmless change fails, or a crash is no error."""
    harmless, faulty, crashing = faults
    with faulty.planted():
        assert isinstance(failure(faulty.caught_by), AssertionError)
    with harmless.planted():
        assert failure(harmless.caught_by) is None
    with crashing.planted(), pytest.raises(AttributeError, match="nothing"):
        failure(crashing.caught_by)


def test_what_is_not_there_is_named():
    """Fails if a fault or a check that no longer exists passes for one that does."""
    for gone in ("paging/test_cache.py::test_gone", "paging/test_gone.py"):
        with pytest.raises(OutOfDateError, match="pytest finds no test paging/test_"):
            failure(gone)
    stale = [
        dataclasses.replace(AROUND[0], wrong=takes(nothing=int)),
        dataclasses.replace(AROUND[0], where="paging.index:nothing"),
        dataclasses.replace(HARMLESS, old="nothing"),
    ]
    for fault in stale:
        with pytest.raises(OutOfDateError, match="nothing"), fault.planted():
            pass
