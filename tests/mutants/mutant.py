"""Faults: functions that are wrong for a while.

A fault is planted in the function's code object and not under its name, so that every
reference to the function and every wrapper around it has the fault, even in a test
module that compiled it when it was imported. A `Fault` puts a wrong function around the
sound one. A `Mutant` changes source text, which ties it to how the function is written:
it is for a line that no argument and no result shows.
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
from collections.abc import Callable, Iterator

import jax
import pytest


TESTS = pathlib.Path(__file__).parents[1]


class OutOfDateError(LookupError):
    """An error: a mutant's function, the place in it or the test no longer exists."""


@dataclasses.dataclass(frozen=True)
class _Planted:
    """A deliberate fault, and the test of the suite that must fail because of it."""

    name: str  # the fault, in a few words
    where: str  # the function, `module:name` or `module:Class.name` within `spec_jax`

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
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Fault(_Planted):
    """A fault that shows in a function's arguments or results."""

    wrong: Callable[[Callable], Callable]  # of the sound function, returns the faulty
    caught_by: str  # the test, as pytest names it from the folder `tests` on

    def _faulty_code(self, function: types.FunctionType) -> types.CodeType:
        """Returns code that calls the wrong function, whatever the arguments are."""
        sound = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        sound.__kwdefaults__ = function.__kwdefaults__
        wrong = self.wrong(sound)
        code = _call.__code__
        consts = (wrong if value == _WRONG else value for value in code.co_consts)
        return code.replace(
            co_consts=tuple(consts), co_freevars=function.__code__.co_freevars
        )


_WRONG = "the wrong function"


def _call(*args, **kwargs):
    wrong = "the wrong function"  # `Fault` puts the function in the constant's place.
    return wrong(*args, **kwargs)


def gives(change: Callable) -> Callable[[Callable], Callable]:
    """Returns a fault of the result: `change` of it."""
    return lambda sound: lambda *args, **kwargs: change(sound(*args, **kwargs))


def takes(**changes: Callable) -> Callable[[Callable], Callable]:
    """Returns a fault of arguments: the change of each, by the argument's name."""

    def wrong(sound):
        bind = _binds(sound, *changes)

        def call(*args, **kwargs):
            given = bind(*args, **kwargs)
            for name, change in changes.items():
                given.arguments[name] = change(given.arguments[name])
            return sound(*given.args, **given.kwargs)

        return call

    return wrong


def _binds(sound: Callable, *names: str) -> Callable[..., inspect.BoundArguments]:
    """Returns what binds a call's arguments, which have those of these names."""
    signature = inspect.signature(sound)
    if absent := {*names} - signature.parameters.keys():
        raise OutOfDateError(f"{sound.__qualname__} does not take {absent}")

    def bind(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return given

    return bind


def fields(**changes: Callable) -> Callable:
    """Returns a change of a node: the change of each field, by the field's name."""
    return lambda node: node.replace(
        **{name: change(getattr(node, name)) for name, change in changes.items()}
    )


def item(number: int, change: Callable) -> Callable:
    """Returns a change of a tuple: the change of one item."""
    return lambda all_: (*all_[:number], change(all_[number]), *all_[number + 1 :])


def returns(name: str) -> Callable[[Callable], Callable]:
    """Returns a fault of the result: an argument, as it was given."""

    def wrong(sound):
        bind = _binds(sound, name)
        return lambda *args, **kwargs: bind(*args, **kwargs).arguments[name]

    return wrong


@dataclasses.dataclass(frozen=True)
class Mutant(_Planted):
    """A fault of one place in a function's source text."""

    old: str  # source text that occurs in the function exactly once
    new: str  # source text that takes its place
    caught_by: str  # the test, as pytest names it from the folder `tests` on

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
