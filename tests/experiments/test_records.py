"""Records: whole lines, plain JSON, and faults found before the work."""

import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import records
from spec_jax.engine import state


def rows(path: pathlib.Path) -> list[dict]:
    """The rows of a file; fails if a line is not whole."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_each_row_is_in_the_file_when_write_returns(tmp_path):
    path = tmp_path / "a.jsonl"
    with records.JsonLines(path) as out:
        assert path.exists()
        for i in range(3):
            out.write({"i": i, "text": "a\nb\u2028"})
            assert [row["i"] for row in rows(path)] == list(range(i + 1))
    assert rows(path)[2] == {"i": 2, "text": "a\nb\u2028"}


def test_old_rows_stay_until_the_first_new_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"old": 1}\n{"old": 2}\n')
    with records.JsonLines(path):
        pass
    assert len(rows(path)) == 2
    with records.JsonLines(path) as out:
        with pytest.raises(ValueError, match="no JSON number"):
            out.write({"x": float("nan")})
        assert len(rows(path)) == 2
        out.write({"new": 1})
        out.write({"new": 2})
    assert rows(path) == [{"new": 1}, {"new": 2}]


def test_half_a_line_is_taken_back(tmp_path):
    path = tmp_path / "a.jsonl"
    out = records.JsonLines(path)
    out.write({"i": 0})

    class FullDisk:
        """Takes three bytes, and then no more."""

        def __init__(self, file):
            self.file, self.space = file, 3

        def write(self, data):
            if not self.space:
                raise OSError(28, "No space left on device")
            self.space, taken = 0, self.space
            return self.file.write(data[:taken])

        def __getattr__(self, name):
            return getattr(self.file, name)

    out._file = FullDisk(out._file)
    with pytest.raises(ValueError, match="No space left on device.*are kept"):
        out.write({"i": 1})
    out.close()
    assert rows(path) == [{"i": 0}]


def test_a_pipe_can_be_written():
    reader, writer = os.pipe()
    with records.JsonLines(f"/dev/fd/{writer}") as out:
        out.write({"i": 0})
        out.write({"i": 1})
    os.close(writer)
    with open(reader) as file:
        assert [json.loads(line)["i"] for line in file] == [0, 1]


def test_no_path_writes_nowhere_but_checks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with records.JsonLines(None) as out:
        out.write({"i": 0})
        with pytest.raises(ValueError, match="no JSON number"):
            out.write({"x": float("inf")})
    assert list(tmp_path.iterdir()) == []


def test_unwritable_paths_are_found_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    faults = {
        tmp_path: "is a directory",
        tmp_path / "no" / "a.jsonl": "does not exist; make it first",
        tmp_path / "file" / "a.jsonl": "does not exist; make it first",
        "a\0b": "cannot be written",
    }
    for path, said in faults.items():
        with pytest.raises(ValueError, match=said) as caught:
            records.JsonLines(path)
        assert len(str(caught.value).splitlines()) == 1

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # Planted, since the tests may run as root, whom no permission stops.
    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(ValueError, match=r"a\.jsonl: cannot be written \(Permission"):
        records.JsonLines(tmp_path / "a.jsonl")


def test_values_become_plain_json():
    row = {
        "np": np.float32(0.5),
        "bool": np.True_,
        "int": np.int64(3),
        "jax": jnp.int32(4),
        "bf16": jnp.bfloat16(1.5),
        "array": np.arange(4).reshape(2, 2),
        "tuple": (1, (2.0, None)),
        "enum": state.Origin.BONUS,
        "path": pathlib.Path("a/b"),
        "nested": {1: {"x": jnp.ones(2)}},
    }
    converted = records.to_json(row, "row")
    assert json.loads(json.dumps(converted, allow_nan=False)) == {
        "np": 0.5,
        "bool": True,
        "int": 3,
        "jax": 4,
        "bf16": 1.5,
        "array": [[0, 1], [2, 3]],
        "tuple": [1, [2.0, None]],
        "enum": 3,
        "path": "a/b",
        "nested": {"1": {"x": [1.0, 1.0]}},
    }
    assert type(converted["enum"]) is int and type(converted["bool"]) is bool


@pytest.mark.parametrize(
    "value", [float("nan"), -float("inf"), np.float32("nan"), jnp.array([0.0, jnp.nan])]
)
def test_nan_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"tpot(\[1\])?=.* is no JSON number"):
        records.to_json({"a": {"tpot": value}}, "row")


def test_provenance():
    found = records.provenance()
    assert json.loads(json.dumps(found)) == found
    assert found["jax_version"] == jax.__version__
    assert found["platform"] == jax.devices()[0].platform
    assert found["device_kind"] and found["jaxlib_version"] and found["num_cpus"] >= 1
    if found["git_commit"] is not None:
        assert len(found["git_commit"]) == 40
        assert isinstance(found["git_dirty"], bool)


def test_provenance_outside_a_checkout(monkeypatch):
    for error in (FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")):

        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(subprocess, "run", fail)
        found = records.provenance()
        assert found["git_commit"] is None and found["git_dirty"] is None


def check_clean() -> None:
    records.check_clean(what="a certificate", allow="--allow-dirty")


def test_code_of_a_commit(monkeypatch):
    """What git says decides; and changes of results are not asked for."""
    asked = []

    def git(*arguments):
        asked.append(arguments)
        return "" if arguments[0] == "status" else "0" * 40

    monkeypatch.setattr(records, "_git", git)
    check_clean()
    assert records.provenance()["git_dirty"] is False
    assert ":(top,exclude)experiments/results" in asked[0]


def test_code_without_a_commit(monkeypatch):
    monkeypatch.setattr(records, "_git", lambda *arguments: None)
    with pytest.raises(ValueError, match="a certificate .* no git checkout"):
        check_clean()


def test_a_library_from_elsewhere_is_not_of_the_commit(monkeypatch, tmp_path):
    """Such as an installed one, beside the scripts of a checkout."""
    monkeypatch.setattr(records, "_git", lambda *a: "" if a[0] == "status" else "0")
    monkeypatch.setattr(records.spec_jax, "__file__", str(tmp_path / "a" / "b.py"))
    with pytest.raises(ValueError, match=f"spec_jax comes from {tmp_path}, not from"):
        check_clean()
    assert records.provenance()["git_dirty"] is True


def test_git_finds_changes_but_those_of_results(monkeypatch, tmp_path):
    """In a checkout of its own."""

    def git(*arguments):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments],
            **{"cwd": tmp_path, "capture_output": True, "text": True, "check": True},
        )
        return done.stdout.rstrip()

    code, row = tmp_path / "code.py", tmp_path / "experiments" / "results" / "row.json"
    row.parent.mkdir(parents=True)
    for file in (code, row):
        file.write_text("1")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(records, "_git", git)
    row.write_text("2")
    check_clean()
    code.write_text("2")
    with pytest.raises(
        ValueError, match=r"without a commit \(code.py\); --allow-dirty"
    ):
        check_clean()


def test_committed_rows_are_of_a_commit(monkeypatch, tmp_path):
    """Fails if changed code can write rows that the repository keeps, unmarked."""
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(
        records, "_git", lambda *a: " M a.py" if a[0] == "status" else "0"
    )
    kept, other = tmp_path / "results" / "a.jsonl", tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match=r"experiments/results .*\(a.py\); --allow"):
        records.open_rows(kept)
    for path, allow_dirty in ((other, False), (None, False), (kept, True)):
        records.open_rows(path, allow_dirty=allow_dirty).close()


def test_a_run_goes_on_with_its_own_rows(tmp_path):
    """Fails if half a row is kept, or rows that were measured otherwise."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1, "x": 1}\n{"a": 1, "x": 2}\n{"a": 1, "x"')
    with records.JsonLines(path) as out:
        assert [row["x"] for row in records.resume(out, {"a": 1})] == [1, 2]
        out.write({"a": 1, "x": 3})
    assert [row["x"] for row in rows(path)] == [1, 2, 3]
    with records.JsonLines(path) as out:
        with pytest.raises(ValueError, match="line 1: a is 1 there and 2 here"):
            records.resume(out, {"a": 2})
        with pytest.raises(ValueError, match="line 1: no row of this script"):
            records.resume(out, {"b": 2})
    path.unlink()
    with records.JsonLines(None) as out:
        assert records.resume(out, {"a": 1}) == []


def test_a_failure_is_a_row():
    """Fails if what comes after is not done, or a full disk is passed over."""

    def fail(error: Exception):
        raise error

    (row,) = records.guarded("b", lambda: fail(ValueError("no such shape\nand more")))
    assert row["kind"] == "error" and row["item"] == "b"
    assert row["error"] == "ValueError: no such shape"
    assert "ValueError" in "".join(row["traceback"]) and records.is_failure(row)
    assert "item=b error=ValueError: no such shape" in records.line(row)
    with pytest.raises(OSError):
        records.guarded("b", lambda: fail(OSError(28, "No space left")))
    for row in ({"equal": False}, {"seen": False}):
        assert records.is_failure({"kind": "x", **row})
    assert not records.is_failure({"kind": "x", "equal": True})
