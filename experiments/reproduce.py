"""How was every published row made? Makes them all anew, on one commit.

Calls the other scripts, one step after the other, each in a process of its own; what
they write replaces the rows, certificates and figures of experiments/results. A step
whose file names the present commit, as clean as it is now, is finished and skipped, so
that the same command begins with the step that was interrupted. Code with changes is
refused, because rows name the commit of their code. An idle machine and several hours
are needed.

`--tables` measures nothing: it writes the tables of README.md and docs anew from the
rows. Exit status: 0 all done, 2 a step failed or did not match, 1 unusable input.
"""

import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lib import (
    cli,
    files,
    processes,
    prompt_files,
    published,
    records,
    reproduction,
)
from spec_jax.model import hub


FOLDERS = ("data", "llama_bin", "texts")
"""Flags of folders, which commands have in braces."""

Step = reproduction.Step


FLAGS = """
    --only PATTERN  the steps in whose names this regular expression is found, such
        as 'spec_round|figures'; --list names them (default: all)
    --data DIR  folder of data sets, with gsm8k/test.jsonl; steps that need it are
        left out without it
    --llama-bin DIR  of a build of llama.cpp, as compare_llama_cpp.py has it; steps
        that need one are left out without it
    --texts DIR  folder of the rollouts that docs/heads.md says how to make; heads
        are left out without it
    --list  say what would be run and what is finished, and run nothing
    --tables  write the tables of README.md and docs from the rows, and run nothing
    --allow-dirty  from changed code too: rows and certificates say so
    """
parse_args = cli.parser(__doc__, FLAGS)


def chosen(args: argparse.Namespace) -> list[Step]:
    """Returns the steps that `--only` names; raises `ValueError` if there are none."""
    every = reproduction.steps()
    found = [s for s in every if args.only is None or args.only.search(s.file)]
    if not found:
        raise ValueError(f"no step is named so: --only {args.only.pattern}; see --list")
    return found


def state_of(args: argparse.Namespace, step: Step, here: Mapping[str, Any]) -> str:
    """Returns "finished", "to do", or "left out" with what the step lacks."""
    commands, (_, model) = " ".join(step.runs), reproduction.FETCHED.split()
    for name in FOLDERS:
        if f"{{{name}}}" in commands and getattr(args, name) is None:
            return f"left out: needs {cli.flag_of(name)}"
    fetched = hub.cache() / hub.FETCHED[model]
    if reproduction.FETCHED in commands and not fetched.is_file():
        return f"left out: needs `fetch_model.py {model}`"
    if not step.path.exists() or not step.flag:
        return "to do"
    *_, last = files.read_rows(step.path)
    made = last.get("environment", last)
    is_finished = all(made.get(n) == here[n] for n in ("git_commit", "git_dirty"))
    return "finished" if is_finished else "to do"


def run_step(args: argparse.Namespace, step: Step) -> int:
    """Runs a step; returns the worst exit status of its runs.

    The file of rows is replaced after the last run, if all have status 0 or 2.
    """
    worst, rows, is_rows = 0, [], step.path.suffix == ".jsonl"
    for number, command in enumerate(step.runs):
        words = command.format(results=records.RESULTS, **vars(args))
        script, *arguments = shlex.split(words)
        if args.allow_dirty and script != "plot":
            arguments.insert(0, "--allow-dirty")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / str(number) if is_rows else step.path
            # First: behind -- are flags of another script.
            status = call(script, [step.flag, str(path)] * bool(step.flag) + arguments)
            status = 0 if status == cli.FAILED and step.mismatches else status
            if status not in (0, cli.FAILED):
                return status
            rows += files.read_rows(path) if is_rows else []
        worst = max(worst, status)
    if is_rows:
        kept = [row for row in rows if not step.keep or row["kind"] in step.keep]
        with records.JsonLines(step.path, allow_dirty=args.allow_dirty) as out:
            out.write_all(shortened(kept))
    return worst


def call(script: str, arguments: Sequence[str]) -> int:
    """Runs a script in a process of its own, and returns its exit status."""
    print(f"$ python -m experiments.{script} {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", f"experiments.{script}", *arguments]
    variables = {**os.environ, "PYTHONPATH": processes.python_path()}
    return subprocess.run(command, env=variables).returncode


def shortened(rows: list[dict[str, Any]]) -> list[dict]:
    """Returns rows in the short form that is published.

    Floats have nine digits, which keep every bit of a float32, and are more than a
    measured time has; files of this checkout, sources of prompts and heads lack the
    folders of this machine; tokens that are the same with and without speculation are
    written once, and summaries lack `by_category`.
    """

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [short(entry) for entry in value]
        if isinstance(value, str):
            return value.replace(f"{published.ROOT}/", "")
        return float(f"{value:.9g}") if isinstance(value, float) else value

    for row in (rows := short(rows)):
        if isinstance(row.get("prompt_source"), str):
            row["prompt_source"] = prompt_files.without_folders(row["prompt_source"])
        if isinstance(row.get("drafter"), str):  # A name or a folder.
            row["drafter"] = pathlib.PurePath(row["drafter"]).name
        row.pop("by_category", None)
        if "spec_ids" in row and row["spec_ids"] == row["plain_ids"]:
            del row["spec_ids"]
    return rows


def run(args: argparse.Namespace) -> bool:
    """Lists or runs steps, or writes tables; returns whether all is well."""
    if args.tables:
        for path in published.update_pages():
            print(path)
        return True
    if not (args.list or args.allow_dirty):
        records.check_clean("a row of experiments/results")
    here, is_well = records.provenance(), True
    for step in chosen(args):
        state = state_of(args, step, here)
        told = step.runs if args.list else ()
        print(f"{step.file}: {state}", *told, sep="\n    ", flush=True)
        if args.list or state != "to do":
            continue
        step.path.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        status = run_step(args, step)
        seconds = round(time.perf_counter() - started, 1)
        print(f"{step.file}: status {status} after {seconds} s", flush=True)
        is_well &= status == 0
        if records.provenance() != here:
            raise ValueError(
                "the commit, or its code, changed while a step ran: run it again"
            )
    return is_well


KEPT = "the same command goes on after the last finished step"
main = cli.script("reproduce.py", parse_args, run, kept=KEPT)
