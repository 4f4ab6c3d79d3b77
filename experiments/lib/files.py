"""Files that scripts read and write; what cannot be used is refused in one line."""

import errno
import fcntl
import io
import os
import pathlib
import stat
import sys
import tempfile


MAX_BYTES = 2**28
"""Of a file of prompts, rows or traces: 256 MiB."""

_LOCKS = pathlib.Path("/proc/locks")


def read(path: pathlib.Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a regular file whole.

    A device or a pipe may have no end, and is refused.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a file that cannot be read, is not regular, or is too large.
      MemoryError: a file for which there is no memory.
    """
    _check_name(path, "read")
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path}: is a directory; name a file")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{path}: is a device or a pipe, which may have no end; name a "
                "regular file"
            )
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except MemoryError:
        raise MemoryError(
            f"{path}: no memory for its {status.st_size:,} bytes; make the file smaller"
        ) from None
    if len(data) > max_bytes:
        size = max(status.st_size, len(data))
        raise ValueError(
            f"{path}: has {size:,} bytes, and {max_bytes:,} are the most that are "
            "read; make the file smaller"
        )
    return data


def open_output(path: pathlib.Path) -> io.FileIO:
    """Opens for appending, without a buffer that could hold half a line.

    A regular file is locked until it is closed: a second process that writes to it is
    refused.

    Raises:
      ValueError: a path that cannot be written, or that another process writes to.
    """
    _check_name(path, "written")
    try:
        if path.is_dir():
            raise ValueError(
                f"{path}: is a directory; name a file, such as {path / 'results.jsonl'}"
            )
        if not path.parent.is_dir():
            raise ValueError(
                f"{path}: the directory {path.parent} does not exist; make it first"
            )
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from None
    try:
        _lock(file, path)
    except BaseException:
        file.close()
        raise
    return file


def check_output(path: pathlib.Path) -> None:
    """Raises `ValueError` unless the file can be written; leaves it as it is."""
    _check_name(path, "written")
    if os.path.lexists(path) and not path.is_dir() and not path.is_file():
        # The reader of a pipe would take its closing for the end.
        if not os.access(path, os.W_OK):
            raise ValueError(f"{path}: cannot be written; name another file")
        return
    is_new = not os.path.lexists(path)
    open_output(path).close()
    if is_new:
        path.unlink()


def check_folder(path: pathlib.Path) -> None:
    """Makes the folder where it is not there, and finds whether it can be written to.

    Raises:
      ValueError: it cannot be made, or written to.
    """
    _check_name(path, "written")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{path}: no folder that can be written to ({error.strerror}); name another"
        ) from None


def is_same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether both name one file, through links too, or would once it is written."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # One of them is not there yet.
        return os.path.realpath(one) == os.path.realpath(other)


def _check_name(path: pathlib.Path, what: str) -> None:
    if "\0" in str(path):
        raise ValueError(f"{path}: cannot be {what} (null character in its name)")


def _lock(file: io.FileIO, path: pathlib.Path) -> None:
    """Locks a regular file until it is closed; the end of the process does that too."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{path}: {_holder(status)} is writing to it; wait until that ends, or "
            "name another file"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        print(
            f"{path}: its file system has no locks ({error.strerror}); no other "
            "process may write to it",
            file=sys.stderr,
        )


def _holder(status: os.stat_result) -> str:
    """The process that has locked the file of this status, as far as Linux says."""
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF"
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK" or not words[4].isdecimal():
            continue
        if words[5].rpartition(":")[2] == str(status.st_ino):
            return f"process {words[4]}{_command(words[4])}"
    return "another process"


def _command(pid: str) -> str:
    """The command line of a process, in brackets; empty where it is not known."""
    try:
        line = pathlib.Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return ""
    words = line.decode(errors="replace").split("\0")
    shown = " ".join(words).strip()
    return f" ({shown if len(shown) <= 80 else shown[:77] + '...'})" if shown else ""
