"""The comparison with llama.cpp: what its programs print, and rows."""

import subprocess

import pytest
from script_runs import models_of, rows_of

from experiments import compare_llama_cpp
from experiments.lib import beside_llama as beside, compare, llama_cpp
from spec_jax.analysis import metrics


OF_PLAIN = b"""
0.00.1 I common_perf_print:    sampling time =       1.50 ms
0.00.1 I common_perf_print:    samplers time =       0.35 ms /    71 tokens
0.00.1 I common_perf_print:        load time =      24.17 ms
0.00.1 I common_perf_print: prompt eval time =       4.00 ms /     7 tokens ( 0.57 ms)
0.00.1 I common_perf_print:        eval time =       5.50 ms /     7 runs   ( 0.79 ms)
0.00.1 I common_perf_print:       total time =      40.00 ms /    14 tokens
"""
OF_SPECULATIVE = b"""
0.00.1 I encoded    7 tokens in    0.005 seconds, speed: 1750.000 t/s
0.00.1 I decoded    8 tokens in    0.006 seconds, speed: 1333.333 t/s
0.00.1 I n_draft   = 2
0.00.1 I n_predict = 8
0.00.1 I n_drafted = 9
0.00.1 I n_accept  = 3
"""


@pytest.fixture
def build(tmp_path):
    return llama_cpp.Build(folder=tmp_path, threads=2, limit_s=30.0)


@pytest.fixture
def printing(monkeypatch):
    """Has every program print this, as llama.cpp 0.5 does."""

    def say(stdout: bytes, stderr: bytes = b"", status: int = 0) -> list[list[str]]:
        commands = []

        def run(command, **_):
            commands.append(command)
            return subprocess.CompletedProcess(command, status, stdout, stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return say


def complete(build):
    return llama_cpp.complete(build, "m", b"prompt\n", max_tokens=8, capacity=64)


def speculate(build):
    sizes = {"gamma": 2, "max_tokens": 8, "capacity": 64}
    return llama_cpp.speculate(build, "m", "d", b"prompt\n", drafter="eagle3", **sizes)


def test_plain_decoding(build, printing):
    """Fails if a number is read from another line, or the text with its frame."""
    (command,) = [printing(b" a\xff\n\n [end of text]\n\n\n", OF_PLAIN)]
    assert complete(build) == llama_cpp.Generated(
        text=b" a\xff\n\n",
        prompt_tokens=7,
        tokens=8,
        prefill_s=0.004,
        decode_s=0.007,
        steps=7,
    )
    joined = " ".join(command[0])
    assert "--temp 0 " in joined and "--no-escape" in joined and " -c 96 " in joined


def test_speculative_decoding(build, printing):
    commands = printing(b"\n\nprompt\n a\n\n\n\n", OF_SPECULATIVE)
    done = speculate(build)
    assert (done.text, done.tokens, done.steps) == (b" a", 8, 8)
    assert (done.proposed, done.accepted, done.rounds) == (9, 3, 5)
    assert done.prefill_s == pytest.approx(0.004)
    assert done.decode_s == pytest.approx(0.006)
    joined = " ".join(commands[0])
    # It stops once it has more tokens than it is asked for.
    assert " -n 7 " in joined and "--spec-type draft-eagle3" in joined
    assert "--spec-draft-n-max 2 " in joined and "--spec-draft-p-min 0 " in joined
    sizes = {"gamma": 2, "max_tokens": 8, "capacity": 64}
    llama_cpp.speculate(build, "m", None, b"prompt\n", drafter="ngram", **sizes)
    joined = " ".join(commands[1])
    assert "--spec-type ngram-simple --spec-ngram-simple-size-n 2" in joined
    assert "--spec-ngram-simple-size-m 2 " in joined and " -md " not in joined


def test_rows(folders, build, tmp_path, monkeypatch):
    """Fails if texts are not compared, or a ratio is upside down."""
    pytest.importorskip("gguf")
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
    arguments = [*models_of(folders), "--gamma", "2", "--gen-tokens", "8"]
    arguments += ["--prompts", str(prompts), "--llama-bin", "bin", "--no-steps"]
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
    drafts = rows["speculative, 2 drafted: end to end"]["drafts"]
    assert drafts["theirs"]["acceptance_rate"] == pytest.approx(1 / 3)
    assert drafts["theirs"]["repetition"] is None  # It prints no tokens.
    texts = [prompt["runs"][2]["ids"] for prompt in prompts]
    counts = [metrics.text_counts(text, metrics.Counters()) for text in texts]
    assert drafts["ours"]["repetition"] == metrics.mean_repetition(counts)
    assert drafts["same"] == {"prompts": 0, "ours": None, "theirs": None}


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
