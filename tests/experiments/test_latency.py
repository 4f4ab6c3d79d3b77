"""Latencies from the command line: rows, consistency, the oracle's side, bad input."""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from experiments import latency
from experiments.lib import cli, subjects
from experiments.support import (
    bandwidth,
    hf_baseline,
    latency_report,
    model_pair,
    step_costs,
    whole_runs,
)
from spec_jax import autoregressive, rounds
from spec_jax.model import params as params_lib, row_model


# Such that steps and whole runs, of all tests here, share their executables.
GAMMA, GEN_TOKENS = 2, 6
CONTEXTS, STEPS, PAGE_SIZE = (8, 20), 2, 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft, and a file of two short prompts beside them."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "prompts.txt").write_text("def first(x):\nimport second\n")
    return tiny_pair.write(folder)


@pytest.fixture(scope="module")
def pair(folders):
    return model_pair.load_pair(
        *folders, gamma_max=GAMMA, slab=GAMMA + 1, dtype=None, impl="auto"
    )


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    monkeypatch.setattr(bandwidth, "LARGE_READ_BYTES", 2**20)


def command(*more: str) -> list[str]:
    return [
        *("--contexts", *map(str, CONTEXTS)),
        *("--steps", str(STEPS), "--page-size", str(PAGE_SIZE), "--repeats", "3"),
        *("--gen-tokens", str(GEN_TOKENS), "--run-repeats", "2"),
        *more,
    ]


def pair_flags(folders, *more: str) -> list[str]:
    target, draft = folders
    models = ("--target", str(target), "--draft", str(draft))
    prompts = ("--prompts", str(target.parent / "prompts.txt"))
    return command(*models, "--gamma", str(GAMMA), *prompts, *more)


def rows_of(path: pathlib.Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def measured(folders, tmp_path_factory):
    """The rows of one run without Hugging Face."""
    out = tmp_path_factory.mktemp("out") / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "LARGE_READ_BYTES", 2**20)
        more = ("--no-hf", "--out", str(out))
        assert latency.main(pair_flags(folders, *more)) == latency.MEASURED == 0
    return out


def test_step_rows(measured):
    """Fails if a step is missing, or compared with another one than it says."""
    steps = {row["step"]: row for row in rows_of(measured, "step")}
    assert list(steps) == [
        *("plain step", "plain step at 20"),
        *("1 live row", "2 live rows", "3 live rows"),
        *("draft step", "round, gamma 1", "round, gamma 2"),
        *("read of its bytes", "read of 256 MiB", "new cache"),
    ]
    for name, row in steps.items():
        assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"], name
        assert 0 < row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"], name
        assert row["n"] == 3 and row["warm_up_s"] > 0
        assert row["steps_per_call"] == STEPS and row["jax_version"] == jax.__version__
        assert (row["ratio_to"] == "1 live row") == ("live row" in name)
    for name in ("plain step", "1 live row"):
        assert steps[name]["ratio"] == steps[name]["ratio_p90"] == 1
    assert steps["plain step at 20"]["context"] == 20
    assert steps["round, gamma 2"]["context"] == 8
    assert steps["round, gamma 2"]["gamma"] == 2
    assert steps["3 live rows"]["num_live"] == 3


def test_run_rows(measured):
    """Fails if totals, ratios or the missing runs are wrong."""
    prompts = rows_of(measured, "prompt")
    assert [row["id"] for row in prompts] == ["1", "2"]
    runs = {row["run"]: row for row in rows_of(measured, "run")}
    assert tuple(runs) == whole_runs.RUNS
    seconds = {}
    for name in ("plain", "speculative"):
        by_prompt = [row["seconds"][name] for row in prompts]
        seconds[name] = np.sum(by_prompt, axis=0)
        assert np.shape(by_prompt) == (2, 2) and np.min(by_prompt) > 0
        speed = np.median(2 * GEN_TOKENS / seconds[name])
        assert runs[name]["tok_s"] == pytest.approx(speed)
        assert runs[name]["tpot_ms"] == pytest.approx(1e3 / speed)
        assert runs[name]["warm_up_s"] > 0
    for name in ("hf_generate", "hf_assisted"):
        assert runs[name]["tok_s"] is runs[name]["warm_up_s"] is None
        assert all(row["seconds"][name] is None for row in prompts)
    (summary,) = rows_of(measured, "summary")
    expected = np.median(seconds["plain"] / seconds["speculative"])
    assert summary["spec_vs_plain"] == pytest.approx(expected)
    assert summary["plain_vs_hf"] is summary["hf_equal_tokens"] is None
    assert summary["hf"] is None
    assert summary["matched"] is True
    assert summary["prompts"] == 2 and summary["gen_tokens"] == GEN_TOKENS
    assert 0 <= summary["acceptance_rate"] <= 1
    assert {field.name for field in latency_report.SUMMARY_FIELDS} <= set(summary)


