"""Kernels from the command line: rows, loops without copies, bits, bad input."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from script_runs import assert_fails_with, rows_of

from experiments import kernels as script
from experiments.lib import (
    cli,
    kernel_checks,
    kernel_costs,
    kernel_plans,
    kernels,
    programs,
    subjects,
    timing,
)
from spec_jax.model import config as config_lib
from spec_jax.native import build
from spec_jax.ops import dispatch
from spec_jax.pallas import skinny_gemm_triton as triton


ROWS, REPEATS = (1, 3), 3
NAMES = [
    *("qkv", "attention out", "gate and up", "down", "head", "context 8"),
    "a call",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder without weights: none are needed."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_pair.config(num_layers=2)
    (folder / "config.json").write_text(json.dumps(config_lib.to_dict(config)))
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "TIMED_S", 1e-4)
    monkeypatch.setattr(timing, "DISPATCH_S", 1e-6)


def command(folder, *more: str) -> list[str]:
    rows = ",".join(map(str, ROWS))
    shared = ["--rows", rows, "--repeats", str(REPEATS), "--contexts", "8"]
    return ["--shapes", str(folder), *shared, *more]


def all_subjects(**changes) -> dict[str, kernels.Subject]:
    made = kernels.all_subjects(
        tiny_pair.config(**changes), contexts=(8, 4096), platform="cpu"
    )
    return {subject.name: subject for subject in made}


def test_a_run(folder, tmp_path, capsys):
    """Fails if a variant is missing, or its bytes, times and ratios do not agree."""
    out = tmp_path / "out.jsonl"
    assert script.main(command(folder, "--out", str(out))) == script.MEASURED == 0
    rows = rows_of(out)
    variants = [("read", None)]
    variants += [(impl, n) for impl in ("native", "xla") for n in ROWS]
    found = [(row["subject"], row["impl"], row["rows"]) for row in rows]
    assert found == [(name, *variant) for name in NAMES for variant in variants]
    for row in rows:
        assert row["kind"] == "kernel" and row["n"] == REPEATS
        assert row["native_isa"] == build.load() and row["dtype"] == "float32"
        # The median of an odd number of turns is one of them.
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, rel=0.05)
        assert 0 < row["read_share_q1"] <= row["read_share"] <= row["read_share_q3"]
        assert row["rows"] != 1 or row["time_ratio_q1"] == row["time_ratio_q3"] == 1
        assert {"git_commit", "jax_version", "cpu", "plan", "warm_up_s"} <= set(row)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("qkv (project): 64 x 32, ") for line in lines)
    assert sum(line.startswith("   3 ") for line in lines) == len(NAMES)


def test_a_run_goes_on(folder, tmp_path, monkeypatch, capsys):
    """After an interrupt, with whole rows; and not with other flags."""
    real, seen = kernel_costs.measure, []

    def interrupted(subject, *arguments, **keywords):
        if subject.name == "down" and "down" not in seen:
            seen.append("down")
            raise KeyboardInterrupt
        seen.append(subject.name)
        return real(subject, *arguments, **keywords)

    monkeypatch.setattr(kernel_costs, "measure", interrupted)
    out = tmp_path / "out.jsonl"
    more = ("--only", "^(qkv|down)", "--rows", "1", "--out", str(out))
    assert script.main(command(folder, *more)) == cli.INTERRUPTED == 130
    assert f"finished rows are in {out}" in capsys.readouterr().err
    assert script.main(command(folder, *more, "--resume")) == 0
    assert seen == ["qkv", "down", "down"]
    assert [row["subject"] for row in rows_of(out)] == ["qkv"] * 3 + ["down"] * 3
    assert script.main(command(folder, *more, "--resume", "--repeats", "4")) == 1
    assert "repeats is 3 there and 4 here" in capsys.readouterr().err
    assert script.main(command(folder, *more, "--resume", "--impls", "xla")) == 1
    assert "asked is {'impls': ['native'" in capsys.readouterr().err


def test_ratios_are_of_the_turns():
    """Fails if a share is inverted, or rows are compared with those of another."""
    variant, read = kernel_costs.Variant, kernel_costs.READ
    seconds = {
        read: [1.0, 2.0, 3.0],
        variant("native", 2): [2.0, 4.0, 6.0],
        variant("native", 4): [8.0, 4.0, 12.0],
        variant("xla", 2): [10.0, 20.0, 30.0],
    }
    loops = {v: timing.Loop(run=None, calls=4, num_bytes=100) for v in seconds}
    timings = timing.Timings(warm_up=dict.fromkeys(seconds, 1.0), seconds=seconds)
    rows = kernel_costs.rows(all_subjects()["qkv"], loops, timings)
    assert [row["read_share"] for row in rows] == [1, 0.5, 0.25, 0.1]
    assert [row["time_ratio"] for row in rows] == [None, 1, 2, 1]
    assert [row["ratio_to_rows"] for row in rows] == [None, 2, 2, 2]
    assert rows[1]["us"] == 4e6


def test_shapes_are_those_of_the_model(monkeypatch):
    """Of Qwen3-0.6B, written down here and nowhere else; large, so streamed."""
    monkeypatch.setattr(timing, "cache_bytes", lambda: 32 * 2**20)
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
        copies = made[name].copies
        assert copies * made[name].num_bytes >= 4 * 32 * 2**20
    assert made["head"].copies == 1 and "context 4096" not in made
    assert all(hash(subject) for subject in found)


@pytest.mark.few(4)
@pytest.mark.parametrize("impl", kernels.IMPLS["cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_a_loop_makes_every_call_and_copies_no_weights(name, impl):
    """Fails if a call is left out, or weights or pages are copied for the loop."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    subject = all_subjects(num_layers=2, **sizes)[name]
    own = dataclasses.replace(subject, copies=3).for_impl(impl)
    fixed, pages = own.allocate()
    inputs = own.inputs(impl, None, kernels.slab_of(impl, 2), 2)
    x, after = inputs["x"], pages
    for _ in range(3):  # What comes before is in the first element.
        for number in range(own.copies):
            y, after = own.call(impl, None, number, x, after, fixed, inputs)
            x = x.at[0, 0].set(y[0, 0].astype(x.dtype))
    static = own, impl, None, 3, True
    compiled = kernels.repeat.lower(*static, pages, fixed, inputs).compile()
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
    inputs = own.inputs("native", None, 1, 1)
    call = jax.jit(lambda pages: own.call(
        "native", None, 0, inputs["x"], pages, fixed, inputs
    ))  # fmt: skip
    assert copied(call.lower(pages).compile(), pages)


