"""Weights are read into the L2 cache ahead of the kernels that multiply them.

Attention and norms of a few rows keep a few of a GPU's multiprocessors busy, and its
memory waits. Programs that have nothing else to do read weights of the next products.
No result depends on what they read.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt


PIECE = 4096  # elements of one read of a program
AT_ONCE = 4  # reads of a program that are in flight together


def beginning(weights: Sequence[jax.Array], num_bytes: int) -> list[jax.Array]:
    """The weights of which `num_bytes` are to be read, flat, in their order."""
    return [
        each.reshape(-1)
        for each, rounds in zip(weights, _rounds(weights, num_bytes), strict=True)
        if rounds
    ]


def _rounds(weights, num_bytes: int) -> list[int]:
    """How often all programs read of each array, `AT_ONCE` whole pieces at a time."""
    found, size = [], PIECE * AT_ONCE
    for each in weights:
        elements = min(num_bytes // each.dtype.itemsize, each.size)
        found.append(elements // size)
        num_bytes -= found[-1] * size * each.dtype.itemsize
    return found


def read(refs, out_ref, program: jax.Array, *, programs: int, num_bytes: int) -> None:
    """Reads a program's share of the first `num_bytes` of flat weights.

    Stores one number in `out_ref`, since what leaves no trace would not be read.
    """
    found = jnp.zeros((PIECE,), refs[0].dtype)
    for ref, rounds in zip(refs, _rounds(refs, num_bytes), strict=True):

        def one(turn, carry, ref=ref):
            first = (program + turn * programs) * (PIECE * AT_ONCE)
            at = first + jnp.arange(PIECE, dtype=jnp.int32)
            pieces = [plt.load(ref.at[at + i * PIECE]) for i in range(AT_ONCE)]
            return functools.reduce(jnp.maximum, pieces, carry)

        turns = jax.lax.div(rounds - program + programs - 1, programs)
        found = jax.lax.fori_loop(0, turns, one, found)
    out_ref[program] = jnp.max(found)
