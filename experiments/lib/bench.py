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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import noise


Thunk = Callable[[], float]
"""Runs once, and returns the seconds of the region that it times."""

READ_S = 20e-3
"""What a timed read of a GPU is to take, about: much more than its dispatch."""

MOST_READ_BYTES = 2 * 2**30
"""Of one array that is read: XLA holds a copy of it beside it, in a loop on a GPU."""

_GPU_BYTES_S, _MOST_PASSES = 3e12, 4096
# XLA's threads share the work along the first dimension.
_PARTS = 64


Case = Callable[[], Thunk]
"""Makes, and compiles, what is timed."""


class Spread(NamedTuple):
    """A median, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float


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
    after_turn: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Makes each case and calls it once, then times all of them in turns.

    Args:
      cases: by their names.
      repeats: turns after the warm-up.
      after_turn: called after the warm-up and after each turn.
    """
    thunks: dict[Hashable, Thunk] = {}
    warm_up = {}
    for name, make in cases.items():
        started = clock()
        thunk = make()
        thunk()
        thunks[name], warm_up[name] = thunk, clock() - started
    after_turn()
    seconds: dict[Hashable, list[float]] = {name: [] for name in thunks}
    for _ in range(repeats):
        for name, thunk in thunks.items():
            seconds[name].append(thunk())
        after_turn()
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


def spread(values: Sequence[float]) -> Spread:
    """Returns median and percentiles, linear between neighbours."""
    return Spread(*(float(x) for x in np.quantile(values, (0.5, 0.1, 0.9))))


def spread_fields(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns the spread under `name`, `name_p10` and `name_p90`."""
    return dict(zip((name, f"{name}_p10", f"{name}_p90"), spread(values), strict=True))


def quartile_fields(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns median and quartiles under `name`, `name_q1` and `name_q3`."""
    found = (float(x) for x in np.quantile(values, (0.5, 0.25, 0.75)))
    return dict(zip((name, f"{name}_q1", f"{name}_q3"), found, strict=True))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Returns each turn's quotient: their median is not the quotient of medians."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def read(num_bytes: int) -> Thunk:
    """Reads an array of `num_bytes` on the whole device: a sum.

    It was read just before, so that an array that fits into the last-level cache is
    read from there, as weights of the same size are in a step.
    """
    if jax.default_backend() == "gpu":
        run, passes = device_read(num_bytes)
        return stopwatch(lambda _: run(), calls=passes, warms=True)
    columns = max(1, num_bytes // (4 * _PARTS))
    array = jnp.ones((_PARTS, columns), jnp.float32)
    total = jax.jit(jnp.sum)
    return stopwatch(lambda _: total(array), warms=True)


def device_read(num_bytes: int) -> tuple[functools.partial, int]:
    """Returns what reads an array of noise again and again, in one executable, and how
    often it does: XLA's sum of its words.

    What is above `MOST_READ_BYTES` is as many reads of a smaller array. The number of
    reads is known before the program is compiled: of a scan whose length is data, a GPU
    asks the host after each pass.
    """
    pieces = math.ceil(num_bytes / MOST_READ_BYTES) or 1
    array = noise.words(max(1, num_bytes // (4 * pieces)))
    passes = math.ceil(READ_S * _GPU_BYTES_S / max(num_bytes, 1))
    passes = min(passes, _MOST_PASSES)
    return functools.partial(_sums, array, passes=passes * pieces), passes


@functools.partial(jax.jit, static_argnames=("passes",))
def _sums(array, *, passes):
    # Each pass adds what the one before it found: none can be left out.
    def one(total, _):
        return jnp.sum(array ^ total, dtype=jnp.uint32), None

    return jax.lax.scan(one, jnp.uint32(0), None, length=passes)[0]
