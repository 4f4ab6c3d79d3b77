"""A mutant: one place of one function that says something else for a while.

The fault is planted in the function's code object and not under its name, so that
whoever holds the function, and every wrapper around it, has the fault: a test module
that compiled it when it was imported too. Executables that were made before are
forgotten, and those made meanwhile are forgotten afterwards.
"""

import ast
import contextlib
import dataclasses
import gc
import inspect
import pkgutil
import textwrap
import types
from collections.abc import Iterator

import jax


NOT_TRACED = {"spec_jax.metrics", "spec_jax.session"}
"""Modules that run on the host: no executable has their faults."""

ROUNDS_ONLY = {
    "spec_jax.acceptance",
    "spec_jax.drafters.draft_model",
    "spec_jax.rounds",
}
"""Modules that are traced in rounds alone: the executables of `DECODING` may stay."""

DECODING = (
    "spec_jax.autoregressive",
    "spec_jax.model",
    "spec_jax.ops",
    "spec_jax.paging",
)
"""Where functions live whose executables never have anything of `ROUNDS_ONLY` in them.

Not where those live: a test may compile one of them by itself.
"""


_JITTED = type(jax.jit(lambda: None))


class OutOfDateError(LookupError):
    """A mutant whose function, or whose place in it, is not there any more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """A deliberate fault, and the checks of the suite that must tell.

    Attributes:
      name: what is wrong, in a few words.
      where: the function, `module:name`; a method is `module:Class.name`.
      old: source text that stands in the function exactly once.
      new: what it says instead.
      caught_by: names of `checks.CHECKS`, each of which must fail.
    """

    name: str
    where: str
    old: str
    new: str
    caught_by: tuple[str, ...]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in the package until the context ends.

        Raises:
          OutOfDateError: there is no such function, or no such place in it.
        """
        function = self._function()
        whole, faulty = function.__code__, self._faulty_code(function)
        self._forget_executables()
        function.__code__ = faulty
        try:
            yield
        finally:
            function.__code__ = whole
            self._forget_executables()

    def _function(self) -> types.FunctionType:
        try:
            return inspect.unwrap(pkgutil.resolve_name(self.where))
        except (AttributeError, ImportError) as error:
            raise OutOfDateError(
                f"mutant {self.name!r}: there is no {self.where}; name the "
                "function that does its work now"
            ) from error

    def _faulty_code(self, function: types.FunctionType) -> types.CodeType:
        """The code of `function` with `new` for `old`, at the same lines."""
        lines, first_line = inspect.getsourcelines(function)
        source = textwrap.dedent("".join(lines))
        if source.count(self.old) != 1:
            raise OutOfDateError(
                f"mutant {self.name!r}: {self.where} says {self.old!r} "
                f"{source.count(self.old)} times, not once; give it the text that "
                "stands there now"
            )
        tree = ast.parse(source.replace(self.old, self.new))
        ast.increment_lineno(tree, first_line - 1)
        (definition,) = tree.body
        definition.decorator_list = []
        names: dict[str, types.FunctionType] = {}
        code = compile(tree, function.__code__.co_filename, "exec")
        exec(code, function.__globals__, names)
        return names[function.__name__].__code__

    def _forget_executables(self) -> None:
        """Evicts whatever may have been traced through the function.

        Not `jax.clear_caches`: the library's own operations would all be compiled
        again, which takes longer than most checks.
        """
        where = self.where.partition(":")[0]
        if where in NOT_TRACED:
            return
        # Wherever they are held: in modules, dictionaries, caches of functions.
        for held in gc.get_objects():
            if type(held) is not _JITTED:
                continue
            home = getattr(held, "__module__", None) or ""
            is_library = home.partition(".")[0] == "jax"
            decodes = any(home == at or home.startswith(f"{at}.") for at in DECODING)
            if not is_library and not (where in ROUNDS_ONLY and decodes):
                held.clear_cache()