def test_bandwidth_is_that_of_the_plain_step(measured):
    (summary,) = rows_of(measured, "summary")
    steps = {row["step"]: row for row in rows_of(measured, "step")}
    plain_s = steps["plain step"]["ms"] / 1e3
    assert summary["achieved_gb_s"] == pytest.approx(
        summary["step_bytes"] / plain_s / 1e9
    )
    assert summary["bandwidth_share"] == steps["read of its bytes"]["ratio"]
    read_s = steps["read of its bytes"]["ms"] / 1e3
    assert summary["read_gb_s"] == pytest.approx(summary["step_bytes"] / read_s / 1e9)
    assert summary["read_best_gb_s"] >= summary["read_gb_s"]


def test_large_weights_are_not_read_twice(pair, monkeypatch):
    def names() -> list[str]:
        costs = step_costs.all_costs(pair, contexts=[8], page_size=16, steps=1)
        return [cost.name for cost in costs]

    assert step_costs.LARGE_READ in names()
    num_bytes = bandwidth.step_bytes(pair.params[0])
    monkeypatch.setattr(bandwidth, "LARGE_READ_BYTES", num_bytes)
    assert step_costs.READ in names() and step_costs.LARGE_READ not in names()


def test_an_untied_embedding_is_not_read():
    config = tiny_pair.config(tie_word_embeddings=False)
    params = params_lib.shapes(config)
    assert bandwidth.step_bytes(params) == params_lib.num_bytes(
        params
    ) - params_lib.num_bytes(params.embed)
    tied = params_lib.shapes(tiny_pair.config())
    assert bandwidth.step_bytes(tied) == params_lib.num_bytes(tied)


def test_every_call_does_the_steps_that_it_is_divided_by(pair, monkeypatch):
    """Fails if a limit or a full cache ends a call early."""
    done = []

    def keep(module, name, count):
        real = getattr(module, name)

        def wrapped(*arguments, **keywords):
            state = real(*arguments, **keywords)
            assert not bool(state.starved)
            done.append((int(count(state)), int(state.length)))
            return state

        monkeypatch.setattr(module, name, wrapped)

    keep(autoregressive, "generate", lambda state: state.num_steps)
    keep(rounds, "generate", lambda state: state.num_rounds)
    # The draft drafts for itself: every round is as long as it can be.
    target = dataclasses.replace(pair.drafter.model, slab=GAMMA + 1)
    pair = dataclasses.replace(pair, target=target, params=(pair.params[1],) * 2)
    costs = step_costs.all_costs(
        pair, contexts=CONTEXTS, page_size=PAGE_SIZE, steps=STEPS
    )
    thunks = {cost.name: cost.thunk for cost in costs}
    for name in ("plain step", "plain step at 20", "round, gamma 1", "round, gamma 2"):
        thunks[name]()
    first, second = CONTEXTS
    assert done == [
        (STEPS, first + STEPS),
        (STEPS, second + STEPS),
        (STEPS, first + 2 * STEPS),
        (STEPS, first + 3 * STEPS),
    ]


def test_repeated_forwards_start_at_the_same_place(pair):
    """Fails if a window is not forgotten: the context would grow with the steps."""
    sizes = step_costs.Sizes(capacity=32, page_size=PAGE_SIZE, steps=STEPS)
    kv = step_costs._filled_cache(pair.target, sizes, 15)
    kv, _ = step_costs._repeat_forward(
        pair.target, pair.params[0], kv, num_live=jnp.int32(3), steps=STEPS
    )
    assert int(kv.length[row_model.SLOT]) == 14
    # The context is zeros, and so is what no row wrote.
    assert np.any(np.asarray(kv.k[0]), axis=(2, 3)).sum() == 3


def test_a_preset(monkeypatch, tmp_path, capsys):
    """Plain decoding only; nothing is said of runs that there are not."""
    monkeypatch.setitem(subjects.PRESETS, "qwen3-0.6b", tiny_pair.config())
    monkeypatch.setattr(subjects, "PRESET_PROMPT_TOKENS", 24)
    out = tmp_path / "out.jsonl"
    more = ("--slab", str(GAMMA + 1), "--no-hf", "--out", str(out))
    assert latency.main(command("--preset", "qwen3-0.6b", *more)) == 0
    steps = [row["step"] for row in rows_of(out, "step")]
    assert steps[:3] == ["plain step", "plain step at 20", "read of its bytes"]
    (summary,) = rows_of(out, "summary")
    assert summary["target"] == "qwen3-0.6b" and summary["draft"] is None
    assert summary["matched"] is summary["acceptance_rate"] is None
    runs = {row["run"]: row["tok_s"] for row in rows_of(out, "run")}
    assert runs.pop("plain") > 0
    assert set(runs.values()) == {None}
    (line,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("speculative")
    ]
    assert line.split() == ["speculative", *"-----"]


