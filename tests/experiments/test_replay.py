"""Replay: what it counts is what live rounds count; files, rows, status, bad input."""

import dataclasses
import functools
import json
import pathlib

import pytest
import tiny_pair
from script_runs import assert_fails_with, models_of, rows_of, write_rows

from experiments import replay
from experiments.lib import cli, policies, profiles, replays, runs, traces
from spec_jax.analysis import metrics
from spec_jax.drafters import registry


SAMPLED = ("--temperature", "0.7", "--top-k", "20", "--top-p", "0.8", "--seed", "7")
COSTS = {"plain_s": 1.0, "verify_s": {"1": 1.0, "5": 2.0}, "draft_s": {"oracle": 0.5}}


def recording(folders, path, *more: str) -> list[str]:
    return [
        *("--record", str(path), "--target", str(folders[0]), "--impl", "native"),
        *("--prompts", "3", "--gen-tokens", "12", "--gamma", "1,4", *more),
    ]


@pytest.fixture(scope="module")
def greedy(folders, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("greedy") / "traces.jsonl"
    assert replay.main(recording(folders, path)) == replay.DONE == 0
    return path


@pytest.fixture(scope="module")
def sampled(folders, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("sampled") / "traces.jsonl"
    assert replay.main(recording(folders, path, *SAMPLED)) == 0
    return path


def rewritten(source: pathlib.Path, folder: pathlib.Path, change) -> pathlib.Path:
    """A copy of a file of rows; `change` gets them all, and returns them."""
    return write_rows(folder / "changed.jsonl", change(rows_of(source)))


def header_with(**changes):
    return lambda rows: [rows[0] | changes, *rows[1:]]


def evaluation(path, *more: str) -> list[str]:
    return [str(path), "--drafter", "ngram", "--gamma", "1,4", *more]


def check(path, folders, *more: str) -> list[str]:
    return evaluation(path, "--check", *models_of(folders), *more)


@pytest.fixture
def assert_refused(capsys):
    """Asserts that a command line ends with status 1, and a line of these words."""
    return functools.partial(assert_fails_with, replay.main, capsys)


#
# Counters
#


class Subject:
    """A drafter with the target and without it, on traces with a stop token inside."""

    def __init__(self, name, path, target, draft, *, stop_at: int = 7):
        header, self.prompts = traces.read(path)
        stop = self.prompts[0].generated_ids[stop_at]
        header = dataclasses.replace(header, stop_ids=(stop,))
        sizes = {"gamma_max": 4, "min_confidence": 0.05}
        longest = max(len(prompt.text) for prompt in self.prompts)
        self.replayer = replays.Replayer(
            header=header,
            built=replays.build(name, header, draft, **sizes),
            capacity=16 * (longest // 16 + 1),
            stop_ids=header.stop_ids,
        )
        self.target = traces.load_target(target, dtype=None, impl="native", gamma_max=4)

    def assert_equal(self, **run) -> metrics.Counters:
        """Asserts that every counter of every prompt is the same; their sum."""
        total = metrics.Counters()
        for prompt in self.prompts:
            live = self.replayer.run_live(self.target, prompt, **run)
            counters, num_forwards = self.replayer.run(prompt, **run)
            written = prompt.until_stop(self.replayer.stop_ids)
            assert replays.differences(live, counters, written) == []
            assert num_forwards.sum() == live.counters.target_steps
            metrics.identities(counters)
            total += counters
        return total


# Every drafter and both settings: what is drawn are a draft model's drafts and the
# target's tokens, of which lookups see no more than the text. The rest is slow.
REPLAYED = [name for name in registry.BUILDERS if name not in registry.NEED_TARGET]
RUNS = [("greedy", name) for name in REPLAYED] + [
    pytest.param(*("sampled", name), marks=() if name == "draft-model" else slow)
    for slow in [pytest.mark.slow]
    for name in REPLAYED
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_replayed_counters_are_live_counters(kind, name, folders, request):
    """Fails if a drafter sees anything else, or draws with other noise, than live."""
    # The target drafts for itself: kept where it draws with the same noise.
    target = folders[0]
    subject = Subject(name, request.getfixturevalue(kind), target, target)
    total = subject.assert_equal(gamma=4)
    assert total.proposed > 0 and total.tokens < 12 * len(subject.prompts)
    if name in ("draft-model", "oracle"):
        assert total.accepted == total.proposed


def test_replayed_policies_choose_what_live_ones_choose(greedy, folders):
    """Fails if adaptive rounds learn other counts on a trace."""
    subject = Subject("ngram", greedy, folders[0], folders[1])
    drafter = subject.replayer.built[0]
    chosen = policies.make("threshold", drafter, gamma=4, round_s=None)
    subject.assert_equal(gamma=4, chosen=chosen)


def test_scheduled_replays_verify_what_live_rounds_do(greedy, folders, tmp_path):
    """By a profile of one slot. Fails if a trace's drafter says no survival."""
    header = rows_of(greedy)[0]
    profile = {"kind": profiles.KIND, "num_slots": 1, "context": 9, "gamma": 4}
    profile |= {name: header[name] for name in ("target", "dtype", "impl")}
    profile |= {"native_isa": header["native_isa"], "drafter": "draft-model"}
    profile |= {"draft": str(folders[1])}
    profile |= {"step_s": [1.0, 1.1, 1.6, 1.7, 2.6], "draft_s": 0.1}
    path, out = tmp_path / "profile.jsonl", tmp_path / "out.jsonl"
    write_rows(path, [profile])
    more = ("--drafter", "draft-model", "--gamma", "4", "--out", str(out))
    assert replay.main(check(greedy, folders, *more, "--schedule", str(path))) == 0
    (scheduled,) = rows_of(out)
    assert scheduled["schedule"] == "profile.jsonl" and scheduled["checked"] == 3
    assert replay.main(evaluation(greedy, "--draft", str(folders[1]), *more)) == 0
    (always,) = rows_of(out)
    assert 0 < sum(scheduled["proposed_at"]) < sum(always["proposed_at"])


def test_whatever_differs_is_named(greedy, folders):
    """Negative control: one counter, one token, one length."""
    subject = Subject("ngram", greedy, folders[0], folders[1])
    prompt, replayer = subject.prompts[1], subject.replayer
    plain = prompt.until_stop(replayer.stop_ids)
    live = replayer.run_live(subject.target, prompt, gamma=2)
    same, _ = replayer.run(prompt, gamma=2)
    changed = [*plain[:5], (plain[5] + 1) % 264, *plain[6:]]
    assert replays.differences(live, same, changed) == [
        f"token 5: live {plain[5]}, in the trace {changed[5]}"
    ]
    assert replays.differences(live, same, plain[:-1]) == [
        f"{len(plain)} tokens live, {len(plain) - 1} in the trace"
    ]
    more = dataclasses.replace(same, accepted=same.accepted + 1)
    assert replays.differences(live, more, plain) == [
        f"accepted: live {same.accepted}, replayed {same.accepted + 1}"
    ]
    with pytest.raises(ValueError, match=r"gamma=5 is outside \[0, 4\]"):
        replayer.run(prompt, gamma=5)


#
# The command line
#


def test_drafters_are_evaluated_without_the_target(
    greedy, folders, tmp_path, capsys, monkeypatch
):
    """Fails if the target is read, or a row is missing or is another's."""
    monkeypatch.setattr(runs, "run_plain", None)
    monkeypatch.setattr(runs, "run_speculative", None)
    monkeypatch.setattr(traces, "load_target", None)
    gone = rewritten(greedy, tmp_path, header_with(target="/nowhere"))
    out = tmp_path / "out.jsonl"
    outside = "spec_jax.drafters.ngram:PromptLookup"
    more = ("--drafter", f"oracle,{outside},draft-model", "--draft", str(folders[1]))
    more += ("--ignore-stop", "--out", str(out))
    assert replay.main(evaluation(gone, *more)) == replay.DONE
    rows = rows_of(out)
    assert [(row["drafter"], row["gamma"]) for row in rows] == [
        *(("oracle", 1), ("oracle", 4), (outside, 1), (outside, 4)),
        *(("draft-model", 1), ("draft-model", 4)),
    ]
    best = rows[1]
    assert best["acceptance_rate"] == 1.0 and best["tokens"] == 36
    # 12 tokens by windows of 4 drafts: 5, 5, and the 2 that are wanted still.
    assert best["rounds"] == 9 and best["rounds_by_rows"] == [0, 0, 3, 0, 0, 6]
    assert best["checked"] is None and best["expected_tok_s"] is None
    assert {row["kind"] for row in rows} == {"replay"} and best["gen_tokens"] == 12
    assert "oracle" in capsys.readouterr().out


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_head_on_recorded_features(kind, greedy, folders, tmp_path, capsys):
    """Fails if features of a trace are not those of live rounds."""
    head = tiny_pair.WRITE_HEAD[kind](tmp_path / kind, folders[0])
    out, target = tmp_path / "out.jsonl", ("--target", str(folders[0]))
    more = ("--drafter", f"ngram,{head}", "--gamma", "4", "--out", str(out))
    assert replay.main(evaluation(greedy, *more, *target, "--check")) == replay.DONE
    lookups, row = rows_of(out)
    assert row["differing"] == [] and row["checked"] == lookups["checked"] == 3
    assert row["proposed"] > 0
    unsure = evaluation(greedy, "--drafter", str(head), *target, "--confidence", "1")
    if kind == "dspark":  # Of which no draft is certain.
        assert replay.main([*unsure, "--out", str(tmp_path / "unsure.jsonl")]) == 0
        assert rows_of(tmp_path / "unsure.jsonl")[0]["proposed"] == 0
    else:
        assert replay.main(unsure) == cli.UNUSABLE
        assert "min_confidence=1.0: an EAGLE-3 head has no" in capsys.readouterr().err
    # Without --target, of another target.
    assert replay.main(evaluation(greedy, "--drafter", str(head))) == cli.UNUSABLE
    assert "not the target of the traces" in capsys.readouterr().err


def test_expected_speed_is_that_of_the_windows(greedy, tmp_path):
    """Fails if a window is charged for rows that it did not have."""
    costs, out = tmp_path / "costs.json", tmp_path / "out.jsonl"
    costs.write_text(json.dumps(COSTS))
    more = ("--drafter", "oracle", "--gamma", "4", "--ignore-stop")
    more += ("--policy", "fixed,goodput")
    assert (
        replay.main(evaluation(greedy, *more, "--costs", str(costs), "--out", str(out)))
        == 0
    )
    fixed, goodput = rows_of(out)
    # 3 windows of 2 rows and 1 draft, 6 of 5 rows and 4 drafts.
    seconds = 3 * (1.25 + 0.5) + 6 * (2.0 + 4 * 0.5)
    assert fixed["expected_tok_s"] == pytest.approx(36 / seconds)
    assert fixed["expected_speedup"] == pytest.approx(36 / seconds)
    assert goodput["gamma_policy"] == "goodput" and goodput["rounds"] >= 9


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_check_finds_one_changed_token(kind, folders, tmp_path, request, capsys):
    """Negative control: exit status 2, one prompt is named, the others are equal."""

    def changed(rows):
        ids = rows[2]["generated_ids"]
        ids[6] = (ids[6] + 1) % tiny_pair.VOCAB_SIZE
        return rows

    path = rewritten(request.getfixturevalue(kind), tmp_path, changed)
    assert replay.main(check(path, folders, "--gamma", "4")) == replay.DIFFERS == 2
    printed = capsys.readouterr().out
    assert "prompt py-02 differs" in printed and "token 6: live" in printed
    assert "py-01" not in printed and "2/3" in printed


def test_a_recording_is_taken_up(greedy, folders, tmp_path, capsys, monkeypatch):
    """Fails if an interrupted recording begins again, or writes other traces."""
    path = rewritten(greedy, tmp_path, lambda rows: rows[:3])
    real, seen = runs.run_plain, []

    def watched(lm, settings, prompt):
        seen.append(prompt)
        return real(lm, settings, prompt)

    monkeypatch.setattr(runs, "run_plain", watched)
    before = path.read_bytes()
    assert replay.main(recording(folders, path)) == 0
    assert len(seen) == 1 and "2 of them taken up" in capsys.readouterr().out
    assert rows_of(path)[1:] == rows_of(greedy)[1:]
    assert path.read_bytes().startswith(before)  # An interrupt cannot lose them.
    # A last line without its end may be half a number: it is made again.
    path.write_bytes(before.rstrip(b"\n"))
    assert replay.main(recording(folders, path)) == 0
    assert "1 of them taken up" in capsys.readouterr().out
    assert rows_of(path)[1:] == rows_of(greedy)[1:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [], ("is empty", "--record")),
        (lambda rows: rows[1:], ("header",)),
        (header_with(gen_tokens=13), ("line 2", "12 generated", "13")),
        (header_with(num_prompts=4), ("3 prompts", "says 4", "interrupted")),
        (
            lambda rows: [*rows[:3], {k: rows[3][k] for k in ("kind", "id")}],
            ("line 4", "lacks 'category'"),
        ),
    ],
)
def test_files_that_are_no_traces(greedy, tmp_path, assert_refused, change, words):
    path = rewritten(greedy, tmp_path, change)
    assert_refused(evaluation(path), "changed.jsonl", *words)
