"""Batches and adaptive gamma from the command line: equal texts, rows, bad input."""

import dataclasses
import json

import pytest
import tiny_pair

from experiments import spec_round, throughput
from experiments.lib import cli, timing
from experiments.support import (
    batched_runs,
    model_pair,
    paired_runs,
    policies,
)
from spec_jax.gamma import goodput, threshold


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


def command(folders, *more: str) -> list[str]:
    target, draft = folders
    return [
        *("--target", str(target), "--draft", str(draft)),
        *("--gen-tokens", "6", "--gamma", "2", "--prompts", "3"),
        *more,
    ]


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_batch_with_adaptive_gamma_and_sampling(folders, tmp_path):
    """Of three prompts in two slots: each as it is alone."""
    out = tmp_path / "out.jsonl"
    more = ("--batch", "2", "--gamma-policy", "threshold", "--temperature", "0.7")
    assert spec_round.main(command(folders, *more, "--out", str(out))) == 0
    *prompts, summary = rows_of(out)
    assert [row["matched"] for row in prompts] == [True] * 3
    assert summary["matched"] and summary["batch"] == 2
    assert summary["gamma_policy"] == "threshold"
    # Prefill and decoding overlap: no number claims to tell them apart.
    assert "speedup_decode" not in summary and summary["speedup_e2e"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--verify-path", "flash"), "--batch does not go together with --verify-path"),
        (("--acceptance", "decode"), "--batch does not go together with --acceptance"),
        (("--draft-cache", "round"), "does not go together with --draft-cache"),
        (("--confidence", "0.5"), "does not go together with --confidence"),
    ],
)
def test_what_a_batch_does_not_have(folders, more, message, capsys):
    with pytest.raises(SystemExit) as error:
        spec_round.main(command(folders, "--batch", "2", *more))
    assert error.value.code == cli.UNUSABLE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--batch", "0"), "0 must be at least 1"),
        (("--gamma-policy", "random"), "invalid choice: 'random'"),
    ],
)
def test_bad_flags(folders, more, message, capsys):
    with pytest.raises(SystemExit) as error:
        spec_round.main(command(folders, *more))
    assert error.value.code == cli.UNUSABLE
    assert message in capsys.readouterr().err


def test_decoding_that_decides_has_no_adaptive_gamma(folders, capsys):
    more = ("--acceptance", "decode", "--gamma-policy", "threshold")
    with pytest.raises(SystemExit):
        spec_round.main(command(folders, *more))
    assert "--acceptance decode has no adaptive gamma" in capsys.readouterr().err


@pytest.mark.parametrize("confidence", ["1.5", "nan"])
def test_a_confidence_that_is_none(folders, confidence, capsys):
    more = ("--confidence", confidence)
    assert spec_round.main(command(folders, *more)) == cli.UNUSABLE
    assert "is no probability" in capsys.readouterr().err


def load(folders, *, drafter):
    target, draft = folders
    return model_pair.load_pair(
        target, draft, gamma_max=2, slab=3, dtype=None, impl="auto", drafter=drafter
    )


SETTINGS = paired_runs.Settings(gamma=2, gen_tokens=6, capacity=64, page_size=16)
PROMPT = [5, 9, 31, 7, 5, 9]


def test_policies_by_name(folders):
    """The costs that goodput goes by are measured, one for each gamma."""
    pair = load(folders, drafter="ngram")
    assert policies.with_policy("fixed", pair, SETTINGS, PROMPT) == SETTINGS
    by_share = policies.with_policy("threshold", pair, SETTINGS, PROMPT)
    assert by_share.gamma_policy == threshold.Threshold(
        ladder=(0, 1, 2),
        # What ngram does not find costs nothing, and is no evidence.
        probing=dataclasses.replace(
            by_share.gamma_policy.probing, silence_is_free=True
        ),
    )
    by_speed = policies.with_policy("goodput", pair, SETTINGS, PROMPT)
    assert isinstance(by_speed.gamma_policy, goodput.Goodput)
    assert by_speed.policy_state.round_s.shape == (3,)
    with pytest.raises(ValueError, match="'none' is not one of fixed, threshold"):
        policies.with_policy("none", pair, SETTINGS, PROMPT)


def test_throughput(folders, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    more = ("--batch", "1,2", "--repeats", "2", "--out", str(out))
    assert throughput.main(command(folders, *more)) == throughput.MATCHED
    rows = rows_of(out)
    ways = [*((None, 0), (1, 0), (1, 2)), *((2, 0), (2, 2))]
    assert [(row["batch"], row["gamma"]) for row in rows] == 3 * ways
    runs, rows = rows[: 2 * len(ways)], rows[2 * len(ways) :]
    assert [row["repeat"] for row in runs] == [0] * len(ways) + [1] * len(ways)
    assert {(run["kind"], run["prompts_equal"]) for run in runs} == {
        ("throughput_run", 3)
    }
    for row in rows:
        seconds = [run["seconds"] for run in runs if run["way"] == row["way"]]
        speed = timing.spread([row["tokens"] / each for each in seconds])
        assert (row["tok_s"], row["tok_s_p10"], row["tok_s_p90"]) == speed
        assert row["prompts_equal"] == row["prompts"] == 3
        assert row["n"] == 2 and row["tok_s"] > 0
    assert rows[0]["ratio"] == 1
    assert "gamma 2, batch 2" in capsys.readouterr().out


def test_no_more_slots_than_prompts(folders, tmp_path, capsys, monkeypatch):
    """Fails if a thousand slots are compiled for one prompt."""
    slots = []
    real = batched_runs.make

    def watched(pair, settings, *, num_slots):
        slots.append(num_slots)
        return real(pair, settings, num_slots=num_slots)

    monkeypatch.setattr(batched_runs, "make", watched)
    out = tmp_path / "out.jsonl"
    more = ("--prompts", "1", "--out", str(out), "--drafter", "ngram")
    assert spec_round.main(command(folders, *more, "--batch", "1000")) == 0
    assert rows_of(out)[-1]["batch"] == 1
    assert "--batch: 1 slots, as many as there are prompts" in capsys.readouterr().out
    more += ("--repeats", "1", "--batch", "1,500,1000")
    assert throughput.main(command(folders, *more)) == 0
    assert [row["batch"] for row in rows_of(out)] == 2 * [None, 1, 1]
    assert "--batch: at most 1 slots" in capsys.readouterr().out
    assert set(slots) == {1}


def test_throughput_of_a_batch_that_differs(folders, monkeypatch):
    """Exit status 2: a planted token in the last prompt's text."""
    real = batched_runs.run_batch

    def corrupted(*args, **kwargs):
        *runs, last = real(*args, **kwargs)
        tokens = [*last.tokens[:-1], (last.tokens[-1] + 1) % 250]
        return [*runs, dataclasses.replace(last, tokens=tokens)]

    monkeypatch.setattr(batched_runs, "run_batch", corrupted)
    more = ("--batch", "2", "--repeats", "1")
    assert throughput.main(command(folders, *more)) == throughput.NOT_MATCHED == 2
