"""Bandwidth: how fast this machine reads memory, and how many bytes a step reads.

A decoding step reads every weight once and computes little, so that a plain read of
as many bytes is what it can be measured against.
"""

import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import timing
from spec_jax.model import params as params_lib


LARGE_READ_BYTES = 256 * 2**20
"""Far more than any last-level cache: what is read comes from memory."""

_CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
# XLA's threads share the work along the first dimension.
_PARTS = 64
# Large enough that Python's part in a read does not count, and several for each core.
_PIECE_WORDS = 2**20 // 8


def step_bytes(params: params_lib.Params) -> int:
    """Bytes of weights that one step reads.

    An embedding that is not tied to the head is left out: a step reads a row of it.
    """
    return params_lib.num_bytes((params.layers, params.final_norm, params.head))


def read(num_bytes: int) -> timing.Thunk:
    """Reads an array of `num_bytes` on all cores: a sum in float32.

    It was read just before, so that an array that fits into the last-level cache is
    read from there, as weights of the same size are in a step.
    """
    columns = max(1, num_bytes // (4 * _PARTS))
    array = jnp.ones((_PARTS, columns), jnp.float32)
    total = jax.jit(jnp.sum)
    return timing.stopwatch(lambda _: total(array), lambda: total(array))


def host_read(num_bytes: int) -> Callable[[int], None]:
    """A function that reads an array of the host as often as it is told, on all cores.

    Reads memory as fast as XLA's sum does, and what lies in a cache twice as fast.
    Waking the threads takes long: it is to be called for a millisecond of reading.

    Args:
      num_bytes: of the array, rounded up to whole words.
    """
    words = np.ones(math.ceil(num_bytes / 8), np.uint64)
    num_threads = _num_usable_cores()
    size = min(_PIECE_WORDS, math.ceil(words.size / num_threads))
    pieces = [words[at : at + size] for at in range(0, words.size, size)]
    pool = futures.ThreadPoolExecutor(num_threads)

    def read_some(remaining: Iterator[np.ndarray]) -> None:
        # Bitwise, because a sum of floats has an order; NumPy lets other threads run.
        for piece in remaining:
            np.bitwise_or.reduce(piece)

    def read(passes: int) -> None:
        # One iterator for all: a core that is interrupted takes fewer pieces.
        remaining = iter(pieces * passes)
        for done in [pool.submit(read_some, remaining) for _ in range(num_threads)]:
            done.result()

    return read


def device_copy(num_bytes: int) -> Callable[[int], jax.Array]:
    """A function that moves `num_bytes` on JAX's device as often as it is told.

    Half of them are read and half are written, as for any copy.
    """
    array = jnp.zeros((max(1, num_bytes // 8),), jnp.uint32)
    increment = jax.jit(lambda x: x + jnp.uint32(1))

    def copy(passes: int) -> jax.Array:
        for _ in range(passes):
            copied = increment(array)
        return copied

    return copy


def _num_usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache that core 0 can use, where Linux tells it."""
    sizes = []
    for path in _CACHES.glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=None)


def summarise(
    params: params_lib.Params,
    *,
    step_s: Sequence[float],
    read_s: Sequence[float],
    large_read_s: Sequence[float],
) -> dict[str, float | int | bool | None]:
    """What a step achieves of what a plain read of as many bytes does.

    Args:
      step_s: seconds of a plain step, in each turn.
      read_s: of `read(step_bytes(params))`, in the same turns.
      large_read_s: of `read(max(step_bytes(params), LARGE_READ_BYTES))`.
    """
    num_bytes = step_bytes(params)
    large_bytes = max(num_bytes, LARGE_READ_BYTES)
    cache_bytes = last_level_cache_bytes()
    return {
        "step_bytes": num_bytes,
        "last_level_cache_bytes": cache_bytes,
        "fits_in_cache": None if cache_bytes is None else num_bytes <= cache_bytes,
        "read_gb_s": num_bytes / timing.spread(read_s).median / 1e9,
        "read_best_gb_s": num_bytes / min(read_s) / 1e9,
        "memory_gb_s": large_bytes / timing.spread(large_read_s).median / 1e9,
        "achieved_gb_s": num_bytes / timing.spread(step_s).median / 1e9,
        "bandwidth_share": timing.spread(timing.ratios(read_s, step_s)).median,
    }
