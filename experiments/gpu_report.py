"""What do steps, rounds and heads do on this GPU, in eight minutes?

    (c) steps      plain steps, active rows, sampling, long contexts, prefill, trees
    (d) rounds     speculative generation at forced acceptance, against plain
    (h) heads      DSpark, EAGLE-3 and DFlash at the acceptance published of them
    (a) exactness  bits of rounds, and batch invariance of kernels, as integers
    (b) batches    tokens a second of several sequences, with and without drafts
    (t) traces     how long each kernel of a step takes

Each call is one of the other scripts, in this process and one after the other, the most
telling first: jax is started once. Another process compiles ahead what is called next.
A call that ended without an error is not made again by the same command, which so goes
on after a fault of the GPU. Rows are written as they are known, and what a call prints
beside them; those of compile-*.jsonl say how long programs took to compile, and how
many launches they have; calls.jsonl says how each call went. Weights are random and
made on the device. Compiled programs are kept below --out. Start it from the root of
the repository, where nothing needs to be installed but its dependencies:
`python -m experiments.gpu_report`. Without a GPU only --dry-run works, which traces and
lowers all programs, and --rehearse.
Exit status: 0 all done and equal, 2 something failed or differs, 1 unusable input.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.lib import processes


DONE, FAILED = 0, 2
RESULTS = pathlib.Path(__file__).parent / "results" / "gpu"
COMPILED = "compiled"

SECTIONS = {
    "c": "steps",
    "d": "rounds",
    "h": "heads",
    "a": "exactness",
    "b": "batches",
    "t": "traces",
}

ON_EITHER_DEVICE = ("kernels", "latency")
"""Scripts that take `--device`."""

XLA_FLAGS = "--xla_enable_command_buffers_during_profiling=true"
"""A trace is to show the launches that are timed."""

# Section, seconds, name, command.
_CALLS = """
c | 45 | steps 0.6b | {small} --steps 128 {all}
d | 40 | rounds of 8b with 0.6b | {pair} {forced} --forced 0.39,0.6,0.8 --gammas 4,2
c | 60 | steps 8b | {pair} --steps 32 {all}
h | 35 | dspark | {large} --head dspark {published}
h | 35 | eagle3 tree of 32 | {large} --head eagle3 --head-tree 32 {published}
a | 60 | exactness | exactness {cells}
h | 30 | eagle3 | {large} --head eagle3 {published}
h | 35 | dflash | {large} --head dflash {published}
a | 30 | exactness dspark | exactness --drafter dspark {one} {cells}
t | 20 | trace 0.6b | {small} {traced}
t | 20 | trace 8b | {large} {traced}
c | 25 | sampling 8b | {large} {sampled} --steps 32 --contexts 128 --rows 1
c | 35 | long contexts 8b | {large} --steps 32 --contexts 16384 32768 --rows 5
c | 30 | steps llama 8b | latency --preset {llama} {turns} {few}
c | 30 | steps qwen2.5 7b | latency --preset {qwen2} {turns} {few}
c | 30 | trees 8b | {large} --steps 32 --contexts 128 --rows 1 --tree-rows 32,64
h | 30 | eagle3 tree of 16 | {large} --head eagle3 --head-tree 16 {published}
h | 30 | eagle3 tree of 64 | {large} --head eagle3 --head-tree 64 {published}
h | 30 | dspark tree of 32 | {large} --head dspark --head-tree 32 {published}
b | 50 | batches | throughput --prompts 16 --batch 1,4,16 --repeats 2 --impl {impl}
a | 60 | rows of kernels 8b | kernels --shapes {8b} {checked}
a | 50 | rows of kernels 0.6b | kernels --shapes {0.6b} {checked}
c | 25 | prompts 8b | {large} --steps 8 --contexts 128 --rows 1 --prefill 128,1024
h | 30 | dspark tree of 16 | {large} --head dspark --head-tree 16 {published}
h | 30 | dspark tree of 64 | {large} --head dspark --head-tree 64 {published}
"""

_WORDS = {
    "0.6b": "qwen3-0.6b",
    "8b": "qwen3-8b",
    "llama": "llama-3.1-8b",
    "qwen2": "qwen2.5-7b",
    "small": "latency --preset {0.6b} {turns}",
    "large": "latency --preset {8b} {turns}",
    "pair": "latency --preset {8b} --draft-preset {0.6b} {turns}",
    "turns": "--impl {impl} --repeats 5",
    "all": "--contexts 128 4096 --rows 1,5,8,16",
    "few": "--steps 32 --contexts 128 --rows 1,5",
    "forced": "--no-steps --contexts 128 --gen-tokens 128",
    "published": "--steps 32 --contexts 128 --forced mt-bench,gsm8k --gen-tokens 128",
    "sampled": "--temperature 0.7 --top-k 20 --top-p 0.8",
    "traced": "--steps 16 --contexts 128 --rows 1 --trace {out}/trace",
    "cells": "--prompts 4 --gen-tokens 32 --gamma 4 --impl {impl}",
    "one": "--page-size 16 --cache paged --gamma-policy fixed",
    "checked": "--check --contexts 300,4096 --impls {impl}",
}

# For a model of two thousandths of the size: all contexts and repeats are less, too.
_REHEARSED = {
    "0.6b": "tiny",
    "8b": "tiny",
    "llama": "tiny",
    "qwen2": "tiny",
    "turns": "--impl {impl} --repeats 1",
    "all": "--steps 2 --contexts 16 32 --rows 1,5",
    "forced": "--no-steps --contexts 16 --gen-tokens 12",
    "published": "--steps 2 --contexts 16 --forced mt-bench,gsm8k --gen-tokens 12",
    "traced": "--steps 2 --contexts 16 --rows 1 --trace {out}/trace",
    "cells": "--prompts 4 --gen-tokens 4 --gamma 4 --impl {impl} --gamma-policy fixed "
    "--sampling greedy --dtype bfloat16",
    "checked": "--rows 1 --contexts 32 --repeats 1 --only '^qkv' --impls {impl}",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A script with its flags."""

    section: str
    name: str  # unique
    script: str
    arguments: tuple[str, ...]  # `{out}` in them is the folder of the report
    seconds: float  # that it is expected to take

    @property
    def file(self) -> str:
        """The name of its files, without a suffix."""
        return f"{self.section}-{re.sub('[^a-z0-9.]+', '-', self.name)}"

    @property
    def command(self) -> str:
        """What a user would type."""
        return f"python -m experiments.{self.script} {' '.join(self.arguments)}"

    @property
    def can_dry_run(self) -> bool:
        """Whether its programs can be compiled without weights."""
        return self.script == "latency"

    def request(
        self, out: pathlib.Path, *, device: str, is_dry: bool = False, prefix: str = ""
    ) -> dict[str, Any]:
        """The arguments of `processes.run_here`.

        Args:
          is_dry: only compile its programs.
          prefix: of the names of its files.
        """
        path = out / f"{prefix}{self.file}.jsonl"
        arguments = [word.replace("{out}", str(out)) for word in self.arguments]
        # Rows say whether there were changes; a refusal would waste the machine.
        arguments += ["--out", str(path), "--allow-dirty"]
        if self.script in ON_EITHER_DEVICE:
            arguments += ["--device", device]
        return {
            "module": f"experiments.{self.script}",
            "arguments": arguments + ["--dry-run"] * is_dry,
            "output": path.with_suffix(".txt"),
        }


