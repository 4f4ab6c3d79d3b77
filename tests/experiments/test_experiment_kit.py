"""The kit of scripts: errors in one line, resumed rows, tasks."""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys

import exactness_commands as commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from script_runs import ROOT, last_line, rows_of, run_python

from experiments import exactness
from experiments.lib import cli, fan_out, records, results, tables
from spec_jax.engine import state


def raising(error: BaseException):
    def work(args):
        raise error

    return work


def run(work, **given) -> int:
    args, kept = argparse.Namespace(**given), lambda args: "rows are kept"
    return cli.script("x.py", lambda argv: args, work, kept=kept, uses_jax=False)()


def jax_out_of_memory(args):
    return jax.block_until_ready(jax.numpy.zeros((2**45,), "int8"))


@pytest.mark.parametrize(
    ("work", "line", "status"),
    [
        (raising(ValueError("two\nlines")), "error: two lines", 1),
        (raising(NotImplementedError("not here")), "error: not here", 1),
        (raising(RuntimeError("it failed")), "error: it failed", 1),
        (raising(FloatingPointError("NaN")), "error: NaN", cli.NOT_FINITE),
        (raising(MemoryError()), "no memory left; ask for less, or free some", 1),
        (jax_out_of_memory, "Ask for shorter texts, or fewer prompts at once", 1),
        (raising(PermissionError(13, "Denied", "a.txt")), "error: a.txt: Denied", 1),
        (raising(KeyboardInterrupt()), "interrupted; rows are kept", cli.INTERRUPTED),
        (raising(ValueError("page_size=12 is odd")), "error: --page-size 12 is odd", 1),
        (raising(ValueError("x.page_size=12")), "error: x.page_size=12", 1),
    ],
)
def test_an_error_is_one_line(work, line, status, capsys):
    assert run(work, page_size=12) == status
    said = last_line(capsys)
    assert said.startswith("x.py: ") and said.endswith(line)


@pytest.mark.parametrize("error", [TypeError("x"), AssertionError("x"), KeyError("x")])
def test_a_fault_of_the_program_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        run(raising(error))


@pytest.mark.parametrize(
    ("script", "lacking", "extra"),
    [("spec_round", "rich", "experiments"), ("train_drafter", "optax", "train")],
)
def test_an_extra_that_is_not_installed_is_named(script, lacking, extra):
    """Fails if an import comes before the line that says what to install."""
    path = ROOT / f"experiments/{script}.py"
    code = (
        f"import runpy, sys; sys.modules['{lacking}'] = None; sys.argv = ['{path}']; "
    )
    ended = run_python("-c", f"{code}runpy.run_path('{path}', run_name='__main__')")
    assert ended.returncode == cli.UNUSABLE
    command = f"pip install -e '.[{extra}]'"
    words = f"{script}.py: error: {lacking} is not installed: {command}"
    assert ended.stderr.splitlines() == [words]


def test_rows_are_in_the_file_when_write_returns(tmp_path):
    """Fails if rows come late, old rows go before the first new one, or NaN is kept."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"old": 1}\n')
    with records.JsonLines(path) as out:
        with pytest.raises(ValueError, match="no JSON number"):
            out.write({"x": float("nan")})
        assert rows_of(path) == [{"old": 1}]
        for i in range(3):
            out.write({"i": i, "text": "a\nb"})
            assert [row["i"] for row in rows_of(path)] == list(range(i + 1))
    # A row keeps its own value of a field that all rows have.
    with records.JsonLines(path) as out:
        out.common = {"temperature": 1.0, "seed": 3}
        out.write({"kind": "cell", "temperature": 0.0})
    (row,) = rows_of(path)
    assert list(row.items()) == [("kind", "cell"), ("temperature", 0.0), ("seed", 3)]
    with records.JsonLines(None) as out:
        out.write({"i": 0})


def test_a_run_goes_on_with_its_own_rows(tmp_path):
    """Fails if half a row is kept, or rows that were measured with other settings."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1, "x": 1}\n{"a": 1, "x": 2}\n{"a": 1, "x"')
    with records.JsonLines(path) as out:
        assert [row["x"] for row in records.resume(out, {"a": 1})] == [1, 2]
        out.write({"a": 1, "x": 3})
    assert [row["x"] for row in rows_of(path)] == [1, 2, 3]
    with records.JsonLines(path) as out:
        with pytest.raises(ValueError, match="line 1: a is 1 there and 2 here"):
            records.resume(out, {"a": 2})
        with pytest.raises(ValueError, match="line 1: no row of this script"):
            records.resume(out, {"b": 2})


