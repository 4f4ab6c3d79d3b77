"""How every script begins and ends: interrupts, errors in one line, outputs."""

import argparse
import ast
import dataclasses
import gc
import io
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest
from script_runs import (
    REQUIRED,
    ROOT,
    last_line,
    main_of,
    models_of,
    rows_of,
    run_python,
)

from experiments.lib import cli, terminal


SCRIPTS = sorted(path.stem for path in (ROOT / "experiments").glob("[!_]*.py"))
WITHOUT_JAX = {"plot", "fetch_model", "gpu_report", "multi_process"}
"""Two need no device, and two leave it to their processes."""


def run(work, **keywords) -> int:
    keywords = {"kept": lambda args: "rows are kept", "uses_jax": False} | keywords
    return cli.run("x.py", argparse.Namespace, lambda args: work(), **keywords)


def raising(error: BaseException):
    def work():
        raise error

    return work


def out_of_memory():
    return bytearray(2**62)


def jax_out_of_memory():
    return jax.block_until_ready(jax.numpy.zeros((2**45,), "int8"))


def test_memory_that_runs_out_names_what_was_asked_for(capsys):
    """Fails if nobody can tell what to ask less of."""
    args = argparse.Namespace(gen_tokens=64, batch=None, prompts="50")
    work = lambda args: out_of_memory()
    assert cli.run("x.py", lambda: args, work, uses_jax=False) == cli.UNUSABLE
    said = last_line(capsys)
    assert said.endswith("free some (it ran with --prompts 50 --gen-tokens 64)")


def test_errors_of_the_library_name_flags(capsys):
    """Fails if a line tells of a parameter, or takes what a file says for a flag."""
    args = argparse.Namespace(page_size=12, rule="block", tree=None)
    for said, shown in {
        "page_size=12 must divide 64": "--page-size 12 must divide 64",
        "rule='block' is of chains": "--rule block is of chains",
        "line 1: page_size=1.5, page_size=128": "line 1: page_size=1.5, page_size=128",
        "x.page_size=12, my_page_size=12": "x.page_size=12, my_page_size=12",
        "gamma=4 and page_size=12.": "gamma=4 and --page-size 12.",
    }.items():
        fail = raising(ValueError(said))
        work = lambda args, fail=fail: fail()
        assert cli.run("x.py", lambda: args, work, uses_jax=False)
        assert last_line(capsys).endswith(f"error: {shown}")


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (raising(ValueError("two\nlines")), "two lines"),
        (raising(NotImplementedError("not here")), "not here"),
        (raising(RuntimeError("it failed")), "it failed"),
        (raising(MemoryError("for x")), "for x"),
        (out_of_memory, "no memory left; ask for less"),
        (jax_out_of_memory, "Ask for shorter texts, or fewer prompts at once"),
        (raising(PermissionError(13, "Denied", "a.txt")), "a.txt: Denied"),
        (lambda: pathlib.Path("/proc/x").mkdir(), "/proc/x: No such file"),
    ],
)
def test_an_error_is_one_line(work, line, capsys):
    assert run(work) == cli.UNUSABLE == 1
    said = last_line(capsys)
    assert said.startswith("x.py: error: ") and line in said


@pytest.mark.parametrize("error", [TypeError("x"), AssertionError("x"), KeyError("x")])
def test_a_fault_of_the_program_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        run(raising(error))


