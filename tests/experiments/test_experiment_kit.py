"""The kit of scripts: errors in one line, resumed rows, tasks."""

import argparse
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from script_runs import ROOT, last_line, rows_of, run_python

from experiments.lib import cli, fan_out, flags, records, results, tables


def run(error: BaseException | None, **given) -> int:
    """Runs a script that ends with an error; by default with one of jax itself."""

    def work(args):
        if error is not None:
            raise error
        jax.block_until_ready(jnp.zeros((2**45,), "int8"))

    args, kept = argparse.Namespace(**given), "rows of {page_size} are kept"
    return cli.script("x.py", lambda _: args, work, kept=kept, uses_jax=False)()


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (ValueError("two\nlines"), "error: two lines", 1),
        (NotImplementedError("not here"), "error: not here", 1),
        (FloatingPointError("NaN"), "error: NaN", cli.FAILED),
        (MemoryError(), "no memory left; ask for less, or free some", 1),
        (None, "Ask for shorter texts, or fewer prompts at once", 1),
        (PermissionError(13, "Denied", "a.txt"), "error: a.txt: Denied", 1),
        (KeyboardInterrupt(), "interrupted; rows of 12 are kept", cli.INTERRUPTED),
        (ValueError("page_size=12 is odd"), "error: --page-size 12 is odd", 1),
        (ValueError("x.page_size=12"), "error: x.page_size=12", 1),
    ],
)
def test_an_error_is_one_line(error, line, status, capsys):
    assert run(error, page_size=12) == status
    said = last_line(capsys)
    assert said.startswith("x.py: ") and said.endswith(line)


def test_a_fault_of_the_program_keeps_its_traceback():
    for error in (TypeError, AssertionError, KeyError):
        with pytest.raises(error):
            run(error("x"))


@pytest.mark.parametrize(
    ("script", "lacking", "extra"),
    [("spec_round", "rich", "experiments"), ("train_drafter", "optax", "train")],
)
def test_an_extra_that_is_not_installed_is_named(script, lacking, extra):
    """Fails if an import comes before the line that says what to install."""
    path = ROOT / f"experiments/{script}.py"
    code = f"import sys; sys.modules['{lacking}'] = None; sys.argv = ['{path}']; "
    code += f"import runpy; runpy.run_path('{path}', run_name='__main__')"
    ended = run_python("-c", code)
    assert ended.returncode == cli.UNUSABLE
    words = f"{lacking} is not installed: pip install -e '.[{extra}]'"
    assert ended.stderr.splitlines() == [f"{script}.py: error: {words}"]


def test_rows_are_in_the_file_when_write_returns(tmp_path):
    """Fails if rows come late, old rows go before the first new one, or NaN is kept."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"old": 1}\n')
    with records.JsonLines(path) as out:
        with pytest.raises(ValueError, match="x=.*nan.* is no JSON number"):
            out.write({"x": {"y": jnp.array([0.0, jnp.nan])}})
        assert rows_of(path) == [{"old": 1}]
        for i in range(3):
            out.write({"i": np.int64(i), "text": "a\nb"})
            assert [row["i"] for row in rows_of(path)] == list(range(i + 1))
    # A row keeps its own value of a field that all rows have.
    with records.JsonLines(path) as out:
        out.common = {"temperature": 1.0, "seed": 3}
        values = {1: {"x": np.arange(4).reshape(2, 2), "y": np.True_}}
        out.write({"path": path, "temperature": jnp.bfloat16(1.5), "by": values})
    (row,) = rows_of(path)
    expected = [("path", str(path)), ("temperature", 1.5)]
    expected += [("by", {"1": {"x": [[0, 1], [2, 3]], "y": True}}), ("seed", 3)]
    assert list(row.items()) == expected
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


def test_git_finds_changes_but_those_of_results(monkeypatch, tmp_path):
    """Fails if changed code is not refused in a checkout, or changed rows are."""

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode().rstrip()

    results = tmp_path / "experiments" / "results"
    code, row = tmp_path / "code.py", results / "row.jsonl"
    results.mkdir(parents=True)
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


def test_a_failure_is_a_row(tmp_path):
    """Fails if the error is raised instead, or a full disk becomes a row."""

    def fail(error: Exception):
        raise error

    path, columns = tmp_path / "a.jsonl", {"x": {"equal": ""}}
    with records.JsonLines(path) as out:
        report = lambda: tables.Report(out, columns)
        one = report()
        one.add("b", lambda: fail(ValueError("no such shape\nand more")))
        (row,) = rows_of(path)
        assert row["kind"] == "error" and row["error"] == "ValueError: no such shape"
        assert "ValueError" in "".join(row["traceback"]) and one.failed
        with pytest.raises(OSError):
            one.add("b", lambda: fail(OSError(28, "No space left")))
        for is_equal in (False, True):
            other = report()
            other.add("c", lambda equal=is_equal: [{"kind": "x", "equal": equal}])
            assert other.failed is not is_equal


def multiplied(factor: int):
    """Returns a function that makes the list of a task's one product."""
    return lambda task: [factor * task]


def test_tasks():
    """Checks tasks in this process; a worker with another version of jax is refused."""
    args = flags.parser("A script.", "cluster")([])
    done = fan_out.each(args, [3], multiplied(2), multiplied, 2)
    assert {task: [*made] for task, made in done} == {3: [6]}
    assert fan_out.call(fan_out.Job(make=multiplied, values=(2,)), 3) == [6]
    other = fan_out.Job(make=multiplied, values=(2,), place={"jax_version": "0.0"})
    with pytest.raises(ValueError, match="jax_version of a worker is .* '0.0', which"):
        fan_out.call(other, 3)


def test_a_speed_up_above_the_tokens_per_step_means_nothing():
    """Fails if a speed-up that only a busy machine shows is not marked as disturbed."""
    summary = {"tokens_per_target_step": 2.0} | dict.fromkeys(tables.SPEEDUPS, 1.5)
    for name in tables.SPEEDUPS:
        busy = results.mark_disturbed(summary | {name: 2.02})
        assert tables.to_row(busy)["disturbed"] is True
    for other in (summary, summary | dict.fromkeys(tables.SPEEDUPS)):
        assert results.mark_disturbed(other) == other | {"disturbed": False}
