"""The GPU report from the command line: its calls, processes, time, what fails."""

import dataclasses
import importlib
import itertools
import os
import subprocess
import sys

import pytest
from script_runs import rows_of

from experiments import exactness, gpu_report
from experiments.lib import cli, gpu_calls, processes, subjects, suite_plan


ROOT = processes.ROOT
MOST_CPU_S = 300
"""Of tracing and lowering every program of the report."""


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(processes, "nvidia_smi", lambda query: None)


@pytest.fixture
def few_layers(monkeypatch):
    """As many as have each kind of kernel: those of a model are traced once anyway."""
    for name in ("qwen3-0.6b", "qwen3-8b"):
        config = dataclasses.replace(subjects.PRESETS[name], num_layers=8)
        monkeypatch.setitem(subjects.PRESETS, name, config)
    whole = subjects.head_config
    shallow = lambda kind, target: whole(kind, target, depth=1)
    monkeypatch.setattr(subjects, "head_config", shallow)


def test_every_call_can_be_parsed(tmp_path, monkeypatch):
    """Fails if a script loses a flag, or two calls write to one file."""
    monkeypatch.chdir(tmp_path)
    for impl, rehearse in itertools.product(("triton", "xla"), (False, True)):
        calls = gpu_calls.all_calls(impl=impl, rehearse=rehearse)
        for each in calls:
            request = each.request(tmp_path, device="gpu")
            assert not any("{" in word for word in request["arguments"]), request
            module = importlib.import_module(request["module"])
            module.parse_args(request["arguments"])
        for names in ([each.name for each in calls], [each.file for each in calls]):
            assert len(set(names)) == len(names)
        assert {each.section for each in calls} == set(gpu_calls.SECTIONS)
    words = [" ".join(each.arguments) for each in calls]
    for head in subjects.HEADS:
        assert any(f"--head {head} --steps" in each for each in words), head


def test_exactness_can_be_planned_on_a_gpu(monkeypatch):
    """Fails if its cells are more than its prompts, or than the kernels, can do."""
    monkeypatch.setattr(suite_plan.dispatch, "backend", lambda: "gpu")
    calls = gpu_calls.all_calls(impl="triton")
    drafters = set()
    for found in (each for each in calls if each.script == "exactness"):
        planned = suite_plan.from_flags(exactness.parse_args(found.arguments))
        assert {cell.impl for cell in planned.plan.cells} == {"triton"}
        assert len({cell.batch for cell in planned.plan.cells}) > 1
        drafters |= {cell.drafter for cell in planned.plan.cells}
    assert {"draft-model", "eagle3", "dspark"} <= drafters


def dry_run(tmp_path, *arguments: str) -> list[dict]:
    arguments = ["--dry-run", "--out", str(tmp_path), *arguments]
    assert gpu_report.main(arguments) == gpu_report.DONE
    paths = [path for path in tmp_path.glob("*.jsonl") if path.stem != "calls"]
    return [row for path in paths for row in rows_of(path)]


def test_programs_are_lowered_without_a_gpu(tmp_path, no_gpu, few_layers, capfd):
    """Fails if a program needs a GPU to be traced and lowered for one."""
    out = tmp_path / "new"
    only = ("--only", "^(steps 0.6b|dspark$|eagle3 tree of 32)")
    rows = dry_run(out, *only)
    assert {row["kind"] for row in rows} == {"compile"}
    names = {"target: plain steps", "target: windows", "draft: proposals"}
    assert names | {"forced: plain", "forced: rounds"} == {r["program"] for r in rows}
    versions, *calls = rows_of(out / "calls.jsonl")
    assert versions["kind"] == "versions" and {"jax", "ptxas", "gpu"} <= set(versions)
    assert [row["status"] for row in calls] == ["done"] * 3
    report = (out / gpu_report.REPORT).read_text()
    assert "## (h, heads) dspark: done" in report and "forced: rounds" in report
    assert "(h) dspark: done" in capfd.readouterr().out


