"""A mutant: a function of which one place has other source text for a while.

The fault is planted in the function's code object and not under its name, so that
every reference to the function and every wrapper around it has the fault, even in a
test module that compiled it when it was imported.
"""

import ast
import contextlib
import dataclasses
import inspect
import os
import pathlib
import pkgutil
import sys
import textwrap
import traceback
import types
from collections.abc import Iterator

import jax
import pytest


TESTS = pathlib.Path(__file__).parents[1]


class OutOfDateError(LookupError):
    """An error: a mutant's function, the place in it or the test no longer exists."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A deliberate fault, and the test of the suite that must fail because of it."""

    name: str  # the fault, in a few words
    where: str  # the function, `module:name` or `module:Class.name` within `spec_jax`
    old: str  # source text that occurs in the function exactly once
    new: str  # source text that takes its place
    caught_by: str  # the test, as pytest names it from the folder `tests` on

    @contextlib.contextmanager
    def planted(self, *, forgets: bool = True) -> Iterator[None]:
        """Keeps the fault in the package until the context ends.

        Raises `OutOfDateError` if there is no such function, or no such place in it.

        Args:
          forgets: clear traces of jax and caches of tests before and after: programs
            and results without the fault would hide it, and those with it would stay.
        """
        function = self._function()
        sound, function.__code__ = function.__code__, self._faulty_code(function)
        try:
            if forgets:
                _forget()
            yield
        finally:
            function.__code__ = sound
            if forgets:
                _forget()

    def _function(self) -> types.FunctionType:
        try:
            return inspect.unwrap(pkgutil.resolve_name(f"spec_jax.{self.where}"))
        except (AttributeError, ImportError) as error:
            raise OutOfDateError(f"{self.name!r}: there is no {self.where}") from error

    def _faulty_code(self, function: types.FunctionType) -> types.CodeType:
        """Compiles `function` with `new` in place of `old`, from the same line on."""
        lines, first_line = inspect.getsourcelines(function)
        source = textwrap.dedent("".join(lines))
        if (count := source.count(self.old)) != 1:
            said = f"{self.where} says {self.old!r} {count} times, not once"
            raise OutOfDateError(f"{self.name!r}: {said}; give it the text of today")
        tree = ast.parse(source.replace(self.old, self.new))
        ast.increment_lineno(tree, first_line - 1)
        (definition,) = tree.body
        definition.decorator_list = []
        names: dict[str, types.FunctionType] = {}
        code = compile(tree, function.__code__.co_filename, "exec")
        exec(code, function.__globals__, names)
        return names[function.__name__].__code__


def _forget() -> None:
    """Clears the traces of jax, and the caches of functions of the tests."""
    jax.clear_caches()
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None)).startswith(f"{TESTS}{os.sep}"):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


class _Errors:
    """A pytest plugin that keeps the exceptions raised in the phases of tests."""

    def __init__(self):
        self.raised: list[BaseException] = []

    def pytest_runtest_makereport(self, call):
        if call.excinfo is not None:
            self.raised.append(call.excinfo.value)


def failure(test: str) -> BaseException | None:
    """Runs a test of the suite in this process; returns its failure, None if it passes.

    Raises:
      LookupError: there is no such test, or it was skipped.
      BaseException: the test did not fail but crashed, which shows nothing.
    """
    errors = _Errors()
    options = "-q -q -s --no-header --no-summary -p no:cacheprovider -p no:faulthandler"
    given = [*options.split(), "-o", "addopts=", str(TESTS / test)]
    code = pytest.main(given, plugins=[errors])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise OutOfDateError(f"pytest finds no test {test}: {code!r}")
    if not errors.raised:
        return None
    error = errors.raised[0]
    if isinstance(error, pytest.skip.Exception):
        raise LookupError(f"{test} was skipped: {error}")
    if not is_outcome(error):
        raise error
    return error


def is_outcome(error: BaseException) -> bool:
    """Returns whether an error is the outcome of a check, and not of a broken program.
    Outcomes are failed assertions, except those of jax itself, and errors that the
    package raises itself, of types that no typing mistake in a mutant raises."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    home = frame.f_globals["__name__"].partition(".")[0]
    if isinstance(error, (AssertionError, pytest.fail.Exception)):
        return home not in ("jax", "jaxlib")
    reported = (ValueError, RuntimeError, MemoryError, FloatingPointError)
    return home == "spec_jax" and isinstance(error, reported)
