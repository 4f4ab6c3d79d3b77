"""Compiles the programs whose bits are promised.

On a GPU, XLA by default times several ways to compile a fusion and takes the fastest:
two processes, or two programs with the same fusion, may then round differently. Exact
programs are compiled without this autotuning.
"""

import functools
import inspect
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax


UNSAFE_COMMANDS = ("WHILE", "CONDITIONAL")
"""Commands of CUDA graphs, as XLA names them, with which results were wrong."""

ALLOW_VARIABLE = "SPEC_JAX_ALLOW_COMMAND_BUFFERS"


def options(platform: str) -> dict[str, bool]:
    """Returns the compiler's options on a platform of jax; {} except on "gpu"."""
    if platform != "gpu":
        return {}
    return {"xla_gpu_experimental_enable_fusion_autotuner": False}


def describe() -> dict[str, Any]:
    """Returns this backend's options, as an entry of results; {} if it has none."""
    found = options(jax.default_backend())
    return {"compiler_options": found} if found else {}


def check_flags() -> None:
    """Raises `ValueError` if XLA_FLAGS put loops or branches into CUDA graphs.

    Rounds then gave wrong tokens and K/V (jax 0.11.2, an H100). The environment
    variable `ALLOW_VARIABLE` set to 1 allows it, for measurements.
    """
    found = _captured(os.environ.get("XLA_FLAGS", ""))
    if found and os.environ.get(ALLOW_VARIABLE) != "1":
        raise ValueError(
            f"XLA_FLAGS: --xla_gpu_enable_command_buffer has {' and '.join(found)}, "
            "with which rounds on a GPU gave wrong tokens and K/V: leave that out, or "
            f"set {ALLOW_VARIABLE}=1 to run it all the same"
        )


def _captured(flags: str) -> list[str]:
    """Returns which of `UNSAFE_COMMANDS` the flags name, read as XLA reads them.

    A list of names replaces the names before it; a list of +NAME and -NAME adds to them
    and removes from them. Flags without a leading dash name a file of flags.
    """
    if flags.strip() and not flags.lstrip().startswith("-"):
        path = pathlib.Path(flags.strip())
        flags = path.read_text() if path.is_file() else ""
    found: set[str] = set()
    pattern = r"--?xla_gpu_enable_command_buffer=[\"']?([\w+,-]*)"
    for names in re.findall(pattern, flags):
        if not re.match(r"[+-]", names):
            found = set()
        for name in names.upper().split(","):
            change = found.discard if name.startswith("-") else found.add
            change(name.lstrip("+-"))
    return [name for name in UNSAFE_COMMANDS if name in found]


class Jitted:
    """`jax.jit` of a function, with `options` of the backend that jax runs on.

    It has the attributes of a jitted function, such as `lower`. Called while another
    function is traced, it becomes a part of that one, whose options hold.
    """

    def __init__(
        self, function: Callable, *, donate_argnames: tuple[str, ...] = (), **how: Any
    ):
        functools.update_wrapper(self, function)
        names = list(inspect.signature(function).parameters) if donate_argnames else []
        self._donated = [(name, names.index(name)) for name in donate_argnames]
        self._how = how | {"donate_argnames": donate_argnames}
        self._plain = jax.jit(function, **self._how)

    def __call__(self, *args, **kwargs):
        """Runs the function, as `jax.jit` does.

        Raises:
          ValueError: a donated argument whose buffers an earlier call was given.
        """
        for name, place in self._donated:
            given = args[place : place + 1], kwargs.get(name)
            if any(map(_is_deleted, jax.tree.leaves(given))):
                raise ValueError(
                    f"the {name} was used up by an earlier call, and its buffers are "
                    f"gone: give {self.__qualname__} the {name} that the call "
                    "returned, or a new one; to keep one, copy it first: "
                    f"jax.tree.map(jnp.copy, {name})"
                )
        jitted = self._jitted
        if jitted is not self._plain and _is_traced((args, kwargs)):
            jitted = self._plain
        return jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_plain" not in self.__dict__:  # Not made yet, as while it is copied.
            raise AttributeError(name)
        return getattr(self._jitted, name)

    @property
    def _jitted(self) -> Any:
        # Not at decoration: asking for the backend would start it.
        return self._on_gpu if options(jax.default_backend()) else self._plain

    @functools.cached_property
    def _on_gpu(self) -> Any:
        return jax.jit(self.__wrapped__, compiler_options=options("gpu"), **self._how)


def jit(function: Callable, **how: Any) -> Jitted:
    """Returns the `Jitted` of a function; used as `jax.jit` is."""
    return Jitted(function, **how)


def _is_deleted(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and leaf.is_deleted()


def _is_traced(values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
