"""Programs: what tracing, lowering and compiling them takes, and what kernels they run.

On a machine without a GPU a program is lowered for one all the same: the kernels,
their plans and the work of Python are those of a machine that has one.
"""

import collections
import contextlib
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax


GPU = "NVIDIA H200"
"""What Pallas is told of the GPU, where there is none."""

MOST_NAMES = 40
"""Of a profiler's trace, the kernels that take longest."""


def lower(
    trace: Callable[[], jax.stages.Traced], *, here: bool | None = None
) -> dict[str, Any]:
    """Seconds of each stage, kernels in the lowered text, and memory.

    Args:
      here: compile for the device of jax, and not only lower for a GPU; None: where
        that is a GPU.
    """
    has_gpu = jax.default_backend() == "gpu" if here is None else here
    started, cpu_started = time.perf_counter(), time.process_time()
    with (
        contextlib.nullcontext() if has_gpu else _without_gpu(),
        warnings.catch_warnings(),
    ):
        # What a loop does not return, such as its counters.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        traced = trace()
        traced_at = time.perf_counter()
        lowered = traced.lower(lowering_platforms=None if has_gpu else ("cuda",))
        lowered_at = time.perf_counter()
    text = lowered.as_text()
    row = {
        "trace_s": traced_at - started,
        "lower_s": lowered_at - traced_at,
        "cpu_s": time.process_time() - cpu_started,
        "kernels": text.count("stablehlo.custom_call"),
        "characters": len(text),
        **dict.fromkeys(("compile_s", "temp_bytes", "alias_bytes")),
    }
    if has_gpu:
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        row |= {
            "compile_s": time.perf_counter() - lowered_at,
            "temp_bytes": getattr(memory, "temp_size_in_bytes", None),
            "alias_bytes": getattr(memory, "alias_size_in_bytes", None),
        }
    return row


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """From jax 0.11 on, Pallas asks the mesh for the GPU, tracing and lowering."""
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
    """Traces one call after a first one; a row of each kernel, the longest first.

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
    """Returns what each kernel of a stream adds to it, in the order given.

    From the end of the kernels before it to its own end: under programmatic dependent
    launch a kernel begins while another runs, and durations count that time twice.

    Args:
      events: the start and the duration of each.
    """
    own = [0.0] * len(events)
    ended = None
    for place in sorted(range(len(events)), key=lambda i: events[i]):
        start, duration = events[place]
        end = start + duration
        own[place] = duration if ended is None else max(end - ended, 0)
        ended = end if ended is None else max(end, ended)
    return own
