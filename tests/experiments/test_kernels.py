"""Bits of rows from the command line: each way to read, and a planted fault."""

import numpy as np
import pytest
import tiny_pair
from script_runs import rows_from
from slow_cases import slow

from experiments import kernels as script
from experiments.lib import subjects
from spec_jax.testing import target_kit


def give_shapes(monkeypatch, layers) -> None:
    """Makes the default preset a tiny model."""
    config = tiny_pair.config(num_layers=layers)
    monkeypatch.setitem(subjects.PRESETS, "tiny", config)


@pytest.mark.parametrize("impl", [slow("interpret"), "native"])
def test_bits_from_the_command_line(tmp_path, impl, monkeypatch):
    """Fails if a row depends on another, or a way to read is left out."""
    layers, contexts, ways = 2, "5,20", 8
    if impl == "interpret":  # A layer takes ten seconds: run one, in one way.
        layers, contexts, ways = 1, "5", 1
        every = target_kit.readings
        monkeypatch.setattr(target_kit, "readings", lambda width: every(width)[-ways:])
    given = ["--contexts", contexts, "--dtype", "bfloat16", "--impl", impl]
    give_shapes(monkeypatch, layers)
    rows = rows_from(script.main, tmp_path, given)
    if impl == "interpret":
        control = rows.pop(0)
        assert control["kind"] == "control" and control["seen"]
    of_context = ["hash"] + ["bitwise"] * ways
    assert [row["kind"] for row in rows] == of_context * len(contexts.split(","))
    for row in rows:
        assert row["kind"] == "hash" or row["equal"] and row["elements"]


def test_a_fault_is_counted(monkeypatch, tmp_path):
    """Negative control: one way to read gives a zero of the other sign."""
    alone = np.zeros((2, 3), np.float32)
    wrong = alone.copy()
    wrong[1, 2] = -0.0
    found = [("in windows", alone, alone), ("moved", alone, wrong)]
    monkeypatch.setattr(target_kit, "compared", lambda *_, **__: iter(found))
    give_shapes(monkeypatch, 1)
    rows = rows_from(script.main, tmp_path, ["--contexts", "5"], status=2)
    rows = [row for row in rows if row["kind"] == "bitwise"]
    assert [(row["differing"], row["equal"]) for row in rows] == [(0, True), (1, False)]