@pytest.fixture
def listening():
    """As a terminal's shell leaves the signal, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def lost_in_garbage_collection():
    """As in `_xla_gc_callback`, which jax registers: an interrupt that is lost."""

    def callback(*_):
        gc.callbacks.remove(callback)
        interrupt()

    gc.callbacks.append(callback)
    gc.collect()
    # What a script goes on doing; the interrupt must come through.
    threading.Event().wait(60)
    raise AssertionError("not interrupted")


def caught_by_a_library():
    try:
        interrupt()
    except BaseException:
        return 0


def made_another_error():
    try:
        interrupt()
    except BaseException:
        raise TypeError("of a library") from None


@pytest.mark.parametrize(
    "work",
    [interrupt, lost_in_garbage_collection, caught_by_a_library, made_another_error],
)
def test_an_interrupt_is_not_lost(work, listening, capsys):
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    assert run(work) == cli.INTERRUPTED == 130
    assert last_line(capsys) == "x.py: interrupted; rows are kept"
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_other_errors_in_garbage_collection_are_reported(monkeypatch):
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def work():
        def callback(*_):
            gc.callbacks.remove(callback)
            raise ValueError

        gc.callbacks.append(callback)
        gc.collect()
        return 0

    assert run(work) == 0
    assert [each.exc_type for each in lost] == [ValueError]


LISTENING = """
import runpy, signal, sys

# As a terminal's shell leaves it, whatever runs the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
RUN = """
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
INTERRUPT = """
class Interrupt:
    def find_spec(self, name, *_):
        if name == "jax":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


# The report starts no jax of its own, and a download needs none.
@pytest.mark.parametrize("name", sorted({*SCRIPTS} - {"gpu_report", "fetch_model"}))
def test_an_interrupt_during_the_imports(name):
    """Fails if a script imports jax before it listens: that takes seconds."""
    path = ROOT / "experiments" / f"{name}.py"
    done = run_python("-c", LISTENING + INTERRUPT + RUN, path)
    assert (done.returncode, done.stderr) == (130, f"{name}.py: interrupted\n")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_extra_that_is_not_installed(name):
    """Fails if a script ends in a traceback where rich is missing."""
    missing = "import runpy, sys\nsys.modules['rich'] = None"
    done = run_python("-c", missing + RUN, ROOT / "experiments" / f"{name}.py")
    said = "error: rich is not installed: pip install -e '.[experiments]'"
    assert (done.returncode, done.stderr) == (1, f"{name}.py: {said}\n")