@pytest.mark.parametrize(
    ("preset", "num_params"),
    [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)],
)
def test_the_real_presets_are_the_released_shapes(preset, num_params):
    config = subjects.PRESETS[preset].validate()
    leaves = jax.tree.leaves(params_lib.shapes(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == num_params


def test_without_the_oracle_one_line_says_how_to_get_it(
    folders, tmp_path, monkeypatch, capsys
):
    """And what is said only then: with `--no-hf` nothing is missing."""
    monkeypatch.setattr(hf_baseline, "missing", lambda: ["torch", "transformers"])
    args = latency.parse_args(pair_flags(folders))
    assert latency.load_subject(args, tmp_path).hf is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch and transformers" in line and hf_baseline.INSTALL in line
    args = latency.parse_args(pair_flags(folders, "--no-hf"))
    assert latency.load_subject(args, tmp_path).hf is None
    assert capsys.readouterr().err == ""


@pytest.mark.oracle
def test_float32_tokens_are_those_of_hugging_face(folders, tmp_path):
    """Fails if the two sides do not run the same weights, or one of them stops."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    out = tmp_path / "out.jsonl"
    arguments = pair_flags(folders, "--dtype", "float32", "--out", str(out))
    assert latency.main(arguments) == 0
    (summary,) = rows_of(out, "summary")
    assert summary["hf_equal_tokens"] == [GEN_TOKENS] * 2
    assert summary["hf"]["torch_num_threads"] >= 1
    for name in whole_runs.SPEEDUPS:
        assert summary[name] > 0
    for row in rows_of(out, "run"):
        assert row["tok_s_p10"] <= row["tok_s"] <= row["tok_s_p90"]


@pytest.mark.oracle
def test_hugging_face_does_not_stop_or_sample(folders, tmp_path):
    """With settings beside the weights that would make it do both."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prompt, num_tokens = [5, 6, 7], 12
    target = tiny_pair.write_model(
        tmp_path / "target", tiny_pair.config(num_layers=2), seed=0
    )
    greedy = hf_baseline.load(target, None, dtype="float32", gamma=1)
    expected = greedy.generate(prompt, num_tokens)
    assert len(expected) == num_tokens
    own = {"eos_token_id": expected[2], "do_sample": True, "temperature": 9.0}
    (target / "generation_config.json").write_text(json.dumps(own))

    hf = hf_baseline.load(target, folders[1], dtype="float32", gamma=3)
    assert hf.generate(prompt, num_tokens) == expected
    assert hf.generate(prompt, num_tokens, assisted=True) == expected
    # The settings are real ones: obeyed, they would end the text.
    settings = transformers.GenerationConfig.from_pretrained(target, do_sample=False)
    hf.target.generation_config = settings
    assert len(hf.generate(prompt, num_tokens)) == 3


@pytest.mark.oracle
def test_the_assistant_drafts_gamma_tokens_a_round(folders):
    """Fails if the assistant is not used, or ends its drafts early."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    target, _ = folders
    # A perfect draft: each round commits gamma + 1 tokens.
    hf = hf_baseline.load(target, target, dtype="float32", gamma=3)
    forwards = []
    hf.target.register_forward_hook(lambda *_: forwards.append(None))
    hf.generate([5, 6, 7], 16, assisted=True)
    assert len(forwards) == 4


def assert_fails_with(capsys, arguments: list[str], *words: str) -> None:
    """Asserts exit status 1 and one clear line, with no traceback."""
    try:
        status = latency.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == cli.UNUSABLE == 1
    last = error.splitlines()[-1]
    assert "error: " in last
    assert "Traceback" not in error
    for word in words:
        assert word in last, last


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--contexts", "3000"], ["3000", "positions"]),
        (["--slab", "2"], ["slab of 3"]),
        (["--prompts", "0"], ["--prompts"]),
        (["--prompts", "missing.jsonl"], ["missing.jsonl"]),
        (["--gen-tokens", "4000"], ["--gen-tokens 4000 is above 2047"]),
        (["--gamma", "0"], ["at least 1"]),
        (["--page-size", "48", "--impl", "xla"], ["page_size"]),
        (["--dtype", "int8"], ["int8"]),
        (["--impl", "mosaic"], ["mosaic"]),
        (["--preset", "qwen3-0.6b"], ["leave out"]),
        (["--preset", "qwen4"], ["qwen4"]),
        (["--out", "/nowhere/out.jsonl"], ["/nowhere"]),
    ],
)
def test_bad_input(folders, capsys, more, words):
    assert_fails_with(capsys, pair_flags(folders, "--no-hf", *more), *words)


def test_models_that_are_not_there(folders, tmp_path, capsys):
    assert_fails_with(capsys, command("--target", str(folders[0])), "--draft")
    missing = ("--target", str(tmp_path), "--draft", str(tmp_path), "--no-hf")
    assert_fails_with(capsys, command(*missing), str(tmp_path))


def test_a_preset_that_does_not_fit(monkeypatch, capsys):
    """Refused before anything is created, with both numbers."""
    huge = tiny_pair.config(vocab_size=2**40)
    monkeypatch.setitem(subjects.PRESETS, "qwen3-0.6b", huge)
    assert_fails_with(capsys, command("--preset", "qwen3-0.6b"), "GiB", "free")


def test_an_interrupted_run_leaves_whole_rows(folders, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_runs, "run_prompt", interrupted)
    out = tmp_path / "out.jsonl"
    more = ("--no-hf", "--out", str(out))
    assert latency.main(pair_flags(folders, *more)) == cli.INTERRUPTED == 130
    assert len(rows_of(out, "step")) == 11
    assert "interrupted" in capsys.readouterr().err
