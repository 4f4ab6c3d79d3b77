"""Cases of a table that wait for `pytest -m slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any, **named: Any) -> Any:
    """Returns one case of these values, marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow, **named)


def slow_but(cases: Iterable[Any], *quick: Any) -> list:
    """Marks all cases but the quick ones as slow; tuples are several values."""
    assert set(quick) <= set(cases)
    as_tuple = lambda case: case if isinstance(case, tuple) else (case,)
    return [case if case in quick else slow(*as_tuple(case)) for case in cases]
