"""Results do not depend on the number of threads: one process for each number. Kernels
run under the compiler's sanitizers, each with faults that they must stop.

A test runs this file as a program under pools of several sizes. It prints hashes of
what the kernels compute, and of a planted fault: sums over as many pieces of K as there
are threads.
"""

import functools
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import decoding
import jax
import jax.numpy as jnp
import native_oracle as oracle
import numpy as np
import pytest
import random_weights
import test_native_head
import test_native_step

from spec_jax.native import build, calls, draws
from spec_jax.rules import sampling


ROOT = pathlib.Path(__file__).parents[2]
K, N = 96, 1500  # several chunks of weight rows for each thread
LIVE = np.int32(5)
PLAIN = {"norm": None, "residual": None, "num_active": LIVE, "eps": 0.0}
PLAIN |= {"out_dtype": np.float32}


@pytest.fixture(scope="module")
def reports() -> dict[int, dict]:
    """Runs the program under pools of one and of three threads; returns its output."""
    decoding.needs("native")
    printed = {}
    for threads in (1, 3):
        # XLA takes the size of its pool from NPROC.
        own = {"NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
        own |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        how = {"env": os.environ | own, "capture_output": True, "text": True}
        result = subprocess.run([sys.executable, __file__], **how, check=False)
        assert result.returncode == 0, result.stderr
        printed[threads] = json.loads(result.stdout)
    if any(report["threads"] == 0 for report in printed.values()):
        pytest.skip("the threads of XLA's pool cannot be counted on this system")
    return printed


def test_bits_do_not_depend_on_the_number_of_threads(reports):
    """Fails if work is split over a dimension that is summed, or threads race."""
    one = reports[1]["digests"]
    assert len(one) == 9 and all(len(runs) == 1 for runs in one.values())
    assert reports[3]["digests"] == one
    # Negative control: sums over as many pieces of K as there are threads.
    assert {n: report["threads"] for n, report in reports.items()} == {1: 1, 3: 3}
    assert len({report["split"] for report in reports.values()}) == 2


def pool_size() -> int:
    """Counts the threads of XLA's pool, by the name that XLA gives them."""
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    return sum(task.read_text().startswith("tf_XLAEigen") for task in tasks)


def digest(outputs) -> str:
    hashed = hashlib.sha256()
    for output in jax.tree.leaves(outputs):
        hashed.update(np.asarray(output).tobytes())
    return hashed.hexdigest()


def computations(rng):
    """Yields name, jitted call and arguments, with work for several threads."""
    project = jax.jit(functools.partial(calls.project, **PLAIN))
    attend = jax.jit(functools.partial(calls.attend, eps=1e-6, scale=0.2))
    slabs = {
        "attend": ([(0, 40), (0, 41), (1, 6)], {"N": 16, "K": 8, "page_size": 8}),
        # Threads share the ranges of keys of one head.
        "attend long": ([(0, 2050), (0, 2051)], {"N": 2, "K": 1, "page_size": 64}),
    }
    for dtype in ("float32", "bfloat16"):
        # Sums of some rows are denormal: every thread flushes them, or none does.
        rows = np.float32([[1], [1], [1e-38], [1e-30], [1]])
        x = (oracle.normal(rng, (5, K), "float32") * rows).astype(np.dtype(dtype))
        w = oracle.normal(rng, (N, K), dtype) * np.dtype(dtype).type(0.1)
        yield f"project {dtype}", project, {"x": x, "w": w}
        for name, (rows, sizes) in slabs.items():
            prefix = [min(p for s, p in rows if s == slot) for slot in {*dict(rows)}]
            slab = oracle.make_slab(
                rng, rows, dtype=dtype, H=32, prefix=prefix, **sizes
            )
            yield f"{name} {dtype}", attend, slab.arguments()

    # These are wide enough for threads to share each operation; each has its own dtype.
    sizes = {"intermediate_size": 600, "num_heads": 24, "num_kv_heads": 8}
    target = test_native_step.make("float32", vocab_size=700, **sizes)
    head = test_native_head.make("plain", "bfloat16", **sizes)
    for its, made in ((test_native_step, target), (test_native_head, head)):
        how = {"live": 6, "forward": its.compile_(made[0])}
        yield its.__name__, functools.partial(its.run, *made), how

    logits = oracle.normal(rng, (5, 3000), "float32")
    settings = sampling.make_settings(temperature=1.0, top_p=0.9, seed=4)
    settings = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (5,)), settings)
    how = draws.Draws(settings, jnp.arange(5), 3000, independent=False)
    draw = jax.jit(lambda logits: draws.draw(logits, how, asked=jnp.ones(5, bool)))
    yield "draw", draw, {"logits": logits}


def split_over_threads(x, w, pieces: int):
    """Plants the fault: adds partial sums over pieces of K."""
    edges = [K * i // pieces for i in range(pieces + 1)]
    parts = zip(edges, edges[1:], strict=False)
    return sum(calls.project(x[:, a:b], w[:, a:b], **PLAIN) for a, b in parts)


def main() -> None:
    random_weights.install()
    rng = np.random.default_rng(0)
    found = {}
    for name, call, arguments in computations(rng):
        # Each runs several times, since threads share the work by chance.
        runs = {digest(call(**arguments)) for _ in range(8)}
        found[name] = sorted(runs)
    x, w = (oracle.normal(rng, shape, "float32") for shape in ((5, K), (N, K)))
    planted = jax.jit(functools.partial(split_over_threads, pieces=pool_size()))
    report = {"threads": pool_size(), "split": digest(planted(x, w)), "digests": found}
    print(json.dumps(report))


HERE = pathlib.Path(__file__).parent
HEADERS = pathlib.Path(build.__file__).parent
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0")
RACES = ("-fsanitize=thread", "-O1", "-pthread")


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
    program = compile_program(tmp_path, "sanitize_threads.cc", *RACES)
    result = run(program)
    assert (result.returncode, result.stdout) == (0, "no races\n"), result.stderr
    result = run(program, "race")
    assert result.returncode != 0 and "data race" in result.stderr


if __name__ == "__main__":
    main()
