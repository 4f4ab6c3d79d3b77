"""The comparison with llama.cpp: what its programs print, rows, what is unusable.

The programs are small scripts that print what llama.cpp 0.5 prints, in its formats.
"""

import json
import sys

import pytest
from script_runs import assert_fails_with, models_of, rows_of

from experiments import compare_llama_cpp
from experiments.lib import beside_llama as beside, compare, llama_cpp, steps
from spec_jax.analysis import metrics
from spec_jax.model import tokenizer


PROGRAM = r"""#!PYTHON -SE
import json, pathlib, sys, time
path, args = pathlib.Path(__file__), sys.argv
with (path.parent / "calls").open("a") as calls:
    calls.write(json.dumps([path.name, *args[1:]]) + "\n")
said = json.loads((path.parent / "said.json").read_text())
mode = said.get(path.name)
if mode == "slow":
    time.sleep(60)
if mode == "fails":
    sys.exit("main: error: unable to load model")
if mode == "garbage":
    print("a newer version, which prints something else")
    sys.exit()
after = lambda flag: args[args.index(flag) + 1]
if path.name == "llama-bench":
    sizes = [(int(n), 0) for n in after("-p").split(",") if n != "0"]
    for prompt, gen in [*sizes, (0, int(after("-n")))]:
        one = 1_000_000 * (prompt or gen)
        row = {"build_commit": "0c1e570", "cpu_info": "A processor"}
        row |= {"n_prompt": prompt, "n_gen": gen, "samples_ns": [one, 3 * one, one]}
        print(json.dumps(row))
    sys.exit()
prompt = pathlib.Path(after("-bf")).read_bytes()
is_early = (path.parent / "calls").read_text().count(path.name) < 3
if mode == "cut" and is_early:
    sys.exit()
text = bytes.fromhex(said["texts"].get(prompt.hex(), b"??".hex()))
size = len(prompt) + (mode == "other tokens")
log = lambda line: print("0.00.104.930 I " + line, file=sys.stderr)
perf = lambda line: log("common_perf_print: " + line)
out = sys.stdout.buffer
if path.name == "llama-completion":
    out.write(text + (b" [end of text]\n" if mode == "ends" else b"") + b"\n\n")
    log("sampler seed: 4294967295")
    perf("   sampling time =       1.50 ms")
    perf("   samplers time =       0.35 ms /    71 tokens")
    perf("       load time =      24.17 ms")
    perf(f"prompt eval time =       4.00 ms / {size:5d} tokens (    0.57 ms per token)")
    perf("       eval time =       5.50 ms /     7 runs   (    0.79 ms per token)")
    perf("      total time =      40.00 ms /    14 tokens")
else:
    end = b"" if mode == "half" and is_early else b"\n\n" + b"\n\n"
    out.write(b"\n\n" + prompt + text + end)
    speed = size / 0.004
    log(f"encoded {size:4d} tokens in    0.005 seconds, speed: {speed:8.3f} t/s")
    log("decoded    8 tokens in    0.006 seconds, speed: 1333.333 t/s")
    log("n_draft   = 2")
    log("n_predict = 8")
    log("n_drafted = 9")
    log("n_accept  = 3")
    log("accept    = 33.333%")
"""


CONVERTER = """
import json, pathlib, sys
from conversion import base
def main():
    path, args = pathlib.Path(__file__).parents[1] / "bin", sys.argv[1:]
    said = json.loads((path / "said.json").read_text())
    if said.get("llama-converter") == "fails":
        sys.exit("NotImplementedError: Architecture 'Other' not supported!")
    pre = base.TextModel().get_vocab_base_pre("a tokenizer")
    with (path / "calls").open("a") as calls:
        calls.write(json.dumps(["convert", pre, *args]) + "\\n")
    if said.get("llama-converter") != "nothing":
        pathlib.Path(args[args.index("--outfile") + 1]).write_bytes(b"GGUF")
"""


