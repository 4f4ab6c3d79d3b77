"""Faults of batches are caught, one at a time, by the tests of the suite."""

import checks
import pytest
import table
from batch_mutants import MUTANTS


pytestmark = pytest.mark.slow


NAMES = sorted({name for mutant in MUTANTS for name in mutant.caught_by})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant):
    """Fails if a check passes in spite of the fault, or the table says otherwise."""
    failures = table.catches(mutant)
    survived = [name for name, failure in failures.items() if failure is None]
    assert not survived
    assert table.row(mutant, failures) in table.rows_of(table.README.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_checks_pass_without_a_mutant(name):
    """The control: what failed above failed because of its mutant, and none is left."""
    assert checks.CHECKS[name].failure() is None
