"""Files of scripts: what is read, what can be written, and what is locked."""

import os
import pathlib
import subprocess
import sys

import pytest

from experiments.lib import files


def test_a_regular_file_is_read_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * 10)
    assert files.read(path, max_bytes=10) == b"x" * 10
    with pytest.raises(ValueError, match="has 10 bytes, and 9 are the most"):
        files.read(path, max_bytes=9)
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "nowhere")


def test_only_regular_files_are_read(tmp_path):
    """Fails if a device is read to the end of memory, or a pipe waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path in (pathlib.Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(ValueError, match="a device or a pipe"):
            files.read(path)
    with pytest.raises(ValueError, match="is a directory"):
        files.read(tmp_path)
    with pytest.raises(ValueError, match="cannot be read .*too long"):
        files.read(tmp_path / ("x" * 300))


def test_no_memory_for_a_file(tmp_path, monkeypatch):
    """Fails if the line does not say which file was too large."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * 10)

    class Full:
        def __enter__(self):
            raise MemoryError

        def __exit__(self, *exc_info): ...

    monkeypatch.setattr(pathlib.Path, "open", lambda *_: Full())
    with pytest.raises(MemoryError, match=r"rows\.jsonl: no memory for its 10 bytes"):
        files.read(path)


def test_what_cannot_be_written(tmp_path):
    for path, words in (
        (tmp_path, "is a directory"),
        (tmp_path / "no" / "out.jsonl", "does not exist; make it first"),
        (tmp_path / ("x" * 300), "cannot be written .*too long"),
        (pathlib.Path("/proc/x"), "cannot be written"),
    ):
        with pytest.raises(ValueError, match=words):
            files.check_output(path)


def test_checking_leaves_files_as_they_are(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    files.check_output(old)
    files.check_output(new)
    assert old.read_text() == "kept" and not new.exists()


def test_the_same_file_by_other_names(tmp_path):
    one, hard, soft, new = (tmp_path / name for name in ("one", "hard", "soft", "new"))
    one.write_text("x")
    os.link(one, hard)
    soft.symlink_to(one)
    for other in (one, hard, soft, tmp_path / "." / "one"):
        assert files.is_same(one, other)
    assert not files.is_same(one, new)
    assert files.is_same(new, tmp_path / ".." / tmp_path.name / "new")


LOCKING = """
import pathlib, sys
from experiments.lib import files
with files.open_output(pathlib.Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_file_has_one_writer(tmp_path):
    """Fails without the lock."""
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", LOCKING, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(ValueError, match="another process is writing to it; wait"):
            files.check_output(path)
        other.stdin.close()
    files.check_output(path)
