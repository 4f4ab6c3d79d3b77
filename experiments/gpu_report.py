"""How do steps, rounds and heads perform on this GPU, in eight minutes?

    (c) steps      plain steps, active rows, sampling, long contexts, prefill, trees
    (d) rounds     speculative generation at forced acceptance, against plain
    (h) heads      DSpark, EAGLE-3 and DFlash at the acceptance published of them
    (a) exactness  bits of rounds, and batch invariance of kernels, as integers
    (b) batches    tokens a second of several sequences, with and without drafts
    (t) traces     how long each kernel of a step takes

Each call is one of the other scripts. One process runs them all, the most telling
first, so that jax is started once and weights are made once; what is called next is
compiled meanwhile by another. A process that ends, or takes too long for a call, is
followed by a new one for the calls that remain. Rows are written as they are known,
and what a call prints beside them; those of compile-*.jsonl say how long programs took
to compile, and how many kernels they have; calls.jsonl says how each call went.
Weights are random and made on the device. Compiled programs are kept below --out. Start
it from the root of the repository, where nothing needs to be installed but its
dependencies: `python -m experiments.gpu_report`. Without a GPU only --dry-run works,
which traces and lowers all programs.
Exit status: 0 all done and equal, 2 something failed or differs, 1 unusable input.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import shlex
import threading
import time
from collections.abc import Sequence
from typing import Any

from experiments.lib import cli, pages, processes


RESULTS = pathlib.Path(__file__).parent / "results" / "gpu"
COMPILED = "compiled"

ON_EITHER_DEVICE = ("kernels", "latency")
"""Scripts that take `--device`."""

DRY_RUNS = "latency"
"""The script that compiles its programs without weights, by `--dry-run`."""


FLAGS = """
    --only PATTERN  the calls in whose section and name this regular expression is
        found, such as '^h' or 'tree of 32'; --list has them (default: all)
    --budget N=490  seconds for all calls together; a call that is expected to take
        more than is left is left out
    --impl NAME=triton  kernels
    --list  say what could be called, in order, and call nothing
    --dry-run  run nothing, and need no GPU: trace and lower all programs
    --out FOLDER  rows of each call, what it printed, and compiled programs
        (default: experiments/results/gpu)
    """
KINDS = {"NAME": ("triton", "xla"), "FOLDER": pathlib.Path}
parse_args = cli.parser(__doc__, FLAGS, **KINDS)


@dataclasses.dataclass(frozen=True)
class Call:
    """A script with its flags."""

    section: str
    name: str  # unique
    script: str
    arguments: tuple[str, ...]  # `{out}` in them is the folder of the report
    seconds: float  # that the call is expected to take

    @property
    def file(self) -> str:
        """The name of the call's files, without a suffix."""
        return f"{self.section}-{re.sub('[^a-z0-9.]+', '-', self.name)}"

    def request(
        self, out: pathlib.Path, *, device: str, prefix: str = "", dry_run: bool = False
    ) -> tuple[str, list[str], pathlib.Path]:
        """Returns arguments of `processes.run_here`; removes rows of an earlier run.

        Args:
          prefix: the beginning of the names of its files.
          dry_run: whether its programs are only compiled.
        """
        path = out / f"{prefix}{self.file}.jsonl"
        path.unlink(missing_ok=True)
        arguments = [word.replace("{out}", str(out)) for word in self.arguments]
        # Rows say whether the code had changes; a refusal would waste the machine.
        arguments += ["--out", str(path), "--allow-dirty", *["--dry-run"] * dry_run]
        if self.script in ON_EITHER_DEVICE:
            arguments += ["--device", device]
        return f"experiments.{self.script}", arguments, path.with_suffix(".txt")


def all_calls(*, impl: str) -> list[Call]:
    """Returns every call, in order; `impl` is the kernels of steps and rounds."""
    page, calls = pages.sections(pathlib.Path(__file__).with_suffix(".md")), []
    for line in pages.filled(page["calls"], page["words"], impl=impl).splitlines():
        section, seconds, name, command = map(str.strip, line.split(" | "))
        script, *arguments = shlex.split(command)
        calls.append(Call(section, name, script, tuple(arguments), float(seconds)))
    return calls


def chosen(args: argparse.Namespace) -> list[Call]:
    """Returns the calls that are asked for, in order.

    Raises:
      ValueError: `--only` matches none of them.
    """
    calls = [
        call
        for call in all_calls(impl=args.impl)
        if (args.only is None or args.only.search(f"{call.section} {call.name}"))
        and (call.script == DRY_RUNS or not args.dry_run)
    ]
    if not calls:
        raise ValueError(f"no call is named so: --only {args.only.pattern}; see --list")
    return calls