def test_values_become_plain_json():
    row = {
        "np": [np.float32(0.5), np.True_, np.int64(3), np.arange(4).reshape(2, 2)],
        "jax": (jnp.int32(4), jnp.bfloat16(1.5)),
        "enum": state.Origin.BONUS,
        "path": pathlib.Path("a/b"),
        "nested": {1: {"x": jnp.ones(2)}},
    }
    converted = records.to_json(row)
    assert json.loads(json.dumps(converted, allow_nan=False)) == {
        "np": [0.5, True, 3, [[0, 1], [2, 3]]],
        "jax": [4, 1.5],
        "enum": 3,
        "path": "a/b",
        "nested": {"1": {"x": [1.0, 1.0]}},
    }
    with pytest.raises(ValueError, match=r"a=.*nan.* is no JSON number"):
        records.to_json({"a": {"tpot": jnp.array([0.0, jnp.nan])}})


def test_git_finds_changes_but_those_of_results(monkeypatch, tmp_path):
    """Fails if changed code is not refused in a checkout, or changed rows are."""

    def git(*arguments):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments],
            **{"cwd": tmp_path, "capture_output": True, "text": True, "check": True},
        )
        return done.stdout.rstrip()

    results = tmp_path / "experiments" / "results"
    code, row = tmp_path / "code.py", results / "row.jsonl"
    row.parent.mkdir(parents=True)
    for file in (code, row):
        file.write_text("1")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(records, "_git", git)
    monkeypatch.setattr(records, "RESULTS", results)
    row.write_text("2")
    with records.JsonLines(row):
        pass
    code.write_text("2")
    with pytest.raises(ValueError, match=r"without a commit \(code.py\); --allow"):
        records.JsonLines(row)
    for path, is_allowed in ((row, True), (tmp_path / "a.jsonl", False)):
        with records.JsonLines(path, allow_dirty=is_allowed):
            pass


def test_a_failure_is_a_row():
    """Fails if the error is raised instead, or a full disk becomes a row."""

    def fail(error: Exception):
        raise error

    (row,) = records.guarded("b", lambda: fail(ValueError("no such shape\nand more")))
    assert row["kind"] == "error" and row["error"] == "ValueError: no such shape"
    assert "ValueError" in "".join(row["traceback"]) and records.is_failure(row)
    with pytest.raises(OSError):
        records.guarded("b", lambda: fail(OSError(28, "No space left")))
    assert records.is_failure({"kind": "x", "equal": False})
    assert not records.is_failure({"kind": "x", "equal": True})


def multiplied(factor: int):
    """Returns a function that makes the list of a task's one product."""
    return lambda task: [factor * task]


def test_tasks():
    """Checks tasks in this process; a worker with another version of jax is refused."""
    parser = argparse.ArgumentParser()
    fan_out.add_flags(parser)
    fan = fan_out.of(parser.parse_args([]), multiplied, 2)
    found = {task: list(made) for task, made in fan(multiplied(2), [3, 1])}
    assert found == {3: [6], 1: [2]}
    job = fan_out.Job(make=multiplied, values=(2,))
    assert fan_out.call(job, 3) == [6]
    other = fan_out.Job(make=multiplied, values=(2,), place={"jax_version": "0.0"})
    with pytest.raises(ValueError, match="jax_version of a worker is .* '0.0', which"):
        fan_out.call(other, 3)


CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=2, include_dashboard=False)
print("at", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
"""A program that starts a cluster, which ends with its standard input."""


@pytest.mark.slow
def test_workers_of_ray_write_the_same_certificate(folders, tmp_path):
    """Fails if a cell is lost or run twice; needs the extra `cluster`."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray: pip install -e '.[cluster]'")
    grid = commands.one_cell(folders, "--gamma", "2,1", "--sampling", "greedy,sampled")
    out, alone, shared = (tmp_path / name for name in ("rows", "alone", "shared"))
    assert exactness.main([*grid, *commands.certifying(alone)]) == 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], **pipes) as cluster:
        lines = (line for line in cluster.stdout if line.startswith("at "))
        address = next(lines).removeprefix("at ").strip()
        more = ["--out", str(out), "--ray", address, *commands.certifying(shared)]
        assert exactness.main([*grid, *more]) == 0
    assert shared.read_bytes() == alone.read_bytes()
    prompts = [(row["cell"], row["index"]) for row in rows_of(out, "prompt")]
    assert len(prompts) == len(set(prompts)) == 3 * commands.NUM_PROMPTS


SUMMARY = {"tokens_per_target_step": 2.0, "speedup_e2e": 1.0, "speedup_decode": 1.5}


def test_a_speed_up_above_the_tokens_per_step_means_nothing():
    """Fails if a speed-up that only a busy machine shows is not marked as disturbed."""
    tokens = SUMMARY["tokens_per_target_step"]
    for name in tables.SPEEDUPS:
        busy = results.mark_disturbed(SUMMARY | {name: 1.01 * tokens})
        assert tables.to_row(busy)["disturbed"] is True
    for summary in (SUMMARY, SUMMARY | dict.fromkeys(tables.SPEEDUPS)):
        assert results.mark_disturbed(summary) == summary | {"disturbed": False}


def test_rates_are_above_zero():
    for text in ("0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="finite number above 0"):
            cli.KINDS["RATE"](text)
