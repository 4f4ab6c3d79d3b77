"""The GPU report from the command line: flags, processes, time, what fails."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from experiments import gpu_report
from experiments.lib import cli
from experiments.support import gpu_markdown, gpu_task, gpu_workers


ROOT = gpu_workers.ROOT


@pytest.fixture
def on_cpu(monkeypatch):
    """No `nvidia-smi` is asked."""
    monkeypatch.setattr(gpu_task, "nvidia_smi", lambda query: None)


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Rows(list):
    """In the place of a file of rows."""

    write = list.append


def make_task(*, budget_s=100.0, clock=lambda: 0.0, only=None):
    """A task, and the rows that it writes."""
    out = Rows()
    task = gpu_task.Task(
        section="a",
        sizes=gpu_task.TINY,
        impl="xla",
        out=out,
        budget_s=budget_s,
        where={"jax_version": "0"},
        clock=clock,
        only=only,
    )
    return task, out


def test_a_failure_is_a_row_and_what_follows_is_done():
    """Fails if an item takes others with it, or a failure is not counted."""
    task, rows = make_task()
    done = []
    for item in task.in_time(["one", "two", "three"]):
        with task.guard(item):
            if item == "two":
                raise ValueError("no such shape\nand more")
            done.append(item)
    assert done == ["one", "three"] and task.failures == 1
    (row,) = rows
    assert row["kind"] == "error" and row["item"] == "two"
    assert row["error"] == "ValueError: no such shape" and row["jax_version"] == "0"
    assert "ValueError" in row["traceback"][-2]


def test_what_there_is_no_time_for_is_named():
    """Fails if a section runs on past its time, or hides what it left out."""
    ticks = itertools.count(0, 10)
    task, rows = make_task(budget_s=25, clock=lambda: next(ticks))
    assert list(task.in_time("abcd")) == ["a", "b"]
    (row,) = rows
    assert row["kind"] == "left out" and row["items"] == ["c", "d"]
    assert "25 s" in row["reason"] and task.failures == 0


def test_items_that_are_asked_for():
    """Fails if `--only` takes the whole name, or hides what it leaves out."""
    task, rows = make_task(only=re.compile("at 12[0-9]$"))
    contexts = task.chosen([128, 1024, 1289], name=lambda c: f"target at {c}")
    assert contexts == [128]
    (row,) = rows
    assert row["items"] == ["target at 1024", "target at 1289"]
    assert row["reason"] == "--only at 12[0-9]$"
    task, rows = make_task()
    assert task.chosen({"copy": 0}) == ["copy"] and not rows


def test_numbers_that_json_lacks():
    task, rows = make_task()
    task.write("kernel", gb_s=float("inf"), us=1.5)
    assert rows[0]["gb_s"] is None and rows[0]["us"] == 1.5


UNHURRIED = ("--budget", "36000")
"""A machine that is busy with other things may take any time."""


def run_python(*codes: str, limit_s: float = 36_000.0) -> list[gpu_workers.Outcome]:
    return gpu_workers.run_all(
        [["-c", code] for code in codes],
        variables=gpu_workers.environment(
            "cpu", memory_share=0.5, compiled=ROOT / "none"
        ),
        limit_s=limit_s,
    )


def test_variables_of_a_process(monkeypatch, tmp_path):
    """Fails if sections have a cache each, or jaxlib would refuse both names."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    made = gpu_workers.environment("cuda", memory_share=0.45, compiled=tmp_path)
    assert made["XLA_CLIENT_MEM_FRACTION"] == "0.45"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in made
    assert made["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    made = gpu_workers.environment("cuda", memory_share=0.45, compiled=tmp_path)
    assert made["JAX_COMPILATION_CACHE_DIR"] == "mine"


def test_it_starts_from_a_bare_tree():
    """Fails if `python -m` from the root needs the packages to be installed."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.gpu_report", "--help"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "python -m experiments.gpu_report" in done.stdout


def test_processes_that_fail_in_every_way():
    """Fails if a fault of a worker is taken for success, or its words are lost."""
    done, failed, died, silent = run_python(
        "import experiments.gpu_report",
        "raise SystemExit(1)",
        "import os, sys; sys.stderr.write('no warps'); sys.stderr.flush(); os.abort()",
        "raise SystemExit(7)",
    )
    assert (done.status, done.exit_status, done.errors) == ("done", 0, "")
    assert (failed.status, failed.exit_status) == ("failed", 1)
    assert (died.status, died.exit_status) == ("died", -signal.SIGABRT)
    assert "no warps" in died.errors
    assert (silent.status, silent.exit_status) == ("died", 7)


def test_a_process_past_its_time_is_ended():
    (outcome,) = run_python("import time; time.sleep(36_000)", limit_s=0.5)
    assert outcome.status == "ended"


def test_a_file_that_ends_in_the_middle_of_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"kind": "hash"}\n{"kind": "ha')
    assert gpu_workers.read_rows(path) == [{"kind": "hash"}]
    assert gpu_workers.read_rows(tmp_path / "none.jsonl") == []


def hashes(**values: str) -> list[dict]:
    return [{"kind": "hash", "check": k, "sha256": v} for k, v in values.items()]


def test_hashes_of_two_processes_are_compared():
    """Fails if a difference is missed, or nothing compared counts as equal."""
    same = gpu_report.compare("a", hashes(qkv="1", out="2"), hashes(qkv="1"))
    assert same["equal"] and same["compared"] == 1 and same["in_one_only"] == ["out"]
    other = gpu_report.compare("a", hashes(qkv="1", out="2"), hashes(qkv="1", out="3"))
    assert not other["equal"] and other["differing"] == ["out"]
    assert not gpu_report.compare("a", hashes(qkv="1"), [])["equal"]


def outcome(status: str) -> gpu_workers.Outcome:
    return gpu_workers.Outcome(status=status, exit_status=0, seconds=1.0, errors="")


def test_bits_that_differ_fail_the_section():
    """Even where both processes ended as they should."""
    rows = [{"kind": "processes", "equal": False}]
    both = [outcome("done"), outcome("done")]
    assert gpu_report._status("a", rows, both)["status"] == "failed"
    assert gpu_report._status("a", [], both)["status"] == "done"
    both[1] = outcome("died")
    assert gpu_report._status("a", [], both)["status"] == "died"


def test_time_that_is_not_used_goes_to_the_next(tmp_path, monkeypatch):
    """Fails if sections together could take more than the budget."""
    now, shares = [0.0], {}

    def run_section(args, letter, *, budget_s):
        shares[letter] = budget_s
        now[0] += 10 if letter == "a" else budget_s
        return {"status": "failed" if letter == "c" else "done"}

    monkeypatch.setattr(gpu_report, "run_section", run_section)
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: now[0])
    arguments = ["--device", "cuda", "--budget", "540", "--out", str(tmp_path)]
    assert gpu_report.main(arguments) == gpu_report.FAILED
    assert list(shares) == list("0abcdef") and now[0] <= 540
    weights = [section.weight for section in gpu_report.SECTIONS.values()]
    assert shares["b"] > 540 * 140 / sum(weights)  # Some of what (a) left.
    assert all(share > 20 for share in shares.values())


def test_steps_and_rounds_from_the_command_line(tmp_path, on_cpu, capfd):
    """Each in a process of its own, on tiny models."""
    folder = tmp_path / "new"
    arguments = ["--impl", "xla", "--sections", "c,d", "--out", str(folder), *UNHURRIED]
    assert gpu_report.main(arguments) == gpu_report.DONE
    *steps, _ = rows_of(folder / "c-steps.jsonl")
    found = [(row["model"], row["step"], row["context"]) for row in steps]
    names = ("plain step", "1 live rows", "5 live rows")
    assert found == [
        *(("target", name, context) for context in (8, 40) for name in names),
        *(("draft", "draft step", context) for context in (8, 40)),
    ]
    for row in steps:
        assert row["ms"] > 0 and row["to_weights"] > 0 and row["copy_gb_s"] > 0

    row, status = rows_of(folder / "d-rounds.jsonl")
    assert row["acceptance"] == "forced" and row["matched"] and row["gamma"] == 2
    assert row["acceptance_rate"] == pytest.approx(0.6, abs=0.2)
    assert row["tokens_per_target_step"] > 1
    assert {"git_commit", "jax_version", "device_kind", "driver"} <= set(row)
    assert status["kind"] == "section" and status["status"] == "done"
    report = (folder / gpu_markdown.NAME).read_text()
    assert "Acceptance is forced" in report and "1 of 1 runs match" in report
    assert "rounds: acceptance=forced" in capfd.readouterr().out


def test_kernels_from_the_command_line(tmp_path, on_cpu):
    """Every kernel interpreted, in a process of its own."""
    arguments = ["--sections", "0b", "--out", str(tmp_path), *UNHURRIED]
    assert gpu_report.main(arguments) == 0
    *probed, status = rows_of(tmp_path / "0-probe.jsonl")
    assert status["status"] == "done"
    found = {row["item"]: row.get("equal") for row in probed}
    same = ("cos", "target out", "target gate", "norm", "argmax", "attention")
    assert [name for name in found if found[name]] == list(same)
    assert {"ptxas", "nvcc", "nvidia-smi", "plain step"} < set(found)
    report = (tmp_path / gpu_markdown.NAME).read_text()
    assert report.index("## (0) probe") < report.index("## (b) kernels")
    rows = rows_of(tmp_path / "b-kernels.jsonl")
    assert rows.pop()["status"] == "done"
    assert {row["kernel"] for row in rows} == {
        "copy",
        "read (XLA's sum)",
        "target out",
        "target gate",
        "attention",
        "norm",
        "argmax",
    }
    for row in rows:
        assert row["us"] > 0 and row["copy_share"] > 0 and row["copy_gb_s"] > 0
    assert {row["impl"] for row in rows} == {"interpret", "xla"}


def test_a_section_that_cannot_run(tmp_path, capfd):
    """The process says why, the report goes on, and the status is not 0."""
    arguments = ["--device", "cuda", "--sections", "c,f", *UNHURRIED]
    assert gpu_report.main([*arguments, "--out", str(tmp_path)]) == gpu_report.FAILED
    for name in ("c-steps", "f-compile"):
        (status,) = rows_of(tmp_path / f"{name}.jsonl")
        assert status["status"] == "failed" and "--device cuda" in status["stderr"]
    assert "(f) compile" in (tmp_path / gpu_markdown.NAME).read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sections", "a,z"], ["--sections", "a,z"]),
        (["--sections", ""], ["--sections"]),
        (["--budget", "0"], ["--budget", "at least 1"]),
        (["--only", "draft ("], ["--only", "draft (", "no regular expression"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_unusable_flags(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        gpu_report.main(arguments)
    assert exit_.value.code == cli.UNUSABLE
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in words)


def test_a_cpu_writes_where_it_is_told(capsys, on_cpu):
    """Fails if a smoke test writes over results of a GPU, into the repository."""
    assert gpu_report.main(["--sections", "c"]) == cli.UNUSABLE
    assert "--out FOLDER is needed on a CPU" in capsys.readouterr().err


def test_a_pattern_without_items(tmp_path, capfd, on_cpu):
    """Fails if `--only` runs another item, or a misspelt one counts as success."""
    arguments = ["--impl", "xla", "--sections", "cd", "--only", "gama 4"]
    assert gpu_report.main([*arguments, "--out", str(tmp_path)]) == cli.UNUSABLE
    assert "--only gama 4: no item of the sections c,d" in capfd.readouterr().err
    *left_out, status = rows_of(tmp_path / "c-steps.jsonl")
    names = [name for row in left_out for name in row["items"]]
    assert "target at 40" in names and "draft step at 8" in names
    assert status["measured"] == 0


def test_a_folder_that_cannot_be_made(tmp_path, capsys, on_cpu):
    (tmp_path / "file").write_text("")
    assert gpu_report.main(["--out", str(tmp_path / "file" / "new")]) == cli.UNUSABLE
    assert "file" in capsys.readouterr().err


def test_tables_of_rows_that_lack_something(tmp_path):
    """An older or broken row is shown as far as it goes."""
    rows = [
        {"kind": "compile", "program": "a step", "trace_s": 1.0},
        {"kind": "error", "item": "head", "error": "ValueError: 3"},
        {"kind": "left out", "items": ["x"], "reason": "no time"},
    ]
    text = "\n".join(gpu_markdown.section("f-compile", rows))
    assert "| a step | 1.0 | - | - | - | - | - |" in text
    assert "**Failed**: head: `ValueError: 3`" in text
    assert "Left out: x: no time." in text
