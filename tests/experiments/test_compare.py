"""Comparisons with Hugging Face and llama.cpp: rows, equal tokens, and settings."""

import dataclasses
import json

import pytest
import tiny_pair
from script_runs import models_of, rows_from

import spec_jax as sj
from experiments import compare_hf, compare_llama_cpp
from experiments.lib import compare, llama_cpp, prompts as prompts_lib
from spec_jax import testing
from spec_jax.analysis import metrics
from spec_jax.model import eagle3_files


def command(folders, folder, *more: str) -> list[str]:
    lines = ["def first(x):", "import second", "class Third(Base):", "for i in x:"]
    (folder / "prompts.txt").write_text("\n".join(lines))
    flags = f"--prompts {folder}/prompts.txt --lengths 4 9 20 --per-length 1 "
    flags += "--gammas 1,3 --repeats 1 --gen-tokens 8"
    return [*models_of(folders), *flags.split(), *more]


@pytest.fixture(scope="module")
def oracle():
    """Skips without torch and transformers; sets one thread, as models are tiny."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_hf.processes, "usable_cores", lambda: 1)
        yield


@pytest.mark.slow
def test_rows_of_runs(oracle, folders, tmp_path):
    """Fails if a run is missing, tokens differ, or speeds are not of the reference."""
    given = command(folders, tmp_path, "--ignore-stop")
    *every, summary = rows_from(compare_hf.main, tmp_path, given)
    rows = [row for row in every if row["kind"] == "comparison"]
    prompts = {row["length"]: row["runs"] for row in every if row["kind"] == "prompt"}
    ways = 2 * (1 + 2 * 2)  # sides, and plain decoding and two methods at two gammas
    assert [row["length"] for row in rows[::ways]] == list(prompts_lib.LENGTHS)
    for row in rows:
        own = {name: row[name] for name in ("side", "method", "gamma")}
        (run,) = (run for run in prompts[row["length"]] if own.items() <= run.items())
        assert row["tok_s"] == pytest.approx(
            8 / sum(run["prefill_s"] + run["decode_s"])
        )
        assert row["identical"] == row["prompts"] == row["n"] == 1
        assert row["tok_s_p10"] <= row["tok_s"] <= row["tok_s_p90"]
        assert row["dtype"] == "float32" and row["hf"]["torch_version"]
        is_reference = (row["side"], row["gamma"]) == ("transformers", None)
        assert not is_reference or row["vs_hf"] == row["vs_hf_p90"] == 1
    assert summary["greedy_identical"] == summary["prompts"] == 3
    assert summary["matched"] is True


def test_another_target_is_told(oracle, folders, tmp_path, monkeypatch):
    """Negative control: other weights on Hugging Face's side give status 2."""
    other = tiny_pair.write_model(
        tmp_path / "other", tiny_pair.config(num_layers=2), seed=7
    )
    real, draft = compare_hf.Theirs.load, folders[1]
    load = lambda *_, **how: real(other, draft, **how)
    monkeypatch.setattr(compare_hf.Theirs, "load", load)
    given = command(folders, tmp_path, "--gammas", "3", "--ignore-stop")
    *_, summary = rows_from(compare_hf.main, tmp_path, given, status=2)
    assert summary["greedy_identical"] < summary["prompts"]
    assert summary["matched"] is True


def test_equal_tokens_of_nan_do_not_match():
    """Fails if a run of either kind matches with NaN, or equal finite runs do not."""
    drafted = compare.Run(side=compare.OURS, method="draft model", gamma=3)
    finite = compare.Generated(ids=[1, 2], count=2, decode_s=1.0)
    wrong = dataclasses.replace(finite, nonfinite=2)
    cases = (finite, finite, 0), (wrong, finite, 2), (finite, wrong, 2)
    for plain, spec, nonfinite in cases:
        every = {compare.OUR_PLAIN: [plain], drafted: [finite, spec]}
        one = compare.PromptRuns(prompt=None, every=every, reference=compare.OUR_PLAIN)
        assert one.nonfinite == nonfinite and one.matched is (nonfinite == 0)


def test_hugging_face_does_not_stop_or_sample(oracle, folders, tmp_path):
    """Fails if settings beside the weights make it stop early or sample."""
    import transformers

    config = tiny_pair.config(num_layers=2)
    target = tiny_pair.write_model(tmp_path / "target", config, seed=0)

    def generated(*folders, method=compare.PLAIN, gamma=None):
        lm = compare_hf.Theirs.load(*folders, dtype="float32")
        run = compare.Run(side=compare_hf.THEIRS, method=method, gamma=gamma)
        return lm.generate(run, [5, 6, 7], max_tokens=12, stop_ids=())

    expected = generated(target, None)
    assert len(expected) == 12
    own = {"eos_token_id": expected[2], "do_sample": True, "temperature": 9.0}
    (target / "generation_config.json").write_text(json.dumps(own))
    drafted = {"method": compare_hf.DRAFT_MODEL, "gamma": 3}
    for how in ({}, drafted):
        assert generated(target, folders[1], **how) == expected
    # The settings are real ones: transformers reads their stop token.
    settings = transformers.GenerationConfig.from_pretrained(target, do_sample=False)
    assert settings.eos_token_id == expected[2]