def all_calls(*, impl: str, rehearse: bool = False) -> list[Call]:
    """Every call of the report, in order.

    Args:
      impl: of steps and rounds.
      rehearse: the same calls of a tiny model, with few repeats.
    """
    words = _WORDS | {"impl": impl} | (_REHEARSED if rehearse else {})
    text = _CALLS.strip()
    for _ in range(4):  # Words that hold words.
        text = re.sub(r"{([\w.]+)}", lambda m: words.get(m[1], m[0]), text)
    calls = []
    for line in text.splitlines():
        section, seconds, name, command = map(str.strip, line.split(" | "))
        script, *arguments = shlex.split(command)
        calls.append(Call(section, name, script, tuple(arguments), float(seconds)))
    return calls


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    cli.add(
        parser,
        f"""
        --sections LETTERS={",".join(SECTIONS)}  sections to run
        --only PATTERN  the calls in whose names this regular expression is found, such
            as '0.6b' or 'tree of 32'; --list names them (default: all)
        --budget N=490  seconds for all calls together; a call that is expected to take
            more than is left is left out
        --impl NAME=triton  kernels
        --rehearse  the same calls with a tiny model and few repeats, on any device
        --list  say what could be called, in order, and call nothing
        --dry-run  run nothing, and need no GPU: trace and lower all programs
        --ahead  compile alone, as the process beside a report does
        --out FOLDER  rows of each call, what it printed, and compiled programs
            (default: experiments/results/gpu)
        """,
        LETTERS=cli.names(cli.one_of(SECTIONS)),
        NAME=("triton", "xla"),
        FOLDER=pathlib.Path,
    )
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    return args


def chosen(args: argparse.Namespace) -> list[Call]:
    """Returns the calls that are asked for, in order.

    Raises:
      ValueError: there are none.
    """
    calls = [
        call
        for call in all_calls(impl=args.impl, rehearse=args.rehearse)
        if call.section in args.sections
        and (args.only is None or args.only.search(call.name))
        and (call.can_dry_run or not (args.dry_run or args.ahead))
    ]
    if not calls:
        what = f" --only {args.only.pattern}" if args.only else ""
        raise ValueError(
            f"no call of the sections {','.join(args.sections)} is named so{what}; "
            "--list names them all"
        )
    return calls


