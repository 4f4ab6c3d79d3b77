"""A weight matrix `[N, K]`: an array, or what an implementation's kernels made of it.

The native kernels read panels (`native/panels.py`). Ops take either form of a weight;
those that are not the kernels' own take a matrix, which is made where it is asked for.
"""

import jax

from spec_jax.native import calls, panels
from spec_jax.ops import bits


Panels = panels.Panels
Weight = calls.Weight


def prepare(w: Weight, impl: str) -> Weight:
    """The weight as the kernels of a resolved `impl` read it, in memory of its own.

    A weight that is in that form already is returned as it is.
    """
    if isinstance(w, panels.Panels):
        return w if impl == "native" else panels.unpack(w)
    return calls.pack(w) if impl == "native" else w


def matrix(w: Weight) -> jax.Array:
    """The weight as an array `[N, K]`."""
    return panels.unpack(w) if isinstance(w, panels.Panels) else w


def take_rows(w: Weight, index: jax.Array) -> jax.Array:
    """Rows `index [...]` of the weight, `[..., K]`."""
    if isinstance(w, panels.Panels):
        return panels.take_rows(w, index)
    return bits.take_rows(w, index)
