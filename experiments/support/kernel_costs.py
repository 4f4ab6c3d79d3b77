"""Kernel costs: kernels by number of rows beside a plain read of as many bytes.

Knows clocks, bytes and ratios; what is called stands in `kernel_subjects`.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil

from experiments.lib import timing
from experiments.support import bandwidth, kernel_subjects


TIMED_S = 10e-3
"""What one timing takes, about: the dispatch of an executable is a few permille."""

_MAX_PASSES = 10_000

_GIB = 2**30


class Variant(NamedTuple):
    """What is timed of a subject: an implementation, or `READ` with no rows."""

    impl: str
    rows: int | None


READ = Variant("read", None)
"""A plain read; on a GPU a plain copy that moves as many bytes, there and back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a subject.

    Attributes:
      timings: seconds of one call, by `Variant`.
      calls: how many calls one timing of each holds.
      copies: over which these calls go in turn.
    """

    timings: timing.Timings
    calls: Mapping[Variant, int]
    copies: Mapping[Variant, int]


def measure(
    subject: kernel_subjects.Subject,
    *,
    impls: Sequence[str],
    rows: Sequence[int],
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
) -> Measured:
    """Times each `Variant`, all of them in turns.

    Args:
      rows: numbers of live rows.
    """
    own = {impl: subject.for_impl(impl) for impl in impls}
    arrays = {each: _Arrays(*each.allocate()) for each in set(own.values())}
    plain_read = bandwidth.host_read
    if jax.default_backend() == "gpu":
        plain_read = bandwidth.device_copy
    runs = {READ: plain_read(subject.copies * subject.num_bytes)}
    copies = {READ: subject.copies}
    for impl in impls:
        for num_rows in rows:
            variant = Variant(impl, num_rows)
            runs[variant] = _kernel(own[impl], variant, arrays[own[impl]])
            copies[variant] = own[impl].copies
    passes: dict[Variant, int] = {}
    thunks = {
        variant: _thunk(run, variant, passes, copies[variant])
        for variant, run in runs.items()
    }
    timings = timing.interleave(thunks, repeats=repeats, after_turn=after_turn)
    calls = {variant: passes[variant] * copies[variant] for variant in runs}
    return Measured(timings=timings, calls=calls, copies=copies)


@dataclasses.dataclass
class _Arrays:
    """What the variants of a subject share; each call writes the pages in place."""

    fixed: Any
    pages: Any


def _kernel(
    subject: kernel_subjects.Subject, variant: Variant, arrays: _Arrays
) -> Callable[[int], Any]:
    """Runs the kernel over all copies as often as it is told."""
    slab = kernel_subjects.slab_of(variant.impl, variant.rows)
    inputs = subject.inputs(slab, variant.rows)

    def run(passes: int) -> Any:
        x, arrays.pages = kernel_subjects.repeat(
            subject,
            variant.impl,
            arrays.pages,
            arrays.fixed,
            inputs,
            jnp.int32(passes),
        )
        return x, arrays.pages

    return run


def _thunk(
    run: Callable[[int], Any],
    variant: Variant,
    passes: dict[Variant, int],
    copies: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> timing.Thunk:
    """Seconds of one call; the first time, finds out how many passes to time.

    Some passes go before the clock starts: the variant before has filled the caches
    with its own bytes, and put other threads to sleep.
    """

    def seconds_of(num_passes: int) -> float:
        before = math.ceil(num_passes / 4)
        timed = timing.stopwatch(
            lambda _: run(num_passes), lambda: run(before), clock=clock
        )
        return timed()

    def thunk() -> float:
        if variant not in passes:
            by_time = math.ceil(TIMED_S / seconds_of(1))
            passes[variant] = min(by_time, _MAX_PASSES)
        return seconds_of(passes[variant]) / (passes[variant] * copies)

    return thunk


def rows(subject: kernel_subjects.Subject, measured: Measured) -> list[dict[str, Any]]:
    """A JSON row of each variant; every ratio is a median over the turns.

    `read_share` is the bandwidth beside the plain read's, `time_ratio` the time beside
    that of the fewest rows.
    """
    timings = measured.timings
    read_s = timings.seconds[READ]
    made = []
    for variant, seconds in timings.seconds.items():
        made.append(
            {
                "kind": "kernel",
                "kernel": subject.kernel,
                "subject": subject.name,
                "shape": subject.shape,
                "context": subject.context,
                "impl": variant.impl,
                "rows": variant.rows,
                "bytes": subject.num_bytes,
                "copies": measured.copies[variant],
                "calls_per_timing": measured.calls[variant],
                "n": len(seconds),
                "warm_up_s": timings.warm_up[variant],
                **_quartiles("us", [1e6 * s for s in seconds]),
                **_quartiles("gb_s", [subject.num_bytes / s / 1e9 for s in seconds]),
                **_quartiles("read_share", timing.ratios(read_s, seconds)),
                **_time_ratio(variant, timings),
            }
        )
    return made


def _time_ratio(variant: Variant, timings: timing.Timings) -> dict[str, Any]:
    """The time beside that of the same implementation's fewest rows."""
    if variant == READ:
        names = ("time_ratio", "time_ratio_q1", "time_ratio_q3", "ratio_to_rows")
        return dict.fromkeys(names)
    fewest = min(v.rows for v in timings.seconds if v.impl == variant.impl)
    base_s = timings.seconds[Variant(variant.impl, fewest)]
    ratios = timing.ratios(timings.seconds[variant], base_s)
    return _quartiles("time_ratio", ratios) | {"ratio_to_rows": fewest}


def _quartiles(name: str, values: Sequence[float]) -> dict[str, float]:
    quartiles = timing.quartiles(values)
    return {
        name: quartiles.median,
        f"{name}_q1": quartiles.q1,
        f"{name}_q3": quartiles.q3,
    }


def check_memory(subjects: Sequence[kernel_subjects.Subject]) -> None:
    """Raises `MemoryError`, with both numbers, if the largest subject does not fit."""
    # Twice: what the kernels read, and as many bytes that are read plainly.
    required = max(2 * s.copies * s.num_bytes + s.num_bytes for s in subjects)
    free = _free_bytes()
    if required > free:
        raise MemoryError(
            f"the largest weights need {required / _GIB:.2f} GiB of memory, but "
            f"{free / _GIB:.2f} GiB are free"
        )


def _free_bytes() -> int:
    """Memory that is left where JAX's arrays go."""
    stats = None
    if jax.default_backend() == "gpu":
        stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available
