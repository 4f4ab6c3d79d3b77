"""What do the kernels, the steps and the rounds do on this GPU, in ten minutes?

    (0) probe         compilers, and one call of each kind of kernel
    (a) bitwise       the row contract of every kernel and of a step, in two processes
    (b) kernels       time and bandwidth of each kernel, by its plan, beside a copy
    (c) steps         plain steps, live rows and draft steps of 8B and 0.6B shapes
    (d) rounds        speculative generation at forced acceptance, against plain
    (e) transformers  the same weights in Hugging Face transformers
    (f) compile       compile times, and launches of each program

Start it from the root of the repository, where nothing needs to be installed but its
dependencies: `python -m experiments.gpu_report`.

Each section is a process of its own with a share of the time; its rows are written as
they are known, and what fails is a row too. Weights are random and made on the device.
Programs are compiled once for all sections, and kept below `--out`.
On a CPU the same code runs at tiny sizes with interpreted kernels, as a smoke test.
Exit status: 0 all done and equal, 2 something failed or differs, 1 unusable input.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import functools
import importlib
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

from experiments.lib import records
from experiments.support import gpu_markdown, gpu_task, gpu_workers


DONE, FAILED = 0, 2
RESULTS = pathlib.Path(__file__).parent / "results" / "gpu"

COMPILED = "compiled"
"""The folder below `--out` of what is compiled."""

BUDGET_S = {"cuda": 540, "cpu": 600}
_GRACE_S = 12.0  # for the start of a process, and for the item that it is at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report.

    Attributes:
      name: of its file.
      module: in `experiments.support`; its `run` gets a `gpu_task.Task`.
      weight: its share of the time, beside those of the sections after it.
      memory_share: of the GPU's memory, for JAX.
      processes: that do the same work at once. The second of them compiles for itself.
      shares_programs: whether it takes what another section compiled.
    """

    name: str
    module: str
    weight: float
    memory_share: float = 0.9
    processes: int = 1
    shares_programs: bool = True


