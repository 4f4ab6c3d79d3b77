"""Kernels from the command line: rows, shapes, loops without copies, bad input."""

import json
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from experiments import kernels
from experiments.lib import cli, subjects
from experiments.support import (
    bandwidth,
    kernel_costs,
    kernel_subjects,
)
from spec_jax.model import config as config_lib
from spec_jax.native import build
from spec_jax.ops import dispatch


ROWS, REPEATS = (1, 3), 3
NAMES = [
    *("qkv", "attention out", "gate and up", "down", "head", "context 8"),
    "a call",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder without weights: none are needed."""
    folder = tmp_path_factory.mktemp("model")
    raw = config_lib.to_dict(tiny_pair.config(num_layers=2))
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def make_quick(monkeypatch) -> None:
    monkeypatch.setattr(kernel_costs, "TIMED_S", 1e-4)
    monkeypatch.setattr(kernel_subjects, "CONTEXTS", (8,))


def command(folder: pathlib.Path, *more: str) -> list[str]:
    rows = ",".join(map(str, ROWS))
    return ["--shapes", str(folder), "--rows", rows, "--repeats", str(REPEATS), *more]


def rows_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory):
    """The rows of one run."""
    out = tmp_path_factory.mktemp("out") / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        assert kernels.main(command(folder, "--out", str(out))) == 0
    return rows_of(out)


def test_every_variant_of_every_subject_has_a_row(measured):
    """Fails if one is missing, doubled, or says less than the others."""
    found = [(row["subject"], row["impl"], row["rows"]) for row in measured]
    variants = [("native", n) for n in ROWS] + [("xla", n) for n in ROWS]
    assert found == [
        (name, *variant) for name in NAMES for variant in [("read", None), *variants]
    ]
    (names,) = {tuple(row) for row in measured}
    assert {"git_commit", "jax_version", "cpu", "last_level_cache_bytes"} <= set(names)
    for row in measured:
        assert row["kind"] == "kernel" and row["n"] == REPEATS
        assert row["native_isa"] == build.load() and row["dtype"] == "float32"
        assert row["warm_up_s"] > 0 and row["calls_per_timing"] >= row["copies"] > 0


def test_numbers_of_a_row_agree(measured):
    """Fails if bytes, times and ratios are not of the same calls."""
    for row in measured:
        # The median of an odd number of turns is one of them.
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        for name in ("us", "gb_s", "read_share"):
            assert 0 < row[f"{name}_q1"] <= row[name] <= row[f"{name}_q3"]
        if row["impl"] == "read":
            assert row["read_share"] == row["read_share_q3"] == 1
            assert row["time_ratio"] is row["ratio_to_rows"] is None
        else:
            assert row["ratio_to_rows"] == 1 and row["time_ratio"] > 0
        if row["rows"] == 1:
            assert row["time_ratio_q1"] == row["time_ratio_q3"] == 1


def test_ratios_are_of_the_turns():
    """Fails if a share is inverted, or rows are compared with those of another."""
    seconds = {
        kernel_costs.READ: [1.0, 2.0, 3.0],
        kernel_costs.Variant("native", 2): [2.0, 4.0, 6.0],
        kernel_costs.Variant("native", 4): [8.0, 4.0, 12.0],
        kernel_costs.Variant("xla", 2): [10.0, 20.0, 30.0],
    }
    measured = kernel_costs.Measured(
        timings=kernel_costs.timing.Timings(
            warm_up=dict.fromkeys(seconds, 1.0), seconds=seconds
        ),
        calls=dict.fromkeys(seconds, 4),
        copies=dict.fromkeys(seconds, 2),
    )
    config = tiny_pair.config()
    rows = kernel_costs.rows(kernel_subjects.all_subjects(config)[0], measured)
    assert [row["read_share"] for row in rows] == [1, 0.5, 0.25, 0.1]
    assert [row["time_ratio"] for row in rows] == [None, 1, 2, 1]
    assert [row["ratio_to_rows"] for row in rows] == [None, 2, 2, 2]
    assert rows[1]["us"] == 4e6


def test_a_table_is_printed_for_every_subject(folder, capsys):
    assert kernels.main(command(folder)) == kernels.MEASURED
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("qkv (project): 64 x 32, ") for line in lines)
    assert any(line.startswith("context 8 (attend): 8 x 1 x 16") for line in lines)
    headers = [line.split() for line in lines if line.startswith("rows")]
    group = ["GB/s", "(q1-q3)", "read", "time"]
    assert headers == [["rows", "native", "us", *group, "xla", "us", *group]] * 7
    assert sum(line.startswith("   3 ") for line in lines) == 7


def test_shapes_are_those_of_the_model(monkeypatch):
    """Of Qwen3-0.6B, written down here and nowhere else; large, so streamed."""
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: 32 * 2**20)
    monkeypatch.setattr(kernel_subjects, "CONTEXTS", (256,))
    config = kernels.read_config("qwen3-0.6b", dtype=None)
    made = {subject.name: subject for subject in kernel_subjects.all_subjects(config)}
    assert {name: (s.kernel, s.shape) for name, s in made.items()} == {
        "qkv": ("project", (4096, 1024)),
        "attention out": ("project", (1024, 2048)),
        "gate and up": ("gate", (6144, 1024)),
        "down": ("project", (1024, 3072)),
        "head": ("project", (151936, 1024)),
        "context 256": ("attend", (256, 8, 128)),
        "a call": ("project", (48, 32)),
    }
    assert made["qkv"].num_bytes == 2 * 4096 * 1024
    assert made["context 256"].num_bytes == 2 * 2 * 256 * 8 * 128
    for name, subject in made.items():
        streamed = subject.copies * subject.num_bytes
        is_large = streamed >= kernel_subjects.STREAMED_CACHES * 32 * 2**20
        assert is_large == (name != "a call")
    assert made["head"].copies == 1
    assert all(hash(subject) for subject in made.values())


def test_a_small_model_reads_as_much_as_a_step(monkeypatch):
    """The embedded target, in both dtypes: fails if a weight is read again sooner."""
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: 32 * 2**20)
    for dtype, step_bytes in (("bfloat16", 21_639_808), ("float32", 43_279_616)):
        config = kernels.read_config("embedded", dtype=dtype)
        for subject in kernel_subjects.all_subjects(config)[:-1]:
            between = subject.copies * subject.num_bytes
            assert step_bytes <= between < step_bytes + subject.num_bytes


def test_contexts_that_the_model_lacks_are_left_out(monkeypatch):
    monkeypatch.setattr(kernel_subjects, "CONTEXTS", (8, 20))
    config = tiny_pair.config(max_position_embeddings=8)
    assert [subject.name for subject in kernel_subjects.all_subjects(config)] == NAMES
    config = tiny_pair.config(max_position_embeddings=20)
    assert len(kernel_subjects.all_subjects(config)) == len(NAMES) + 1


@pytest.fixture(params=NAMES)
def subject(request):
    """Of a model of two layers that is large enough for a copy to be noticed."""
    config = tiny_pair.config(
        num_layers=2, hidden_size=128, intermediate_size=256, vocab_size=512
    )
    made = kernel_subjects.all_subjects(config)
    return {subject.name: subject for subject in made}[request.param]


@pytest.mark.parametrize("impl", kernel_subjects.IMPLS["cpu"])
def test_a_loop_makes_every_call_and_copies_no_weights(subject, impl):
    """Fails if a call is left out, or weights or pages are copied for the loop."""
    own = subject.for_impl(dispatch.resolve(impl))
    fixed, pages = own.allocate()
    inputs = own.inputs(kernel_subjects.slab_of(impl, 2), 2)
    arguments = (own, impl, pages, fixed, inputs)

    # The same passes one by one: what comes before is in the first element.
    one_pass = jax.jit(own.one_pass, static_argnums=0)
    x, after = inputs["x"], pages
    for _ in range(3):
        x, after = one_pass(impl, x, after, fixed, inputs)
    compiled = kernel_subjects.repeat.lower(*arguments, jnp.int32(3)).compile()
    actual, _ = compiled(pages, fixed, inputs, jnp.int32(3))
    np.testing.assert_allclose(actual, x, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(actual, inputs["x"])

    assert not copied(compiled, (fixed, pages))
    if impl == "native":
        assert compiled.memory_analysis().temp_size_in_bytes < own.num_bytes


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
    config = tiny_pair.config(num_layers=8)
    own = kernel_subjects.all_subjects(config)[-2].for_impl("native")
    fixed, pages = own.allocate()
    inputs = own.inputs(1, 1)
    one_pass = jax.jit(own.one_pass, static_argnums=0)
    compiled = one_pass.lower("native", inputs["x"], pages, fixed, inputs).compile()
    assert len(copied(compiled, pages)) == 2


def test_slabs_are_those_of_the_model():
    """Fails if a kernel is measured at a height that the model does not use."""
    pallas = kernel_subjects.IMPLS["cuda"][:2]
    for impl in (*pallas, "interpret"):
        assert [kernel_subjects.slab_of(impl, n) for n in (1, 5, 16)] == [16] * 3
    assert [kernel_subjects.slab_of("native", n) for n in (1, 5)] == [1, 5]
    assert [kernel_subjects.slab_of("xla", n) for n in (1, 5)] == [2, 5]


def test_kernels_of_a_gpu_are_measured_as_others_are():
    """The Triton kernels, interpreted: one product and one attention."""
    config = tiny_pair.config(dtype="bfloat16")
    made = {each.name: each for each in kernel_subjects.all_subjects(config)}
    for name in ("attention out", "context 8"):
        measured = kernel_costs.measure(
            made[name], impls=("interpret",), rows=(1, 3), repeats=1
        )
        rows = kernel_costs.rows(made[name], measured)
        assert [row["rows"] for row in rows] == [None, 1, 3]
        assert all(row["us"] > 0 for row in rows)


def test_a_copy_counts_both_ways():
    """Fails if half as much is moved as is said, or not as often."""
    copy = bandwidth.device_copy(8000)
    copied = copy(3)
    assert 2 * copied.nbytes == 8000 and np.all(np.asarray(copied) == 1)


def test_a_timing_is_as_long_as_it_should_be(monkeypatch):
    """Fails if seconds are divided by another number of calls than were made."""
    monkeypatch.setattr(kernel_costs, "TIMED_S", 8.0)
    now, made, passes = [0.0], [], {}

    def run(num_passes: int) -> None:
        # Compilation takes long, once.
        now[0] += (0 if made else 100) + 2 * num_passes
        made.append(num_passes)

    variant = kernel_costs.Variant("native", 1)
    thunk = kernel_costs._thunk(run, variant, passes, 4, clock=lambda: now[0])
    assert thunk() == thunk() == 0.5
    assert made == [1, 1, 1, 4, 1, 4] and passes == {variant: 4}


def test_a_plain_read_reads_everything_as_often_as_it_should(monkeypatch):
    """Fails if a piece is left out, or read by two threads."""
    read = []
    counting = types.SimpleNamespace(
        **{name: getattr(np, name) for name in ("ones", "uint64", "ndarray")},
        bitwise_or=types.SimpleNamespace(
            reduce=lambda piece: read.append((piece.ctypes.data, piece.size))
        ),
    )
    monkeypatch.setattr(bandwidth, "np", counting)
    monkeypatch.setattr(bandwidth, "_PIECE_WORDS", 100)
    bandwidth.host_read(8 * 1234 - 3)(5)
    first = min(address for address, _ in read)
    pieces = {at: size for at, size in read}
    assert all(read.count(piece) == 5 for piece in read)
    assert sum(pieces.values()) == 1234
    assert sorted(pieces) == [first + 800 * i for i in range(len(pieces))]


def assert_fails_with(capsys, arguments: list[str], *words: str) -> None:
    """Asserts exit status 1 and one clear line, with no traceback."""
    try:
        status = kernels.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == cli.UNUSABLE == 1
    last = error.splitlines()[-1]
    assert "error: " in last and "Traceback" not in error
    for word in words:
        assert word in last, last


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--device", "cuda"], ["--device cuda", "no GPU"]),
        (["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["--shapes", "qwen3-0.7b"], ["qwen3-0.7b", "embedded", "qwen3-8b", "folder"]),
        (["--dtype", "float16"], ["--dtype", "float16"]),
        (["--impls", "native,triton"], ["--impls", "native,triton", "native,xla"]),
        (["--rows", "0"], ["--rows", "at least 1"]),
        (["--rows", "1,,2"], ["--rows", "1,,2"]),
        (["--rows", "9"], ["--rows", "9 rows", "context of 8"]),
        (["--repeats", "0"], ["--repeats", "at least 1"]),
        (["--out", "missing/out.jsonl"], ["missing"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_unusable_flags(folder, capsys, more, words):
    assert_fails_with(capsys, command(folder, *more), *words)


def test_a_folder_that_is_no_model(tmp_path, capsys):
    assert_fails_with(capsys, command(tmp_path), "config.json", "no such file")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert_fails_with(capsys, command(tmp_path), "LlamaForCausalLM")


def test_rows_are_sorted_and_each_is_there_once(folder):
    assert kernels.parse_args(["--rows", "4,1,2,1"]).rows == (1, 2, 4)


def test_without_a_compiler_the_reason_is_given(folder, capsys, monkeypatch):
    def fail(isa=None):
        raise build.BuildError("no C++ compiler found: looked for g++")

    monkeypatch.setattr(build, "load", fail)
    assert_fails_with(capsys, command(folder), "no C++ compiler found")


def test_weights_that_do_not_fit(capsys, monkeypatch):
    """Refused before anything is created, with both numbers."""
    huge = tiny_pair.config(vocab_size=2**40)
    monkeypatch.setitem(subjects.PRESETS, "qwen3-0.6b", huge)
    arguments = ["--shapes", "qwen3-0.6b", "--rows", "1"]
    assert_fails_with(capsys, arguments, "GiB", "free")


def test_an_interrupted_run_leaves_whole_rows(folder, tmp_path, monkeypatch, capsys):
    real, seen = kernel_costs.measure, []

    def interrupted(subject, **keywords):
        if seen:
            raise KeyboardInterrupt
        seen.append(subject)
        return real(subject, **keywords)

    monkeypatch.setattr(kernel_costs, "measure", interrupted)
    out = tmp_path / "out.jsonl"
    status = kernels.main(command(folder, "--out", str(out)))
    assert status == cli.INTERRUPTED == 130
    assert {row["subject"] for row in rows_of(out)} == {"qkv"}
    assert "finished rows are in" in capsys.readouterr().err
