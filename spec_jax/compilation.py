"""How programs whose bits are promised are compiled.

On a GPU, XLA by default times several ways to compile a fusion and takes the fastest:
two processes, or two programs with fusions of one meaning, may then round differently.
Exact programs are compiled without that.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def options(platform: str) -> dict[str, bool]:
    """Returns the compiler's options on a platform of jax; none but on a GPU."""
    if platform != "gpu":
        return {}
    return {"xla_gpu_experimental_enable_fusion_autotuner": False}


def describe() -> dict[str, Any]:
    """Returns the options here, as results state them: nothing where there are none."""
    found = options(jax.default_backend())
    return {"compiler_options": found} if found else {}


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


def _is_traced(values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
