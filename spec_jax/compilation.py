"""How programs whose bits are promised are compiled.

On a GPU, XLA by default times several ways to compile a fusion and takes the fastest:
two processes, or two programs with fusions of one meaning, may then round differently.
Exact programs are compiled without that.

On a CPU each operation that XLA does not fuse is a kernel: to compile one takes some
ten milliseconds, and to start one as long as some hundred additions. `one_kernel` makes
one of all that a function of a few integers does.
"""

import contextlib
import functools
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
    """Returns the compiler's options on a platform of jax; none but on a GPU."""
    if platform != "gpu":
        return {}
    return {"xla_gpu_experimental_enable_fusion_autotuner": False}


def describe() -> dict[str, Any]:
    """Returns the options here, as results state them: nothing where there are none."""
    found = options(jax.default_backend())
    return {"compiler_options": found} if found else {}


def check_flags() -> None:
    """Raises `ValueError` if XLA_FLAGS put loops or branches into CUDA graphs.

    Rounds then gave wrong tokens and K/V (jax 0.11.2, an H100). `ALLOW_VARIABLE` set to
    1 lets it be measured.
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

    A list of names replaces what was asked for before; one of +NAME and -NAME changes
    it. Flags without a dash are the name of a file of flags.
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

    All that `jax.jit` gives a function, such as `lower`, is there too. Called while
    another function is traced it is a part of that one, whose options hold.
    """

    def __init__(self, function: Callable, **how: Any):
        functools.update_wrapper(self, function)
        self._how = how
        self._plain = jax.jit(function, **how)

    def __call__(self, *args, **kwargs):
        """Runs the function, as `jax.jit` does."""
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
        # Not when it is decorated: jax would start its backend to be asked.
        return self._on_gpu if options(jax.default_backend()) else self._plain

    @functools.cached_property
    def _on_gpu(self) -> Any:
        return jax.jit(self.__wrapped__, compiler_options=options("gpu"), **self._how)


def jit(function: Callable, **how: Any) -> Jitted:
    """Returns `Jitted` of a function, to be used as `jax.jit` is."""
    return Jitted(function, **how)


# Operations that the compiler of `one_kernel` takes. It has no scatters, sorts or calls
# of other kernels; loops and branches that leave a value unread end the process.
_TAKEN = frozenset(
    """
    add and argmax argmin broadcast_in_dim clamp concatenate convert_element_type
    cumprod cumsum div dynamic_slice dynamic_update_slice eq gather ge gt iota
    is_finite jit le lt max min mul ne neg not or pad pjit reduce_and reduce_max
    reduce_min reduce_or reduce_sum rem reshape rev select_n sign slice split squeeze
    sub transpose xor
    """.split()
)
# Floats are only moved: it may contract operations that other compilers round twice.
_MOVES = frozenset(
    """
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather jit pad pjit
    reshape rev select_n slice split squeeze transpose
    """.split()
)
_MARKS = {"inlineable": "false", "xla_cpu_small_call": "true"}
_SMALL = 256  # elements: the columns of the widest window
_tracing = threading.local()


def one_kernel(function: Callable) -> Callable:
    """Has XLA make one kernel of a function on a CPU: bookkeeping of a few integers.

    No value changes, and nothing does on other platforms, outside of a trace, and where
    the function does what such a kernel cannot, as scattering or adding floats. Arrays
    that it passes on or never reads take no part, as the pages of a cache. A function
    within it that is decorated too is a part of its kernel.

    Args:
      function: of pytrees; leaves that are no arrays of jax are static. Where it reads
        an array of more than 256 elements and returns one of that shape, the second
        depends on the first.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        """Calls the function, as one kernel where it is traced outside of another."""
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
    """Returns what a traced function makes of arrays, as one kernel on a CPU."""
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
        """Computes what is asked in a kernel of its own."""

        def run(*values):
            with xla_metadata.set_xla_metadata(**dict.fromkeys(_MARKS)):
                results = compute(*values)
            # XLA's compiler ends the process over an argument that nothing reads, as
            # may happen once constants are folded: what is returned is read. A large
            # array that is changed in place would be copied for that.
            changed = {_kind(result) for result in results}
            kept = [v for v in values if v.size <= _SMALL or _kind(v) not in changed]
            return results, jax.lax.optimization_barrier(kept)

        with xla_metadata.set_xla_metadata(**_MARKS):
            returned = jax.jit(run)(*values)
        return jax.lax.optimization_barrier(returned)[0]  # So that all is returned.

    found = dict(known)
    if asked:
        values = (known[v] for v in read)
        results = jax.lax.platform_dependent(*values, cpu=as_one, default=compute)
        found |= zip(asked, results, strict=True)
    return [v.val if isinstance(v, core.Literal) else found[v] for v in jaxpr.outvars]


def _is_in(variable: Any, variables: Any) -> bool:
    """Returns whether a variable is in a set; literals, unhashable, never are."""
    return not isinstance(variable, core.Literal) and variable in variables


def _kind(value: jax.Array) -> tuple[Any, ...]:
    return value.shape, value.dtype


def _primitives(jaxpr: core.Jaxpr) -> set[str]:
    """Returns the names of all that a traced function does, and what it calls; of what
    it does with floats but for moving them, other names."""
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
