"""How every script begins and ends: interrupts, errors in one line, outputs."""

import argparse
import ast
import dataclasses
import gc
import importlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest

from experiments.lib import cli, files, terminal


ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "experiments").glob("[!_]*.py"))
WITHOUT_JAX = {"plot", "gpu_report", "multi_process"}
"""One needs no device, and two leave it to their processes."""

REQUIRED = {
    "ablate_heads": ("--out", "rows.jsonl"),
    "compare_llama_cpp": ("--llama-bin", "bin"),
    "plot": ("--out", "figures", "--theory"),
    "reproduce": ("--list",),
    "replay": ("--record", "traces.jsonl"),
    "sweep": ("--out", "sweep.jsonl"),
    "train_drafter": ("--family", "eagle3", "--stage", "export"),
    "train_pair": ("--stage", "export"),
}
"""The least that a command line must have."""


def run(work, **keywords) -> int:
    keywords = {"kept": lambda args: "rows are kept", "uses_jax": False} | keywords
    return cli.run("x.py", argparse.Namespace, lambda args: work(), **keywords)


def last_line(capsys) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def raising(error: BaseException):
    def work():
        raise error

    return work


def out_of_memory():
    return bytearray(2**62)


def jax_out_of_memory():
    return jax.block_until_ready(jax.numpy.zeros((2**45,), "int8"))


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


# The report starts no jax of its own.
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "gpu_report"])
def test_an_interrupt_during_the_imports(name):
    """Fails if a script imports jax before it listens: that takes seconds."""
    path = ROOT / "experiments" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, "-c", LISTENING + INTERRUPT + RUN, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (130, f"{name}.py: interrupted\n")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_begins_and_ends_alike(name):
    source = (ROOT / "experiments" / f"{name}.py").read_text()
    _, first, second, *_, last = ast.parse(source).body
    assert ast.unparse(first) == "from experiments.lib import cli"
    is_main = "if __name__ == '__main__':\n    cli."
    assert ast.unparse(second) == is_main + "start()"
    assert ast.unparse(last) == is_main + "end(main)"
    assert source.count("cli.script(") == 1 and "sys.exit" not in source


def spec_round(folders, out) -> subprocess.Popen:
    target, draft = folders
    command = [sys.executable, "-c", LISTENING + RUN, "experiments/spec_round.py"]
    command += ["--target", str(target), "--draft", str(draft), "--out", str(out)]
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
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) >= (num_rows or 0)


def test_interrupts_that_the_shell_ignores_are_ignored(capsys):
    """As of a script in the background of another."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(lambda: interrupt() or 7) == 7
    finally:
        signal.signal(signal.SIGINT, before)


def main_of(name: str):
    return importlib.import_module(f"experiments.{name}").main


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
    done = subprocess.run(
        [sys.executable, "experiments/spec_round.py", "--prompts", "1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "nonsense"},
    )
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "JAX_PLATFORMS=nonsense" in line


END = """
import argparse, sys
from experiments.lib import cli

def work(args):
    for i in range(int(sys.argv[1])):
        print(i, "\\u27e6", "x" * 100)
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


def test_characters_that_cannot_be_printed_are_replaced():
    done = end(1, output="", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"0 ? x")


OUTPUTS = {
    "compare_hf": ("--out", "--plot"),
    "compare_llama_cpp": ("--out",),
    "exactness": ("--out", "--certificate"),
    "history": ("--out",),
    "kernels": ("--out",),
    "latency": ("--out",),
    "multi_process": ("--out",),
    "parity": ("--out", "--heatmap", "--save-bundle"),
    "plan": ("--out",),
    "regret": ("--out",),
    "replay": ("--out", "--record"),
    "spec_round": ("--out", "--dump-verify-mismatches"),
    "sweep": ("--out",),
    "throughput": ("--out",),
}
"""Flags that name a file to be written."""

SOURCES = {
    "exactness": ("--prompts", "--verify"),
    "kernels": ("--shapes",),
    "latency": ("--target",),
    "multi_process": ("--target",),
    "parity": ("--prompts", "--mismatch", "--bundle"),
    "replay": ("--prompts", "traces", "--costs"),
}
"""Flags that name a file to be read; `--prompts` where none are named here."""


