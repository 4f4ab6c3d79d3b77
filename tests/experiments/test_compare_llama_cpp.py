"""The comparison with llama.cpp: its rows."""

import pytest
from script_runs import rows_of

from experiments import compare_llama_cpp
from experiments.lib import compare, llama_cpp
from spec_jax.analysis import metrics


def test_rows(folders, tmp_path, monkeypatch):
    """Fails if texts are not compared, or a ratio is inverted."""
    kept = metrics.Counters(tokens=8, rounds=5, proposed=9, accepted=3)

    def generated(folder, model, prompt: bytes, *, gamma, **_):
        decode_s, counters = (0.006, kept) if gamma else (0.007, None)
        told = {"prefill_s": 0.004, "decode_s": decode_s, "counters": counters}
        return compare.Generated(text=b"??", count=8, **told), len(prompt)

    monkeypatch.setattr(llama_cpp, "check", lambda folder: None)
    monkeypatch.setattr(llama_cpp, "generate", generated)
    out, prompts = tmp_path / "out.jsonl", tmp_path / "prompts.txt"
    prompts.write_text("def first(x):\nimport second\nfor i in x:")
    arguments = ["--target", str(folders[0]), "--gamma", "2", "--gen-tokens", "8"]
    arguments += ["--prompts", str(prompts), "--llama-bin", "bin", "--no-steps"]
    (tmp_path / "model.gguf").touch()
    arguments += ["--gguf", str(tmp_path / "model.gguf")]
    arguments += ["--repeats", "2", "--out", str(out)]
    assert compare_llama_cpp.main(arguments) == compare_llama_cpp.MATCHED == 0
    prompts = rows_of(out, "prompt")
    ours, theirs, our_drafts, their_drafts = prompts[0]["runs"]
    assert ours["ids"] == our_drafts["ids"] and len(ours["decode_s"]) == 2
    assert theirs["text"] == "??" and theirs["first_difference"] == 0
    assert (their_drafts["rounds"], their_drafts["accepted"]) == (5, 3)
    rows = {row["figure"]: row for row in rows_of(out, "comparison")}
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
