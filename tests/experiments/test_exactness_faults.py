"""The exactness suite on faults: each is caught, located, and told from equality."""

import dataclasses
import re

import exactness_commands as commands
import numpy as np
import pytest
import tiny_pair
import wrong_targets

from experiments import exactness
from experiments.support import (
    exactness_certificate as certificates,
    exactness_evidence as evidence,
    exactness_runs as runs,
    parity_inputs,
)
from spec_jax import rounds
from spec_jax.debug import recorder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return commands.write_pair(tmp_path_factory.mktemp("pair"))


def certify(folders, tmp_path, *more) -> tuple[int, dict]:
    """One cell: the exit status, and the certificate."""
    certificate = tmp_path / "run.json"
    more = (*more, *commands.certifying(certificate))
    status = exactness.main(commands.one_cell(folders, *more))
    return status, certificates.read(certificate)


@pytest.mark.parametrize("more", [(), ("--batch", "2")], ids=["alone", "batch"])
def test_logits_that_are_not_finite_are_not_exact(tmp_path, capsys, more):
    """All bits are equal, and the certificate is of nothing."""
    folders = tiny_pair.write_scaled(tmp_path, final_norm=3e38)
    status, certificate = certify(folders, tmp_path, *more)
    assert status == exactness.NOT_EXACT == 2
    assert certificate["exact"] is False
    (cell,) = certificate["cells"]
    assert set(cell["equal"].values()) <= {commands.NUM_PROMPTS, evidence.NOT_COMPARED}
    assert 0 < cell["nonfinite_logits"] <= cell["tokens"] and not cell["exact"]
    (warning,) = certificate["warnings"]
    assert "hold NaN or infinity" in warning
    assert warning in capsys.readouterr().out
    assert commands.verify(folders, tmp_path / "run.json") == exactness.NOT_EXACT
    assert warning in capsys.readouterr().out


def test_constant_logits_prove_nothing(tmp_path, capsys):
    """Weights of zero: equal, whatever went wrong; the certificate says so."""
    folders = tiny_pair.write_scaled(tmp_path, others=0.0)
    status, certificate = certify(folders, tmp_path)
    assert status == exactness.EXACT and certificate["exact"]
    n = commands.NUM_PROMPTS * commands.GEN_TOKENS
    assert certificate["cells"][0]["constant_logits"] == n
    assert certificate["warnings"] == [
        f"{n} of {n} tokens are of logits that are all equal: they prove nothing"
    ]
    assert certificate["warnings"][0] in capsys.readouterr().out


def run_with_verifier(folders, tmp_path, monkeypatch, wrong) -> tuple[int, list[dict]]:
    """One cell, with a fault planted in what verifies: the status, and its rows."""
    real = runs.load

    def load(*arguments, **keywords):
        pair = real(*arguments, **keywords)
        return dataclasses.replace(pair, verifier=wrong(pair.verifier))

    monkeypatch.setattr(runs, "load", load)
    return run_one_cell(folders, tmp_path)


def run_one_cell(folders, tmp_path) -> tuple[int, list[dict]]:
    out = tmp_path / "wrong.jsonl"
    more = ("--drafter", "always-right", "--out", str(out))
    status = exactness.main(commands.one_cell(folders, *more))
    return status, [row for row in commands.rows_of(out) if row["kind"] == "prompt"]


def test_one_ulp_in_one_row_is_caught(folders, tmp_path, monkeypatch, capsys):
    """The tokens are the same: logits tell, at the second row of the first window."""
    status, rows = run_with_verifier(
        folders,
        tmp_path,
        monkeypatch,
        lambda target: wrong_targets.OneUlpOff(target=target),
    )
    assert status == exactness.NOT_EXACT
    for row in rows:
        found = {d["what"]: d for d in row["differences"]}
        assert "tokens" not in found and "kv" not in found
        assert found["logits"]["position"] == row["prompt_tokens"] + 1
        assert found["logits"]["row"] == 1
        # Two of three rows of each window.
        assert found["logits"]["count"] == commands.GEN_TOKENS * 2 // 3
    printed = capsys.readouterr().out
    assert "row 1 of its window" in printed
    # The window it began in, which the microscope takes up.
    spec = re.search(r"experiments/parity.py --mismatch (\S+:3)", printed)[1]
    found = parity_inputs.read_mismatch(spec)
    assert found.position == rows[0]["prompt_tokens"] and len(found.text.window) == 3
    assert (found.acceptance, found.prefill) == ("verify", "rows")
    assert found.starts == (found.position - 1,) and found.window_rows == 4


def test_a_run_with_differences_goes_on(folders, tmp_path, monkeypatch):
    """Fails if windows are taken for prompts, or lost, when rows are taken up."""
    wrong = {"wrong": lambda target: wrong_targets.OneUlpOff(target=target)}
    run_with_verifier(folders, tmp_path, monkeypatch, **wrong)
    first = (tmp_path / "wrong.jsonl").read_bytes()
    status, rows = run_one_cell(folders, tmp_path)
    assert status == exactness.NOT_EXACT and len(rows) == commands.NUM_PROMPTS
    assert (tmp_path / "wrong.jsonl").read_bytes() == first


def test_stale_values_are_caught(folders, tmp_path, monkeypatch):
    """Located by layer and position, whatever they do to the tokens after them."""
    status, rows = run_with_verifier(
        folders,
        tmp_path,
        monkeypatch,
        lambda target: wrong_targets.StaleValues(target=target),
    )
    assert status == exactness.NOT_EXACT
    for row in rows:
        (found,) = (d for d in row["differences"] if d["what"] == "kv")
        assert (found["layer"], found["part"]) == (1, "v")
        assert found["position"] == row["prompt_tokens"] - 1


def test_a_wrong_log_prob_is_caught(folders, tmp_path, monkeypatch):
    real = recorder.Recorder.detach

    def wrong(self, state):
        state, recording = real(self, state)
        if isinstance(state, rounds.RoundState):
            at = int(state.length) - 3
            log_prob = recording.log_prob
            log_prob = log_prob.at[at].set(np.nextafter(log_prob[at], np.float32(-99)))
            recording = recording.replace(log_prob=log_prob)
        return state, recording

    monkeypatch.setattr(recorder.Recorder, "detach", wrong)
    status, rows = run_one_cell(folders, tmp_path)
    assert status == exactness.NOT_EXACT
    for row in rows:
        (found,) = row["differences"]
        assert (found["what"], found["count"]) == ("log_probs", 1)
        assert found["position"] == row["prompt_tokens"] + commands.GEN_TOKENS - 2