def test_extras_that_are_not_installed(monkeypatch, capsys):
    """Each is named once, and what is there is not."""
    for module in ("scipy", "optax", "orbax"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as error:
        cli.start("train")
    assert error.value.code == cli.UNUSABLE
    said = "scipy,optax,orbax is not installed: pip install -e '.[experiments,train]'"
    assert last_line(capsys).endswith(f"error: {said}")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_usage_error_is_one_line(name, capsys):
    """Fails if the flags are listed before it."""
    with pytest.raises(SystemExit) as error:
        main_of(name)([*REQUIRED.get(name, ()), "--nonsense"])
    assert error.value.code == cli.UNUSABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("error: unrecognized arguments: --nonsense (flags: --help)")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_begins_and_ends_alike(name):
    source = (ROOT / "experiments" / f"{name}.py").read_text()
    _, first, second, *_, last = ast.parse(source).body
    assert ast.unparse(first) == "from experiments.lib import cli"
    is_main = "if __name__ == '__main__':\n    cli."
    extra = "'train'" if "spec_jax.training import" in source else ""
    assert ast.unparse(second) == is_main + f"start({extra})"
    assert ast.unparse(last) == is_main + "end(main)"
    assert source.count("cli.script(") == 1 and "sys.exit" not in source


def spec_round(folders, out) -> subprocess.Popen:
    command = [sys.executable, "-c", LISTENING + RUN, "experiments/spec_round.py"]
    command += [*models_of(folders), "--out", str(out)]
    # More than can be done before the signal comes.
    command += ["--prompts", "50", "--gen-tokens", "300", "--ignore-stop"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("num_rows", [None, 0, 1])
def test_an_interrupt_ends_a_run_and_keeps_its_rows(folders, tmp_path, num_rows):
    """In compilation, as soon as the file is there, and between prompts.

    Fails if the clean-up of jax crashes the process, or the signal is lost.
    """
    out = tmp_path / "out.jsonl"
    process = spec_round(folders, out)
    if num_rows is None:
        assert "compiling" in process.stdout.readline()
    while num_rows is not None and process.poll() is None:
        if out.exists() and out.read_bytes().count(b"\n") >= num_rows:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error
    line = f"spec_round.py: interrupted; finished rows are in {out}"
    assert error.splitlines()[-1] == line and "Traceback" not in error
    assert len(rows_of(out)) >= (num_rows or 0)


def test_interrupts_that_the_shell_ignores_are_ignored(capsys):
    """As of a script in the background of another."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(lambda: interrupt() or 7) == 7
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - WITHOUT_JAX))
def test_a_platform_that_is_not_there(name, tmp_path, monkeypatch, capsys):
    """One line, before anything runs."""

    def no_devices():
        raise RuntimeError("Unable to initialize backend 'x'")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "default_backend", no_devices)
    assert main_of(name)(REQUIRED.get(name, ())) == cli.UNUSABLE
    said = last_line(capsys)
    assert said.startswith(f"{name}.py: error: JAX_PLATFORMS=")
    assert "Unable to initialize backend 'x'" in said and "leave" in said


def test_a_platform_that_is_not_installed():
    """As jax has it: what it raises says nothing."""
    arguments = ("experiments/spec_round.py", "--prompts", "1")
    done = run_python(*arguments, JAX_PLATFORMS="nonsense")
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "JAX_PLATFORMS=nonsense" in line


END = """
import argparse, sys
from experiments.lib import cli

def work(args):
    for i in range(int(sys.argv[1])):
        print(i, "\\u27e6", "x" * 100)
    with open(__import__("os").devnull) as file:
        assert file.fileno() > 2
    return 0

def main():
    return cli.run("x.py", argparse.Namespace, work, uses_jax=False)

cli.start()
cli.end(main)
"""


def end(num_lines: int, *, output: str, **variables) -> subprocess.CompletedProcess:
    """Runs a small script whose standard output is the shell's `output`."""
    command = f"'{sys.executable}' -c '{END}' {num_lines} {output}; exit $?"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("num_lines", [1, 10_000])
def test_a_full_disk_behind_standard_output(num_lines):
    """Found in a buffer that is written at the end, too."""
    done = end(num_lines, output="> /dev/full")
    assert done.returncode == cli.UNUSABLE
    assert done.stderr == (
        b"x.py: error: standard output: cannot be written (No space left on device)\n"
    )


@dataclasses.dataclass
class Unbuffered:
    """A standard output."""

    raw: io.RawIOBase
    encoding = "utf-8"

    def write(self, text: str) -> None:
        self.raw.write(text.encode())

    def flush(self) -> None: ...


def test_a_full_disk_behind_a_console(monkeypatch, capsys):
    # Unbuffered, so that nothing is left to be written when it is closed.
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", Unbuffered(full))
        assert run(lambda: terminal.console().print("x")) == cli.UNUSABLE
    assert "standard output: cannot be written (No space" in last_line(capsys)


def test_a_reader_that_has_gone():
    """As of SIGPIPE, which ends other programs; and nothing is said."""
    done = end(10_000, output="| head -1")
    assert done.returncode == cli.PIPE_CLOSED == 141
    assert done.stderr == b"" and done.stdout.startswith(b"0 ")


def test_a_console_whose_reader_has_gone(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdout", Unbuffered(pipe))
        work = lambda: terminal.console().print("x")
        assert run(work) == cli.PIPE_CLOSED


@pytest.mark.parametrize("output", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(output):
    """Runs without them; and fails if a file of the script is taken for one."""
    done = end(10_000, output=output)
    assert done.returncode == 0 and done.stderr == b""
    assert (done.stdout == b"") == (">&-" in output.replace("2>&-", ""))


def test_characters_that_cannot_be_printed_are_replaced():
    done = end(1, output="", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"0 ? x")