@pytest.fixture
def fake(tmp_path):
    """A folder of the three programs; what they say is in `said.json`. Beside it what
    CMake noted, and the sources: their converter."""
    folder = tmp_path / "bin"
    folder.mkdir()
    sources = tmp_path / "llama cpp"
    (sources / "conversion").mkdir(parents=True)
    (sources / "conversion" / "base.py").write_text(
        "class TextModel:\n    def get_vocab_base_pre(self, tokenizer):\n"
        "        raise NotImplementedError\n"
    )
    (sources / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (tmp_path / "CMakeCache.txt").write_text(
        f"ggml_SOURCE_DIR:STATIC={sources}/ggml\n"
        f"llama.cpp_SOURCE_DIR:STATIC={sources}\nOTHER:STATIC=1\n"
    )
    for name in llama_cpp.PROGRAMS:
        path = folder / name
        path.write_text(PROGRAM.replace("PYTHON", sys.executable))
        path.chmod(0o755)
    say(folder)
    return folder


def say(folder, *, texts=(), **modes):
    """Makes a program do otherwise, by its name, and says texts of prompts."""
    modes = {f"llama-{name.replace('_', '-')}": mode for name, mode in modes.items()}
    texts = {prompt.hex(): text.hex() for prompt, text in dict(texts).items()}
    (folder / "said.json").write_text(json.dumps(modes | {"texts": texts}))


def calls(folder) -> list[list[str]]:
    """The commands of all that has run."""
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def find(folder, limit_s=30.0) -> llama_cpp.Build:
    return llama_cpp.find(folder, threads=2, limit_s=limit_s)


def complete(build):
    return llama_cpp.complete(build, "m", b"prompt\n", max_tokens=8, capacity=64)


def speculate(build):
    sizes = {"gamma": 2, "max_tokens": 8, "capacity": 64}
    return llama_cpp.speculate(build, "m", "d", b"prompt\n", drafter="eagle3", **sizes)


def bench(build):
    return llama_cpp.bench(build, "m", prompts=(5, 8), tokens=64, repeats=3)


def test_what_programs_print_is_read(fake):
    """Fails if a number is read from another line, or the text with its frame."""
    say(fake, texts={b"prompt\n": b" a\xff\n\n"})
    done = complete(find(fake))
    assert done == llama_cpp.Generated(
        text=b" a\xff\n\n",
        prompt_tokens=7,
        tokens=8,
        prefill_s=0.004,
        decode_s=0.007,
        steps=7,
    )
    done = speculate(find(fake))
    assert (done.text, done.tokens, done.steps) == (b" a\xff\n\n", 8, 8)
    assert (done.proposed, done.accepted, done.rounds) == (9, 3, 5)
    assert done.prefill_s == pytest.approx(0.004)
    assert done.decode_s == pytest.approx(0.006)
    found = bench(find(fake))
    assert set(found) == {"pp5", "pp8", "tg64"}
    assert found["pp5"].seconds == [0.005, 0.015, 0.005]
    assert found["tg64"].seconds == pytest.approx([0.001, 0.003, 0.001])
    assert found["tg64"].build == "0c1e570"


def test_the_end_of_a_text_is_no_text(fake):
    say(fake, texts={b"prompt\n": b"a"}, completion="ends")
    assert complete(find(fake)).text == b"a"


@pytest.mark.parametrize("mode", ["cut", "half"])
def test_what_is_cut_short_is_asked_for_again(fake, mode):
    """Fails if one such log or text ends the comparison, or is asked for for ever."""
    say(fake, speculative_simple=mode)
    assert speculate(find(fake)).accepted == 3
    assert len(calls(fake)) == 3
    say(fake, speculative_simple="garbage")
    with pytest.raises(ValueError, match="not understood"):
        speculate(find(fake))
    assert len(calls(fake)) == 3 + llama_cpp._TRIES


def test_programs_are_told_to_decode_greedily(fake):
    """Fails if a prompt is escaped, or drafts are fewer by confidence."""
    complete(find(fake)), speculate(find(fake))
    plain, drafted = calls(fake)
    for command in (plain, drafted):
        joined = " ".join(command)
        assert "--temp 0 " in joined and "--top-k 1" in joined
        assert "--no-escape" in joined and " -c 96 " in joined and "-t 2 " in joined
    assert plain[0] == "llama-completion" and " -n 8 " in " ".join(plain)
    joined = " ".join(drafted)
    # It stops once it has more tokens than it is asked for.
    assert " -n 7 " in joined and "--spec-type draft-eagle3" in joined
    assert "--spec-draft-n-max 2 " in joined and "--spec-draft-p-min 0 " in joined


PARTS = {"completion": complete, "speculative_simple": speculate, "bench": bench}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("garbage", "an output that is not understood"),
        ("fails", "ended with status 1: main: error: unable to load model"),
        ("slow", "not done after 0.5 s; give --limit-s more"),
    ],
)
def test_programs_that_do_otherwise(fake, name, mode, words):
    """Controls: no number comes of an output that is another, or of none."""
    say(fake, **{name: mode})
    with pytest.raises(ValueError, match=words) as error:
        PARTS[name](find(fake, limit_s=0.5 if mode == "slow" else 36_000.0))
    assert f"llama-{name.replace('_', '-')}: " in str(error.value)
    assert "\n" not in str(error.value)


def test_programs_that_cannot_be_run(fake):
    (fake / "llama-bench").chmod(0o644)
    with pytest.raises(ValueError, match=r"llama-bench: cannot be run \(Permission"):
        bench(find(fake))
    (fake / "llama-completion").unlink()
    with pytest.raises(ValueError, match=r"no llama-completion; name the folder `bin`"):
        find(fake)


