"""Which command made every published row? Makes them all anew, on one commit.

Calls the other scripts, one step after the other, each in a process of its own; what
they write replaces the rows, certificates and figures of experiments/results. A step is
finished when `reproduce.jsonl` there has its command with the present commit and its
files exist: it is skipped, so that the same command goes on where it was interrupted.
Every step adds the seconds that it took. Code with changes is refused, because rows
name the commit of their code. An idle machine and several hours are needed.

`--tables` measures nothing: it writes the tables of README.md and docs anew from the
rows. Exit status: 0 all done, 2 a step failed or did not match, 1 unusable input.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.lib import files, prompt_files, published, records, sweep_cells
from spec_jax import loading


DONE, FAILED = 0, 2

RESULTS = records.RESULTS
LOG = "reproduce.jsonl"

DATA = "{data}"
LLAMA = "{llama}"
"""In a command: the folders of `--data` and `--llama-bin`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What makes a file of results, or several.

    Attributes:
      file: below `RESULTS`; the name of the step.
      runs: commands, each a script and its flags; {results} in them is `RESULTS`, and
        {first} the rows of the first run.
      flag: which names the file; None where the script writes it without being told.
      keep: of several runs whose rows the file holds, the kind that is kept.
      totals: whether the categories of each set of prompts of a sweep become one row.
      mismatches: whether runs that do not match are expected, and no failure.
    """

    file: str
    runs: tuple[str, ...]
    flag: str | None = "--out"
    keep: str | None = None
    totals: bool = False
    mismatches: bool = False

    @property
    def path(self) -> pathlib.Path:
        """Where it stands, in the end."""
        return RESULTS / self.file


GAMMAS = (1, 2, 4, 7)
_MATCHED = (
    *("--gamma 1", "--gamma 2", "--gamma 3", "--gamma 7", "--page-size 8"),
    *("--page-size 64 --dtype float32", "--gen-tokens 256", "--prefill batched"),
    "--prefill rows",
)
_ONE_KIND = "--impl native --dtype bfloat16 --page-size 16 --cache paged"
_DRAFTERS = (
    "--product --drafter ngram,suffix,hybrid,draft-model,oracle --gamma-policy "
    "fixed,threshold,goodput --batch 1,4 --sampling greedy,sampled --gamma 4 "
    f"{_ONE_KIND} --prompts 8 --gen-tokens 64"
)
_FULL = "--full --prompts 12 --gen-tokens 256"
_TREES = (
    "--product --tree 2x4:7,4x6:15,4x16:31,4x16:63 --sampling greedy,sampled --batch "
    f"1,4 --drafter draft-model --gamma-policy fixed {_ONE_KIND} --prompts 8 "
    "--gen-tokens 64"
)
_GREEDY_TREES = ("4x8:7@0.6", "4x12:15@0.6", "4x16:31@0.6", "4x6:15@1")
# The second is EAGLE-2's: scored by probability, the most probable children.
_SAMPLED_TREES = ("4x6:15@0.7", "4x6:15@1/greedy", "4-2-1")
_MATCHED_TREES = (
    *("50", "50 --temperature 0.7", "50 --temperature 1", "50 --batch 4"),
    *("50 --batch 4 --temperature 1", f"{DATA}/gsm8k/test.jsonl:50"),
    f"{DATA}/gsm8k/test.jsonl:50 --temperature 1 --batch 4",
)
_HELD = ("humaneval/HumanEval.jsonl", "mbpp/mbpp.jsonl", "mt_bench/question.jsonl")
"""Data sets on which nothing was ever chosen."""
_HEAD = (
    "--product --tree none,4x6:15 --gamma 4,7 --sampling greedy,sampled --batch 1,4 "
    f"--gamma-policy fixed {_ONE_KIND} --prompts 8 --gen-tokens 64"
)
_ROUNDS_OF_HEADS = (
    *(f"--gamma {gamma} --temperature {t}" for gamma in (4, 7) for t in (0, 0.7, 1)),
    *("--tree 4x6:15@0.7 --temperature 1", "--tree 4x7:31@0.7 --temperature 1"),
    *("--gamma 7 --batch 4", "--gamma 7 --batch 4 --temperature 1"),
)
_TREES_OF_HEADS = {
    "eagle3": ("4x12:15@0.6", "4x16:31@0.6"),
    "dspark": ("4x7:15@0.6", "4x7:31@0.6"),  # No deeper than a block.
}
_FLASH = "--verify-path flash --prompts 20 --gen-tokens 256"


def steps() -> Iterator[Step]:
    """Every step, in order."""
    yield from _speeds()
    yield from _comparisons()
    yield from _heads()
    yield from _certificates()
    rounds = [f"spec_round_{i}_gamma{g}" for i in ("native", "xla") for g in GAMMAS]
    names = [*rounds, "latency_embedded_native", "latency_embedded_xla"]
    names += ["compare_hf", "parity_flash"]
    listed = " ".join(f"{{results}}/{name}.jsonl" for name in names)
    command = f"plot {listed} --out {{results}}/figures --theory"
    yield Step(file="figures/speedup.svg", runs=(command,), flag=None)


def _speeds() -> Iterator[Step]:
    """Rounds, steps and kernels of both implementations."""
    for impl, repeats in (("native", 3), ("xla", 2)):
        for gamma in GAMMAS:
            command = f"spec_round --impl {impl} --prompts 50 --repeats {repeats}"
            yield Step(
                file=f"spec_round_{impl}_gamma{gamma}.jsonl",
                runs=(f"{command} --gamma {gamma}",),
            )
        command = f"spec_round --impl {impl} --prompts"
        runs = tuple(f"{command} 50 {more}" for more in _MATCHED)
        yield Step(file=f"matched_{impl}.jsonl", runs=runs, keep="summary")
        runs = (f"{command} {DATA}/gsm8k/test.jsonl:50 --gen-tokens 256",)
        yield Step(file=f"matched_gsm8k_{impl}.jsonl", runs=runs, keep="summary")
        command = f"latency --impl {impl}"
        embedded, preset = f"{command} --repeats 15", f"{command} --preset qwen3-0.6b"
        yield Step(file=f"latency_embedded_{impl}.jsonl", runs=(embedded,))
        yield Step(
            file=f"latency_qwen3_0.6b_{impl}.jsonl", runs=(f"{preset} --repeats 7",)
        )
    yield Step(file="compare_hf.jsonl", runs=("compare_hf",))
    yield Step(file="kernels_embedded.jsonl", runs=("kernels",))
    command = "kernels --shapes qwen3-0.6b --rows 1,5,8 --repeats 8"
    yield Step(file="kernels_qwen3_0.6b.jsonl", runs=(command,))


def _trees() -> Iterator[Step]:
    """Rounds of trees: greedy, and drawn; what their rows cost; and that they match,
    everywhere."""
    command = "latency --impl native --tree-rows 8,16,32,64 --repeats 20"
    yield Step(file="latency_trees_native.jsonl", runs=(command,))
    command = "spec_round --impl native --prompts 50 --tree"
    runs = [f"{command} {tree}" for tree in _GREEDY_TREES]
    runs += [f"{command} {tree} --temperature 1" for tree in _SAMPLED_TREES]
    runs += ["spec_round --impl native --prompts 50 --gamma 7 --temperature 1"]
    yield Step(file="trees_native.jsonl", runs=tuple(runs), keep="summary")
    for impl, sets in {
        "native": (*_MATCHED_TREES, *(f"{DATA}/{name}:50" for name in _HELD)),
        "xla": _MATCHED_TREES[:1] + _MATCHED_TREES[4:6],
    }.items():
        command = f"spec_round --impl {impl} --tree 4x12:15@0.6 --prompts"
        runs = [f"{command} {prompts}" for prompts in sets]
        yield Step(file=f"matched_trees_{impl}.jsonl", runs=tuple(runs), keep="summary")


def _heads() -> Iterator[Step]:
    """Rounds and a certificate of each shipped head, and all of them on data sets."""
    names = loading.shipped_heads()
    for name in names:
        command = f"spec_round --impl native --drafter {name} --prompts"
        runs = [f"{command} 50 {more}" for more in _ROUNDS_OF_HEADS]
        runs += [
            f"{command} 50 --tree {tree}" for tree in _TREES_OF_HEADS.get(name, ())
        ]
        runs += [f"{command} {DATA}/gsm8k/test.jsonl:50 --gamma 7"]
        yield Step(file=f"{name}_native.jsonl", runs=tuple(runs), keep="summary")
        yield Step(
            file=f"certificates/{name}_native_bfloat16.json",
            runs=(f"exactness --drafter {name} {_HEAD}",),
            flag="--certificate",
        )
    if names:
        listed = ",".join((*names, "draft-model", "ngram", "suffix"))
        command = f"sweep --impl native --drafter {listed} --gamma 7 --temperature 0,1"
        yield Step(
            file="evaluation.jsonl",
            runs=(f"{command} --prompts {DATA}:20",),
            totals=True,
        )


def _comparisons() -> Iterator[Step]:
    """Trees, designs, batches, policies, traces, and a path that mismatches."""
    yield from _trees()
    yield from _beside_llama()
    command = "history --prompts 20"
    yield Step(file="history.jsonl", runs=(command,), keep="history")
    command = "throughput --repeats 5"
    yield Step(file="throughput.jsonl", runs=(command,), keep="throughput")
    if "dspark" in loading.shipped_heads():
        yield _schedule()
    command = "regret --prompts 6 --gen-tokens 96 --live --repeats 2"
    yield Step(file="regret.jsonl", runs=(command,))
    # Recordings of other settings do not go into one file.
    record = "replay --record {{scratch}}_{} --prompts 50 --gamma 7{}"
    sampled = " --temperature 0.7 --top-k 20 --top-p 0.8"
    yield Step(
        file="replay_check.jsonl",
        runs=tuple(
            run
            for name, more in (("greedy", ""), ("drawn", sampled))
            for run in (record.format(name, more), f"replay {{scratch}}_{name} --check")
        ),
        keep="replay",
    )
    yield Step(
        file="mismatches_flash.jsonl",
        runs=(f"spec_round --impl native {_FLASH} --temperature 0",),
        flag="--dump-verify-mismatches",
        mismatches=True,
    )
    yield Step(
        file="parity_flash.jsonl",
        runs=("parity --mismatch {results}/mismatches_flash.jsonl:1",),
        mismatches=True,
    )


def _schedule() -> Step:
    """A batch of 16 with what is verified scheduled, beside fixed gammas; plain prompts
    and mixed ones."""
    about = "--impl native --drafter dspark --batch 16"
    runs = [f"profile_steps {about} --gamma 7"]
    for prompts in ("32", f"{DATA}/spec_bench/question.jsonl:39"):
        command = f"throughput {about} --repeats 5 --prompts {prompts} --gamma"
        runs += [f"{command} {gamma}" for gamma in GAMMAS[:-1]]
        runs += [f"{command} {GAMMAS[-1]} --schedule {{first}}"]
    return Step(file="schedule.jsonl", runs=tuple(runs), keep="throughput")


def _beside_llama() -> Iterator[Step]:
    """Speeds beside llama.cpp, of the pair and of a preset, and what it keeps of the
    drafts of shipped heads."""
    runs = {"": "--repeats 5", "_qwen3_0.6b": "--preset qwen3-0.6b --repeats 5"}
    if heads := loading.shipped_heads():
        kept = "--gamma 4,7 --no-steps --repeats 1"
        runs["_heads"] = f"--drafter {','.join(heads)} {kept}"
    for name, more in runs.items():
        command = f"compare_llama_cpp --llama-bin {LLAMA} {more}"
        file = f"compare_llama_cpp{name}.jsonl"
        yield Step(file=file, runs=(command,), keep="comparison")


def _certificates() -> Iterator[Step]:
    gsm8k = f"--prompts {DATA}/gsm8k/test.jsonl:50 --gen-tokens 64"
    for name, more in {
        "default": "",
        "drafters_native_bfloat16": f" {_DRAFTERS}",
        "trees_native_bfloat16": f" {_TREES}",
        "full_native_bfloat16": f" {_FULL}",
        "gsm8k_native_bfloat16": f" {gsm8k} --impl native --dtype bfloat16",
    }.items():
        yield Step(
            file=f"certificates/{name}.json",
            runs=(f"exactness{more}",),
            flag="--certificate",
        )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    cli.add(
        parser,
        """
        --only PATTERN  the steps in whose names this regular expression is found, such
            as 'spec_round|figures'; --list names them (default: all)
        --data DIR  folder of data sets, with gsm8k/test.jsonl; steps that need it are
            left out without it
        --llama-bin DIR  of a build of llama.cpp, as compare_llama_cpp.py has it; steps
            that need one are left out without it
        --list  say what would be run and what is finished, and run nothing
        --tables  write the tables of README.md and docs from the rows, and run nothing
        --allow-dirty  from changed code too: rows and certificates say so
        """,
    )
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[Step]:
    """The steps that are asked for; raises `ValueError` where there are none."""
    found = [s for s in steps() if args.only is None or args.only.search(s.file)]
    if not found:
        raise ValueError(f"no step is named so: --only {args.only.pattern}; see --list")
    return found


def state_of(
    args: argparse.Namespace, step: Step, log: Sequence[dict], commit: str | None
) -> str:
    """ "finished", "left out" for want of a flag, or "to do"."""
    for word, flag in ((DATA, "data"), (LLAMA, "llama_bin")):
        if getattr(args, flag) is None and any(word in run for run in step.runs):
            return f"left out, for want of {cli.flag_of(flag)}"
    wanted = {"step": step.file, "commands": list(step.runs), "git_commit": commit}
    is_logged = any(wanted.items() <= row.items() for row in log)
    return "finished" if is_logged and step.path.exists() else "to do"


def words_of(args: argparse.Namespace, parts: pathlib.Path) -> dict[str, Any]:
    """What stands in braces in a command; `parts` is the folder of its runs' rows."""
    return {
        "results": RESULTS,
        "data": args.data,
        "llama": args.llama_bin,
        "first": parts / "0.jsonl",
        "scratch": parts / "scratch",
    }


