"""The main job from its command line: exit status, lines written, bad input."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import chex
import pytest
import tiny_pair

from experiments import spec_round
from experiments.lib import cli
from experiments.support import (
    model_pair,
    paired_runs,
    prompt_runs,
    report,
)
from spec_jax.analysis import metrics
from spec_jax.model import load, tokenizer
from spec_jax.ops import dispatch
from spec_jax.rules import sampling


DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


def command(folders, *more: str) -> list[str]:
    target, draft = folders
    return [
        *("--target", str(target), "--draft", str(draft)),
        *("--gen-tokens", "6", "--gamma", "2", "--prompts", "2"),
        *more,
    ]


def rows_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_matched_run(folders, tmp_path, capsys):
    """Fails if a line is missing, or the summary is not that of the lines."""
    out = tmp_path / "out.jsonl"
    status = spec_round.main(command(folders, "--out", str(out), "--repeats", "2"))
    assert status == spec_round.MATCHED == 0
    *prompts, summary = rows_of(out)
    assert [row["id"] for row in prompts] == ["py-01", "py-02"]
    assert {row["kind"] for row in prompts} == {"prompt"}
    for row in prompts:
        assert row["matched"] and row["plain_ids"] == row["spec_ids"]
        assert len(row["baseline_e2e_s"]) == len(row["spec_e2e_s"]) == 2
        assert row["repetition"] == metrics.repetition(row["spec_ids"])
        assert row["acceptance_rate"] == row["accepted"] / row["proposed"]
    assert summary["kind"] == "summary" and summary["matched"] is True
    assert summary["verify_decode_mismatches"] == summary["nonfinite_logits"] == 0
    assert summary["tokens"] == sum(row["tokens"] for row in prompts)
    weighted = sum(row["tokens"] * row["repetition"] for row in prompts)
    assert summary["repetition"] == pytest.approx(weighted / summary["tokens"])
    assert summary["tercile_prompts"] == [1, 1]
    assert summary["rounds"] == sum(row["rounds"] for row in prompts)
    assert summary["impl"] == dispatch.resolve("auto") and summary["gamma"] == 2
    assert {field.name for field in report.FIELDS} <= set(summary)
    printed = capsys.readouterr().out
    assert "acceptance_rate" in printed and "speedup_e2e" in printed


def test_the_sample_is_drawn_beside_greedy_runs(folders, tmp_path, capsys):
    """Fails if the text is greedy, its settings are unsaid, or it enters a number."""
    out = tmp_path / "out.jsonl"
    more = ("--gen-tokens", "24", "--ignore-stop", "--out", str(out))
    assert spec_round.main(command(folders, *more)) == 0
    heading, text = sample_of(capsys)
    assert heading == (
        "Prompt py-01: temperature 0.7, top-p 0.8, top-k 20, seed 0; equal to plain "
        "decoding (the numbers below are of the measured, greedy runs)"
    )
    first, _, summary = rows_of(out)
    assert summary["temperature"] == 0 and summary["tokens"] == 48
    greedy = byte_text(folders, first["spec_ids"])
    assert unmarked(text).endswith(greedy) is False
    # Named, even as 0, a temperature is that of the measured runs and of the text.
    assert spec_round.main(command(folders, "--temperature", "0", *more)) == 0
    heading, text = sample_of(capsys)
    assert heading == "Prompt py-01: greedy; equal to plain decoding"
    assert unmarked(text).endswith(greedy)
    assert rows_of(out)[0]["spec_ids"] == first["spec_ids"]


def test_a_sample_that_differs_is_said(folders, monkeypatch, capsys):
    """Exit status 2, though every measured run matched."""
    real = paired_runs.run_speculative

    def corrupted(pair, settings, prompt):
        run = real(pair, settings, prompt)
        if settings.sampling is None:
            return run
        tokens = [*run.tokens[:-1], (run.tokens[-1] + 1) % 250]
        return dataclasses.replace(run, tokens=tokens)

    monkeypatch.setattr(paired_runs, "run_speculative", corrupted)
    assert spec_round.main(command(folders, "--ignore-stop")) == 2
    printed = capsys.readouterr().out
    assert "NOT EQUAL to plain decoding at token 5 (the" in printed
    assert re.search(r"matched +true", printed)


def test_an_interrupted_sample_leaves_the_numbers(folders, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(spec_round.sample_text, "draw", interrupted)
    assert spec_round.main(command(folders)) == cli.INTERRUPTED
    assert "acceptance_rate" in capsys.readouterr().out


@pytest.mark.parametrize("drafter", ["draft-model", "hybrid", "ngram"])
def test_a_pair_that_draws_is_that_of_loading(folders, drafter):
    """Fails if the sample's drafts are greedy where `--temperature 0.7` draws them."""
    sizes = {"gamma_max": 2, "slab": 3, "dtype": None, "impl": "xla"}
    drawn = sampling.make_settings(temperature=0.7, top_k=20, top_p=0.8, seed=3)
    loaded = model_pair.load_pair(
        *folders, **sizes, drafter=drafter, sampling_settings=drawn
    )
    greedy = model_pair.load_pair(*folders, **sizes, drafter=drafter)
    made = model_pair.with_sampling(greedy, drawn)
    assert made.drafter == loaded.drafter
    chex.assert_trees_all_equal(made.params, loaded.params)
    if drafter != "ngram":
        assert made.drafter != greedy.drafter