def command(folders, fake, *more: str) -> list[str]:
    sizes = (
        "--gamma",
        "2",
        "--gen-tokens",
        "8",
        "--prompts",
        str(fake / "prompts.txt"),
    )
    (fake / "prompts.txt").write_text("def first(x):\nimport second\nfor i in x:")
    return [*models_of(folders), *sizes, "--llama-bin", str(fake), *more]


def test_rows(folders, fake, tmp_path, capsys):
    """Fails if texts are not compared, or a ratio is upside down."""
    pytest.importorskip("gguf")
    out = tmp_path / "out.jsonl"
    arguments = command(
        folders, fake, "--repeats", "2", "--no-steps", "--out", str(out)
    )
    assert compare_llama_cpp.main(arguments) == compare_llama_cpp.MATCHED == 0
    prompts = rows_of(out, "prompt")
    ours, theirs, our_drafts, their_drafts = prompts[0]["runs"]
    assert ours["ids"] == our_drafts["ids"] and len(ours["decode_s"]) == 2
    assert theirs["text"] == "??" and theirs["first_difference"] == 0
    assert (their_drafts["rounds"], their_drafts["accepted"]) == (5, 3)
    assert our_drafts["tokens"] <= our_drafts["rounds"] + our_drafts["accepted"]
    rows = {row["figure"]: row for row in rows_of(out, "comparison")}
    assert len(rows) == 5
    row = rows["plain: decode"]
    assert row["theirs"] == pytest.approx(1.0) and row["n"] == 2
    seconds = [run["decode_s"] for prompt in prompts for run in prompt["runs"][:1]]
    tokens = 8 * len(prompts)
    turns = [sum(turn) / tokens for turn in zip(*seconds, strict=True)]
    assert row["ours"] == pytest.approx(1e3 * sum(turns) / 2)
    row = rows["plain: end to end"]
    assert row["theirs"] == pytest.approx((4 + 7) / 8)
    assert row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"]
    assert (row["prompts"], row["same_ours"], row["same_theirs"]) == (3, 3, 0)
    drafted = rows["speculative, 2 drafted: end to end"]
    assert drafted["theirs"] == pytest.approx((4 + 6) / 8)
    theirs = drafted["drafts"]["theirs"]
    assert theirs["acceptance_rate"] == pytest.approx(1 / 3)
    assert theirs["accepted_per_round"] == pytest.approx(3 / 5)
    assert theirs["repetition"] is None  # It prints no tokens.
    texts = [prompt["runs"][2]["ids"] for prompt in prompts]
    counts = [metrics.text_counts(text, metrics.Counters()) for text in texts]
    repetition = metrics.mean_repetition(counts)
    assert drafted["drafts"]["ours"]["repetition"] == repetition
    nothing = {"prompts": 0, "ours": None, "theirs": None}
    assert drafted["drafts"]["same"] == nothing
    shown = capsys.readouterr().out
    assert "plain: our text in 3 of 3 prompts, llama.cpp's in 0" in shown
    assert "and 0.600 there (- and - where" in shown
    assert f"our texts repeat {repetition:.0%} of their 4-grams" in " ".join(
        shown.split()
    )

    # The very texts: now they agree.
    encoder = tokenizer.load(folders[0])
    lines = (fake / "prompts.txt").read_text().splitlines()
    runs = zip(lines, (prompt["runs"][0] for prompt in prompts), strict=True)
    texts = {
        line.encode(): beside.text_of(encoder, [i for i in run["ids"] if i])
        for line, run in runs
    }
    say(fake, texts=texts)
    assert compare_llama_cpp.main(arguments) == 0
    rows = {row["figure"]: row for row in rows_of(out, "comparison")}
    assert rows["plain: end to end"]["same_theirs"] == 3
    drafted = rows["speculative, 2 drafted: end to end"]
    assert drafted["same_theirs"] == 3
    assert drafted["drafts"]["same"]["theirs"] == pytest.approx(3 / 5)
    ours = drafted["drafts"]["ours"]["accepted_per_round"]
    assert drafted["drafts"]["same"]["ours"] == pytest.approx(ours)