@pytest.mark.slow
def test_all_programs_are_lowered(tmp_path, no_gpu):
    """Fails if Python takes most of the eight minutes that a GPU may have."""
    rows = dry_run(tmp_path)
    assert len(rows) > 50 and {row["kind"] for row in rows} == {"compile"}
    assert sum(row["cpu_s"] for row in rows) < MOST_CPU_S


@pytest.mark.slow
def test_a_rehearsal(tmp_path, no_gpu):
    """Fails if a call does not run where all others do, or what is compiled ahead of
    them is another program."""
    out = str(tmp_path)
    only = ("--only", "^(steps 0.6b|eagle3$)", "--budget", "36000")
    arguments = ["--rehearse", "--impl", "xla", "--out", out, *only]
    assert gpu_report.main(arguments) == gpu_report.DONE
    rows = rows_of(tmp_path / "h-eagle3.jsonl", "rounds")
    assert [row["forced_rate"] for row in rows] == ["mt-bench", "gsm8k"]
    assert all(row["matched"] and row["differing_kv"] == 0 for row in rows)
    (head,) = (r for r in rows_of(tmp_path / "h-eagle3.jsonl") if "pass_bytes" in r)
    assert head["drafts"] == 7 and head["pass_bytes"] > 0
    ahead = rows_of(tmp_path / "compile-h-eagle3.jsonl")
    assert all(row["launches"] > 0 and row["compile_s"] > 0 for row in ahead)
    # Plain decoding, which both calls share, and rounds: of either process.
    made = (tmp_path / gpu_report.COMPILED).glob("jit_generate-*-cache")
    assert len(list(made)) == 2


SCRIPT = """
import json, os, pathlib, time

def main(argv):
    out = argv[argv.index("--out") + 1]
    pathlib.Path(out).write_text(json.dumps({"kind": "pid", "pid": os.getpid()}))
    print(f"here is {argv[0]}", flush=True)
    actions = {
        "die": os.abort, "fail": lambda: 2, "raise": lambda: 1 / 0,
        "leave": lambda: os._exit(0), "sleep": lambda: time.sleep(36_000),
    }
    return actions.get(argv[0], int)()
"""


def call(what: str, seconds: float = 3600.0) -> gpu_calls.Call:
    own = {"section": "c", "script": "a_script", "arguments": (what.split()[0],)}
    return gpu_calls.Call(name=what, seconds=seconds, **own)


