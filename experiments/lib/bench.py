"""Benchmarks: cases timed in turns, their spread, and plain reads of memory.

Knows clocks and numbers; knows nothing of models. What is compared runs in one process
and in turns, so that whatever slows the machine down slows all of it down. What takes
microseconds is called many times in one executable, so that neither Python nor the
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
"""The most of one array that is read: a larger read is several of a smaller array."""

GPU_READS = 32
"""Reads that a GPU is asked for at once, each while the one before it runs: their
dispatch is not measured."""

# XLA's threads share the work along the first dimension.
_PARTS = 64


Case = Callable[[], Thunk]
"""Makes, and compiles, what is timed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds by the name of the case."""

    # Of making a case and its first call, with preparation and compilation
    warm_up: Mapping[Hashable, float]
    # Of the `repeats` calls after it; entries at one place were taken in one turn
    seconds: Mapping[Hashable, Sequence[float]]

    def row(
        self, name: Hashable, *, ratio_to: Hashable | None = None
    ) -> dict[str, Any]:
        """Returns the fields of a case's row: n, warm-up, times, ratios.

        Args:
          ratio_to: the case that it is compared with, if any.
        """
        seconds = self.seconds[name]
        fields = {"n": len(seconds), "warm_up_s": self.warm_up[name]}
        fields |= spread_fields("ms", [1e3 * s for s in seconds])
        if ratio_to is not None:
            found = ratios(seconds, self.seconds[ratio_to])
            fields |= spread_fields("ratio", found)
        return fields


def run(
    cases: Mapping[Hashable, Case],
    *,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Makes each case and calls it once, then times all of them in turns.

    Args:
      cases: by their names.
      repeats: turns after the warm-up, which is shown as one more.
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
      run: the timed region; may donate what it is given.
      prepare: not timed; what it returns is complete before the clock starts.
      calls: how often `run` does what is to be timed: the seconds are divided by it.
      warms: run once before the clock, each time: what ran before has filled the
        processor's caches with its own bytes, and put other threads to sleep.
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
    """Returns a `stopwatch` of warm caches, of copies of what `run` donates."""
    copies = lambda: jax.tree.map(jnp.copy, state)
    return stopwatch(run, copies, calls=calls, warms=True)


_SHARES = {"p10": 0.1, "q1": 0.25, "q3": 0.75, "p90": 0.9}


def spread_fields(
    name: str, values: Sequence[float], tails: Sequence[str] = ("p10", "p90")
) -> dict[str, float]:
    """Returns the median under `name`, and quantiles, linear between neighbours, under
    `name_p10` and `name_p90`, or the like."""
    found = np.quantile(values, [0.5, *(_SHARES[tail] for tail in tails)])
    names = (name, *(f"{name}_{tail}" for tail in tails))
    return dict(zip(names, found.tolist(), strict=True))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Returns each turn's quotient: their median is not the quotient of medians."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def read(num_bytes: int) -> Thunk:
    """Reads an array of `num_bytes` on the whole device: a sum.

    It was read just before, so that an array that fits into the last-level cache is
    read from there, as weights of the same size are in a step.
    """
    array, pieces = pieces_of(num_bytes)
    calls = GPU_READS if jax.default_backend() == "gpu" else 1
    return stopwatch(
        lambda _: [_sum(array) for _ in range(pieces * calls)], calls=calls, warms=True
    )


def pieces_of(num_bytes: int) -> tuple[jax.Array, int]:
    """Returns an array of noise, and how often it is read to have read so much."""
    pieces = math.ceil(num_bytes / MOST_READ_BYTES) or 1
    columns = max(1, num_bytes // (4 * _PARTS * pieces))
    return jax.random.bits(jax.random.key(0), (_PARTS, columns)), pieces


_sum = jax.jit(functools.partial(jnp.sum, dtype=jnp.uint32))
