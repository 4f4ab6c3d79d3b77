"""The comparison with llama.cpp: its rows."""

import pytest
from script_runs import rows_of

from experiments import compare_llama_cpp
from experiments.lib import beside_llama as beside, compare, llama_cpp


@pytest.fixture
def build(tmp_path):
    return llama_cpp.Build(folder=tmp_path, threads=2, limit_s=30.0)


def test_rows(folders, build, tmp_path, monkeypatch):
    """Fails if texts are not compared, or a ratio is upside down."""
    told = {"prefill_s": 0.004, "steps": 8, "tokens": 8}

    def generated(prompt: bytes, **more) -> llama_cpp.Generated:
        length = len(prompt)  # A token a byte.
        return llama_cpp.Generated(text=b"??", prompt_tokens=length, **told, **more)

    def plain(build, target, prompt, **_):
        return generated(prompt, decode_s=0.007)

    def drafted(build, target, draft, prompt, **_):
        counts = {"rounds": 5, "proposed": 9, "accepted": 3}
        return generated(prompt, decode_s=0.006, **counts)

    monkeypatch.setattr(llama_cpp, "find", lambda *_, **__: build)
    monkeypatch.setattr(llama_cpp, "complete", plain)
    monkeypatch.setattr(llama_cpp, "speculate", drafted)
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


def test_perplexity_of_its_own(build, tmp_path):
    """Fails if flags are swapped, or another number of its output is taken."""
    program = build.folder / llama_cpp.PERPLEXITY
    program.write_text(
        "#!/bin/sh\necho '[1]9.1,[2]8.2,'\necho \"Final estimate: PPL = $6$8 +/- 0.1\""
    )
    program.chmod(0o755)
    sizes = {"window": 64, "windows": 2}
    found = llama_cpp.perplexity(build, tmp_path / "m", tmp_path / "t", **sizes)
    assert found == {"perplexity": 642}


def test_text_beyond_ours_is_not_compared():
    """Fails if a last round of theirs that commits more is told as another text."""
    made = lambda text, tokens: llama_cpp.Generated(
        text=text, prompt_tokens=1, tokens=tokens, prefill_s=1, decode_s=1, steps=1
    )
    plain, drafted = (compare.Run(side="x", method=m) for m in ("plain", "eagle3"))
    for text, tokens, first in (
        (b"abcd", 3, None),
        (b"abcd", 2, 2),  # The control: no more tokens, and another text.
        (b"ax", 3, 1),
        (b"a", 3, 1),
    ):
        generated = {plain: [made(b"ab", 2)], drafted: [made(text, tokens)]}
        runs = beside.PromptRuns(prompt=None, generated=generated)
        assert runs.first_difference(drafted) == first