def test_heads_are_converted_and_compared(folders, head, fake, tmp_path):
    """Fails if a drafter or a gamma is left out, or gets the file of another."""
    pytest.importorskip("gguf")
    out = tmp_path / "out.jsonl"
    more = ("--drafter", "eagle3", "--gamma", "1,2", "--no-steps", "--repeats", "1")
    arguments = command((folders[0], head), fake, *more, "--out", str(out))
    assert compare_llama_cpp.main(arguments) == 0
    rows = {row["figure"]: row for row in rows_of(out, "comparison")}
    names = [f"eagle3, {gamma} drafted" for gamma in (1, 2)]
    assert {f"{name}: end to end" for name in ("plain", *names)} <= set(rows)
    for name in names:
        drafts = rows[f"{name}: end to end"]["drafts"]
        assert drafts["ours"]["rounds"] > 0 and drafts["theirs"]["accepted"] == 9
    done = calls(fake)
    (converted,) = (call for call in done if call[0] == "convert")
    assert converted[1:3] == ["gpt-2", str(head)]
    after = lambda call, flag: call[call.index(flag) + 1]
    assert after(converted, "--target-model-dir") == str(folders[0])
    drafted = [call for call in done if call[0] == "llama-speculative-simple"]
    assert [after(call, "--spec-draft-n-max") for call in drafted] == ["1", "2"] * 3
    for call in drafted:
        assert after(call, "-md") == after(converted, "--outfile")
        assert after(call, "--spec-type") == "draft-eagle3"


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("fails", "ended with status 1: NotImplementedError: Architecture"),
        ("nothing", "wrote no GGUF file of"),
        ("no sources", "CMakeCache.txt: names no sources of llama.cpp"),
    ],
)
def test_heads_that_cannot_be_converted(folders, head, fake, mode, words, capsys):
    pytest.importorskip("gguf")
    say(fake, converter=mode)
    if mode == "no sources":
        (fake.parent / "CMakeCache.txt").write_text("ggml_SOURCE_DIR:STATIC=x\n")
    arguments = command((folders[0], head), fake, "--drafter", "eagle3", "--no-steps")
    assert_fails_with(compare_llama_cpp.main, capsys, arguments, words)


def test_rows_of_steps(folders, fake, tmp_path, monkeypatch):
    """Ours and llama-bench's names of the same step, and what is in turns."""
    pytest.importorskip("gguf")
    timed = property(lambda cost: lambda: lambda: 2e-3)
    monkeypatch.setattr(steps.Cost, "case", timed)
    out = tmp_path / "out.jsonl"
    more = ("--repeats", "2", "--out", str(out))
    assert compare_llama_cpp.main(command(folders, fake, *more)) == 0
    rows = {row["figure"]: row for row in rows_of(out, "comparison")}
    theirs = {
        "plain step": 1,
        "draft step": 1,
        "5 rows": 5,
        "8 rows": 8,
        "prompt of 64": 64,
        "prompt of 512": 512,
    }
    for name, wanted in theirs.items():
        assert rows[name]["theirs"] == pytest.approx(wanted)
        assert rows[name]["ours"] == pytest.approx(2)
        assert rows[name]["ratio"] == pytest.approx(wanted / 2)
        assert rows[name]["llama_cpp"]["build"] == "0c1e570"
    benches = [call for call in calls(fake) if call[0] == "llama-bench"]
    assert len(benches) == 2 * 3  # both models, a warm-up and two turns
    models = [call[call.index("-m") + 1].rpartition("/")[2] for call in benches]
    assert models[:2] == ["target.gguf", "draft-model.gguf"]


def test_another_tokenizer_is_seen(folders, fake, capsys):
    pytest.importorskip("gguf")
    say(fake, completion="other tokens")
    arguments = command(folders, fake, "--no-steps")
    words = ("a prompt of 13 tokens as 14", "its tokenizer is another")
    assert_fails_with(compare_llama_cpp.main, capsys, arguments, *words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "--llama-bin is missing: name the folder `bin`"),
        (("--llama-bin", "{tmp}/none"), "no llama-bench, llama-completion"),
        (("--llama-bin", "{tmp}", "--drafter", "ngram"), "--drafter ngram"),
        (
            ("--llama-bin", "{tmp}", "--preset", "qwen3-0.6b", "--no-steps"),
            "--preset has steps alone",
        ),
        (("--llama-bin", "{tmp}", "--threads", "0"), "must be at least 1"),
    ],
)
def test_unusable_input(tmp_path, capsys, more, words):
    more = [word.replace("{tmp}", str(tmp_path)) for word in more]
    assert_fails_with(compare_llama_cpp.main, capsys, more, words)


def test_what_is_beyond_our_text_is_not_compared():
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


def test_drafts_that_are_not_decodings_are_told(folders, fake, monkeypatch):
    """Negative control of exit status 2."""
    pytest.importorskip("gguf")
    generate = beside.Sides.generate

    def other(self, run, prompt):
        done = generate(self, run, prompt)
        if run.side == beside.OURS and run.gamma:
            object.__setattr__(done, "text", b"other")
        return done

    monkeypatch.setattr(beside.Sides, "generate", other)
    arguments = command(folders, fake, "--no-steps", "--repeats", "1")
    assert compare_llama_cpp.main(arguments) == compare_llama_cpp.NOT_MATCHED == 2