def set_up(compiled: pathlib.Path, memory_share: float) -> None:
    """Sets the environment variables of a process, before it imports JAX.

    Args:
      compiled: the folder of compiled programs, unless the environment names another.
      memory_share: the share of a GPU's memory that JAX may take. Below 0.5, memory is
        taken when it is needed, and the process has a lower priority.
    """
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # XLA's warnings would bury the rows; its errors are printed.
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }.items():
        os.environ.setdefault(name, value)
    # A trace must show the launches that are timed.
    shown = "--xla_enable_command_buffers_during_profiling=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {shown}".strip()
    # jaxlib refuses the older name of this variable beside the newer one.
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{memory_share:.2f}"
    if memory_share < 0.5:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        os.nice(10)


def worker_of(args: argparse.Namespace, *, is_ahead: bool) -> processes.Worker:
    """Returns the process that runs calls, with most of the memory, or the one that
    compiles ahead of it, with little."""
    share = 0.04 if is_ahead else 0.88
    output = args.out / ("ahead.txt" if is_ahead else "worker.txt")
    begin = functools.partial(set_up, args.out / COMPILED, share)
    return processes.Worker(output, begin)


def compile_ahead(
    args: argparse.Namespace,
    worker: processes.Worker,
    calls: Sequence[Call],
    begun: set[str],
    over: threading.Event,
) -> None:
    """Compiles the programs of calls that are not begun, until `over` is set."""
    how = {"device": device_here(), "prefix": "compile-", "dry_run": True}
    for call in calls:
        if call.script == DRY_RUNS and call.name not in begun and not over.is_set():
            worker.run(*call.request(args.out, **how), limit_s=args.budget)


def device_here() -> str:
    """Returns "gpu", or "cpu" where no GPU is found."""
    return "cpu" if processes.nvidia_smi("name") is None else "gpu"


def run_all(args: argparse.Namespace) -> bool:
    """Runs the calls, each with a row in `calls.jsonl`; returns whether all is well."""
    calls, started, is_well = chosen(args), time.monotonic(), True
    args.out.mkdir(parents=True, exist_ok=True)
    worker, ahead = (worker_of(args, is_ahead=is_ahead) for is_ahead in (False, True))
    # The first call starts at once, and compiles its own programs.
    begun, over = {calls[0].name}, threading.Event()
    given = (args, ahead, calls, begun, over)
    compiling = threading.Thread(target=compile_ahead, args=given, daemon=True)
    with (args.out / "calls.jsonl").open("w", buffering=1) as file:
        print(json.dumps({"kind": "versions", **processes.versions()}), file=file)
        try:
            if not args.dry_run:
                compiling.start()
            for call in calls:
                begun.add(call.name)
                left_s = args.budget - (time.monotonic() - started)
                is_in_time = call is calls[0] or left_s >= call.seconds
                row = run_call(args, worker, call, left_s if is_in_time else None)
                print(json.dumps(row), file=file)
                is_well &= row["status"] in ("done", "left out")
                print(f"{time.monotonic() - started:5.0f} s {call.section} "
                      f"{call.name}: {row['status']} after {row['seconds']} s, of "
                      f"{call.seconds:.0f} expected; {row['rows']} rows",
                      flush=True)  # fmt: skip
        finally:
            over.set()
            worker.end()
            ahead.end()
    print(f"rows: {args.out}", flush=True)
    return is_well


def run_call(
    args: argparse.Namespace, worker: processes.Worker, call: Call, left_s: float | None
) -> dict[str, Any]:
    """Runs a call within `left_s` seconds, None: leaves it out; returns its row."""
    device = "gpu" if args.dry_run else device_here()
    request = call.request(args.out, device=device, dry_run=args.dry_run)
    if args.dry_run:
        outcome = processes.run_here(*request)
    elif left_s is None:
        outcome = processes.Outcome(status="left out", exit_status=None, seconds=0.0)
    else:
        outcome = worker.run(*request, limit_s=min(left_s, 3 * call.seconds))
    path = args.out / f"{call.file}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else ()
    rows = [json.loads(line) for line in lines]
    return {
        "kind": "call",
        "section": call.section,
        "name": call.name,
        "command": f"python -m experiments.{call.script} {' '.join(call.arguments)}",
        "expected_s": call.seconds,
        "rows": len(rows),
        "errors": [row["error"] for row in rows if row["kind"] == "error"],
        **dataclasses.asdict(outcome),
    }


def run(args: argparse.Namespace) -> bool:
    """Runs the report; returns whether all is well.

    Raises:
      ValueError: there is no GPU here, or `--out` is missing where it is needed.
    """
    if args.list:
        for call in chosen(args):
            words = " ".join((call.script, *call.arguments))
            print(f"{call.section} {call.name}, {call.seconds:.0f} s: {words}")
        return True
    if not args.dry_run and device_here() == "cpu":
        raise ValueError(
            "no GPU is found (nvidia-smi does not name one); --dry-run --out FOLDER "
            "traces and lowers all programs without one"
        )
    if args.dry_run and args.out is None:
        raise ValueError(
            "--out FOLDER is needed with --dry-run: experiments/results/gpu is for "
            "what is measured on a GPU"
        )
    args.out = (args.out or RESULTS).resolve()
    return run_all(args)


# Each call uses jax, in another process.
main = cli.script("gpu_report.py", parse_args, run, uses_jax=False)
