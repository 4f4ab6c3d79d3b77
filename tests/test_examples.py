"""Examples of docstrings run as they are, and print what they promise."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["algorithms", "generation", "loading", "lossless"])
def test_examples_of_the_docstrings_run(module):
    """As they stand there, on the embedded pair."""
    module = importlib.import_module(f"spec_jax.{module}")
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert tests
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        assert runner.run(test).failed == 0, test.name


def test_a_failing_example_is_seen():
    """Negative control of the above."""
    parsed = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "it", None, 0)
    said = []
    assert doctest.DocTestRunner().run(parsed, out=said.append).failed == 1 and said
