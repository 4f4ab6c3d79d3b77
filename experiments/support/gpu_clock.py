"""Timing on an accelerator: executables dispatched back to back, and a plain copy.

An executable holds many calls of what is measured, so that the GPU never waits for the
host; several dispatches make one timing. The host blocks once, at its end.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib import timing
from experiments.support import gpu_arrays


COPY = "copy"

_MAX_DISPATCHES = 2000
_COMPILERS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """An executable with `calls` calls in it, and what one call must move.

    Attributes:
      run: dispatches it once, and returns arrays to wait for.
      num_bytes: that one call must read, and write where that counts.
    """

    run: Callable[[], Any]
    calls: int
    num_bytes: int


def copy_loop(num_bytes: int) -> Loop:
    """Reads an array of `num_bytes` of noise and writes another, once a dispatch.

    What is read and what is written both count, as for any copy.
    """
    array = gpu_arrays.bits(num_bytes // 4)
    increment = jax.jit(lambda x: x + jnp.uint32(1))
    return Loop(run=lambda: increment(array), calls=1, num_bytes=2 * num_bytes)


def measure(
    loops: Mapping[str, Loop],
    *,
    repeats: int,
    timed_s: float,
    after_turn: Callable[[], None] = lambda: None,
) -> timing.Timings:
    """Seconds of one call of each, all of them in turns."""
    thunks = {name: _thunk(loop, timed_s) for name, loop in loops.items()}
    return timing.interleave(thunks, repeats=repeats, after_turn=after_turn)


def _thunk(loop: Loop, timed_s: float) -> timing.Thunk:
    """Finds out at its first call how many dispatches fill `timed_s`."""
    dispatches = 0

    def seconds_of(number: int) -> float:
        def run(_):
            for _ in range(number - 1):
                loop.run()
            return loop.run()

        # One dispatch goes before the clock: caches hold what ran before.
        return timing.stopwatch(run, loop.run, calls=number * loop.calls)()

    def thunk() -> float:
        nonlocal dispatches
        if not dispatches:
            once = seconds_of(1) * loop.calls
            dispatches = min(max(1, math.ceil(timed_s / once)), _MAX_DISPATCHES)
        return seconds_of(dispatches)

    return thunk


def rows(loops: Mapping[str, Loop], timings: timing.Timings) -> dict[str, dict]:
    """Times, bandwidths and shares of the copy's bandwidth, by name.

    The share of a turn is of the copy of the same turn; None without a copy.
    """
    made = {}
    copy_s = timings.seconds.get(COPY)
    for name, loop in loops.items():
        seconds = timings.seconds[name]
        rates = [loop.num_bytes / s / 1e9 for s in seconds]
        row = {
            "calls": loop.calls,
            "bytes": loop.num_bytes,
            "n": len(seconds),
            **quartiles("us", [1e6 * s for s in seconds]),
            **quartiles("gb_s", rates),
            "warm_up_s": timings.warm_up[name],
            "copy_gb_s": None,
            "copy_share": None,
        }
        if copy_s is not None:
            copy_rates = [loops[COPY].num_bytes / s / 1e9 for s in copy_s]
            row["copy_gb_s"] = timing.quartiles(copy_rates).median
            row |= quartiles("copy_share", timing.ratios(rates, copy_rates))
        made[name] = row
    return made


def quartiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles under `name`, `name_q1` and `name_q3`."""
    found = timing.quartiles(values)
    return {name: found.median, f"{name}_q1": found.q1, f"{name}_q3": found.q3}


def compile_all(
    lowered: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Compiles in threads: XLA lets go of Python's lock.

    Args:
      lowered: `jax.stages.Lowered` by name.

    Returns:
      The executables, and why the others have none.
    """
    compiled, failed = {}, {}
    with futures.ThreadPoolExecutor(_COMPILERS) as pool:
        pending = {name: pool.submit(each.compile) for name, each in lowered.items()}
        for name, future in pending.items():
            try:
                compiled[name] = future.result()
            except Exception as error:
                failed[name] = error
    return compiled, failed
