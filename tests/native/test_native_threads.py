"""Results do not depend on the number of threads: one process for each number."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from spec_jax.native import build


PROGRAM = pathlib.Path(__file__).with_name("thread_digests.py")
ROOT = PROGRAM.parents[2]


@pytest.fixture(scope="module")
def reports() -> dict[int, dict]:
    """Runs the program under pools of one and of three threads; returns its output."""
    try:
        build.load()
    except build.BuildError as error:
        pytest.skip(str(error))
    printed = {}
    for threads in (1, 3):
        # XLA takes the size of its pool from NPROC.
        environment = {"NPROC": str(threads), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        result = subprocess.run(
            [sys.executable, str(PROGRAM)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
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


def test_a_split_over_threads_is_caught(reports):
    """Negative control: sums over as many pieces of K as there are threads."""
    assert {n: report["threads"] for n, report in reports.items()} == {1: 1, 3: 3}
    assert len({report["split"] for report in reports.values()}) == 2
