"""What do steps, rounds and heads do on this GPU, in eight minutes?

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
which traces and lowers all programs, and --rehearse.
Exit status: 0 all done and equal, 2 something failed or differs, 1 unusable input.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from experiments.lib import cli, gpu_calls, processes


DONE, FAILED = 0, 2
RESULTS = pathlib.Path(__file__).parent / "results" / "gpu"
COMPILED = "compiled"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    cli.add(
        parser,
        f"""
        --sections LETTERS={",".join(gpu_calls.SECTIONS)}  sections to run
        --only PATTERN  the calls in whose names this regular expression is found, such
            as '0.6b' or 'tree of 32'; --list names them (default: all)
        --budget N=490  seconds for all calls together; a call that is expected to take
            more than is left is left out
        --impl NAME=triton  kernels
        --rehearse  the same calls with a tiny model and few repeats, on any device
        --list  say what could be called, in order, and call nothing
        --dry-run  run nothing, and need no GPU: trace and lower all programs
        --out FOLDER  rows of each call, what it printed, and compiled programs
            (default: experiments/results/gpu)
        """,
        LETTERS=cli.names(cli.one_of(gpu_calls.SECTIONS)),
        NAME=("triton", "xla"),
        FOLDER=pathlib.Path,
    )
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[gpu_calls.Call]:
    """Returns the calls that are asked for, in order.

    Raises:
      ValueError: there are none.
    """
    calls = [
        call
        for call in gpu_calls.all_calls(impl=args.impl, rehearse=args.rehearse)
        if call.section in args.sections
        and (args.only is None or args.only.search(call.name))
        and (call.can_dry_run or not args.dry_run)
    ]
    if not calls:
        what = f" --only {args.only.pattern}" if args.only else ""
        raise ValueError(
            f"no call of the sections {','.join(args.sections)} is named so{what}; "
            "--list names them all"
        )
    return calls


def worker_of(args: argparse.Namespace, *, is_ahead: bool) -> processes.Worker:
    """Returns the process that runs calls; or that which compiles ahead of it, beside
    which it has most of the memory."""
    share = 0.04 if is_ahead else 0.88
    set_up = functools.partial(gpu_calls.set_up, args.out / COMPILED, share)
    output = args.out / ("ahead.txt" if is_ahead else "worker.txt")
    return processes.Worker(output, set_up)


def compile_ahead(
    args: argparse.Namespace,
    worker: processes.Worker,
    calls: Sequence[gpu_calls.Call],
    begun: set[str],
    over: threading.Event,
) -> None:
    """Compiles for each call, those first that have not begun; until it is over."""
    left = [call for call in calls if call.can_dry_run]
    while left and not over.is_set():
        call = next((each for each in left if each.name not in begun), left[0])
        left.remove(call)
        how = {"device": device_here(), "prefix": "compile-", "dry_run": True}
        worker.run(*call.request(args.out, **how), limit_s=args.budget)


def device_here() -> str:
    """Returns "gpu", or "cpu" where there is none."""
    return "cpu" if processes.nvidia_smi("name") is None else "gpu"


def run_all(args: argparse.Namespace) -> int:
    """Runs the calls in turn; writes after each of them how they went."""
    calls, started = chosen(args), time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [{"kind": "versions", **processes.versions()}]
    worker, ahead = (worker_of(args, is_ahead=is_ahead) for is_ahead in (False, True))
    # The first call would wait for what it compiles itself.
    begun, over = {calls[0].name}, threading.Event()
    given = (args, ahead, calls, begun, over)
    compiling = threading.Thread(target=compile_ahead, args=given, daemon=True)
    try:
        if not args.dry_run:
            compiling.start()
        for call in calls:
            begun.add(call.name)
            left_s = args.budget - (time.monotonic() - started)
            is_in_time = call is calls[0] or left_s >= call.seconds
            rows.append(run_call(args, worker, call, left_s if is_in_time else None))
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (args.out / "calls.jsonl").write_text(text)
            row = rows[-1]
            print(f"{time.monotonic() - started:5.0f} s ({call.section}) {call.name}: "
                  f"{row['status']} after {row['seconds']} s, of {call.seconds:.0f} "
                  f"expected; {row['rows']} rows", flush=True)  # fmt: skip
        if args.rehearse and not args.dry_run:
            compiling.join()  # Its rows are a part of what is rehearsed.
    finally:
        over.set()
        worker.end()
        ahead.end()
    print(f"rows: {args.out}", flush=True)
    known = ("done", "left out")
    return DONE if all(row["status"] in known for row in rows[1:]) else FAILED


def run_call(
    args: argparse.Namespace,
    worker: processes.Worker,
    call: gpu_calls.Call,
    left_s: float | None,
) -> dict[str, Any]:
    """Runs a call in the seconds that are left, None: too few; returns its row."""
    device = "gpu" if args.dry_run else device_here()
    request = call.request(args.out, device=device, dry_run=args.dry_run)
    if args.dry_run:
        outcome = processes.run_here(*request)
    elif left_s is None:
        outcome = processes.Outcome(status="left out", exit_status=None, seconds=0.0)
    else:
        # However long a small machine takes for a rehearsal.
        limit_s = left_s if args.rehearse else min(left_s, 3 * call.seconds)
        outcome = worker.run(*request, limit_s=limit_s)
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


def run(args: argparse.Namespace) -> int:
    """Runs the report; returns the exit status.

    Raises:
      ValueError: there is no GPU here.
    """
    own_out = args.out is not None
    args.out = (args.out or RESULTS).resolve()
    if args.list:
        for call in chosen(args):
            words = " ".join((call.script, *call.arguments))
            print(f"({call.section}) {call.name}, {call.seconds:.0f} s: {words}")
        return DONE
    needs_gpu = not (args.dry_run or args.rehearse)
    if needs_gpu and device_here() == "cpu":
        raise ValueError(
            "no GPU is found (nvidia-smi does not name one); --dry-run --out FOLDER "
            "traces and lowers all programs without one"
        )
    if not needs_gpu and not own_out:
        raise ValueError(
            "--out FOLDER is needed with --dry-run and --rehearse: "
            "experiments/results/gpu is for what is measured on a GPU"
        )
    return run_all(args)


main = cli.script(
    "gpu_report.py",
    parse_args,
    run,
    kept=lambda args: f"rows are in {args.out}" if args.out else "",
    uses_jax=False,  # Each call does, in a process of its own.
)

if __name__ == "__main__":
    cli.end(main)