def sample_of(capsys) -> tuple[str, str]:
    """The heading and the text of what a run printed, marks included."""
    printed = capsys.readouterr().out
    start = printed.index("Prompt py-01")
    heading, _, text = printed[start:].partition("\n")
    _, _, text = text.partition("\n")  # the legend
    return heading, text[: text.rindex("\n\nmetric")]


def unmarked(text: str) -> str:
    return "".join(c for c in text if c not in "".join(report.MARKS[0].all()))


def byte_text(folders, ids: list[int]) -> str:
    """The text of generated tokens, as it is shown."""
    pieces = tokenizer.load(folders[0]).decode_pieces(ids)
    return "".join(map(report._without_controls, pieces))


def test_wide_defaults_change_nothing(folders, tmp_path):
    """Fails if `JAX_ENABLE_X64` stops a script, or moves a token."""
    rows = {}
    for wide in ("0", "1"):
        out = tmp_path / f"{wide}.jsonl"
        done = subprocess.run(
            [sys.executable, spec_round.__file__, *command(folders, "--out", str(out))],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "JAX_ENABLE_X64": wide,
                "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
            },
        )
        assert done.returncode == spec_round.MATCHED, done.stderr
        *prompts, _ = rows_of(out)
        rows[wide] = [(row["plain_ids"], row["rounds"]) for row in prompts]
    assert rows["0"] == rows["1"]


def test_a_run_that_does_not_match(folders, tmp_path, monkeypatch):
    """Exit status 2, and the replay counts the planted token."""
    real = paired_runs.run_speculative

    def corrupted(pair, settings, prompt):
        run = real(pair, settings, prompt)
        if len(run.tokens) < settings.gen_tokens or settings.gen_tokens == 1:
            return run
        tokens = [*run.tokens[:-1], (run.tokens[-1] + 1) % 250]
        return dataclasses.replace(run, tokens=tokens)

    monkeypatch.setattr(paired_runs, "run_speculative", corrupted)
    out = tmp_path / "out.jsonl"
    more = ("--ignore-stop", "--out", str(out))
    assert spec_round.main(command(folders, *more)) == spec_round.NOT_MATCHED == 2
    *prompts, summary = rows_of(out)
    assert summary["matched"] is False
    assert summary["verify_decode_mismatches"] == len(prompts) == 2


@pytest.mark.parametrize("more", [(), ("--batch", "2"), ("--acceptance", "decode")])
def test_logits_that_are_not_finite_match_nothing(tmp_path, capsys, more):
    """Finite weights that overflow at run time: equal tokens, and exit status 2."""
    folders = tiny_pair.write_scaled(tmp_path, final_norm=3e38)
    out = tmp_path / "out.jsonl"
    more = (*more, "--ignore-stop", "--out", str(out))
    assert spec_round.main(command(folders, *more)) == spec_round.NOT_MATCHED == 2
    *prompts, summary = rows_of(out)
    for row in prompts:
        assert row["plain_ids"] == row["spec_ids"] and not row["matched"]
        assert 0 < row["nonfinite_logits"] <= row["tokens"]
    assert summary["matched"] is False
    assert summary["nonfinite_logits"] == sum(p["nonfinite_logits"] for p in prompts)
    assert "nonfinite_logits" in capsys.readouterr().out


