"""The GPU report from the command line: its calls, processes, time and failures."""

import dataclasses
import importlib
import os
import re
import signal
import threading

import pytest
from script_runs import ROOT, rows_of
from slow_cases import slow

from experiments import exactness, gpu_report
from experiments.lib import pages, processes, subjects, suite_plan


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(processes, "nvidia_smi", lambda query: None)


@pytest.fixture
def few_layers(monkeypatch):
    """Gives models few layers, which have all kernels: each is traced once anyway."""
    for name in ("qwen3-0.6b", "qwen3-8b"):
        config = dataclasses.replace(subjects.PRESETS[name], num_layers=8)
        monkeypatch.setitem(subjects.PRESETS, name, config)
    whole = subjects.head_config
    shallow = lambda kind, target: whole(kind, target, depth=1)
    monkeypatch.setattr(subjects, "head_config", shallow)


def test_every_call_can_be_parsed(tmp_path, monkeypatch):
    """Fails if a script loses a flag, or two calls write to one file."""
    monkeypatch.chdir(tmp_path)
    for impl in ("triton", "xla"):
        calls = gpu_report.all_calls(impl=impl)
        for each in calls:
            module, arguments, _ = each.request(tmp_path, device="gpu")
            assert not any("{" in word for word in arguments), arguments
            importlib.import_module(module).parse_args(arguments)
        for names in ([each.name for each in calls], [each.file for each in calls]):
            assert len(set(names)) == len(names)
        assert all(f"    ({each.section}) " in gpu_report.__doc__ for each in calls)
    words = [" ".join(each.arguments) for each in calls]
    for head in subjects.HEADS:
        assert any(f"--head {head} --steps" in each for each in words), head


def test_exactness_can_be_planned_on_a_gpu(monkeypatch):
    """Fails if cells need more prompts than it has, or other kernels than Triton's."""
    monkeypatch.setattr(suite_plan.dispatch, "backend", lambda: "gpu")
    drafters = set()
    for call in gpu_report.all_calls(impl="triton"):
        if call.script == "exactness":
            cells = suite_plan.from_flags(exactness.parse_args(call.arguments)).cells
            assert {cell.impl for cell in cells} == {"triton"}
            assert len({cell.batch for cell in cells}) > 1
            drafters |= {cell.drafter for cell in cells}
    assert {"draft-model", "dspark"} <= drafters


def test_a_process_that_ended_is_followed_by_another(tmp_path, monkeypatch):
    """Fails if a crash or an endless call of one script ends the calls after it."""
    words = "import os, time\ndef main(words):\n    return eval(words[0])\n"
    (tmp_path / "scripted.py").write_text(words)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(processes, "_START_S", 9.0)
    worker = processes.Worker(tmp_path / "worker.txt", os.getpid)
    for word, limit_s, *expected in (
        ("0", 9, "done", 0),
        ("time.sleep(99)", 1, "ended", -signal.SIGKILL),
        ("os._exit(7)", 9, "died", 7),
    ):
        output = tmp_path / "output.txt"
        one = worker.run("scripted", [word], output, limit_s=limit_s)
        assert [one.status, one.exit_status] == expected
    worker.end()


@pytest.mark.parametrize(
    ("only", "programs"),
    [
        ("^c steps 0.6b$", {"target: plain steps", "target: windows"}),
        slow("^h eagle3 tree of 32", {"target: plain steps", "draft: proposals",
                     "forced: plain", "forced: rounds"}),
    ],
)  # fmt: skip
def test_programs_are_lowered_without_a_gpu(
    tmp_path, no_gpu, few_layers, only, programs
):
    """Fails if tracing a program and lowering it for a GPU needs a GPU."""
    out = tmp_path / "new"
    arguments = ["--dry-run", "--out", str(out), "--only", only]
    assert gpu_report.main(arguments) == 0
    (path,) = (path for path in out.glob("*.jsonl") if path.stem != "calls")
    rows = rows_of(path)
    assert {row["kind"] for row in rows} == {"compile"}
    assert programs == {row["program"] for row in rows}
    versions, *calls = rows_of(out / "calls.jsonl")
    assert versions["kind"] == "versions" and {"jax", "ptxas", "gpu"} <= set(versions)
    assert [row["status"] for row in calls] == ["done"]


TINY = {
    "0.6b": "tiny",
    "8b": "tiny",
    "turns": "--impl xla --repeats 1",
    "all": "--contexts 16 --rows 1,5",
    "published": "--steps 2 --contexts 16 --forced mt-bench,gsm8k --gen-tokens 12",
}


@pytest.mark.slow
def test_calls_of_a_tiny_model(tmp_path, no_gpu, monkeypatch):
    """Fails if a call needs its own process, or runs what was not compiled ahead."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)  # The tests set it.
    page = pages.sections(ROOT / "experiments/gpu_report.md")
    page["words"] += "\n".join(map(": ".join, TINY.items()))
    page["calls"] = re.sub(r"\| \d+ \|", "| 9000 |", page["calls"])
    monkeypatch.setattr(pages, "sections", lambda _: page)
    only = ("--only", " (steps 0.6b|eagle3)$", "--budget", "36000")
    args = gpu_report.parse_args(["--out", str(tmp_path), *only])
    assert gpu_report.run_all(args)
    worker = gpu_report.worker_of(args, is_ahead=True)
    calls = gpu_report.chosen(args)
    gpu_report.compile_ahead(args, worker, calls, {calls[0].name}, threading.Event())
    worker.end()
    every = rows_of(tmp_path / "h-eagle3.jsonl")
    rows = [row for row in every if row["kind"] == "rounds"]
    assert [row["forced_rate"] for row in rows] == ["mt-bench", "gsm8k"]
    assert all(row["matched"] and row["differing_kv"] == 0 for row in rows)
    (head,) = (row for row in every if "pass_bytes" in row)
    assert head["drafts"] == 7 and head["pass_bytes"] > 0
    ahead = rows_of(tmp_path / "compile-h-eagle3.jsonl")
    assert all(row["compile_s"] > 0 for row in ahead)
    # Plain decoding of both calls, and rounds: compiled once, not in each process.
    made = (tmp_path / gpu_report.COMPILED).glob("jit_generate-*-cache")
    assert len(list(made)) == 3
