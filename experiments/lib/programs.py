"""Programs: times of tracing, lowering and compiling them, and the kernels they run.

On a machine without a GPU a program is lowered for a GPU, too: the kernels, their plans
and the work of Python are those of a machine that has one.
"""

import collections
import contextlib
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np


GPU = "NVIDIA H200"
"""The GPU for which Pallas lowers on a machine without one."""

MOST_NAMES = 40
"""How many kernels of a profiler's trace are listed, the longest first."""


def lower(trace: Callable[[], jax.stages.Traced], *, compiles: bool) -> dict:
    """Returns seconds of each stage, kernels in the lowered text, and memory.

    Args:
      compiles: compile for the device of jax; otherwise only lower, for a GPU.
    """
    times, row = [time.perf_counter()], {"compile_s": None, "temp_bytes": None}
    clock = lambda: times.append(time.perf_counter())
    with (
        contextlib.nullcontext() if compiles else _without_gpu(),
        warnings.catch_warnings(),
    ):
        # A loop does not return all that is donated, such as its counters.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        traced = trace()
        clock()
        lowered = traced.lower(lowering_platforms=None if compiles else ("cuda",))
        clock()
    if compiles:
        memory = lowered.compile().memory_analysis()
        clock()
        row["temp_bytes"] = getattr(memory, "temp_size_in_bytes", None)
    stages = zip(("trace_s", "lower_s", "compile_s"), np.diff(times), strict=False)
    kernels = lowered.as_text().count("stablehlo.custom_call")
    return row | {name: float(s) for name, s in stages} | {"kernels": kernels}


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """Sets a mesh that names the GPU, which Pallas needs from jax 0.11 on."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    device = jax.sharding.AbstractDevice(
        device_kind=GPU, num_cores=None, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def profile(folder: pathlib.Path, name: str, call: Callable[[], Any]) -> list[dict]:
    """Traces one call after a first one; returns a row of each kernel, longest first.

    On a GPU times are `own_times`; on a CPU, where calls nest, they are durations.

    Args:
      folder: where the trace is kept, for a viewer.
    """
    call()
    with jax.profiler.trace(str(folder / name)):
        call()
    path = sorted((folder / name).rglob("*.xplane.pb"))[-1]
    is_gpu = jax.default_backend() == "gpu"
    took, counts = collections.Counter(), collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            if is_gpu and not ("GPU" in plane.name and "Stream" in line.name):
                continue
            events = list(line.events)
            times = [event.duration_ns for event in events]
            if is_gpu:
                times = own_times([(e.start_ns, e.duration_ns) for e in events])
            for event, time_ns in zip(events, times, strict=True):
                took[event.name] += time_ns
                counts[event.name] += 1
    total = sum(took.values())
    return [
        {
            "kind": "trace",
            "program": name,
            "event": event,
            "calls": counts[event],
            "own_us": nanoseconds / 1e3,
            "share": nanoseconds / total,
        }
        for event, nanoseconds in took.most_common(MOST_NAMES)
    ]


def own_times(events: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the time that each kernel adds to its stream, in the order given.

    It lasts from the end of the kernels before to the kernel's own end: in programmatic
    dependent launch kernels overlap, and durations count that time twice.

    Args:
      events: the start and the duration of each.
    """
    starts, durations = np.array(events).reshape(-1, 2).T
    order = np.lexsort((durations, starts))
    ended = np.maximum.accumulate((starts + durations)[order])
    own = np.empty_like(starts)
    own[order] = np.diff(ended, prepend=starts[order[:1]])
    return own.tolist()
