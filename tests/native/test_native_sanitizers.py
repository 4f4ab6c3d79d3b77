"""The kernels under the compiler's sanitizers, each with faults that they must stop."""

import pathlib
import signal
import subprocess

import decoding
import pytest

from spec_jax.native import build


HERE = pathlib.Path(__file__).parent
HEADERS = pathlib.Path(build.__file__).parent
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0")
MEMORY += ("-DSPEC_JAX_NO_ASSEMBLY",)  # sanitizers cannot see into it
THREADS = ("-fsanitize=thread", "-O1", "-pthread")


def run(*command) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False
    )


def compile_program(folder, source: str, *flags: str) -> pathlib.Path:
    """Compiles a program; skips where the compiler or its sanitizer is missing."""
    decoding.needs("native")
    compiler = build.find_compiler()
    probe, program = folder / "probe.cc", folder / "program"
    probe.write_text("int main() {}\n")
    probed = run(*compiler, *flags, probe, "-o", program)
    if probed.returncode or run(program).returncode:
        pytest.skip(f"{compiler[0]} has no working {flags[0]}: {probed.stderr[:200]}")
    same = [flag for flag in build.FLAGS if "contract" in flag or "std" in flag]
    command = [*same, *flags, "-g", "-w", f"-I{HEADERS}", HERE / source, "-o", program]
    compiled = run(*compiler, *command)
    assert compiled.returncode == 0, compiled.stderr
    return program


FAULTS = {
    "overrun": "ERROR: AddressSanitizer",
    "late": "heap-use-after-free",
    "undefined": "signed integer overflow",
}


@pytest.mark.slow
def test_kernels_stay_in_bounds(tmp_path):
    """Fails if a kernel reads or writes outside an array, overflows, waits for ever, or
    gives a wrong result. The faults of `FAULTS` are the negative control: each must
    stop the program."""
    flags = (*MEMORY, *build.ISA_FLAGS[build.available_isas()[0]])
    program = compile_program(tmp_path, "sanitize.cc", *flags)
    result = run(program)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all in bounds\n"
    for fault, message in FAULTS.items():
        result = run(program, fault)
        assert result.returncode != 0 and message in result.stderr, fault
    assert run(program, "wait").returncode == -signal.SIGALRM


@pytest.mark.slow
def test_threads_do_not_race(tmp_path):
    """Fails if threads share what one of them writes, or a loop ends too early."""
    program = compile_program(tmp_path, "sanitize_threads.cc", *THREADS)
    result = run(program)
    assert (result.returncode, result.stdout) == (0, "no races\n"), result.stderr
    result = run(program, "race")
    assert result.returncode != 0 and "data race" in result.stderr