def test_a_target_alone_is_compared_by_prompt_lookup(oracle, folders, tmp_path):
    """Fails if a draft model is asked for, or other tokens in bfloat16 are failures."""
    target, more = command(folders, tmp_path)[:2], command(folders, tmp_path)[4:]
    given = [*target, *more, "--dtype", "bfloat16"]
    *rows, summary = rows_from(compare_hf.main, tmp_path, given)
    rows = [row for row in rows if row["kind"] == "comparison"]
    assert {row["method"] for row in rows} == {"plain", "prompt lookup"}
    assert summary["matched"] and rows[0]["draft"] is None


def test_rows_of_llama_cpp(folders, tmp_path, monkeypatch):
    """Fails if texts are not compared, or a ratio is inverted."""
    kept = metrics.Counters(tokens=8, rounds=5, proposed=9, accepted=3)

    def generated(folder, model, prompt: bytes, *, gamma, **_):
        decode_s, counters = (0.006, kept) if gamma else (0.007, None)
        told = {"prefill_s": 0.004, "decode_s": decode_s, "counters": counters}
        return compare.Generated(text=b"??", count=8, **told)

    monkeypatch.setattr(llama_cpp, "generate", generated)
    prompts, model = tmp_path / "prompts.txt", tmp_path / "model.gguf"
    prompts.write_text("def first(x):\nimport second\nfor i in x:")
    for path in (model, *(tmp_path / name for name in llama_cpp.PROGRAMS)):
        path.touch()
    given = f"--target {folders[0]} --gamma 2 --gen-tokens 8 --prompts {prompts} "
    given += f"--llama-bin {tmp_path} --no-steps --gguf {model} --repeats 2"
    found = rows_from(compare_llama_cpp.main, tmp_path, given.split())
    prompts = [row for row in found if row["kind"] == "prompt"]
    ours, theirs, our_drafts, their_drafts = prompts[0]["runs"]
    assert ours["ids"] == our_drafts["ids"] and len(ours["decode_s"]) == 2
    assert theirs["text"] == "??" and theirs["first_difference"] == 0
    assert (their_drafts["rounds"], their_drafts["accepted"]) == (5, 3)
    rows = {row["figure"]: row for row in found if row["kind"] == "comparison"}
    assert len(rows) == 5
    row = rows["plain: end to end"]
    assert row["theirs"] == pytest.approx((4 + 7) / 8) and row["n"] == 2
    assert row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"]
    assert (row["prompts"], row["same_ours"], row["same_theirs"]) == (3, 3, 0)
    seconds = [run["decode_s"] for prompt in prompts for run in prompt["runs"][:1]]
    turns = [sum(turn) / (8 * 3) for turn in zip(*seconds, strict=True)]
    assert rows["plain: decode"]["ours"] == pytest.approx(1e3 * sum(turns) / 2)
    drafts = rows["ngram, 2 drafted: end to end"]["drafts"]
    assert drafts["theirs"]["accepted_per_round"] == pytest.approx(3 / 5)
    runs = [prompt["runs"][2] for prompt in prompts]
    assert drafts["ours"]["accepted"] == sum(run["accepted"] for run in runs)


def test_llama_cpp_gets_a_head_with_all_its_weights(folders, tmp_path):
    """Fails if a head goes there without an output projection, or with another one."""
    lm = sj.load(folders[0], drafter="ngram")
    for shares in (False, True):
        head = tiny_pair.write_head(
            tmp_path / f"{shares}", folders[0], shares_head=shares
        )
        whole = compare_llama_cpp._whole(head, "eagle3", lm, tmp_path / "whole")
        assert (whole == head) is not shares
    read = [
        eagle3_files.load(folder, lm.target.config, lm.params)
        for folder in (head, whole)
    ]
    assert [config.shares_head for config, _ in read] == [True, False]
    testing.assert_same_bits(read[0][1], read[1][1])


def test_text_beyond_ours_is_not_compared():
    """Fails if tokens of their last round beyond our text count as a difference."""
    made = lambda text, count: compare.Generated(text=text, count=count, decode_s=1.0)
    for text, tokens, first in (
        (b"abcd", 3, None),
        (b"abcd", 2, 2),  # Control: as many tokens, and another text.
        (b"ax", 3, 1),
        (b"a", 3, 1),
    ):
        assert made(b"ab", 2).first_difference(made(text, tokens)) == first
