"""Compiles the programs whose bits are promised.

On a GPU, XLA by default times several ways to compile a fusion and takes the fastest:
two processes, or two programs with the same fusion, may then round differently. Exact
programs are compiled without this autotuning.

On a CPU each operation that XLA does not fuse is a kernel: to compile a kernel takes
about ten milliseconds, and to start one as long as about a hundred additions.
`one_kernel` compiles a function of a few integers to one kernel.
"""

import contextlib
import functools
import inspect
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import xla_metadata
from jax.extend import core


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


# Operations that XLA can compile in `one_kernel`: no scatters, sorts or calls of other
# kernels. Loops and branches with a value that nothing reads crash the process.
_TAKEN = frozenset(
    """
    add and argmax argmin broadcast_in_dim clamp concatenate convert_element_type
    cumprod cumsum div dynamic_slice dynamic_update_slice eq gather ge gt iota
    is_finite jit le lt max min mul ne neg not or pad pjit reduce_and reduce_max
    reduce_min reduce_or reduce_sum rem reshape rev select_n sign slice split squeeze
    sub transpose xor
    """.split()
)
# The operations allowed on floats: arithmetic might be contracted, and round once less.
_MOVES = frozenset(
    """
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather jit pad pjit
    reshape rev select_n slice split squeeze transpose
    """.split()
)
_MARKS = {"inlineable": "false", "xla_cpu_small_call": "true"}
_SMALL = 256  # elements; the widest window has as many columns
_tracing = threading.local()


def one_kernel(function: Callable) -> Callable:
    """Has XLA compile a function to one kernel on a CPU: bookkeeping of integers.

    Values stay the same. The function is called as it is on other platforms, outside of
    a trace, and if it needs an operation that such a kernel lacks (a scatter, a sum of
    floats). Arrays that it returns unchanged or never reads, such as a cache's pages,
    stay outside of the kernel. A decorated function that it calls joins its kernel.

    Args:
      function: of pytrees, whose leaves are static unless they are `jax.Array`s. If it
        reads an array of more than 256 elements and returns one of the same shape and
        dtype, the returned array must depend on the one read.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        """Calls the function; as one kernel if traced, and not within another one."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        if getattr(_tracing, "one_kernel", False) or not _is_traced(leaves):
            return function(*args, **kwargs)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def of_arrays(*values):
            given = dict(enumerate(leaves)) | dict(zip(places, values, strict=True))
            args, kwargs = jax.tree.unflatten(structure, given.values())
            return function(*args, **kwargs)

        arrays = [leaves[i] for i in places]
        with _within_one_kernel():
            closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        if not _primitives(closed.jaxpr) <= _TAKEN:
            return function(*args, **kwargs)
        return jax.tree.unflatten(jax.tree.structure(shapes), _run(closed, arrays))

    return call


def _run(closed: core.ClosedJaxpr, arrays: list[jax.Array]) -> list[Any]:
    """Returns a traced function's results for arrays; on a CPU by one kernel."""
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    known = dict(zip(inputs, [*closed.consts, *arrays], strict=True))
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    asked = list(dict.fromkeys(v for v in jaxpr.outvars if _is_in(v, made)))
    read = [v for eqn in jaxpr.eqns for v in eqn.invars if _is_in(v, known)]
    read = list(dict.fromkeys(read))

    def compute(*values):
        now = known | dict(zip(read, values, strict=True))
        whole = core.ClosedJaxpr(jaxpr, [now[v] for v in jaxpr.constvars])
        outputs = core.jaxpr_as_fun(whole)(*(now[v] for v in jaxpr.invars))
        by_place = zip(jaxpr.outvars, outputs, strict=True)
        found = {v: output for v, output in by_place if _is_in(v, made)}
        return [found[v] for v in asked]

    def as_one(*values):
        """Computes the results that were `asked` in a kernel of its own."""

        def run(*values):
            with xla_metadata.set_xla_metadata(**dict.fromkeys(_MARKS)):
                results = compute(*values)
            # XLA's compiler crashes on an argument that nothing reads, which constant
            # folding may bring about: arguments are returned, and so are read. A large
            # array that is changed in place is not: it would be copied.
            changed = {_kind(result) for result in results}
            kept = [v for v in values if v.size <= _SMALL or _kind(v) not in changed]
            return results, jax.lax.optimization_barrier(kept)

        with xla_metadata.set_xla_metadata(**_MARKS):
            returned = jax.jit(run)(*values)
        return jax.lax.optimization_barrier(returned)[0]  # Keeps all results alive.

    found = dict(known)
    if asked:
        values = (known[v] for v in read)
        results = jax.lax.platform_dependent(*values, cpu=as_one, default=compute)
        found |= zip(asked, results, strict=True)
    return [v.val if isinstance(v, core.Literal) else found[v] for v in jaxpr.outvars]


def _is_in(variable: Any, variables: Any) -> bool:
    """Returns whether a variable is in a set; unhashable literals never are."""
    return not isinstance(variable, core.Literal) and variable in variables


def _kind(value: jax.Array) -> tuple[Any, ...]:
    return value.shape, value.dtype


def _primitives(jaxpr: core.Jaxpr) -> set[str]:
    """Returns the primitives of a traced function and of all that it calls, by name; a
    name that is not in `_MOVES` gets the suffix " of floats" if its results are."""
    names = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        floats = [v for v in eqn.outvars if _is_float(v)]
        names.add(f"{name} of floats" if floats and name not in _MOVES else name)
        for inner in core.jaxprs_in_params(eqn.params):
            names |= _primitives(inner)
    return names


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


@contextlib.contextmanager
def _within_one_kernel() -> Iterator[None]:
    _tracing.one_kernel = True
    try:
        yield
    finally:
        _tracing.one_kernel = False


def _is_traced(values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
