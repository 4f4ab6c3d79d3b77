"""What do the kernels, the steps and the rounds do on this GPU, in ten minutes?

    (0) first light   versions, one call of each kind of kernel, a step with its trace
    (a) rows          batch invariance of kernels and of rounds, compared as integers
    (b) kernels       time and bandwidth of each kernel, at 16, 32 and 64 rows, by plan
    (c) steps         plain steps, active rows, prefill, sampling, sets of XLA's flags
    (d) rounds        speculative generation at forced acceptance, against plain
    (e) transformers  the same weights in Hugging Face transformers
    (f) compile       compile times, and launches of each program

Each call is one of the other scripts, in a process of its own with a share of the time.
The most telling come first, and as many are made as the time is enough for: nine in
nine minutes. Rows are written as they are known; what a call prints is in report.md.
Weights are random and made on the device. Programs are compiled once for all calls, and
kept below --out. Start it from the root of the repository, where nothing needs to be
installed but its dependencies: `python -m experiments.gpu_report`. Without a GPU only
--dry-run works: it traces and lowers all programs.
Exit status: 0 all done and equal, 2 something failed or differs, 1 unusable input.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.lib import gpu_calls, processes


DONE, FAILED = 0, 2
RESULTS = pathlib.Path(__file__).parent / "results" / "gpu"
REPORT, COMPILED = "report.md", "compiled"
_GRACE_S = 6.0  # for the start of a process


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    cli.add(
        parser,
        f"""
        --sections LETTERS={",".join(gpu_calls.SECTIONS)}  sections to run
        --only PATTERN  the calls in whose names this regular expression is found, such
            as '0.6b' or 'gamma 4'; --list names them (default: all)
        --budget N=540  seconds for all calls together
        --quick  fewer repeats, plans and contexts
        --impl NAME=triton  kernels of steps and rounds; those of triton and mosaic are
            measured at the shapes of Qwen3 whatever this is
        --list  say what could be called, in order, and call nothing
        --dry-run  run nothing, and need no GPU: trace and lower all programs
        --out FOLDER  rows of each call, what it printed, report.md and compiled
            programs (default: experiments/results/gpu)
        """,
        LETTERS=_sections,
        NAME=("triton", "mosaic", "xla"),
        FOLDER=pathlib.Path,
    )
    return parser.parse_args(argv)


def _sections(text: str) -> tuple[str, ...]:
    """The type of `--sections`."""
    letters = tuple(sorted(set(text.replace(",", ""))))
    if not letters or not set(letters) <= set(gpu_calls.SECTIONS):
        known = ",".join(gpu_calls.SECTIONS)
        raise argparse.ArgumentTypeError(f"{text!r}: sections are {known}, such as a,c")
    return letters


def chosen(args: argparse.Namespace) -> list[gpu_calls.Call]:
    """The calls that are asked for, in order.

    Raises:
      ValueError: there are none.
    """
    calls = [
        call
        for call in gpu_calls.all_calls(impl=args.impl, quick=args.quick)
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


def affordable(calls: Sequence[gpu_calls.Call], budget_s: float) -> int:
    """How many calls, one after another, the time is enough for; one at least."""
    ends = itertools.accumulate(call.seconds for call in calls)
    return max(1, sum(end <= budget_s for end in ends))


def run_call(
    args: argparse.Namespace, call: gpu_calls.Call, *, budget_s: float
) -> dict[str, Any]:
    """Runs a call; returns the row that says how it went."""
    path = args.out / f"{call.file}.jsonl"
    # What an earlier report left would be taken for the rows of this one.
    path.unlink(missing_ok=True)
    # Rows say whether there were changes; to be refused now would waste the machine.
    arguments = [word.replace("{out}", str(args.out)) for word in call.arguments]
    arguments += ["--out", str(path), "--allow-dirty"]
    if call.script in gpu_calls.ON_EITHER_DEVICE:
        arguments += ["--device", gpu_calls.DEVICE]
    module, output = f"experiments.{call.script}", path.with_suffix(".txt")
    if args.dry_run:
        outcome = processes.run_here(module, [*arguments, "--dry-run"], output=output)
    else:
        compiled = None if gpu_calls.ANEW in call.marks else args.out / COMPILED
        variables = processes.environment(
            compiled=compiled,
            xla_flags=f"{gpu_calls.XLA_FLAGS} {call.xla_flags}".strip(),
            memory_share=0.45 if gpu_calls.HALF in call.marks else 0.9,
        )
        variables |= dict(word.split("=", 1) for word in call.variables)
        outcome = processes.run(
            module,
            arguments,
            output=output,
            variables=variables,
            limit_s=budget_s + _GRACE_S,
        )
    rows = processes.read_rows(path)
    row = {
        "kind": "call",
        "section": call.section,
        "name": call.name,
        "command": f"python -m {module} {' '.join(call.arguments)}",
        "xla_flags": call.xla_flags,
        "variables": list(call.variables),
        **dataclasses.asdict(outcome),
        "rows": len(rows),
        "errors": [row["error"] for row in rows if row["kind"] == "error"],
    }
    print(f"({call.section}) {call.name}: {row['status']} after {row['seconds']} s, "
          f"{row['rows']} rows", flush=True)  # fmt: skip
    return row


def compare(folder: pathlib.Path, calls: Sequence[gpu_calls.Call]) -> dict[str, Any]:
    """The row that says whether all processes got the same bits from each kernel."""
    hashes: dict[str, set[str]] = {}
    count: dict[str, int] = {}
    for call in calls:
        for row in processes.read_rows(folder / f"{call.file}.jsonl"):
            if row["kind"] == "hash":
                name = f"{row['shapes']} {row['check']} {row['impl']}"
                hashes.setdefault(name, set()).add(row["sha256"])
                count[name] = count.get(name, 0) + 1
    twice = [name for name in hashes if count[name] > 1]
    differing = sorted(name for name in twice if len(hashes[name]) > 1)
    return {"kind": "processes", "compared": len(twice), "differing": differing}


def run_all(args: argparse.Namespace) -> int:
    """The calls, in turn; writes the report after each of them.

    What a call does not use of its time goes to those after it.
    """
    calls = chosen(args)
    if not args.dry_run:
        count = affordable(calls, args.budget)
        if calls[count:]:
            needed_s = sum(call.seconds for call in calls)
            print(f"{count} of {len(calls)} calls, for which the time is enough; "
                  f"--budget {needed_s:.0f} is enough for all", flush=True)  # fmt: skip
        calls = calls[:count]
    args.out.mkdir(parents=True, exist_ok=True)
    started, rows = time.monotonic(), [{"kind": "versions", **processes.versions()}]
    waiting = list(calls)
    while waiting:
        weight = sum(call.seconds for call in waiting)
        call = waiting.pop(0)
        remaining_s = args.budget - (time.monotonic() - started)
        share_s = remaining_s * call.seconds / weight - _GRACE_S / 2
        if share_s < 1 and not args.dry_run:
            (args.out / f"{call.file}.jsonl").unlink(missing_ok=True)
            rows.append(_left_out(call))
            continue
        rows.append(run_call(args, call, budget_s=share_s))
        write_report(args.out, rows, calls)
    rows.append(compare(args.out, calls))
    path = write_report(args.out, rows, calls)
    print(f"report: {path}", flush=True)
    is_done = all(row.get("status", "done") == "done" for row in rows)
    return DONE if is_done and not rows[-1]["differing"] else FAILED


def _left_out(call: gpu_calls.Call) -> dict[str, Any]:
    row = {"kind": "call", "section": call.section, "name": call.name}
    return row | {"status": "left out", "errors": [], "command": "no time was left"}


def write_report(
    folder: pathlib.Path, rows: Sequence[dict], calls: Sequence[gpu_calls.Call]
) -> pathlib.Path:
    """Writes the rows, and `report.md` with what each call printed."""
    lines = [json.dumps(row) for row in rows]
    (folder / "calls.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / REPORT
    path.write_text("\n".join(_markdown(folder, rows, calls)) + "\n")
    return path


def _markdown(
    folder: pathlib.Path, rows: Sequence[dict], calls: Sequence[gpu_calls.Call]
) -> Iterator[str]:
    files, section = {call.name: call.file for call in calls}, None
    yield "# Measured on a device"
    for row in rows:
        if row["kind"] != "call":
            yield from ("", *(f"- {k}: {v}" for k, v in row.items() if k != "kind"))
            continue
        if row["section"] != section:
            section = row["section"]
            yield from ("", f"## ({section}) {gpu_calls.SECTIONS[section]}")
        yield from (
            "",
            f"### {row['name']}: {row['status']}",
            "",
            f"`{row['command']}`",
        )
        yield from (f"\n**Failed**: `{error}`" for error in row["errors"])
        text = folder / f"{files[row['name']]}.txt"
        if text.exists() and row["status"] != "left out":
            printed = text.read_text(errors="replace").rstrip()
            yield from ("", "```", printed.replace("```", "'''"), "```")


def run(args: argparse.Namespace) -> int:
    """Runs the report; returns the exit status.

    Raises:
      ValueError: there is no GPU here.
    """
    args.out = (args.out or RESULTS).resolve()
    if args.list:
        for call in chosen(args):
            flags = f"XLA_FLAGS={call.xla_flags} " if call.xla_flags else ""
            words = " ".join((*call.variables, call.script, *call.arguments))
            print(f"({call.section}) {call.name}: {flags}{words}")
        return DONE
    if not args.dry_run and processes.nvidia_smi("name") is None:
        raise ValueError(
            "no GPU is found (nvidia-smi does not name one); --dry-run --out FOLDER "
            "traces and lowers all programs without one"
        )
    if args.dry_run and args.out == RESULTS:
        raise ValueError(
            "--out FOLDER is needed with --dry-run: experiments/results/gpu is for "
            "what is measured on a GPU"
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
