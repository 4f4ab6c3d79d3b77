"""Peak memory of one side of a comparison, in a process of its own.

`python -m experiments.lib.peak_memory SIDE` reads a `Request` from its standard
input and writes the peaks to its standard output. A process per side: what one
library keeps for itself would hide in the peak of the other.
"""

import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys

from experiments.lib import processes


OURS, THEIRS = "spec_jax", "transformers"
SIDES = (OURS, THEIRS)

Peaks = dict[str, dict[str, int | None]]
"""By stage: "libraries", "weights", and then each way to generate, in this order."""

_STATUS = pathlib.Path("/proc/self/status")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the process does: load two folders, and generate after one prompt."""

    target: str
    draft: str
    dtype: str
    impl: str
    backend: str  # JAX's, "cpu" or "gpu": torch takes the same
    prompt: list[int]
    gamma: int
    gen_tokens: int
    page_size: int
    stop_ids: list[int]


def measure(side: str, request: Request) -> Peaks:
    """Starts the process, waits, and returns the peak up to the end of each stage.

    A stage has `host_bytes`, the most memory that the process ever held at once: the
    interpreter, the libraries, whatever compiling took, weights, caches. On a GPU it
    has `device_bytes` besides, the most that the library's allocator gave out there.

    Raises:
      MemoryError: the operating system ended the process.
      RuntimeError: it failed; the message says how.
    """
    done = subprocess.run(
        [sys.executable, "-m", "experiments.lib.peak_memory", side],
        input=json.dumps(dataclasses.asdict(request)),
        env={**os.environ, "PYTHONPATH": processes.python_path()},
        capture_output=True,
        text=True,
    )
    if done.returncode < 0:
        raise MemoryError(
            f"the process that measures the memory of {side} was ended by signal "
            f"{-done.returncode}; give it more memory, or leave it out (--no-memory)"
        )
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["it does not say why"]
        raise RuntimeError(f"measuring the memory of {side} failed: {why[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_host_bytes() -> int:
    """The most memory that this process ever held at once.

    Not `ru_maxrss` where it can be helped: Linux hands that of the parent on to the
    child, even to one that runs another program.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return int(value.split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _note(peaks: Peaks, stage: str, device_bytes: int | None) -> None:
    peaks[stage] = {"host_bytes": peak_host_bytes(), "device_bytes": device_bytes}


def _measure_ours(request: Request) -> Peaks:
    """Plain decoding, then rounds."""
    import jax

    from experiments.lib import runs
    from spec_jax import loading
    from spec_jax.paging import index

    peaks: Peaks = {}

    def note(stage: str) -> None:
        stats = jax.devices()[0].memory_stats() if request.backend != "cpu" else None
        _note(peaks, stage, stats["peak_bytes_in_use"] if stats else None)

    note("libraries")
    lm = loading.load(
        request.target,
        draft=request.draft,
        gamma_max=request.gamma,
        slab=request.gamma + 1,
        dtype=request.dtype,
        impl=request.impl,
    )
    note("weights")
    num_positions = len(request.prompt) + request.gen_tokens
    settings = runs.Settings(
        gamma=request.gamma,
        gen_tokens=request.gen_tokens,
        capacity=index.pages_for(num_positions, request.page_size) * request.page_size,
        page_size=request.page_size,
        stop_ids=tuple(request.stop_ids),
    )
    runs.run_plain(lm, settings, request.prompt)
    note("plain")
    runs.run_speculative(lm, settings, request.prompt)
    note("draft model")
    return peaks


def _measure_theirs(request: Request) -> Peaks:
    """Plain decoding, then assisted, then with prompt lookup."""
    import torch
    import transformers  # noqa: F401  (its memory is that of the libraries)

    from experiments.lib import hf

    peaks: Peaks = {}

    def note(stage: str) -> None:
        on_gpu = request.backend != "cpu"
        _note(peaks, stage, torch.cuda.max_memory_allocated() if on_gpu else None)

    note("libraries")
    folders = pathlib.Path(request.target), pathlib.Path(request.draft)
    baseline = hf.load(*folders, dtype=request.dtype, backend=request.backend)
    note("weights")
    for method in (hf.PLAIN, *hf.METHODS):
        sizes = {"max_tokens": request.gen_tokens, "stop_ids": request.stop_ids}
        how = {"method": method, "gamma": request.gamma} | sizes
        hf.generate(baseline, request.prompt, **how)
        note(method)
    return peaks


if __name__ == "__main__":  # The process: one side, named by the only argument.
    _measures = {OURS: _measure_ours, THEIRS: _measure_theirs}
    print(json.dumps(_measures[sys.argv[1]](Request(**json.load(sys.stdin)))))