def run_step(args: argparse.Namespace, step: Step) -> int:
    """Runs a step; returns the worst exit status of its runs.

    The file is replaced when all runs of several have ended well.
    """
    worst, rows = 0, []
    with tempfile.TemporaryDirectory() as folder:
        parts = pathlib.Path(folder)
        words = words_of(args, parts)
        for number, command in enumerate(step.runs):
            script, *arguments = shlex.split(command.format(**words))
            path = parts / f"{number}.jsonl" if step.keep else step.path
            is_recorded = "--record" in arguments
            if step.flag and not is_recorded:
                arguments += [step.flag, str(path)]
            if args.allow_dirty and script != "plot":
                arguments.insert(0, "--allow-dirty")
            status = call(script, arguments)
            worst = max(worst, 0 if status == FAILED and step.mismatches else status)
            if status not in (DONE, FAILED):
                return status
            if step.keep and not is_recorded:
                rows += files.read_rows(path).values()
        if step.keep:
            with records.open_rows(step.path, allow_dirty=args.allow_dirty) as out:
                out.write_all(row for row in rows if row["kind"] == step.keep)
    return worst


def call(script: str, arguments: Sequence[str]) -> int:
    """Runs a script in a process of its own, and returns its exit status."""
    print(f"$ python -m experiments.{script} {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", f"experiments.{script}", *arguments]
    paths = [str(published.ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, env={**os.environ, **variables}).returncode


def run_all(args: argparse.Namespace) -> int:
    """Runs what is not finished; returns the exit status."""
    if not args.allow_dirty:
        records.check_clean(what="a row of experiments/results", allow="--allow-dirty")
    here, path = records.provenance(), RESULTS / LOG
    log = _read_log(path)
    worst = DONE
    for step in chosen(args):
        state = state_of(args, step, log, here["git_commit"])
        print(f"{step.file}: {state}", flush=True)
        if state != "to do":
            continue
        step.path.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        status = run_step(args, step)
        seconds = round(time.perf_counter() - started, 1)
        print(f"{step.file}: status {status} after {seconds} s", flush=True)
        worst = max(worst, FAILED if status else DONE)
        if status not in (DONE, FAILED):
            continue
        if records.provenance() != here:
            raise ValueError(
                "the commit, or its code, changed while a step ran: run it again"
            )
        if step.path.suffix == ".jsonl":
            shorten(step.path, totals=step.totals, allow_dirty=args.allow_dirty)
        row = {"kind": "step_of_reproduction", "step": step.file}
        row |= {"commands": list(step.runs), "seconds": seconds, "status": status}
        log = [old for old in log if old["step"] != step.file] + [row | here]
        with records.open_rows(path, allow_dirty=args.allow_dirty) as out:
            out.write_all(log)
    return worst


def shorten(
    path: pathlib.Path, *, totals: bool = False, allow_dirty: bool = False
) -> None:
    """Writes the rows of a file anew, as short as they can be published.

    Floats have nine digits, which is every bit of a float32, and more than a measured
    time has; sources of prompts lack the folders of this machine.

    Args:
      totals: of a sweep, whether the categories of each set of prompts become one row.
    """

    def nine_digits(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: nine_digits(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [nine_digits(entry) for entry in value]
        return float(f"{value:.9g}") if isinstance(value, float) else value

    rows = [*files.read_rows(path).values()]
    if totals:
        # What all rows say, such as the commit, is said of their totals too.
        shared = {k: v for k, v in rows[0].items() if all(r.get(k) == v for r in rows)}
        rows = [shared | total for total in sweep_cells.totals(rows)]
        for row in rows:
            del row["conventions"]  # Other tools' names of the same counts.
    for row in (rows := nine_digits(rows)):
        if isinstance(row.get("prompt_source"), str):
            row["prompt_source"] = prompt_files.without_folders(row["prompt_source"])
    with records.open_rows(path, allow_dirty=allow_dirty) as out:
        out.write_all(rows)


def _read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    return [*files.read_rows(path).values()] if path.exists() else []


def run(args: argparse.Namespace) -> int:
    """Lists, writes tables, or runs; returns the exit status."""
    if args.tables:
        for path in published.update_pages():
            print(path)
        return DONE
    if args.list:
        log, commit = _read_log(RESULTS / LOG), records.provenance()["git_commit"]
        for step in chosen(args):
            state = state_of(args, step, log, commit)
            print(f"{step.file}: {state}", *step.runs, sep="\n    ")
        return DONE
    return run_all(args)


main = cli.script(
    "reproduce.py",
    parse_args,
    run,
    kept=lambda args: "the same command goes on after the last finished step",
)

if __name__ == "__main__":
    cli.end(main)
