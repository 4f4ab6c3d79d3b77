"""The GPU report from the command line: its calls, processes, time, what fails."""

import importlib
import itertools
import json
import os
import subprocess
import sys

import pytest
from script_runs import rows_of

from experiments import exactness, gpu_report
from experiments.lib import cli, gpu_calls, processes, suite_plan


ROOT = processes.ROOT
MOST_CPU_S = 60
"""Of tracing and lowering every program of the report."""


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(processes, "nvidia_smi", lambda query: None)


@pytest.fixture
def gpu(monkeypatch):
    """One is found; what is called runs on the CPU."""
    monkeypatch.setattr(processes, "nvidia_smi", lambda query: "a GPU")
    monkeypatch.setattr(gpu_calls, "DEVICE", "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def call(name: str, *arguments: str, **more) -> gpu_calls.Call:
    shared = {"section": "b", "script": "kernels", "seconds": 1.0}
    return gpu_calls.Call(name=name, arguments=arguments, **(shared | more))


def calls_are(monkeypatch, *calls: gpu_calls.Call) -> None:
    monkeypatch.setattr(gpu_calls, "all_calls", lambda **unused: list(calls))


@pytest.mark.parametrize(
    ("impl", "quick"),
    list(itertools.product(("triton", "mosaic", "xla"), (False, True))),
)
def test_every_call_can_be_parsed(impl, quick, tmp_path, monkeypatch):
    """Fails if a script loses a flag, or two calls write to one file."""
    monkeypatch.chdir(tmp_path)
    calls = gpu_calls.all_calls(impl=impl, quick=quick)
    for each in calls:
        arguments = [word.replace("{out}", str(tmp_path)) for word in each.arguments]
        assert not any("{" in word for word in arguments), arguments
        arguments.append("--allow-dirty")
        if each.script in gpu_calls.ON_EITHER_DEVICE:
            arguments += ["--device", "gpu"]
        arguments += ["--out", f"{each.file}.jsonl"]
        importlib.import_module(f"experiments.{each.script}").parse_args(arguments)
    for names in ([each.name for each in calls], [each.file for each in calls]):
        assert len(set(names)) == len(names)
    assert {each.section for each in calls} == set(gpu_calls.SECTIONS)
    # Both backends, whatever the others run on; of small heads Mosaic has no kernels.
    words = [" ".join((each.script, *each.arguments)) for each in calls]
    for backend in {"triton", "mosaic"} - {impl}:
        assert any(f"latency --preset qwen3-0.6b --steps 64 --impl {backend}" in each
                   for each in words) or impl == "xla"  # fmt: skip
    assert not any("--impl mosaic" in each for each in words if "preset" not in each)
    # What is compared between processes is compiled in both of them.
    anew = [each.name for each in calls if gpu_calls.ANEW in each.marks]
    assert "rows of kernels 0.6b" in anew and "each kernel once 8b" in anew


def test_exactness_can_be_planned_on_a_gpu(monkeypatch):
    """Fails if its cells are more than its prompts, or than the kernels, can do."""
    monkeypatch.setattr(suite_plan.dispatch, "backend", lambda: "gpu")
    calls = gpu_calls.all_calls(impl="triton", quick=False)
    (found,) = (each for each in calls if each.script == "exactness")
    planned = suite_plan.from_flags(exactness.parse_args(found.arguments))
    assert {cell.impl for cell in planned.plan.cells} == {"triton"}
    assert len({cell.batch for cell in planned.plan.cells}) > 1


@pytest.mark.slow
def test_the_first_call_is_lowered_without_a_gpu(tmp_path, no_gpu, capfd):
    """Fails if it needs a GPU; the whole plan, and its time, is a slow test."""
    out = tmp_path / "new"
    arguments = ["--dry-run", "--sections", "0", "--out", str(out)]
    assert gpu_report.main(arguments) == gpu_report.DONE
    *rows, _ = rows_of(out / "calls.jsonl")
    assert rows[0]["kind"] == "versions" and {"jax", "ptxas", "gpu"} <= set(rows[0])
    assert [row["status"] for row in rows[1:]] == ["done", "done"]
    lowered = rows_of(out / "0-each-kernel-once-0.6b.jsonl")
    assert {row["kind"] for row in lowered} == {"compile"}
    report = (out / gpu_report.REPORT).read_text()
    assert "## (0) first light" in report and "program=qkv, triton" in report
    assert "each kernel once 0.6b: done" in capfd.readouterr().out


@pytest.mark.slow
def test_all_programs_are_lowered_within_a_minute_of_cpu(tmp_path, no_gpu):
    """Fails if Python takes the ten minutes that a GPU may have."""
    arguments = ["--dry-run", "--out", str(tmp_path)]
    assert gpu_report.main(arguments) == gpu_report.DONE
    paths = [path for path in tmp_path.glob("*.jsonl") if path.stem != "calls"]
    rows = [row for path in paths for row in rows_of(path)]
    assert len(rows) > 300 and {row["kind"] for row in rows} == {"compile"}
    assert sum(row["cpu_s"] for row in rows) < MOST_CPU_S


def test_calls_are_processes_whose_rows_are_kept(tmp_path, monkeypatch, gpu):
    """Fails if what one prints is lost, or a failure is taken for success."""
    quick = ("--rows", "1", "--repeats", "1", "--only", "^a call")
    calls_are(
        monkeypatch,
        call("a product", *quick, "--impls", "xla"),
        call("its bits", *quick, "--impls", "native", "--check", "once"),
        call("bits anew", *quick, "--impls", "native", "--check", "once"),
        call("unusable", "--rows", "0", section="c"),
    )
    arguments = ["--out", str(tmp_path), "--budget", "36000"]
    assert gpu_report.main(arguments) == gpu_report.FAILED
    _, *calls, compared = rows_of(tmp_path / "calls.jsonl")
    statuses = [(row["name"], row["status"], row["rows"]) for row in calls]
    assert statuses == [
        ("a product", "done", 2),
        ("its bits", "done", 1),
        ("bits anew", "done", 1),
        ("unusable", "failed", 0),
    ]
    assert compared["compared"] == 1 and compared["differing"] == []
    report = (tmp_path / gpu_report.REPORT).read_text()
    assert "### unusable: failed" in report and "must be at least 1" in report
    assert "plain read" in report


def test_hashes_of_processes_are_compared(tmp_path):
    """Fails if a difference is missed, or names of other models are compared."""
    calls = [call("one"), call("two")]

    def differing(*shapes_and_hashes) -> dict:
        for each, (shapes, sha256) in zip(calls, shapes_and_hashes, strict=True):
            row = {"kind": "hash", "check": "qkv", "impl": "triton"}
            row |= {"shapes": shapes, "sha256": sha256}
            (tmp_path / f"{each.file}.jsonl").write_text(json.dumps(row) + "\n{half")
        return gpu_report.compare(tmp_path, calls)

    assert differing(("8b", "1"), ("8b", "1"))["differing"] == []
    assert differing(("8b", "1"), ("8b", "2"))["differing"] == ["8b qkv triton"]
    assert differing(("8b", "1"), ("0.6b", "2"))["compared"] == 0


def test_time_that_is_not_used_goes_to_the_next(tmp_path, monkeypatch, gpu):
    """Fails if calls together could take more than the budget."""
    now, shares = [0.0], {}

    def run_call(args, each, *, budget_s):
        shares[each.name] = budget_s
        now[0] += 10 if each.name.startswith("rows") else budget_s
        return {"kind": "call", "section": each.section, "name": each.name,
                "status": "done", "command": "", "errors": []}  # fmt: skip

    monkeypatch.setattr(gpu_report, "run_call", run_call)
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: now[0])
    arguments = ["--budget", "3000", "--out", str(tmp_path)]
    assert gpu_report.main(arguments) == gpu_report.DONE
    calls = gpu_calls.all_calls(impl="triton", quick=False)
    assert list(shares) == [each.name for each in calls] and now[0] <= 3000
    weight = sum(each.seconds for each in calls)
    # Some of what calls before it left.
    assert shares["kernels 8b"] > 3000 * 45 / weight - 6


