"""Histories of paths, and the replay bundles that hold them."""

import io
import json
import pathlib

import numpy as np
import parity_runs
import pytest
import tiny_pair

from experiments.lib import cli, records
from experiments.support import parity_bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))[0]


#
# Histories
#


def test_rows_have_no_history_of_their_own(folder, tmp_path, capsys):
    """Their windows write what decoding writes, wherever one begins."""
    out = tmp_path / "out.jsonl"
    more = ("--cache-length", "20", "--history", "own", "--out", str(out))
    assert parity_runs.run(folder, *more) == 0
    row = parity_runs.row_of(out)
    assert row["history"] == "own" and row["verify"]["window_rows"] == 4
    # Keys and values of two layers with one head of 16.
    assert row["prefix"] == {"differing": 0, "elements": 20 * 64, "first": None}
    said = "written by windows of its own path: no difference in 1,280 values"
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def own(folder, tmp_path_factory) -> dict[str, pathlib.Path]:
    """What comes out of a look at windows of a path that is not by rows."""
    pytest.importorskip("matplotlib")
    place = tmp_path_factory.mktemp("own")
    paths = {
        "out": place / "out.jsonl",
        "save-bundle": place / "run.npz",
        "heatmap": place / "map.svg",
    }
    more = [part for name, path in paths.items() for part in (f"--{name}", str(path))]
    path = ("--verify-path", "flash", "--history", "own", "--cache-length", "20")
    assert parity_runs.run(folder, *path, *more) == 2
    return paths


def test_another_path_has_a_history_of_its_own(own):
    """Its negative control is `test_what_differs_is_told_by_the_status`."""
    row = parity_runs.row_of(own["out"])
    assert row["history"] == "own" and row["met_again"] is None
    first = row["prefix"]["first"]
    # From the first window on, which begins with the last token of the prompt.
    where = {"layer": 0, "part": "k", "position": len(parity_runs.PROMPT) - 1}
    assert {key: first[key] for key in where} == where
    assert 0 < first["differing"] <= first["elements"] == 16 and first["max_ulp"] > 0
    assert first["differing"] < row["prefix"]["differing"] < row["prefix"]["elements"]
    assert "prefix K/V: first: layer 0, k, position 13" in own["heatmap"].read_text()


def test_a_bundle_has_both_histories(folder, own, tmp_path, capsys):
    """Fails if the second run starts from the first one's K/V, or a bit less."""
    out = tmp_path / "out.jsonl"
    more = ("--bundle", str(own["save-bundle"]), "--out", str(out))
    assert parity_runs.run(folder, *more, prompt=False) == 0
    first, again = parity_runs.row_of(own["out"]), parity_runs.row_of(out)
    keys = ("prefix", "history", "first", "rows", "cells")
    assert [again[key] for key in keys] == [first[key] for key in keys]

    def spoil(meta, arrays):
        del meta
        arrays["own_v_1"].reshape(-1)[2] ^= 1

    other = rewritten(own["save-bundle"], tmp_path / "other.npz", spoil)
    assert parity_runs.run(folder, "--bundle", other, prompt=False) == 2
    printed = capsys.readouterr().out
    assert printed.count("every value is the bundle's") == 3
    assert "verify: other values" in printed


#
# Bundles
#


@pytest.fixture(scope="module")
def bundle(folder, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("bundle") / "run.npz"
    assert parity_runs.run(folder, "--inject", "0:v", "--save-bundle", str(path)) == 0
    return path


def test_a_bundle_runs_again(folder, bundle, capsys, tmp_path):
    """Fails if the scene, the sides or the fault are not those of the first run."""
    out = tmp_path / "out.jsonl"
    more = ("--bundle", str(bundle), "--out", str(out))
    assert parity_runs.run(folder, *more, prompt=False) == 0
    assert capsys.readouterr().out.count("every value is the bundle's") == 2
    assert parity_runs.row_of(out)["first"]["operation"] == "v"


def rewritten(bundle: pathlib.Path, path: pathlib.Path, change) -> str:
    """A copy of the bundle after `change(meta, arrays)`."""
    with np.load(bundle) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(str(arrays["meta"]))
    change(meta, arrays)
    arrays["meta"] = np.asarray(json.dumps(records.to_json(meta, "meta")))
    np.savez(path, **arrays)
    return str(path)


def test_an_outcome_that_differs_is_said(folder, bundle, tmp_path, capsys):
    """Negative control: one bit of the prefix that the second run starts from."""

    def spoil(meta, arrays):
        del meta
        arrays["v_0"].reshape(-1)[2] ^= 1

    other = rewritten(bundle, tmp_path / "other.npz", spoil)
    assert parity_runs.run(folder, "--bundle", other, prompt=False) == 2
    assert "other values" in capsys.readouterr().out


BAD_BUNDLES = {
    "another format": (
        lambda meta, arrays: meta.update(format=parity_bundle.FORMAT + 1),
        "of format 3, and this version reads format 2",
    ),
    "other weights": (
        lambda meta, arrays: meta.update(weights_sha256=["0" * 64] * 2),
        "of other weights: .* 000000000000",
    ),
    "another model": (
        lambda meta, arrays: meta["config"].update(hidden_size=64),
        "of another model: this one has hidden_size 32 and not 64",
    ),
    "an array less": (lambda meta, arrays: arrays.pop("k_1"), "damaged bundle"),
    "an unknown path": (
        lambda meta, arrays: meta["sides"][0].update(path="up"),
        "damaged bundle: path='up'",
    ),
}


@pytest.mark.parametrize("fault", BAD_BUNDLES)
def test_bundles_that_cannot_be_used(folder, bundle, tmp_path, fault, capsys):
    change, message = BAD_BUNDLES[fault]
    bad = rewritten(bundle, tmp_path / "bad.npz", change)
    assert parity_runs.run(folder, "--bundle", bad, prompt=False) == cli.UNUSABLE
    parity_runs.pattern_found(message, capsys.readouterr().err)


def test_files_that_are_no_bundles(folder, tmp_path, capsys):
    other = io.BytesIO()
    np.savez(other, x=np.zeros(3))
    for content in (b"text", b"", other.getvalue()):
        path = tmp_path / "bad.npz"
        path.write_bytes(content)
        assert (
            parity_runs.run(folder, "--bundle", str(path), prompt=False) == cli.UNUSABLE
        )
        assert "not a replay bundle" in capsys.readouterr().err
    assert parity_runs.run(folder, "--bundle", str(tmp_path / "no"), prompt=False) == 1
    assert "No such file" in capsys.readouterr().err
