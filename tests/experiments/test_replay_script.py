"""Replay from its command line: files, rows, exit status, bad input."""

import json
import pathlib

import pytest
import tiny_pair

from experiments import replay
from experiments.lib import cli
from experiments.support import paired_runs, replay_costs, traces
from spec_jax.analysis import metrics
from spec_jax.gamma import theory


SAMPLED = ("--temperature", "0.7", "--top-k", "20", "--top-p", "0.8", "--seed", "7")
COSTS = {"plain_s": 1.0, "verify_s": {"1": 1.0, "5": 2.0}, "draft_s": {"oracle": 0.5}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


def record(folders, path, *more: str) -> int:
    return replay.main(
        [
            *("--record", str(path), "--target", str(folders[0]), "--impl", "native"),
            *("--prompts", "3", "--gen-tokens", "12", "--gamma", "1,4", *more),
        ]
    )


@pytest.fixture(scope="module")
def greedy(folders, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("greedy") / "traces.jsonl"
    assert record(folders, path) == replay.JUDGED == 0
    return path


@pytest.fixture(scope="module")
def sampled(folders, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("sampled") / "traces.jsonl"
    assert record(folders, path, *SAMPLED) == 0
    return path


def rows_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewritten(source: pathlib.Path, folder: pathlib.Path, change) -> pathlib.Path:
    """A copy of a file of rows; `change` gets them all, and returns them."""
    path = folder / "changed.jsonl"
    lines = [json.dumps(row) for row in change(rows_of(source))]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def header_with(**changes):
    return lambda rows: [rows[0] | changes, *rows[1:]]


def judge(path, *more: str) -> int:
    return replay.main([str(path), "--drafter", "ngram", "--gamma", "1,4", *more])


def check(path, folders, *more: str) -> int:
    target, draft = folders
    return judge(path, "--check", "--target", str(target), "--draft", str(draft), *more)


def test_what_is_recorded(greedy, folders):
    """Fails if a line lacks what replay needs, or says where it does not come from."""
    header, *lines = rows_of(greedy)
    assert header["kind"] == "traces" and header["num_prompts"] == len(lines) == 3
    assert header["target"] == str(folders[0]) and header["impl"] == "native"
    assert header["slab"] == 5 and header["temperature"] == 0.0
    assert header["vocab_size"] == tiny_pair.VOCAB_SIZE
    assert len(header["fingerprint"]) == len(header["vocabulary"]) == 64
    assert header["jax_version"]
    assert [line["id"] for line in lines] == ["py-01", "py-02", "py-03"]
    assert all(len(line["generated_ids"]) == 12 for line in lines)
    read, prompts = traces.read(greedy)
    assert read.to_row().items() <= {**header, "stop_ids": read.stop_ids}.items()
    assert [prompt.to_row() for prompt in prompts] == lines


def test_drafters_are_judged_without_the_target(
    greedy, folders, tmp_path, capsys, monkeypatch
):
    """Fails if the target is read, or a row is missing or is another's."""
    monkeypatch.setattr(paired_runs, "run_plain", None)
    monkeypatch.setattr(paired_runs, "run_speculative", None)
    gone = rewritten(greedy, tmp_path, header_with(target="/nowhere"))
    out = tmp_path / "out.jsonl"
    drafters = ("--drafter", "oracle,ngram,draft-model", "--draft", str(folders[1]))
    more = (*drafters, "--ignore-stop", "--out", str(out))
    assert judge(gone, *more) == replay.JUDGED
    rows = rows_of(out)
    assert [(row["drafter"], row["gamma"]) for row in rows] == [
        *(("oracle", 1), ("oracle", 4), ("ngram", 1), ("ngram", 4)),
        *(("draft-model", 1), ("draft-model", 4)),
    ]
    best = rows[1]
    assert best["acceptance_rate"] == 1.0 and best["tokens"] == 36
    # 12 tokens by windows of 4 drafts: 5, 5, and the 2 that are wanted still.
    assert best["rounds"] == 9 and best["rounds_by_rows"] == [0, 0, 3, 0, 0, 6]
    assert best["checked"] is None and best["expected_tok_s"] is None
    assert {row["kind"] for row in rows} == {"replay"} and best["gen_tokens"] == 12
    assert replay.main([str(gone), *drafters, "--gamma", "4", "--out", str(out)]) == 0
    assert rows_of(out)[0]["tokens"] < 36  # One of the texts meets a stop token.
    assert "oracle" in capsys.readouterr().out


def test_expected_speed_is_that_of_the_windows(greedy, tmp_path):
    """Fails if a window is charged for rows that it did not have."""
    costs, out = tmp_path / "costs.json", tmp_path / "out.jsonl"
    costs.write_text(json.dumps(COSTS))
    more = ("--drafter", "oracle", "--gamma", "4", "--ignore-stop")
    more += ("--policy", "fixed,goodput")
    assert judge(greedy, *more, "--costs", str(costs), "--out", str(out)) == 0
    fixed, goodput = rows_of(out)
    # 3 windows of 2 rows and 1 draft, 6 of 5 rows and 4 drafts.
    seconds = 3 * (1.25 + 0.5) + 6 * (2.0 + 4 * 0.5)
    assert fixed["expected_tok_s"] == pytest.approx(36 / seconds)
    assert fixed["expected_speedup"] == pytest.approx(36 / seconds)
    assert goodput["gamma_policy"] == "goodput" and goodput["rounds"] >= 9


def test_costs_as_latency_writes_them(tmp_path):
    path = tmp_path / "latency.jsonl"
    steps = {
        "plain step": (None, 2.0),
        "1 live row": (1, 2.0),
        "2 live rows": (2, 3.0),
        "draft step": (1, 0.5),
    }
    rows = [
        {"kind": "step", "step": name, "num_live": num_live, "ms": ms}
        for name, (num_live, ms) in steps.items()
    ]
    rows += [{"kind": "summary"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = replay_costs.read(path, ("draft-model", "ngram", "hybrid"))
    curve = theory.CostCurve(
        plain_s=0.002, rows=(1, 2), verify_s=(0.002, 0.003), draft_s=0.0005
    )
    assert curves["draft-model"] == curves["hybrid"] == curve
    assert curves["ngram"].draft_s == 0.0
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match="rows of several runs"):
        replay_costs.read(path, ("ngram",))


def test_a_number_for_all_drafters(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(
        json.dumps(COSTS | {"draft_s": 0.25, "overhead_s": 0.125}, indent=1)
    )
    curve = replay_costs.read(path, ("suffix",))["suffix"]
    assert curve.draft_s == 0.25 and curve.overhead_s == 0.125
    assert replay_costs.expected_seconds(curve, [0, 0, 0]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_check_finds_live_runs_equal(kind, folders, tmp_path, request, capsys):
    path, out = request.getfixturevalue(kind), tmp_path / "out.jsonl"
    more = ("--drafter", "ngram,draft-model", "--gamma", "4")
    assert check(path, folders, *more, "--out", str(out)) == replay.JUDGED
    rows = rows_of(out)
    assert len(rows) == 2
    assert all(row["checked"] == 3 and row["differing"] == [] for row in rows)
    assert "3/3" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_check_finds_one_changed_token(kind, folders, tmp_path, request, capsys):
    """Negative control: exit status 2, and the prompt is named."""

    def changed(rows):
        ids = rows[2]["generated_ids"]
        ids[6] = (ids[6] + 1) % tiny_pair.VOCAB_SIZE
        return rows

    path = rewritten(request.getfixturevalue(kind), tmp_path, changed)
    assert check(path, folders, "--gamma", "4") == replay.DIFFERS == 2
    printed = capsys.readouterr().out
    assert "prompt py-02 differs" in printed and "token 6: live" in printed
    assert "py-01" not in printed and "2/3" in printed


def test_a_check_finds_one_counter_that_differs(greedy, folders, monkeypatch):
    """Negative control: tokens that are equal do not make counters equal."""
    real = paired_runs.run_speculative

    def miscounted(*arguments):
        run = real(*arguments)
        counters = metrics.Counters(**vars(run.counters) | {"row_steps": 1})
        return paired_runs.Speculative(**vars(run) | {"counters": counters})

    monkeypatch.setattr(paired_runs, "run_speculative", miscounted)
    assert check(greedy, folders, "--gamma", "4") == replay.DIFFERS


def test_a_recording_is_taken_up(greedy, folders, tmp_path, capsys, monkeypatch):
    """Fails if an interrupted recording begins again, or writes other traces."""
    path = rewritten(greedy, tmp_path, lambda rows: rows[:3])
    real, seen = paired_runs.run_plain, []

    def watched(pair, settings, prompt):
        seen.append(prompt)
        return real(pair, settings, prompt)

    monkeypatch.setattr(paired_runs, "run_plain", watched)
    assert record(folders, path) == 0
    assert len(seen) == 1 and "2 of them taken up" in capsys.readouterr().out
    assert rows_of(path)[1:] == rows_of(greedy)[1:]


def assert_fails_with(capsys, run, *words: str) -> None:
    """Asserts exit status 1 and one clear line, with no traceback."""
    try:
        status = run()
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == cli.UNUSABLE == 1
    lines = [line for line in error.splitlines() if "error:" in line]
    assert len(lines) == 1, error
    for word in words:
        assert word in lines[0], error


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--drafter", "medusa"), ("'medusa' is no drafter", "oracle")),
        (("--drafter", ""), ("'' is no drafter",)),
        (("--gamma", "0"), ("--gamma",)),
        (("--gamma", "1,5"), ("5 rows", "gamma 4", "--gamma has 5", "record again")),
        (("--gamma-policy", "mood"), ("'mood' is no gamma policy", "threshold")),
        (("--policy", "goodput"), ("goodput", "give --costs")),
        (("--confidence", "2", "--drafter", "draft-model"), ("min_confidence=2.0",)),
        (("--temperature", "0.7"), ("temperature 0.0 and 0.7", "record again")),
        (("--seed", "3"), ("seed 0 and 3",)),
        (("--top-p", "0.9", "--top-k", "5"), ("top_k None and 5", "top_p 1.0 and 0.9")),
        (("--dtype", "bfloat16"), ("dtype 'float32' and 'bfloat16'",)),
        (("--impl", "xla"), ("impl 'native' and 'xla'",)),
        (("--gen-tokens", "13"), ("gen_tokens 12 and 13",)),
        (("--prompts", "4"), ("prompt_source '3' and '4'",)),
        (("--page-size", "8"), ("page_size 16 and 8",)),
        (("--raw",), ("raw False and True",)),
        (("--target", "x"), ("--target", "--check")),
        (("--record", "x"), ("one file",)),
        (("--costs", "nowhere.json"), ("nowhere.json", "cannot be read")),
        (("--out", "/nowhere/out.jsonl"), ("/nowhere",)),
    ],
)
def test_unusable_flags(greedy, folders, capsys, more, words):
    draft = ("--draft", str(folders[1]))
    assert_fails_with(capsys, lambda: judge(greedy, *draft, *more), *words)


def test_rows_do_not_replace_the_traces(greedy, capsys):
    before = greedy.read_text()
    out = greedy.parent / "." / greedy.name
    assert_fails_with(capsys, lambda: judge(greedy, "--out", str(out)), "replace")
    assert greedy.read_text() == before


def test_flags_that_repeat_the_recording(sampled):
    """What is given again is no error where it agrees: also where it is a default."""
    more = (*SAMPLED, "--prompts", "3", "--gen-tokens", "12", "--page-size", "16")
    assert judge(sampled, *more, "--gamma", "1") == 0


def test_a_default_that_is_given_is_compared(sampled, capsys):
    """Fails if `--temperature 0` passes for greedy traces, since it is the default."""
    run = lambda: judge(sampled, "--temperature", "0")
    assert_fails_with(capsys, run, "temperature 0.7 and 0.0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [], ("is empty", "--record")),
        (lambda rows: rows[1:], ("header",)),
        (lambda rows: [[1], *rows], ("header",)),
        (lambda rows: [{"kind": "summary"}], ("header",)),
        (header_with(format=2), ("format 2", "this is 1")),
        (header_with(slab="5"), ("line 1", "slab='5' is no int")),
        (header_with(slab=1), ("line 1", "slab=1 must be at least 2")),
        (header_with(stop_ids=[0.5]), ("line 1", "stop_ids=[0.5]")),
        (header_with(top_p=0.0), ("top_p=0.0",)),
        (header_with(gen_tokens=13), ("line 2", "12 generated", "13")),
        (header_with(vocab_size=40), ("line 2", "outside the vocabulary [0, 40)")),
        (header_with(num_prompts=4), ("3 prompts", "says 4", "interrupted")),
        (header_with(num_prompts=2), ("3 prompts", "says 2")),
        (lambda rows: [*rows[:3], {"kind": "prompt"}], ("line 4", "no trace")),
        (lambda rows: [*rows[:3], rows[3] | {"id": 5}], ("line 4", "id=5 is no str")),
        (lambda rows: [*rows[:3], rows[3] | {"prompt_ids": []}], ("line 4", "empty")),
        (
            lambda rows: [*rows[:3], {k: rows[3][k] for k in ("kind", "id")}],
            ("line 4", "lacks 'category'"),
        ),
    ],
)
def test_files_that_are_no_traces(greedy, tmp_path, capsys, change, words):
    path = rewritten(greedy, tmp_path, change)
    assert_fails_with(capsys, lambda: judge(path), "changed.jsonl", *words)


def test_a_damaged_line_is_named(greedy, tmp_path, capsys):
    path = tmp_path / "damaged.jsonl"
    path.write_text(greedy.read_text()[:-20])
    assert_fails_with(capsys, lambda: judge(path), "damaged.jsonl, line 4", "no JSON")
    assert_fails_with(capsys, lambda: judge(tmp_path / "none"), "none", "--record")


def test_traces_of_another_vocabulary(greedy, folders, tmp_path, capsys):
    """A draft that reads other tokens, by its config or by its tokenizer."""
    wider = tiny_pair.config(vocab_size=280)
    larger = tiny_pair.write_model(tmp_path / "larger", wider, seed=1)
    other = tiny_pair.write_model(tmp_path / "other", tiny_pair.config(), seed=1)
    tiny_pair.byte_tokenizer("extra").save(str(other / "tokenizer.json"))
    for draft, word in ((larger, "vocab_size 264 and 280"), (other, "vocabulary '")):
        more = ("--drafter", "ngram,draft-model", "--draft", str(draft))
        run = lambda more=more: judge(greedy, *more)
        assert_fails_with(capsys, run, "another vocabulary", word, "--draft")


def test_traces_of_another_model(greedy, folders, tmp_path, capsys, monkeypatch):
    """Refused before anything runs, with both fingerprints."""
    other = tiny_pair.write_model(
        tmp_path / "other", tiny_pair.config(num_layers=2), seed=9
    )
    monkeypatch.setattr(paired_runs, "run_speculative", None)
    run = lambda: check(greedy, (other, folders[1]))
    assert_fails_with(capsys, run, "not the target", "fingerprint '", "record again")


def test_a_file_of_another_recording_is_kept(greedy, folders, tmp_path, capsys):
    path = rewritten(greedy, tmp_path, lambda rows: rows[:3])
    before = path.read_text()
    run = lambda: record(folders, path, "--temperature", "0.5")
    assert_fails_with(capsys, run, "another recording", "temperature 0.0 and 0.5")
    path.write_text(before.replace("py-02", "py-20"))
    run = lambda: record(folders, path)
    assert_fails_with(capsys, run, "prompts of another file")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--drafter", "ngram"), ("--drafter judges traces",)),
        (("--check",), ("--check judges traces",)),
        (("--draft", "x"), ("--draft judges traces",)),
        (("--temperature", "-1"), ("--temperature -1.0 is negative",)),
        (("--top-p", "0"), ("--top-p",)),
        (("--target", "nowhere"), ("nowhere",)),
        (("--prompts", "51"), ("51", "50")),
        (("--gen-tokens", "2047"), ("py-01", "Shorten the prompt to 1, or")),
    ],
)
def test_recordings_that_cannot_be(folders, tmp_path, capsys, more, words):
    path = tmp_path / "traces.jsonl"
    assert_fails_with(capsys, lambda: record(folders, path, *more), *words)
    assert not path.exists() or not path.read_text()


def test_no_file_is_named(capsys):
    assert_fails_with(capsys, lambda: replay.main([]), "one file", "--record FILE")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("no table of costs",)),
        ("[1, 2]", ("no table of costs",)),
        ('{"plain_s": 1}', ("no 'draft_s'",)),
        ('{"kind": "step"}\n{"kind": "summary"}', ("no 'step'",)),
        (json.dumps(COSTS | {"plain_s": 0}), ("plain_s=0",)),
        (json.dumps(COSTS | {"verify_s": {"2": 1.0}}), ("must rise from 1",)),
        (json.dumps(COSTS | {"verify_s": {"1": 1.0, "3": 2.0}}), ("4", "3")),
    ],
)
def test_costs_that_are_none(greedy, tmp_path, capsys, text, words):
    path = tmp_path / "costs.json"
    path.write_text(text)
    run = lambda: judge(greedy, "--costs", str(path))
    assert_fails_with(capsys, run, *words)