def test_the_most_telling_calls_fit_in_nine_minutes(tmp_path, monkeypatch, gpu, capfd):
    """Fails if a call is begun that has no time, or the default leaves out a round."""
    made = []

    def run_call(args, each, *, budget_s):
        made.append((each, budget_s))
        return {"kind": "call", "section": each.section, "name": each.name,
                "status": "done", "command": "", "errors": []}  # fmt: skip

    monkeypatch.setattr(gpu_report, "run_call", run_call)
    assert gpu_report.main(["--out", str(tmp_path)]) == gpu_report.DONE
    assert {each.section for each, _ in made} == set("0acde")
    assert all(budget_s > each.seconds - 4 for each, budget_s in made)
    assert "calls, for which the time is enough; --budget 1" in capfd.readouterr().out
    made.clear()
    assert gpu_report.main(["--out", str(tmp_path), "--budget", "9"]) == gpu_report.DONE
    assert len(made) == 1  # However short the time is.


def run_python(tmp_path, code: str, *, limit_s: float = 36_000.0):
    (tmp_path / "a_script.py").write_text(code)
    variables = processes.environment(compiled=tmp_path)
    variables["PYTHONPATH"] = str(tmp_path)
    output = tmp_path / "out.txt"
    done = processes.run(
        "a_script", [], output=output, variables=variables, limit_s=limit_s
    )
    return done, output.read_text()


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("print('fine')", "done", "fine"),
        ("raise SystemExit(1)", "failed", ""),
        ("import os, sys; print('no warps', flush=True); os.abort()", "died", "warps"),
        ("raise SystemExit(7)", "died", ""),
    ],
)
def test_how_a_process_ends(tmp_path, code, status, words):
    done, printed = run_python(tmp_path, code)
    assert done.status == status and words in printed


def test_a_process_past_its_time_is_ended(tmp_path):
    done, _ = run_python(tmp_path, "import time; time.sleep(36_000)", limit_s=0.5)
    assert done.status == "ended"


def test_variables_of_a_process(monkeypatch, tmp_path):
    """Fails if calls have a cache each, or jaxlib would refuse both names."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    made = processes.environment(compiled=tmp_path, xla_flags="--b", memory_share=0.45)
    assert made["XLA_CLIENT_MEM_FRACTION"] == "0.45"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in made
    assert made["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path)
    assert made["XLA_FLAGS"] == "--mine --b"
    anew = processes.environment(compiled=None)
    assert anew["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    made = processes.environment(compiled=tmp_path)
    assert made["JAX_COMPILATION_CACHE_DIR"] == "mine"


def test_it_starts_from_a_bare_tree():
    """Fails if `python -m` from the root needs the packages to be installed."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.gpu_report", "--list", "--only", "gamma 4"],
        **{"cwd": ROOT, "env": variables, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(d) rounds gamma 4: latency --preset qwen3-8b")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sections", "a,z"], ["--sections", "a,z"]),
        (["--sections", ""], ["--sections"]),
        (["--budget", "0"], ["--budget", "at least 1"]),
        (["--only", "draft ("], ["--only", "no regular expression"]),
        (["--dry-run", "--only", "gama 4", "--out", "x"], ["--only gama 4", "--list"]),
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