@pytest.fixture
def ways_to_end(tmp_path, monkeypatch):
    """Calls of a script that ends in another way each; a GPU is found."""
    package = tmp_path / "experiments_of_test"
    package.mkdir()
    (package / "a_script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(processes, "nvidia_smi", lambda query: "a GPU")
    request = gpu_calls.Call.request

    def of_test(self, *arguments, **keywords):
        return request(self, *arguments, **keywords) | {"module": "a_script"}

    monkeypatch.setattr(gpu_calls.Call, "request", of_test)

    def run(*calls: gpu_calls.Call, budget: str = "36000") -> tuple[int, list[dict]]:
        monkeypatch.setattr(gpu_calls, "all_calls", lambda **unused: list(calls))
        status = gpu_report.main(["--out", str(tmp_path), "--budget", budget])
        return status, rows_of(tmp_path / "calls.jsonl")[1:]

    return run


def test_what_ends_is_followed_by_another_process(tmp_path, ways_to_end):
    """Fails if one call takes those after it along, or its rows are lost."""
    names = ("fine", "again", "fail", "raise", "die", "then", "leave", "last")
    status, rows = ways_to_end(*map(call, names))
    assert status == gpu_report.FAILED
    assert [(row["name"], row["status"]) for row in rows] == [
        *(("fine", "done"), ("again", "done"), ("fail", "failed")),
        *(("raise", "failed"), ("die", "died"), ("then", "done")),
        *(("leave", "died"), ("last", "done")),
    ]
    pids = [rows_of(tmp_path / f"c-{name}.jsonl")[0]["pid"] for name in names]
    assert all(row["rows"] == 1 for row in rows)
    # One process until it dies, and so on.
    assert len({*pids[:5]}) == len({*pids[5:7]}) == 1 and len({*pids}) == 3
    report = (tmp_path / gpu_report.REPORT).read_text()
    assert "die: died" in report and "here is die" in report
    assert "ZeroDivisionError" in report


def test_what_takes_too_long_is_ended(tmp_path, ways_to_end, monkeypatch, capfd):
    """Fails if a call that hangs takes the time of others, or of the machine."""
    monkeypatch.setattr(gpu_report, "_START_S", 6.0)
    calls = call("sleep", 0.1), call("fine", 0.1), call("too long", 3600)
    status, rows = ways_to_end(*calls, call("last", 0.1), budget="600")
    assert status == gpu_report.FAILED
    found = [(row["name"], row["status"]) for row in rows]
    assert found[:2] == [("sleep", "ended"), ("fine", "done")]
    assert found[2:] == [("too long", "left out"), ("last", "done")]
    assert "left out, for want of time: too long" in capfd.readouterr().out


def test_the_first_call_is_made_however_short_the_time_is(ways_to_end):
    status, rows = ways_to_end(call("fine"), call("other"), budget="60")
    assert status == gpu_report.DONE
    assert [row["status"] for row in rows] == ["done", "left out"]


def test_the_most_telling_calls_fit():
    """Fails if the default leaves out a head, or bits."""
    args, spent_s, made = gpu_report.parse_args([]), 0.0, []
    for each in gpu_calls.all_calls(impl="triton"):
        if each.seconds <= args.budget - spent_s:
            made.append(each)
            spent_s += each.seconds
    assert {"dspark", "eagle3 tree of 32", "exactness", "trace 8b"} <= {
        each.name for each in made
    }
    assert len(made) >= 12


def test_variables_of_a_process(monkeypatch, tmp_path):
    """Fails if calls have a cache each, or jaxlib would refuse both names."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    made = processes.environment(compiled=tmp_path, xla_flags="--b", memory_share=0.88)
    assert made["XLA_CLIENT_MEM_FRACTION"] == "0.88"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in made
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in made
    assert made["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path)
    assert made["XLA_FLAGS"] == "--mine --b"
    ahead = processes.environment(compiled=tmp_path, memory_share=0.04)
    assert ahead["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    anew = processes.environment(compiled=None)
    assert anew["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    made = processes.environment(compiled=tmp_path)
    assert made["JAX_COMPILATION_CACHE_DIR"] == "mine"


def test_it_starts_from_a_bare_tree():
    """Fails if `python -m` from the root needs the packages to be installed."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.gpu_report", "--list", "--only", "dspark$"],
        **{"cwd": ROOT, "env": variables, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(h) dspark, 35 s: latency --preset qwen3-8b")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sections", "a,z"], ["--sections", "a,z"]),
        (["--sections", ""], ["--sections"]),
        (["--budget", "0"], ["--budget", "at least 1"]),
        (["--only", "draft ("], ["--only", "no regular expression"]),
        (["--dry-run", "--only", "gama 4", "--out", "x"], ["--only gama 4", "--list"]),
        (["--rehearse"], ["--out FOLDER is needed"]),
        (["--dry-run"], ["--out FOLDER is needed"]),
        ([], ["no GPU is found", "--dry-run"]),
        (["--dry-run", "--out", "/dev/null/new"], ["/dev/null"]),
    ],
)
def test_unusable_flags(capsys, no_gpu, arguments, words):
    try:
        status = gpu_report.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    last = capsys.readouterr().err.splitlines()[-1]
    assert status == cli.UNUSABLE
    assert all(word in last for word in words), last