def run_all(args: argparse.Namespace, device: str) -> int:
    """Runs the calls in turn; writes after each of them how they went."""
    calls, started, log = chosen(args), time.monotonic(), args.out / "calls.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    known = {row["name"]: row for row in processes.read_rows(log) if "name" in row}
    rows: list[dict[str, Any]] = []
    how = {"compiled": args.out / COMPILED, "xla_flags": XLA_FLAGS}
    # Before anything imports jax.
    os.environ.update(processes.environment(**how, memory_share=0.88))
    with _compiling_ahead(args, how):
        for call in calls:
            before = known.get(call.name, {})
            if before.get("status") == "done" and before["command"] == call.command:
                rows.append(before)
                continue
            left_s = args.budget - (time.monotonic() - started)
            rows.append(run_call(args, call, device, left_s=left_s))
            log.write_text("".join(json.dumps(row) + "\n" for row in rows))
            row = rows[-1]
            print(
                f"{time.monotonic() - started:5.0f} s ({call.section}) {call.name}: "
                f"{row['status']} after {row['seconds']} s, of {call.seconds:.0f} "
                f"expected; {row['rows']} rows",
                flush=True,
            )
            if row["status"] == "failed" and not args.dry_run:
                _check_device()
    print(f"rows: {args.out}", flush=True)
    is_well = all(row["status"] in ("done", "left out") for row in rows)
    return DONE if is_well else FAILED


@contextlib.contextmanager
def _compiling_ahead(args: argparse.Namespace, how: dict[str, Any]) -> Iterator[None]:
    """Runs another process that compiles for the calls, beside most of the memory."""
    if args.dry_run:
        yield
        return
    command = [sys.executable, "-m", "experiments.gpu_report", *args.argv]
    command += ["--out", str(args.out), "--ahead"]
    with (
        (args.out / "ahead.txt").open("w") as output,
        subprocess.Popen(
            ["nice", "-n", "10", *command],
            env=processes.environment(**how, memory_share=0.04),
            cwd=processes.ROOT,
            stdout=output,
            stderr=output,
        ) as ahead,
    ):
        try:
            yield
            if args.rehearse:
                ahead.wait()  # Its rows are a part of what is rehearsed.
        finally:
            processes.end(ahead)


def _compile_all(args: argparse.Namespace, device: str) -> int:
    """Compiles for each call that can be compiled without weights."""
    for call in chosen(args):
        request = call.request(args.out, device=device, is_dry=True, prefix="compile-")
        processes.run_here(**request)
    return DONE


def _check_device() -> None:
    """Raises `RuntimeError` where a fault of a kernel spoilt the hold on the GPU."""
    import jax
    import jax.numpy as jnp

    try:
        jnp.ones((8,)).sum().block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"the device no longer answers ({str(error).splitlines()[0]}): the same "
            "command goes on with the calls that are left"
        ) from None


def run_call(
    args: argparse.Namespace, call: Call, device: str, *, left_s: float
) -> dict[str, Any]:
    """Runs a call in the time that is left, or leaves it out; returns its row."""
    path = args.out / f"{call.file}.jsonl"
    path.unlink(missing_ok=True)
    outcome = processes.Outcome(status="left out", exit_status=None, seconds=0.0)
    if args.dry_run or left_s >= call.seconds:
        request = call.request(args.out, device=device, is_dry=args.dry_run)
        outcome = processes.run_here(**request)
        gc.collect()
    rows = processes.read_rows(path)
    return {
        "kind": "call",
        "section": call.section,
        "name": call.name,
        "command": call.command,
        "expected_s": call.seconds,
        "rows": len(rows),
        "errors": [row["error"] for row in rows if row["kind"] == "error"],
        **dataclasses.asdict(outcome),
    }


def run(args: argparse.Namespace) -> int:
    """Runs the report; returns the exit status.

    Raises:
      ValueError: there is no GPU here.
      RuntimeError: it no longer answers.
    """
    own_out = args.out is not None
    args.out = (args.out or RESULTS).resolve()
    if args.list:
        for call in chosen(args):
            print(f"({call.section}) {call.name}, {call.seconds:.0f} s: {call.command}")
        return DONE
    has_gpu = processes.nvidia_smi("name") is not None
    needs_gpu = not (args.dry_run or args.rehearse)
    if needs_gpu and not has_gpu:
        raise ValueError(
            "no GPU is found (nvidia-smi does not name one); --dry-run --out FOLDER "
            "traces and lowers all programs without one"
        )
    if not needs_gpu and not own_out:
        raise ValueError(
            "--out FOLDER is needed with --dry-run and --rehearse: "
            "experiments/results/gpu is for what is measured on a GPU"
        )
    device = "gpu" if has_gpu or args.dry_run else "cpu"
    return (_compile_all if args.ahead else run_all)(args, device)


main = cli.script(
    "gpu_report.py",
    parse_args,
    run,
    kept=lambda args: f"rows are in {args.out}" if args.out else "",
    uses_jax=False,  # Each call does.
)

if __name__ == "__main__":
    cli.end(main)