def refused(name: str, arguments: list[str], capsys) -> str:
    """The line of a usage error."""
    with pytest.raises(SystemExit) as error:
        main_of(name)(arguments)
    assert error.value.code == cli.UNUSABLE == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "output", "source"),
    [
        (name, output, source)
        for name, outputs in OUTPUTS.items()
        for output in outputs
        for source in SOURCES.get(name, ("--prompts",))
        if (name, output, source)
        not in (
            ("exactness", "--certificate", "--verify"),  # not together
            ("replay", "--record", "traces"),
            ("replay", "--record", "--costs"),
        )
    ],
)
def test_no_output_replaces_an_input(name, output, source, tmp_path, capsys):
    """Fails if a file of prompts is overwritten by the rows of its run."""
    path, link = tmp_path / "input.svg", tmp_path / "link.svg"
    path.write_text("a prompt")
    os.link(path, link)
    named = str(path)
    if source == "--prompts":
        named += ":1"
    if source == "--shapes":
        named = str(tmp_path)
    given = [named] if source == "traces" else [source, named]
    required = [*REQUIRED.get(name, ())]
    if name in ("sweep", "replay"):
        required = []
    if (name, output) == ("replay", "--out") and source == "--prompts":
        (tmp_path / "traces").touch()
        given.append(str(tmp_path / "traces"))
    line = refused(name, [*required, output, str(link), *given], capsys)
    assert f"{output} {link} would replace what {source} reads" in line
    assert path.read_text() == "a prompt"


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_output_replaces_what_comes_with_the_package(name, capsys):
    prompts = ROOT / "experiments" / "prompts" / "python_50.jsonl"
    before = prompts.read_bytes()
    required = ["x"] if name == "replay" else []
    line = refused(name, [*required, "--out", str(prompts)], capsys)
    assert "would replace what the script reads" in line
    assert prompts.read_bytes() == before


@pytest.mark.parametrize("name", sorted({*OUTPUTS} - {"kernels", "parity"}))
def test_no_output_replaces_a_model(name, folders, capsys):
    target, draft = map(str, folders)
    out = folders[1] / "model.safetensors"
    arguments = ["--target", target, "--draft", draft, "--out", str(out)]
    required = ["x"] if name == "replay" else []
    line = refused(name, [*required, *arguments], capsys)
    assert f"{out} would replace what --draft reads" in line


@pytest.mark.parametrize("name", ["compare_hf", "exactness", "parity", "spec_round"])
def test_two_outputs_are_two_files(name, tmp_path, capsys):
    first, second = OUTPUTS[name][:2]
    path = str(tmp_path / "out.svg")
    line = refused(name, [first, path, second, path], capsys)
    assert {first, second} <= set(line.split()) and "write to one file" in line


@pytest.mark.parametrize(
    ("name", "flag"), [(name, flag) for name in OUTPUTS for flag in OUTPUTS[name]]
)
def test_outputs_are_checked_before_the_work(name, flag, tmp_path, capsys):
    """Names that are too long, too, which raised; and figures, once at the end."""
    for path, words in (
        (tmp_path / "no" / "x.svg", "does not exist; make it first"),
        (tmp_path / ("x" * 300 + ".svg"), "too long"),
    ):
        line = refused(name, [flag, str(path)], capsys)
        assert f"error: argument {flag}: {path}" in line
        assert words in line


@pytest.mark.parametrize(
    ("name", "flag"), [("parity", "--heatmap"), ("compare_hf", "--plot")]
)
def test_figures_are_checked_before_the_work(name, flag, tmp_path, monkeypatch, capsys):
    line = refused(name, [flag, str(tmp_path / "x.txt")], capsys)
    assert "x.txt: not a .png or .svg file" in line
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    line = refused(name, [flag, str(tmp_path / "x.svg")], capsys)
    assert "needs matplotlib" in line


def test_one_sweep_writes_to_a_file(tmp_path, capsys):
    """Fails if two sweeps on one file both run everything."""
    out = tmp_path / "sweep.jsonl"
    with files.open_output(out):
        assert "is writing to it; wait" in refused("sweep", ["--out", str(out)], capsys)


def test_nobody_reads_what_has_no_end(folders, capsys):
    """Fails if a device is read until memory ends."""
    target, draft = map(str, folders)
    models = ["--target", target, "--draft", draft]
    assert main_of("sweep")(["--out", "/dev/full", *models]) == cli.UNUSABLE
    assert "/dev/full: is a device or a pipe" in last_line(capsys)


@pytest.mark.parametrize("name", ["spec_round", "throughput", "sweep", "replay"])
@pytest.mark.parametrize("more", [("--top-k", "5"), ("--top-p", "0.5")])
def test_sampling_without_a_temperature(name, more, tmp_path, capsys):
    """Fails if a flag is ignored."""
    required = [
        str(tmp_path / word) if "." in word else word for word in REQUIRED.get(name, ())
    ]
    line = refused(name, [*required, *more], capsys)
    assert f"{more[0]} is of sampling, and --temperature 0 decodes greedily" in line


def test_half_a_character(capsys):
    line = refused("parity", ["--prompt", "a\udcff"], capsys)
    assert "--prompt: character 1 is half of a surrogate pair" in line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--steps", "0"), "argument --steps: 0 must be at least 1"),
        (("--stage", "nothing"), "argument --stage"),
    ],
)
def test_training_that_cannot_be(more, words, capsys):
    """Fails if no steps are 200 steps, or the status is 2."""
    assert words in refused("train_pair", ["--stage", "draft", *more], capsys)


@pytest.mark.parametrize("work", ["/proc/x", "/dev/null"])
def test_a_folder_of_training_that_cannot_be_written(work, capsys):
    arguments = ["--stage", "target", "--work", work]
    assert main_of("train_pair")(arguments) == cli.UNUSABLE
    assert f"{work}: no folder that can be written to" in last_line(capsys)
