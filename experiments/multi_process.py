"""Do several processes write what one does, bit for bit?

Starts the processes on this machine, each with devices of its own, joined by
`jax.distributed`: gloo on a CPU, NCCL on GPUs. Each reads its parts of the target; all
of them run autoregressive decoding, chains, a batch and, of a drafter that has them, a
tree. One process with one device runs the same, and the SHA-256 of tokens,
log-probabilities, logits and K/V are compared. Exit status: 0 all are equal, 2 some
differ, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments.lib import flags, models, processes, records, terminal
from spec_jax import generation, loading, lossless
from spec_jax.engine import protocols
from spec_jax.parallel import shard


EQUAL, DIFFERENT = 0, 2
PROMPTS = ("import os", "def quicksort(xs):")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_models(parser.add_argument_group("models"))
    runs = parser.add_argument_group("runs")
    cli.add(
        runs,
        """
        --processes N=2  processes to start on this machine
        --worker I  be process I of a cluster in place of starting any
        --coordinator HOST:PORT  of --worker: where process 0 listens
        --limit-s SECONDS=1800  after which processes are ended
        """,
        **{"HOST:PORT": str, "SECONDS": cli.positive},
    )
    flags.add_drafter(runs)
    flags.add_rounds(runs)
    flags.add_gen_tokens(runs, default=16)
    flags.add_out(parser, rows="one per run, with the hashes of both")
    args = parser.parse_args(argv)
    args.devices = args.devices or args.processes
    flags.check_models(parser, args)
    if args.devices % args.processes:
        parser.error(
            f"--devices {args.devices} are not as many on each of --processes "
            f"{args.processes}: take a multiple"
        )
    if (args.worker is None) != (args.coordinator is None):
        parser.error("--worker and --coordinator go together: give both, or neither")
    return args


def hashes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs everything on the mesh of all processes; returns the evidence, as rows."""
    lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma)
    greedy = {"max_tokens": args.gen_tokens, "stop": (), "page_size": args.page_size}
    drawn = generation.Sampling(temperature=0.7, seed=1)
    runs: list[tuple[str, loading.LanguageModel, tuple[str, ...], dict[str, Any]]] = [
        ("plain", lm, PROMPTS[:1], {"gamma": 0}),
        ("chain", lm, PROMPTS[:1], {}),
        ("batch", lm, PROMPTS, {"sampling": drawn}),
    ]
    if protocols.has_own(lm.drafter, "for_tree"):
        tree = lm.with_tree(f"2x{args.gamma}:{args.gamma}")
        runs.append(("tree", tree, PROMPTS[:1], {}))
    rows = []
    for name, model, prompts, settings in runs:
        found = lossless.evidence_of(model, list(prompts), **greedy, **settings)
        rows.append({"run": name, "hashes": [one.hashes() for one in found]})
    return rows


def work_as(args: argparse.Namespace) -> None:
    """Runs as one of several processes; the first writes its rows to the output."""
    shard.make_cpu_devices(args.devices // args.processes)
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.worker)
    rows = hashes(args)
    if args.worker == 0:
        print(json.dumps(rows), flush=True)


def start(args: argparse.Namespace, count: int, devices: int) -> list[dict[str, Any]]:
    """Starts `count` processes of this script, and returns the rows of the first.

    Raises:
      RuntimeError: one of them failed, or took too long; with the end of its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    given = [
        word
        for name in ("target", "draft", "dtype", "impl", "isa", "segments", "gamma")
        + ("drafter", "page_size", "gen_tokens")
        if getattr(args, name) is not None
        for word in (cli.flag_of(name), str(getattr(args, name)))
    ]
    command = [sys.executable, "-m", "experiments.multi_process", *given]
    command += ["--processes", str(count), "--devices", str(devices)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        outputs = [pathlib.Path(folder) / f"{number}.out" for number in range(count)]
        started = []
        for number, output in enumerate(outputs):
            own = ["--worker", str(number), "--coordinator", address]
            with output.open("wb") as file:
                one = subprocess.Popen(
                    [*command, *own],
                    cwd=processes.ROOT,
                    env=processes.environment(compiled=None),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            ended.callback(processes.end, one)
            started.append(one)
        until = time.monotonic() + args.limit_s
        # All would wait for one that failed.
        while None in (codes := [one.poll() for one in started]) and not any(codes):
            if time.monotonic() > until:
                raise RuntimeError(
                    f"processes took longer than --limit-s {args.limit_s}"
                )
            time.sleep(0.2)
        for number, (code, output) in enumerate(zip(codes, outputs, strict=True)):
            if code:
                raise RuntimeError(
                    f"process {number} ended with status {code}: "
                    f"{output.read_text()[-1000:]}"
                )
        return json.loads(outputs[0].read_text().splitlines()[-1])


def run(args: argparse.Namespace) -> int:
    """Starts both, compares, and shows it; returns the exit status."""
    if args.worker is not None:
        work_as(args)
        return EQUAL
    console, is_equal = terminal.console(), True
    with records.open_out(args) as out:
        out.common = records.provenance() | {
            "processes": args.processes,
            "devices": args.devices,
            "segments": args.segments,
            "drafter": args.drafter,
        }
        several = start(args, args.processes, args.devices)
        alone = start(args, 1, 1)
        for one, other in zip(alone, several, strict=True):
            same = one == other
            is_equal &= same
            out.write({**other, "one_process": one["hashes"], "equal": same})
            digest = other["hashes"][0]["kv"][:16]
            console.print(f"{one['run']:6} {'equal' if same else 'DIFFERENT'} {digest}")
    console.print(
        f"{args.processes} processes, {args.devices} devices and one, "
        f"{args.segments} segments: {'equal' if is_equal else 'DIFFERENT'}"
    )
    return EQUAL if is_equal else DIFFERENT


main = cli.script("multi_process.py", parse_args, run, uses_jax=False)

if __name__ == "__main__":
    cli.end(main)
