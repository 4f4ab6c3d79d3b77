"""A mutant: one place of one function that says something else for a while.

The fault is planted in the function's code object and not under its name, so that
whoever holds the function, and every wrapper around it, has the fault: a test module
that compiled it when it was imported too.
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
    """A mutant whose function, or whose place in it, is not there any more."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A deliberate fault, and the test of the suite that must fail because of it.

    Attributes:
      name: what is wrong, in a few words.
      where: the function, `module:name` within `spec_jax`; a method is
        `module:Class.name`.
      old: source text that occurs in the function exactly once.
      new: what it says instead.
      caught_by: the test, as pytest names it from the folder `tests` on.
    """

    name: str
    where: str
    old: str
    new: str
    caught_by: str

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Keeps the fault in the package until the context ends.

        All that was traced, and what tests keep for each other, is forgotten before
        and after: an executable without the fault would hide it, and one with it, or
        what it computed, would be left to the next test.

        Raises:
          OutOfDateError: there is no such function, or no such place in it.
        """
        function = self._function()
        sound, faulty = function.__code__, self._faulty_code(function)
        function.__code__ = faulty
        _forget()
        try:
            yield
        finally:
            function.__code__ = sound
            _forget()

    def check(self) -> None:
        """Plants the fault and takes it back: nothing is run, and nothing forgotten.

        Raises as `planted`.
        """
        function = self._function()
        sound, function.__code__ = function.__code__, self._faulty_code(function)
        function.__code__ = sound

    def _function(self) -> types.FunctionType:
        try:
            return inspect.unwrap(pkgutil.resolve_name(f"spec_jax.{self.where}"))
        except (AttributeError, ImportError) as error:
            raise OutOfDateError(
                f"mutant {self.name!r}: there is no {self.where}; name the function "
                "that does its work now"
            ) from error

    def _faulty_code(self, function: types.FunctionType) -> types.CodeType:
        """Compiles `function` with `new` for `old`, at the same lines."""
        lines, first_line = inspect.getsourcelines(function)
        source = textwrap.dedent("".join(lines))
        if source.count(self.old) != 1:
            raise OutOfDateError(
                f"mutant {self.name!r}: {self.where} says {self.old!r} "
                f"{source.count(self.old)} times, not once; give it the text of today"
            )
        tree = ast.parse(source.replace(self.old, self.new))
        ast.increment_lineno(tree, first_line - 1)
        (definition,) = tree.body
        definition.decorator_list = []
        names: dict[str, types.FunctionType] = {}
        code = compile(tree, function.__code__.co_filename, "exec")
        exec(code, function.__globals__, names)
        return names[function.__name__].__code__


def _forget() -> None:
    """Forgets what jax has traced, and what functions of the tests have cached."""
    jax.clear_caches()
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None)).startswith(f"{TESTS}{os.sep}"):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


class _Errors:
    """A plugin that keeps what was raised in the phases of tests."""

    def __init__(self):
        self.raised: list[BaseException] = []

    def pytest_runtest_makereport(self, call):
        if call.excinfo is not None:
            self.raised.append(call.excinfo.value)


def failure(test: str) -> BaseException | None:
    """Runs a test of the suite in this process, and returns how it fails, if it does.

    Raises:
      LookupError: there is no such test, or it was skipped.
      BaseException: the test did not fail but crashed, which tells nothing.
    """
    errors = _Errors()
    options = "-q -q -s --no-header --no-summary -p no:cacheprovider -p no:faulthandler"
    code = pytest.main(
        [*options.split(), "-o", "addopts=", str(TESTS / test)], plugins=[errors]
    )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise OutOfDateError(f"pytest finds no test {test}: {code!r}")
    if not errors.raised:
        return None
    (error, *_) = errors.raised
    if isinstance(error, pytest.skip.Exception):
        raise LookupError(f"{test} was skipped: {error}")
    if not is_outcome(error):
        raise error
    return error


def is_outcome(error: BaseException) -> bool:
    """Whether an error says that something is wrong, or just that something broke.

    Assertions do, except those of jax itself, and so does what the package reports
    with a type that no slip of the pen raises.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    home = frame.f_globals["__name__"].partition(".")[0]
    if isinstance(error, (AssertionError, pytest.fail.Exception)):
        return home not in ("jax", "jaxlib")
    reported = (ValueError, RuntimeError, MemoryError, FloatingPointError)
    return home == "spec_jax" and isinstance(error, reported)
