"""Benchmarks: cases timed in turns, their spread, and plain reads of memory.

Knows clocks and numbers; knows nothing of models. What is compared runs in one process
and in turns, so that whatever slows the machine down slows all of it down. What takes
microseconds is called many times in one executable, so that neither Python nor the
dispatch of an executable is measured.
"""

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import noise, processes


Thunk = Callable[[], float]
"""Runs once, and returns the seconds of the region that it times."""

DISPATCH_S = 2.5e-3
"""What one executable of many calls is to take, about: much more than its dispatch."""

TIMED_S = 10e-3
"""What one timing of such executables takes, at least."""

MOST_READ_BYTES = 2 * 2**30
"""Of one array that is read: XLA holds a copy of it beside it, in a loop on a GPU."""

_NOMINAL_BYTES_S = {"cpu": 20e9, "gpu": 3e12}
_MOST_PASSES, _MOST_DISPATCHES = 4096, 2000
_CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
# XLA's threads share the work along the first dimension.
_PARTS = 64
# Large enough that Python's part in a read does not count, and several for each core.
_PIECE_WORDS = 2**20 // 8
# A little more than the L2 of an H100 or H200.
_GPU_CACHE_BYTES = 64 * 2**20


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
        self, name: Hashable, unit: str = "ms", *, ratio_to: Hashable | None = None
    ) -> dict[str, Any]:
        """Returns the fields of a case's row: n, warm-up, times, ratios.

        Args:
          unit: "ms" or "us".
          ratio_to: the case that it is compared with, if any.
        """
        seconds, scale = self.seconds[name], {"ms": 1e3, "us": 1e6}[unit]
        fields = {"n": len(seconds), "warm_up_s": self.warm_up[name]}
        fields |= spread_fields(unit, [scale * s for s in seconds])
        if ratio_to is not None:
            found = ratios(seconds, self.seconds[ratio_to])
            fields |= spread_fields("ratio", found)
        return fields


def run(
    cases: Mapping[Hashable, Case],
    *,
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
    failed: Callable[[Hashable, Exception], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Makes each case and calls it once, then times all of them in turns.

    Args:
      cases: by their names.
      repeats: turns after the warm-up.
      after_turn: called after the warm-up and after each turn.
      failed: told of a case that cannot be made or called, which is left out; None
        raises what it raised.
    """
    thunks: dict[Hashable, Thunk] = {}
    warm_up = {}
    for name, make in cases.items():
        started = clock()
        try:
            thunk = make()
            thunk()
        except Exception as error:
            if failed is None:
                raise
            failed(name, error)
            continue
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """An executable with `calls` calls in it, and what one call must move."""

    run: Callable[[], Any]  # dispatches it once, and returns arrays to wait for
    calls: int
    num_bytes: int  # that one call must read


def passes_for(num_bytes: int, platform: str | None = None) -> int:
    """Returns how often a scan repeats calls that move `num_bytes`, for `DISPATCH_S`.

    Known before the program is compiled: of a scan whose length is data, a GPU asks
    the host after each pass.

    Args:
      platform: "cpu" or "gpu"; jax's own if None.
    """
    nominal = _NOMINAL_BYTES_S.get(platform or jax.default_backend(), 20e9)
    passes = math.ceil(DISPATCH_S * nominal / max(num_bytes, 1))
    return min(passes, _MOST_PASSES)


def loop_thunk(
    loop: Loop,
    *,
    timed_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Thunk:
    """Returns the seconds of one call; finds out first how many dispatches to time.

    A quarter as many go before the clock, as with `warms` of `stopwatch`.
    """
    dispatches = 0

    def seconds_of(number: int) -> float:
        several = lambda count: [loop.run() for _ in range(count)][-1]
        before = lambda: several(math.ceil(number / 4))
        calls = number * loop.calls
        return stopwatch(lambda _: several(number), before, calls=calls, clock=clock)()

    def thunk() -> float:
        nonlocal dispatches
        if not dispatches:
            once = max(seconds_of(1) * loop.calls, 1e-9)
            wanted = math.ceil((TIMED_S if timed_s is None else timed_s) / once)
            dispatches = min(max(1, wanted), _MOST_DISPATCHES)
        return seconds_of(dispatches)

    return thunk


def read(num_bytes: int) -> Thunk:
    """Reads an array of `num_bytes` on the whole device: a sum.

    It was read just before, so that an array that fits into the last-level cache is
    read from there, as weights of the same size are in a step.
    """
    if jax.default_backend() == "gpu":
        return loop_thunk(device_read(num_bytes))
    columns = max(1, num_bytes // (4 * _PARTS))
    array = jnp.ones((_PARTS, columns), jnp.float32)
    total = jax.jit(jnp.sum)
    return stopwatch(lambda _: total(array), warms=True)


def device_read(num_bytes: int) -> Loop:
    """Reads an array of noise again and again: XLA's sum of its words.

    What is above `MOST_READ_BYTES` is as many reads of a smaller array.
    """
    pieces = math.ceil(num_bytes / MOST_READ_BYTES) or 1
    array = noise.words(max(1, num_bytes // (4 * pieces)))
    calls = passes_for(num_bytes)
    run = functools.partial(_sums, array, passes=calls * pieces)
    return Loop(run=run, calls=calls, num_bytes=4 * array.size * pieces)


@functools.partial(jax.jit, static_argnames=("passes",))
def _sums(array, *, passes):
    # Each pass adds what the one before it found: none can be left out.
    def one(total, _):
        return jnp.sum(array ^ total, dtype=jnp.uint32), None

    return jax.lax.scan(one, jnp.uint32(0), None, length=passes)[0]


def host_read(num_bytes: int) -> Loop:
    """Reads an array of the host on all cores, again and again.

    Reads memory as fast as XLA's sum does, and what lies in a cache twice as fast.

    Args:
      num_bytes: of the array, rounded up to whole words.
    """
    words = np.ones(math.ceil(num_bytes / 8), np.uint64)
    num_threads = processes.usable_cores()
    size = min(_PIECE_WORDS, math.ceil(words.size / num_threads))
    pieces = [words[at : at + size] for at in range(0, words.size, size)]
    pool = futures.ThreadPoolExecutor(num_threads)
    passes = passes_for(num_bytes, "cpu")

    def read_some(remaining: Iterator[np.ndarray]) -> None:
        # Bitwise, because a sum of floats has an order; NumPy lets other threads run.
        for piece in remaining:
            np.bitwise_or.reduce(piece)

    def run() -> None:
        # One iterator for all: a core that is interrupted takes fewer pieces.
        remaining = iter(pieces * passes)
        for done in [pool.submit(read_some, remaining) for _ in range(num_threads)]:
            done.result()

    return Loop(run=run, calls=passes, num_bytes=num_bytes)


def cache_bytes() -> int | None:
    """Returns the size of the last cache of JAX's device, where it is known."""
    if jax.default_backend() == "gpu":
        return _GPU_CACHE_BYTES
    sizes = []
    for path in _CACHES.glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=None)