def test_calls_of_a_pass_may_be_fed_together():
    """As on a GPU: fails if one of the calls is left out."""
    own = dataclasses.replace(all_subjects()["qkv"], copies=3)
    fixed, pages = own.allocate()
    inputs = own.inputs("native", None, 1, 1)
    x, _ = kernels.repeat(own, "native", None, 1, False, pages, fixed, inputs)
    ys = [own.call("native", None, i, inputs["x"], (), fixed, inputs)[0][0, 0]
          for i in range(3)]  # fmt: skip
    np.testing.assert_array_equal(x[0, :3], jnp.stack(ys))


def test_slabs_are_those_of_the_model():
    """Fails if a kernel is measured at a height that the model does not use."""
    for impl in dispatch.PALLAS:
        assert [kernels.slab_of(impl, n) for n in (1, 16, 17)] == [16, 16, 32]
    assert [kernels.slab_of("native", n) for n in (1, 5)] == [1, 5]
    assert [kernels.slab_of("xla", n) for n in (1, 5)] == [2, 5]


# These are for processors: their products leave few plans.
SMALL = {"draft-60m", "tiny"}


@pytest.mark.parametrize("model", sorted(subjects.PRESETS.keys() - SMALL))
def test_plans_of_the_real_shapes_can_be_launched(model):
    """Fails if the kernel's own plan is not first, or one is there twice."""
    config = subjects.PRESETS[model]
    for subject in kernels.all_subjects(config, contexts=(128,), platform="gpu"):
        for impl in subject.only or ("triton",):
            first, *plans = subject.plans(impl, 12)
            assert first is None and len(set(plans)) == len(plans) <= 11
            assert len({kernel_plans.describe(plan) for plan in plans}) == len(plans)
            if impl == "triton" and subject.kernel in ("project", "gate"):
                parts = 2 if subject.kernel == "gate" else 1
                own = triton.plan_for(*subject.shape, parts=parts)
                assert len(plans) >= 5 and own not in plans


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
    run = depends_on(what)
    case = kernel_checks.Case(name="faulty", run=run, inputs=inputs, pages=())
    expected, row = kernel_checks.reference(case)
    assert row["kind"] == "hash" and len(row["sha256"]) == 64
    checks = list(kernel_checks.check(case, expected))
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
    more = ["--impls", impl, "--check", "rows", "--out", str(out)]
    more += ["--only", f"^{only}", "--dtype", "bfloat16"]
    assert script.main(command(folder, *more)) == 0
    rows = rows_of(out)
    if impl == "interpret":
        control = rows.pop(0)
        assert control["kind"] == "control" and control["seen"]
    assert [row["kind"] for row in rows] == ["hash"] + ["bitwise"] * grids
    assert all(row["equal"] for row in rows[1:])
    before = out.read_bytes()
    assert script.main(command(folder, *more, "--resume")) == 0
    assert out.read_bytes() == before  # Nothing is run twice.