SECTIONS = {
    "0": Section(name="probe", module="gpu_probe", weight=40),
    "a": Section(
        name="bitwise",
        module="gpu_bitwise",
        weight=100,
        memory_share=0.4,
        processes=2,
    ),
    "b": Section(name="kernels", module="gpu_kernels", weight=140),
    "c": Section(name="steps", module="gpu_steps", weight=100),
    "d": Section(name="rounds", module="gpu_rounds", weight=90),
    # The other half is torch's.
    "e": Section(
        name="transformers", module="gpu_transformers", weight=60, memory_share=0.45
    ),
    # Measures how long it takes to compile.
    "f": Section(
        name="compile", module="gpu_compile", weight=50, shares_programs=False
    ),
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to run; auto is cuda where nvidia-smi finds a GPU (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--sections",
        type=_sections,
        default=tuple(SECTIONS),
        metavar="LETTERS",
        help="such as a,c (default: all)",
    )
    parser.add_argument(
        "--budget",
        type=cli.positive,
        metavar="SECONDS",
        help="for all sections together (default: 540), on a CPU for each (600)",
    )
    parser.add_argument(
        "--only",
        type=_pattern,
        metavar="PATTERN",
        help="of each section, the items whose names this regular expression is found "
        "in, such as 'draft (out|down)' of b or 'target at 128$' of c (default: all)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer contexts, plans, gammas and repeats",
    )
    parser.add_argument(
        "--impl",
        choices=("triton", "mosaic", "interpret", "xla"),
        help="kernels (default: triton, on a CPU interpret)",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help="JSON lines of each section, report.md and compiled programs (default: "
        "experiments/results/gpu; on a CPU there is none)",
    )
    # Of the processes that this script starts.
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _sections(text: str) -> tuple[str, ...]:
    """The type of `--sections`."""
    letters = tuple(sorted(set(text.replace(",", ""))))
    if not letters or not set(letters) <= set(SECTIONS):
        raise argparse.ArgumentTypeError(
            f"{text!r}: sections are {','.join(SECTIONS)}, such as a,c"
        )
    return letters


def _pattern(text: str) -> re.Pattern:
    """The type of `--only`."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no regular expression: {error}"
        ) from None


def work(args: argparse.Namespace) -> int:
    """One section, in a process of its own; returns its exit status."""
    import jax

    (letter,) = args.sections
    found = jax.devices()[0]
    if (found.platform == "gpu") != (args.device == "cuda"):
        raise ValueError(
            f"--device {args.device}, but JAX finds {found.device_kind} only: install "
            "the extra cuda12 or cuda13, and leave JAX_PLATFORMS unset"
        )
    section = SECTIONS[letter]
    if args.again or not section.shares_programs:
        jax.config.update("jax_enable_compilation_cache", False)
    module = importlib.import_module(f"experiments.support.{section.module}")
    sizes = sizes_for(args.device, quick=args.quick)
    with records.JsonLines(args.worker) as out:
        task = gpu_task.Task(
            section=letter,
            sizes=sizes,
            impl=args.impl,
            out=out,
            budget_s=args.budget,
            where=gpu_task.where(sizes),
            only_hashes=args.again,
            only=args.only,
            say=lambda line: print(line, flush=True),
        )
        with task.guard(section.name):
            module.run(task)
    return 1 if task.failures else 0


def sizes_for(device: str, *, quick: bool) -> gpu_task.Sizes:
    """What is measured: tiny models on a CPU."""
    if device == "cpu":
        return gpu_task.TINY
    return gpu_task.QUICK if quick else gpu_task.REAL


def run_section(
    args: argparse.Namespace, letter: str, *, budget_s: float
) -> dict[str, Any]:
    """Runs a section's processes; returns the row that says how it went."""
    section = SECTIONS[letter]
    path = args.out / f"{letter}-{section.name}.jsonl"
    # What an earlier report left would be taken for the rows of this one.
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        again = pathlib.Path(folder) / "again.jsonl"
        shared = ["-m", "experiments.gpu_report", "--sections", letter]
        shared += ["--device", args.device, "--impl", args.impl]
        shared += ["--budget", str(max(1, round(budget_s)))]
        shared += ["--quick"] if args.quick else []
        shared += ["--only", args.only.pattern] if args.only else []
        commands = [[*shared, "--worker", str(path)]]
        if section.processes == 2:
            commands.append([*shared, "--again", "--worker", str(again)])
        outcomes = gpu_workers.run_all(
            commands,
            variables=gpu_workers.environment(
                args.device,
                memory_share=section.memory_share,
                compiled=args.out / COMPILED,
            ),
            limit_s=budget_s + _GRACE_S,
        )
        rows = gpu_workers.read_rows(path)
        has_hashes = any(row["kind"] == "hash" for row in rows)
        if section.processes == 2 and (has_hashes or args.only is None):
            rows.append(compare(letter, rows, gpu_workers.read_rows(again)))
    rows.append(_status(letter, rows, outcomes))
    with records.JsonLines(path) as out:
        for row in rows:
            out.write(row)
    return rows[-1]


def measured(rows: list[dict]) -> list[dict]:
    """The rows of items that were tried."""
    return [row for row in rows if row["kind"] not in ("left out", "section")]


def compare(letter: str, rows: list[dict], others: list[dict]) -> dict[str, Any]:
    """The row that says whether two processes got the same bits.

    What one of them did not get to is counted and compared with nothing.
    """
    hashes, other_hashes = (
        {row["check"]: row["sha256"] for row in each if row["kind"] == "hash"}
        for each in (rows, others)
    )
    both = hashes.keys() & other_hashes.keys()
    differing = sorted(name for name in both if hashes[name] != other_hashes[name])
    return {
        "section": letter,
        "kind": "processes",
        "compared": len(both),
        "in_one_only": sorted(hashes.keys() ^ other_hashes.keys()),
        "differing": differing,
        "equal": bool(both) and not differing,
    }


def _status(letter: str, rows: list[dict], outcomes: list) -> dict[str, Any]:
    """How a section went: its processes, and what its rows say."""
    worst = max(outcomes, key=lambda outcome: outcome.status != "done")
    unequal = [row for row in rows if row.get("equal") is False]
    status = worst.status
    if status == "done" and unequal:
        status = "failed"
    errors = [row["error"] for row in rows if row["kind"] == "error"]
    print(f"({letter}) {status} after {worst.seconds:.0f} s", flush=True)
    if worst.errors and not errors:
        print(worst.errors, file=sys.stderr)
    return {
        "section": letter,
        "kind": "section",
        "name": SECTIONS[letter].name,
        "status": status,
        "exit_status": worst.exit_status,
        "seconds": round(max(outcome.seconds for outcome in outcomes), 1),
        "errors": errors,
        "measured": len(measured(rows)),
        "left_out": sum(row["kind"] == "left out" for row in rows),
        "stderr": worst.errors,
    }


def run_all(args: argparse.Namespace) -> int:
    """All sections; writes the tables after each of them, or at the end on a CPU.

    Raises:
      ValueError: `--only` is found in no item of the sections.
    """
    run = _run_together if args.device == "cpu" else _run_in_turn
    rows = list(run(args))
    print(f"tables: {gpu_markdown.write(args.out)}", flush=True)
    if {row["status"] for row in rows} != {"done"}:
        return FAILED
    if args.only and not any(row["measured"] for row in rows):
        raise ValueError(
            f"--only {args.only.pattern}: no item of the sections "
            f"{','.join(args.sections)} is named so; report.md names them all"
        )
    return DONE


def _run_in_turn(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One after another; what a section does not use goes to those after it."""
    started = time.monotonic()
    waiting = list(args.sections)
    while waiting:
        weight = sum(SECTIONS[letter].weight for letter in waiting)
        letter = waiting.pop(0)
        remaining_s = args.budget - (time.monotonic() - started)
        share_s = remaining_s * SECTIONS[letter].weight / weight - _GRACE_S / 2
        yield run_section(args, letter, budget_s=max(share_s, 1))
        gpu_markdown.write(args.out)


def _run_together(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two at a time, each with all of the time: nobody reads times of a CPU here."""
    with futures.ThreadPoolExecutor(2) as pool:
        run = functools.partial(run_section, args, budget_s=args.budget)
        yield from pool.map(run, args.sections)


def run(args: argparse.Namespace) -> int:
    """Runs the report, or one section of it; returns the exit status."""
    if args.device == "auto":
        args.device = "cpu" if gpu_task.nvidia_smi("name") is None else "cuda"
    args.budget = args.budget or BUDGET_S[args.device]
    args.impl = args.impl or ("interpret" if args.device == "cpu" else "triton")
    if args.worker:
        return work(args)
    if args.out is None:
        if args.device == "cpu":
            raise ValueError(
                "--out FOLDER is needed on a CPU, to write to: "
                "experiments/results/gpu is for what is measured on a GPU"
            )
        args.out = RESULTS
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    return run_all(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the report; returns the exit status."""
    return cli.run(
        "gpu_report.py",
        lambda: parse_args(argv),
        run,
        kept=lambda args: f"rows are in {args.out}" if args.out else "",
        uses_jax=False,  # Each section does, in a process of its own.
    )


if __name__ == "__main__":
    cli.end(main)
