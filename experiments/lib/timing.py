"""Timing: thunks that time themselves, run in turns, and what their seconds say.

Knows clocks and numbers; knows nothing of models. What is compared runs in one
process and in turns, so that whatever slows the machine down slows all of it down.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


Thunk = Callable[[], float]
"""Runs once, and returns the seconds of the region that it times."""


class Spread(NamedTuple):
    """A median, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float


class Quartiles(NamedTuple):
    """A median, and the first and third quartile."""

    median: float
    q1: float
    q3: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds by name.

    Attributes:
      warm_up: of the whole first call, with preparation and compilation.
      seconds: of the `repeats` calls after it; entries at the same place were
        taken in the same turn.
    """

    warm_up: Mapping[Hashable, float]
    seconds: Mapping[Hashable, Sequence[float]]


def stopwatch(
    run: Callable[[Any], Any],
    prepare: Callable[[], Any] = lambda: None,
    *,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Thunk:
    """A thunk that times `run(prepare())`, from start to the last array being there.

    Args:
      run: the timed region.
      prepare: not timed; what it returns is complete before the clock starts.
      calls: how often `run` does what is to be timed: the seconds are divided by it.
    """

    def thunk() -> float:
        prepared = jax.block_until_ready(prepare())
        started = clock()
        jax.block_until_ready(run(prepared))
        return (clock() - started) / calls

    return thunk


def interleave(
    thunks: Mapping[Hashable, Thunk],
    *,
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Calls each thunk once to warm it up, then all of them in turn, `repeats` times.

    Args:
      after_turn: called after the warm-up and after each turn.
    """
    warm_up = {}
    for name, thunk in thunks.items():
        started = clock()
        thunk()
        warm_up[name] = clock() - started
    after_turn()
    seconds = {name: [] for name in thunks}
    for _ in range(repeats):
        for name, thunk in thunks.items():
            seconds[name].append(thunk())
        after_turn()
    return Timings(warm_up=warm_up, seconds=seconds)


def spread(values: Sequence[float]) -> Spread:
    """Median and percentiles, linear between neighbours."""
    return Spread(*(float(x) for x in np.quantile(values, (0.5, 0.1, 0.9))))


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles, linear between neighbours."""
    return Quartiles(*(float(x) for x in np.quantile(values, (0.5, 0.25, 0.75))))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The quotient of each turn: their median is not the quotient of the medians."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
