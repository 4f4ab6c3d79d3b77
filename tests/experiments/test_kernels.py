"""Kernels from the command line: rows, loops without copies, bits, bad input."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from script_runs import assert_has_fields_of, rows_of

from experiments import kernels as script
from experiments.lib import bench, kernel_checks, kernels, subjects
from spec_jax.model import config as config_lib
from spec_jax.native import build
from spec_jax.ops import dispatch


ROWS, REPEATS = (1, 3), 3
NAMES = ["qkv", "head", "context 8", "a call"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder without weights: none are needed."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_pair.config(num_layers=2)
    (folder / "config.json").write_text(json.dumps(config_lib.to_dict(config)))
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench, "TIMED_S", 1e-4)
    monkeypatch.setattr(bench, "DISPATCH_S", 1e-6)


def command(folder, *more: str) -> list[str]:
    rows = ",".join(map(str, ROWS))
    shared = ["--rows", rows, "--repeats", str(REPEATS), "--contexts", "8"]
    return ["--shapes", str(folder), *shared, *more]


def all_subjects(**changes) -> dict[str, kernels.Subject]:
    made = kernels.all_subjects(
        tiny_pair.config(**changes), contexts=(8, 4096), platform="cpu"
    )
    return {subject.name: subject for subject in made}


def test_a_run(folder, tmp_path):
    """Fails if a case is missing, or its bytes, times and ratios do not agree."""
    out = tmp_path / "out.jsonl"
    more = ("--only", "^(qkv|head|context|a call)", "--out", str(out))
    assert script.main(command(folder, *more)) == script.MEASURED == 0
    rows = rows_of(out)
    cases = [script.READ, *((impl, n) for impl in ("native", "xla") for n in ROWS)]
    found = [(row["subject"], row["impl"], row["rows"]) for row in rows]
    assert found == [(name, *case) for name in NAMES for case in cases]
    for row in rows:
        assert row["kind"] == "kernel" and row["n"] == REPEATS
        assert row["native_isa"] == build.load() and row["dtype"] == "float32"
        # The median of an odd number of turns is one of them.
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, rel=0.05)
        assert 0 < row["read_share_q1"] <= row["read_share"] <= row["read_share_q3"]
        assert row["impl"] != "read" or row["read_share"] == 1
        assert row["rows"] != 1 or row["time_ratio_q1"] == row["time_ratio_q3"] == 1
        removed = ("plan", "job", "asked")
        assert_has_fields_of(row, "kernels_qwen3_0.6b.jsonl", *removed)


def test_shapes_are_those_of_the_model(monkeypatch):
    """Of Qwen3-0.6B, written down here and nowhere else; large, so streamed."""
    monkeypatch.setattr(bench, "cache_bytes", lambda: 32 * 2**20)
    config = subjects.read_config("qwen3-0.6b", dtype=None)
    found = kernels.all_subjects(config, contexts=(256,), platform="gpu")
    made = {subject.name: subject for subject in found}
    assert {name: (s.kernel, s.shape) for name, s in made.items()} == {
        "qkv": ("project", (4096, 1024)),
        "attention out": ("project", (1024, 2048)),
        "gate and up": ("gate", (6144, 1024)),
        "down": ("project", (1024, 3072)),
        "head": ("project", (151936, 1024)),
        "context 256": ("attend", (256, 8, 128)),
        "norm": ("norm", (16, 1024)),
        "argmax": ("argmax", (16, 151936)),
        "draw": ("draw", (16, 151936)),
    }
    assert made["context 256"].num_bytes == 2 * 2 * 256 * 8 * 128
    for name in ("qkv", "gate and up", "head", "context 256"):
        assert made[name].copies * made[name].num_bytes >= 4 * 32 * 2**20
    for impl in dispatch.PALLAS:
        assert [kernels.slab_of(impl, n) for n in (1, 16, 17)] == [16, 16, 32]


@pytest.mark.parametrize("impl", kernels.IMPLS["cpu"])
@pytest.mark.parametrize("name", ["gate and up", "context 8"])
def test_a_loop_makes_every_call_and_copies_no_weights(name, impl):
    """Fails if a call is left out, or weights or pages are copied for the loop."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    subject = all_subjects(num_layers=2, **sizes)[name]
    own = dataclasses.replace(subject, copies=3).for_impl(impl)
    fixed, pages = own.allocate()
    inputs = own.inputs(impl, fixed, kernels.slab_of(impl, 2), 2)
    x, after = inputs["x"], pages
    for _ in range(3):  # What comes before is in the first element.
        for number in range(own.copies):
            copy = {k: v[number:] if type(v) is tuple else v for k, v in fixed.items()}
            y, after = own.call(impl, x, after, copy, inputs)
            x = x.at[0, 0].set(y[0, 0].astype(x.dtype))
    compiled = kernels.repeat.lower(own, impl, 3, True, pages, fixed, inputs).compile()
    actual, _ = compiled(pages, fixed, inputs)
    np.testing.assert_allclose(actual, x, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(actual, inputs["x"])
    assert not copied(compiled, (fixed, pages))


def copied(compiled, arrays) -> list[str]:
    """The copies that a program makes of arrays of these shapes, if they are large."""
    large = {array.shape for array in jax.tree.leaves(arrays) if array.size >= 2**10}
    found = []
    for shape in large:
        sizes = ",".join(map(str, shape))
        found += re.findall(rf"f32\[{sizes}\]\S* copy\(", compiled.as_text())
    return found


def test_pages_that_are_not_donated_are_seen_to_be_copied():
    """Negative control of `copied`."""
    own = dataclasses.replace(all_subjects()["context 8"], context=64, copies=2)
    fixed, pages = own.allocate()
    inputs = own.inputs("native", fixed, 1, 1)
    call = jax.jit(lambda pages: own.call("native", inputs["x"], pages, fixed, inputs))
    assert copied(call.lower(pages).compile(), pages)


def depends_on(what: str):
    """Rows whose bits depend on something that they must not know."""

    def run(inputs, pages):
        x, height = inputs["x"], inputs["x"].shape[0]
        extra = {
            "nothing": 0.0,
            "active rows": inputs["num_active"].astype(jnp.float32) * 1e-3,
            "places": jnp.arange(height, dtype=jnp.float32)[:, None] * 1e-3,
            "height": height * 1e-3,
        }[what]
        return x * 2 + extra, pages

    return run


@pytest.mark.parametrize(
    ("what", "caught"),
    [
        ("nothing", set()),
        ("active rows", {"active rows", "alone", "other heights"}),
        # Past sixteen, rows come again at other places.
        ("places", {"alone", "other places", "other heights"}),
        ("height", {"other heights"}),
    ],
)
def test_every_grid_catches_what_it_is_for(what, caught):
    """Negative controls: a kernel with a fault, one grid or more that differs."""
    inputs = {"x": jax.random.normal(jax.random.key(0), (16, 8))}
    inputs["num_active"] = jnp.int32(16)
    case = kernel_checks.Case(name="faulty", run=depends_on(what), inputs=inputs)
    first, *checks = kernel_checks.check(case)
    assert first["kind"] == "hash" and len(first["sha256"]) == 64
    found = {row["check"].partition(": ")[2] for row in checks if not row["equal"]}
    assert len(checks) == 4 and found == caught


def test_bits_are_compared_as_integers():
    """Fails if NaN equals nothing, or zeros of both signs are one."""
    x = jnp.asarray([[1.0, jnp.nan], [0.0, 2.0]], jnp.bfloat16)
    assert kernel_checks.differing({"x": x}, {"x": x}) == 0
    assert kernel_checks.differing(x, x.at[1, 0].set(-0.0)) == 1
    compare = kernel_checks.compare_rows
    expected = jnp.arange(12.0).reshape(4, 3)
    actual = jnp.roll(expected, -1, axis=0).at[3].set(jnp.nan)
    assert compare(actual, expected, at=[1, 2, 3, 0], live=3) == (0, 9)
    assert compare(actual, expected, at=[1, 2, 3, 0], live=4) == (3, 12)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("impl", "only", "grids"),
    [("interpret", "attention out", 4), ("native", "context", 6)],
)
def test_bits_from_the_command_line(folder, tmp_path, impl, only, grids):
    """Fails if a row of our kernels depends on another, or a grid is left out."""
    out = tmp_path / "out.jsonl"
    more = ["--impls", impl, "--check", "--out", str(out)]
    more += ["--only", f"^{only}", "--dtype", "bfloat16"]
    assert script.main(command(folder, *more)) == 0
    rows = rows_of(out)
    if impl == "interpret":
        control = rows.pop(0)
        assert control["kind"] == "control" and control["seen"]
    assert [row["kind"] for row in rows] == ["hash"] + ["bitwise"] * grids
    assert all(row["equal"] and row["impl"] == impl for row in rows[1:])
