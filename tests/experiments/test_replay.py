"""Replay: what it counts is what live rounds count; files, rows, bad input."""

import dataclasses
import json
import pathlib

import pytest
from script_runs import assert_fails_with, rows_of, write_rows

from experiments import replay
from experiments.lib import runs
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import registry


SAMPLED = ("--temperature", "0.7", "--top-k", "20", "--top-p", "0.8", "--seed", "7")
COSTS = {"plain_s": 1.0, "verify_s": {"1": 1.0, "5": 2.0}, "draft_s": {"oracle": 0.5}}


@pytest.fixture(scope="module")
def recorded(folders, tmp_path_factory):
    """The file of three traces, by how they are drawn."""
    folder = tmp_path_factory.mktemp("traces")
    found = {"greedy": folder / "greedy.jsonl", "sampled": folder / "sampled.jsonl"}
    for kind, path in found.items():
        given = ["--record", str(path), "--target", str(folders[0]), "--impl", "native"]
        given += ["--prompts", "3", "--gen-tokens", "12", "--gamma", "1,4"]
        given += SAMPLED if kind == "sampled" else ()
        assert replay.main(given) == replay.DONE == 0
    return found


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
def test_replayed_counters_are_live_counters(kind, name, folders, recorded):
    """Fails if a drafter sees anything else, or draws with other noise, than live; with
    a stop token inside. The target drafts for itself: kept where it draws the same."""
    target, how = folders[0], {"slab": 5, "gamma_max": 4, "impl": "native"}
    path = recorded[kind]
    args = replay.parse_args(
        [str(path), "--gamma", "4", "--drafter", name, "--draft", str(target)]
    )
    header, traces = replay.read(path)
    header = dataclasses.replace(header, stop_ids=(traces[0].generated_ids[7],))
    built = replay.build(args, header)[name]
    lm = loading.load(target, drafter="ngram", **how).with_drafter(*built)
    settings = runs.Settings(
        gamma=4,
        gen_tokens=header.gen_tokens,
        capacity=256,
        page_size=header.page_size,
        stop_ids=header.stop_ids,
        sampling=header.settings,
    )
    total = metrics.Counters()
    for trace in traces:
        live = runs.run_speculative(lm, settings, trace.prompt_ids)
        found, forwards = replay.replay(header, built, trace, gamma=4, capacity=256)
        assert found == live.counters and forwards.sum() == live.counters.target_steps
        assert live.tokens == trace.until_stop(header.stop_ids)
        total += found
    metrics.identities(total)
    assert total.proposed > 0 and total.tokens < 12 * len(traces)
    if name in ("draft-model", "oracle"):
        assert total.accepted == total.proposed


def test_drafters_are_evaluated_without_the_target(
    recorded, folders, tmp_path, monkeypatch, capsys
):
    """Fails if the target is read, a row is missing, or a window is charged for rows
    that it did not have."""
    monkeypatch.setattr(runs, "run_plain", None)
    monkeypatch.setattr(loading, "load", None)
    header, *traces = rows_of(recorded["greedy"])
    gone = {"target": "/nowhere", "stop_ids": []}
    path = write_rows(tmp_path / "traces.jsonl", [header | gone, *traces])
    costs, out = tmp_path / "costs.json", tmp_path / "out.jsonl"
    costs.write_text(json.dumps(COSTS))
    outside = "spec_jax.drafters.ngram:PromptLookup"
    given = [str(path), "--drafter", f"oracle,{outside},draft-model", "--gamma", "1,4"]
    given += ["--draft", str(folders[1]), "--costs", str(costs), "--out", str(out)]
    assert replay.main(given) == replay.DONE
    rows = rows_of(out)
    assert [(row["drafter"], row["gamma"]) for row in rows] == [
        *(("oracle", 1), ("oracle", 4), (outside, 1), (outside, 4)),
        *(("draft-model", 1), ("draft-model", 4)),
    ]
    best = rows[1]
    assert best["acceptance_rate"] == 1.0 and best["tokens"] == 36
    # 12 tokens by windows of 4 drafts: 5, 5, and the 2 that are wanted still.
    assert best["rounds"] == 9 and best["rounds_by_rows"] == [0, 0, 3, 0, 0, 6]
    seconds = 3 * (1.25 + 0.5) + 6 * (2.0 + 4 * 0.5)
    assert best["expected_speedup"] == pytest.approx(36 / seconds)
    assert {row["kind"] for row in rows} == {"replay"} and best["gen_tokens"] == 12
    assert "oracle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [], ("is empty", "--record")),
        (lambda rows: rows[1:], ("header",)),
        (lambda rows: [rows[0] | {"gen_tokens": 13}, *rows[1:]], ("[12]", "3 of 13")),
        (lambda rows: rows[:3], ("has 2 traces", "says 3")),
        (
            lambda rows: [*rows[:3], {k: rows[3][k] for k in ("kind", "id")}],
            ("line 4", "lacks 'prompt_ids'"),
        ),
    ],
)
def test_files_that_are_no_traces(recorded, tmp_path, capsys, change, words):
    rows = change(rows_of(recorded["greedy"]))
    path = write_rows(tmp_path / "changed.jsonl", rows)
    given = [str(path), "--drafter", "ngram", "--gamma", "4"]
    assert_fails_with(replay.main, capsys, given, "changed.jsonl", *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "name one file"),
        (("{traces}", "--prompts", "4"), "--prompts is what the traces say"),
        (("--record", "new", "--drafter", "ngram"), "--drafter is of evaluation"),
        (("{traces}", "--drafter", "ngram", "--gamma", "7"), "windows of at most 5"),
        (("{traces}", "--drafter", "dspark"), "dspark reads its target"),
        (("{traces}", "--drafter", "draft-model", "--gamma", "4"), "another vocab"),
    ],
)
def test_what_is_refused(recorded, capsys, flags, words):
    traces: pathlib.Path = recorded["greedy"]
    given = [flag.format(traces=traces) for flag in flags]
    if "--gamma" not in given:
        given += ["--gamma", "4"]
    assert_fails_with(replay.main, capsys, given, words)
