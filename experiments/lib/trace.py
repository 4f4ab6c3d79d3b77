"""A profiler's trace of a few calls: which kernels took how long."""

import collections
import pathlib
from collections.abc import Callable
from typing import Any

import jax


MOST_NAMES = 40


def record(folder: pathlib.Path, name: str, call: Callable[[], Any]) -> list[dict]:
    """Traces one call after a first one; a row of each kernel, the longest first.

    Args:
      folder: where the trace is kept, for a viewer.
    """
    call()
    with jax.profiler.trace(str(folder / name)):
        call()
    path = sorted((folder / name).rglob("*.xplane.pb"))[-1]
    took, counts = collections.Counter(), collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" not in plane.name and jax.default_backend() == "gpu":
            continue
        for line in plane.lines:
            if jax.default_backend() == "gpu" and "Stream" not in line.name:
                continue
            for event in line.events:
                took[event.name] += event.duration_ns
                counts[event.name] += 1
    total = sum(took.values())
    return [
        {
            "kind": "trace",
            "program": name,
            "event": event,
            "calls": counts[event],
            "us": nanoseconds / 1e3,
            "share": nanoseconds / total,
        }
        for event, nanoseconds in took.most_common(MOST_NAMES)
    ]