def test_a_kernel_that_fails_takes_no_other_with_it(folder, tmp_path, monkeypatch):
    """Fails if a fault ends the run, or is not counted."""
    real = kernel_checks.case_of

    def case_of(subject, impl):
        if subject.name == "qkv":
            raise AssertionError("no warps\nand more")
        return real(subject, impl)

    monkeypatch.setattr(kernel_checks, "case_of", case_of)
    out = tmp_path / "out.jsonl"
    more = ["--impls", "native", "--check", "once", "--only", "^(qkv|down)"]
    assert script.main(command(folder, *more, "--out", str(out))) == script.FAILED == 2
    error, other = rows_of(out)
    assert (
        error["error"] == "AssertionError: no warps" and error["item"] == "qkv, native"
    )
    assert other["kind"] == "hash"


def test_a_plan_that_fails_takes_no_other_with_it():
    """Fails if the kernel's own plan is not timed because another cannot run."""
    subject = all_subjects(dtype="bfloat16")["attention out"]
    bad = triton.Plan(block_n=16, block_k=3)
    variant = kernel_costs.Variant
    tried = [
        variant("interpret", 1),
        variant("interpret", 1, bad),
        variant("native", 1),
    ]
    *rows, error = kernel_costs.measure(subject, tried, repeats=1)
    assert [row["impl"] for row in rows] == ["read", "interpret", "native"]
    assert "block_k=3" in error["item"] and error["kind"] == "error"


def test_a_dry_run_lowers_for_a_gpu(folder, tmp_path):
    """Wherever this is; fails if a kernel is lowered for each of its copies."""
    out = tmp_path / "out.jsonl"
    more = ["--device", "gpu", "--dry-run", "--plans", "2", "--out", str(out)]
    more += ["--dtype", "bfloat16", "--only", "^(attention out|context|argmax)"]
    assert script.main(command(folder, *more, "--impls", "triton,xla")) == 0
    found = {(row["program"], row["kernels"]) for row in rows_of(out)}
    assert {("attention out, triton", 1), ("context 8, triton", 1)} <= found
    assert {("argmax, triton", 2), ("attention out, xla", 0)} <= found


@pytest.mark.parametrize(
    ("events", "own"),
    [
        ([], []),
        ([(5, 10)], [10]),
        # One that waits for the one before began within it; then one after a gap.
        ([(0, 10), (4, 11), (20, 5)], [10, 5, 10]),
        ([(4, 11), (0, 10)], [5, 10]),  # In no order.
        ([(0, 10), (2, 3), (4, 8)], [10, 0, 2]),  # Ends before the one before it.
    ],
)
def test_own_times_of_kernels(events, own):
    """Fails if time that two kernels share counts twice, as in their durations."""
    assert programs.own_times(events) == own


def test_launches_are_counted_outside_of_fusions():
    hlo = """
%fused (p: f32[4]) -> f32[4] {
  %a = f32[4]{0} dynamic-slice(p), x
}
%body (s: f32[4]) -> f32[4] {
  %b = f32[4]{0} fusion(s), kind=kLoop, calls=%fused
  %c = f32[4]{0} custom-call(b), custom_call_target="triton"
}
ENTRY %main (s: f32[4]) -> f32[4] {
  %w = f32[4]{0} while(s), condition=%cond, body=%body
  ROOT %d = f32[4]{0} copy(w)
}
"""
    assert programs.count_launches(hlo) == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--device", "gpu"], ["--device gpu", "no GPU"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--shapes", "qwen3-0.7b"], ["qwen3-0.7b", "embedded", "qwen3-8b", "folder"]),
        (["--shapes", "."], ["config.json", "no such file"]),
        (["--dtype", "float16"], ["--dtype", "float16"]),
        (["--impls", "native,mosaic"], ["mosaic", "removed", "9b82177"]),
        (["--impls", "native,triton"], ["--impls", "native,triton", "native,xla"]),
        (["--rows", "0"], ["--rows", "at least 1"]),
        (["--rows", "1,,2"], ["--rows", "1,,2"]),
        (["--rows", "9"], ["--rows", "9 rows", "context of 8"]),
        (["--repeats", "0"], ["--repeats", "at least 1"]),
        (["--only", "draft ("], ["--only", "no regular expression"]),
        (["--only", "nothing"], ["--only nothing", "none of qkv"]),
    ],
)
def test_unusable_flags(folder, tmp_path, monkeypatch, capsys, more, words):
    monkeypatch.chdir(tmp_path)
    assert_fails_with(script.main, capsys, command(folder, *more), *words)


def test_what_cannot_be_run_is_refused_before_anything_is(folder, capsys, monkeypatch):
    """Weights that do not fit, with both numbers; kernels that cannot be built."""
    huge = tiny_pair.config(vocab_size=2**40)
    monkeypatch.setitem(subjects.PRESETS, "qwen3-0.6b", huge)
    assert_fails_with(
        script.main, capsys, ["--shapes", "qwen3-0.6b", "--rows", "1"], "GiB", "free"
    )

    def fail(isa=None):
        raise build.BuildError("no C++ compiler found: looked for g++")

    monkeypatch.setattr(build, "load", fail)
    assert_fails_with(script.main, capsys, command(folder), "no C++ compiler found")
