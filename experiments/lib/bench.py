"""Benchmarks: cases timed in turns, their spread, and plain reads of memory.

This module handles clocks and numbers, and no models. Compared cases run in one process
and in turns, so that whatever slows the machine down slows all of them down. Operations
of microseconds are called many times in one executable, so that neither Python nor the
dispatch of an executable is measured.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import terminal


Thunk = Callable[[], float]
"""Runs once, and returns the seconds of the region that it times."""

MOST_READ_BYTES = 2 * 2**30
"""Largest array that is read, in bytes: larger reads are several of a smaller one."""

GPU_READS = 32
"""Reads that are dispatched to a GPU at once, each while the one before it runs, so
that their dispatch is not measured."""

# XLA's threads share the work along the first dimension.
_PARTS = 64


Case = Callable[[], Thunk]
"""Makes and compiles a timed call, its `Thunk`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds by the name of the case."""

    # To make a case and call it once, with preparation and compilation
    warm_up: Mapping[Hashable, float]
    # For each of the `repeats` calls after it; entries at one index are of one turn
    seconds: Mapping[Hashable, Sequence[float]]

    def row(self, name: Hashable, *, ratio_to: Hashable) -> dict[str, Any]:
        """Returns the fields of a case's row: n, warm-up, times, and ratios to those of
        the case `ratio_to`."""
        seconds = self.seconds[name]
        fields = {"n": len(seconds), "warm_up_s": self.warm_up[name]}
        fields |= spread_fields("ms", [1e3 * s for s in seconds])
        found = ratios(seconds, self.seconds[ratio_to])
        return fields | spread_fields("ratio", found)


def run(
    cases: Mapping[Hashable, Case],
    *,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Makes each case and calls it once, then times all of them in turns.

    Args:
      repeats: turns after the warm-up, which the progress bar counts as one more.
    """
    thunks: dict[Hashable, Thunk] = {}
    warm_up = {}
    with terminal.counted("turns", total=repeats + 1) as advance:
        for name, make in cases.items():
            started = clock()
            thunks[name] = make()
            thunks[name]()
            warm_up[name] = clock() - started
        advance()
        seconds: dict[Hashable, list[float]] = {name: [] for name in thunks}
        for _ in range(repeats):
            for name, thunk in thunks.items():
                seconds[name].append(thunk())
            advance()
    return Timings(warm_up=warm_up, seconds=seconds)


def stopwatch(
    run: Callable[[Any], Any],
    prepare: Callable[[], Any] = lambda: None,
    *,
    calls: int = 1,
    warms: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Thunk:
    """Returns a thunk that times `run(prepare())` until its last array is there.

    Args:
      run: the timed region; may donate its argument.
      prepare: makes that argument, untimed; it is complete before the clock starts.
      calls: how often `run` repeats the timed operation; seconds are divided by it.
      warms: call `run` once before each timed call: the code that ran before has
        filled the processor's caches with its bytes, and other threads sleep.
    """

    def thunk() -> float:
        if warms:
            jax.block_until_ready(run(prepare()))
        prepared = jax.block_until_ready(prepare())
        started = clock()
        jax.block_until_ready(run(prepared))
        return (clock() - started) / calls

    return thunk


def on_copies(run: Callable[[Any], Any], state: Any, *, calls: int = 1) -> Thunk:
    """Returns a `stopwatch` with warm caches; `run` may donate its copy of `state`."""
    copies = lambda: jax.tree.map(jnp.copy, state)
    return stopwatch(run, copies, calls=calls, warms=True)


_SHARES = {"p10": 0.1, "q1": 0.25, "q3": 0.75, "p90": 0.9}


def spread_fields(
    name: str, values: Sequence[float], tails: Sequence[str] = ("p10", "p90")
) -> dict[str, float]:
    """Returns the median as the field `name`, and a quantile for each of `tails`,
    linear between neighbours, as `name_p10`, `name_p90` and so on."""
    found = np.quantile(values, [0.5, *(_SHARES[tail] for tail in tails)])
    names = (name, *(f"{name}_{tail}" for tail in tails))
    return dict(zip(names, found.tolist(), strict=True))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Returns each turn's quotient, whose median is not the quotient of medians."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def read(num_bytes: int) -> Thunk:
    """Returns a thunk that reads `num_bytes` on the whole device, as a sum.

    Each timed read follows an untimed one, so that an array that fits into the
    last-level cache is read from there, as weights of this size are in a step.
    """
    array, pieces = pieces_of(num_bytes)
    calls = GPU_READS if jax.default_backend() == "gpu" else 1
    return stopwatch(
        lambda _: [_sum(array) for _ in range(pieces * calls)], calls=calls, warms=True
    )


def pieces_of(num_bytes: int) -> tuple[jax.Array, int]:
    """Returns an array of noise, and how many reads of it make up `num_bytes`."""
    pieces = math.ceil(num_bytes / MOST_READ_BYTES) or 1
    columns = max(1, num_bytes // (4 * _PARTS * pieces))
    return jax.random.bits(jax.random.key(0), (_PARTS, columns)), pieces


_sum = jax.jit(functools.partial(jnp.sum, dtype=jnp.uint32))