def test_an_interrupted_run_leaves_whole_lines(folders, tmp_path, monkeypatch, capsys):
    """Fails if results are written at the end only."""
    real, seen = prompt_runs.run_prompt, []

    def interrupted(*arguments, **keywords):
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(real(*arguments, **keywords))
        return seen[-1]

    monkeypatch.setattr(prompt_runs, "run_prompt", interrupted)
    out = tmp_path / "out.jsonl"
    status = spec_round.main(command(folders, "--out", str(out)))
    assert status == cli.INTERRUPTED == 130
    assert [row["id"] for row in rows_of(out)] == ["py-01"]
    assert "interrupted" in capsys.readouterr().err


def test_conversations_and_categories(folders, tmp_path, capsys):
    """Every turn is run; counts stand by category, in the table and in the summary."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"question_id": 1, "category": "chat", "turns": ["hello", "and then?"]},
        {"question_id": 2, "category": "math", "turns": ["1 + 1"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--prompts", str(path), "--out", str(out), "--temperature", "0")
    assert spec_round.main(command(folders, *more)) == 0
    *prompts, summary = rows_of(out)
    assert [row["id"] for row in prompts] == ["1 turn 1", "1 turn 2", "2"]
    assert prompts[1]["prompt_tokens"] > prompts[0]["prompt_tokens"]
    parts = summary["by_category"]
    assert {name: part["prompts"] for name, part in parts.items()} == {
        "chat": 2,
        "math": 1,
    }
    for name in ("tokens", "proposed", "accepted"):
        assert sum(part[name] for part in parts.values()) == summary[name]
    table = capsys.readouterr().out.partition("by category")[2]
    assert re.search(r"chat +2 ", table) and re.search(r"math +1 ", table)


def test_prefill_by_rows_and_other_page_sizes_match(folders):
    """Every value once; each run compiles its programs."""
    for more in (
        ("--prefill", "rows", "--impl", "xla", "--drafter", "ngram"),
        ("--prefill", "batched", "--page-size", "8", "--dtype", "bfloat16"),
    ):
        assert spec_round.main(command(folders, "--prompts", "1", *more)) == 0


@pytest.mark.parametrize(
    "file",
    [
        "gsm8k/test.jsonl",
        "spec_bench/question.jsonl",
        "humaneval/HumanEval.jsonl",
    ],
)
def test_prompts_of_real_benchmarks(folders, file):
    if not (DATA / file).exists():
        pytest.skip(f"{file} is not beside the checkout")
    assert spec_round.main(command(folders, "--prompts", f"{DATA / file}:1")) == 0


def assert_fails_with(capsys, arguments: list[str], *words: str) -> None:
    """Asserts exit status 1 and one clear line, with no traceback."""
    try:
        status = spec_round.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == cli.UNUSABLE == 1
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if "error:" in line]
    assert len(lines) == 1, error
    for word in words:
        assert word in lines[0], error


@pytest.mark.parametrize(
    "more, words",
    [
        (("--gamma", "0"), ("--gamma", "0 must be at least 1")),
        (("--gamma", "-3"), ("--gamma", "-3 must be at least 1")),
        (("--gamma", "four"), ("--gamma", "four")),
        (("--gen-tokens", "0"), ("--gen-tokens", "at least 1")),
        (("--page-size", "12", "--impl", "xla"), ("page_size=12", "128")),
        (("--impl", "cuda"), ("--impl", "cuda", "triton")),
        (("--impl", "triton"), ("triton", "xla")),
        (("--dtype", "float16"), ("--dtype", "float16")),
        (("--drafter", "medusa"), ("--drafter", "medusa")),
        (("--repeats", "0"), ("--repeats", "at least 1")),
        (("--prompts", "51"), ("51", "50")),
        (("--prompts", "nowhere.jsonl"), ("nowhere.jsonl",)),
        (("--gen-tokens", "2047"), ("py-01", "Shorten the prompt to 1, or")),
        (
            ("--gen-tokens", "1000000000"),
            ("--gen-tokens 1000000000 is above 2047", "2048"),
        ),
        (("--page-size", "1000000000"), ("--page-size 1000000000 is above 2048",)),
        (("--top-k", "0"), ("--top-k", "0 must be at least 1")),
        (("--top-k", "5"), ("--top-k", "give a temperature")),
        (("--min-p", "2", "--temperature", "1"), ("--min-p 2.0 is outside",)),
        (("--seed", "-1"), ("--seed -1 is outside",)),
        (("--out", "x" * 300), ("--out", "too long")),
        (("--out", "/nowhere/out.jsonl"), ("/nowhere",)),
        (("--seed", "x"), ("--seed",)),
        (("--frobnicate",), ("--frobnicate",)),
    ],
)
def test_unusable_flags(folders, capsys, more, words):
    assert_fails_with(capsys, command(folders, *more), *words)


def test_out_is_checked_before_the_run(folders, tmp_path, capsys, monkeypatch):
    """Fails if an unwritable file is found only after the work."""

    def must_not_run(*_, **__):
        raise AssertionError("the run began")

    monkeypatch.setattr(spec_round, "run_all", must_not_run)
    assert_fails_with(capsys, command(folders, "--out", str(tmp_path)), "directory")


def test_a_broken_line_is_named(folders, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    assert_fails_with(
        capsys, command(folders, "--prompts", str(path)), "prompts.jsonl", "2"
    )


def test_an_empty_prompt_is_named(folders, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    assert_fails_with(capsys, command(folders, "--prompts", str(path)), "empty", "2")


def test_a_prompt_that_is_too_long(folders, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("x" * 3000 + "\n")
    assert_fails_with(capsys, command(folders, "--prompts", str(path)), "3000", "2042")


def test_one_of_target_and_draft_is_missing(folders, capsys):
    assert_fails_with(capsys, ["--target", str(folders[0])], "--draft")
    assert_fails_with(
        capsys, ["--target", "nowhere", "--draft", str(folders[1])], "nowhere"
    )


def copied(folders, tmp_path) -> tuple[pathlib.Path, pathlib.Path]:
    target, draft = (tmp_path / name for name in ("target", "draft"))
    shutil.copytree(folders[0], target)
    shutil.copytree(folders[1], draft)
    return target, draft


def test_truncated_weights(folders, tmp_path, capsys):
    target, draft = copied(folders, tmp_path)
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_fails_with(capsys, command((target, draft)), "model.safetensors", "again")


def test_another_architecture(folders, tmp_path, capsys):
    target, draft = copied(folders, tmp_path)
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (target / "config.json").write_text(json.dumps(config))
    assert_fails_with(
        capsys, command((target, draft)), "LlamaForCausalLM", "Qwen3ForCausalLM"
    )


def test_models_of_different_vocabularies(folders, tmp_path, capsys):
    draft = tiny_pair.write_model(
        tmp_path / "draft", tiny_pair.config(vocab_size=280), seed=1
    )
    assert_fails_with(
        capsys, command((folders[0], draft)), "vocabularies", "280", "264"
    )


def test_different_tokenizers(folders, tmp_path, capsys):
    target, draft = copied(folders, tmp_path)
    tiny_pair.byte_tokenizer("extra").save(str(draft / "tokenizer.json"))
    assert_fails_with(capsys, command((target, draft)), "extra")


def test_a_model_that_does_not_fit(folders, capsys, monkeypatch):
    """Refused before a weight is read, with both numbers."""
    monkeypatch.setattr(load.psutil, "virtual_memory", lambda: _Free(1000))
    monkeypatch.setattr(load.files, "read_into", None)
    assert_fails_with(capsys, command(folders), "GiB", "free")


@dataclasses.dataclass
class _Free:
    available: int


def test_tokens_are_compared_and_not_assumed(folders):
    """Negative control of `matched`: one differing token is enough."""
    run = paired_runs.Plain(tokens=[1, 2, 3], timing=None)
    spec = paired_runs.Speculative(
        tokens=[1, 2, 4],
        **{"origins": [], "timing": None, "mismatches": None},
        counters=metrics.Counters(),
    )
    result = prompt_runs.PromptResult(
        prompt=None, prompt_ids=[1], plain=[run], spec=[spec], mismatches=0
    )
    assert not result.matched
    same = dataclasses.replace(spec, tokens=[1, 2, 3])
    assert dataclasses.replace(result, spec=[same]).matched
    of_nan = dataclasses.replace(same, counters=metrics.Counters(nonfinite=1))
    assert not dataclasses.replace(result, spec=[of_nan]).matched
    of_nan = dataclasses.replace(run, nonfinite=1)
    assert not dataclasses.replace(result, plain=[of_nan], spec=[same]).matched
