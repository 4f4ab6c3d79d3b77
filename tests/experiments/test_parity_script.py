"""The microscope from its command line: status, row, heat map, bad input."""

import json
import pathlib

import pytest
import tiny_pair

from experiments import parity, plot
from spec_jax.model import fingerprint, load, observe, tokenizer


PROMPT = "def double(x):"
NATIVE = ("--impl", "native")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))[0]


def run(folder, *more: str, prompt: bool = True) -> int:
    """The exit status; of `PROMPT` with three drafts, unless `more` names a text."""
    text = ("--prompt", PROMPT, "--gamma", "3", *NATIVE) if prompt else ()
    return parity.main(["--target", str(folder), *text, *more])


def row_of(path: pathlib.Path) -> dict:
    """The only row of a file."""
    (line,) = path.read_text().splitlines()
    return json.loads(line)


def test_an_equal_run(folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run(folder, "--out", str(out)) == 0
    row = row_of(out)
    assert row["kind"] == "parity" and row["equal"] and row["first"] is None
    assert row["operations"] == list(observe.LAYER_OPERATIONS)
    assert row["layers"] == [0, 1] and len(row["cells"]) == 2
    assert set(row["outside"]) == set(observe.OUTSIDE)
    cells = [*row["cells"][0], *row["cells"][1], *row["outside"].values()]
    assert sum(cell["elements"] for cell in cells) == row["num_values"]
    assert {cell["differing"] for cell in cells} == {0}
    assert row["start"] == len(PROMPT) - 1 and len(row["window"]) == 4
    # Decoding drafted, and so it agrees with itself.
    chosen = [choice["verify_argmax"] for choice in row["rows"]]
    assert chosen[:3] == row["window"][1:]
    assert row["argmax_flips"] == [] and row["moved_by_recording"] == [0, 0]
    assert f"no difference in {row['num_values']:,d} values" in capsys.readouterr().out


def test_a_path_of_a_tree(folder, tmp_path, capsys):
    """Fails if siblings are not run."""
    out = tmp_path / "out.jsonl"
    text = ("--prompt", PROMPT, *NATIVE, "--tree", "2-2")
    assert run(folder, *text, "--out", str(out), prompt=False) == 0
    row = row_of(out)
    assert row["equal"] and row["verify"]["tree"] == [0, 0, 0, 1, 1, 2, 2]
    assert row["reference"]["tree"] is None and len(row["window"]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "a path of a tree of 7 rows" in printed
    inject = ("--inject", "1:attention:parent")
    assert run(folder, *text, *inject, prompt=False) == 0


def test_a_planted_fault_is_named_and_drawn(folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run(folder, "--inject", "1:gate:zero-head", "--out", str(out)) == 0
    row = row_of(out)
    first = row["first"]
    assert (first["layer"], first["operation"]) == (1, "gate")
    cell = row["cells"][1][row["operations"].index("gate")]
    assert 0 < first["differing"] <= cell["differing"] <= cell["elements"]
    assert row["fault"] == {"layer": 1, "operation": "gate", "kind": "zero-head"}
    printed = capsys.readouterr().out
    assert "first: layer 1, gate, position 13" in printed
    pytest.importorskip("matplotlib")
    assert plot.main([str(out), "--out", str(tmp_path)]) == 0
    assert "first: layer 1, gate" in (tmp_path / "divergence.svg").read_text()
    assert cell["relative"] > 0 and row["cells"][0][0]["relative"] == 0.0
    # What was chosen stands as text beside its ids: here single bytes.
    words = tokenizer.load(folder)
    for choice in row["rows"]:
        for side in ("reference", "verify"):
            texts = [words.decode([token]) for token, _ in choice[f"{side}_top"]]
            assert choice[f"{side}_texts"] == texts and len(texts) == 5
    token, logit = row["rows"][0]["reference_top"][0]
    quoted = json.dumps(words.decode([token]), ensure_ascii=False)
    assert f"{token} {quoted}: {logit:.4g}" in printed


def test_what_differs_is_told_by_the_status(folder, tmp_path, capsys):
    """Negative control of the equal run, and of a fault that is named."""
    out = tmp_path / "out.jsonl"
    other = ("--verify-path", "flash", "--verify-dtype", "bfloat16")
    assert run(folder, *other, "--out", str(out)) == 2
    row = row_of(out)
    assert row["first"]["operation"] in observe.OPERATIONS
    assert row["verify"]["dtype"] == "bfloat16"
    # Both started from what decoding wrote.
    assert row["history"] == "decode" and row["prefix"]["differing"] == 0
    printed = capsys.readouterr().out
    assert "growth" in printed and "…" not in printed  # no number is cut off
    # The paths part long before the fault.
    assert run(folder, *other, "--inject", "logits") == 2


def test_cache_lengths_and_prompts(folder, tmp_path):
    """Fails if the prompt is not cut or continued, or is not the one that is named."""
    out = tmp_path / "out.jsonl"
    for length in ("20", "4"):
        assert run(folder, "--cache-length", length, "--out", str(out)) == 0
        assert row_of(out)["start"] == int(length)
    assert row_of(out)["window"][0] == tiny_pair.byte_tokenizer().encode(PROMPT).ids[4]
    more = (*NATIVE, "--gamma", "3", "--cache-length", "3", "--prompts", "5")
    assert run(folder, *more, "--out", str(out), prompt=False) == 0
    assert row_of(out)["id"] == "py-05"


#
# Mismatches
#


@pytest.fixture(scope="module")
def mismatch(folder) -> dict:
    """A line as `history.py --dump-verify-mismatches` writes it."""
    _, params = load.load(folder)
    return {
        "kind": "mismatch",
        "id": "py-01",
        "prompt_ids": [5, 6, 7, 8],
        "tokens": [9, 10],
        "start": 6,
        "starts": [3, 4, 6],
        "window": [11, 12, 13],
        "window_rows": 4,
        "position": 7,
        "verify_argmax": 14,
        "decode_argmax": 15,
        "verify_top5": [],
        "verify_path": "row-loop",
        "prefill": "rows",
        "impl": "native",
        "dtype": "float32",
        "slab": 4,
        "page_size": 16,
        "weights_sha256": fingerprint.of_params(params),
    }


def write(path: pathlib.Path, *rows) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_a_mismatch_is_taken_up(folder, tmp_path, mismatch):
    """Fails if it is not run as the line says, on its own text."""
    out = tmp_path / "out.jsonl"
    first = mismatch | {"tokens": [], "window": [8, 12, 13], "position": 4}
    first |= {"start": 3, "starts": [3]}
    lines = write(tmp_path / "lines.jsonl", mismatch, first)
    for spec, start, window in (
        (lines, 6, [11, 12, 13]),
        # A first window begins with the prompt's last token.
        (f"{lines}:2", 3, [8, 12, 13]),
    ):
        assert run(folder, "--mismatch", spec, "--out", str(out), prompt=False) == 0
        row = row_of(out)
        assert (row["start"], row["window"]) == (start, window)
        assert row["verify"]["path"] == "row-loop" and row["verify"]["slab"] == 4
        # By rows, whose windows write what decoding writes.
        assert row["history"] == "decode" and row["prefix"]["differing"] == 0
        assert row["met_again"] is False


def test_a_choice_that_is_met_again(folder, tmp_path, mismatch, capsys):
    """Negative control: the same line, and one other token in it."""
    out, lines = tmp_path / "out.jsonl", write(tmp_path / "lines.jsonl", mismatch)
    run(folder, "--mismatch", lines, "--out", str(out), prompt=False)
    chosen = row_of(out)["rows"][1]["reference_argmax"]
    # No rows differ here: a line that says so tells of no flip.
    none = {"verify_argmax": chosen, "decode_argmax": chosen}
    for changes, met in (
        (none, None),
        ({"decode_argmax": chosen, "verify_argmax": chosen + 1}, False),
    ):
        lines = write(tmp_path / "lines.jsonl", mismatch | changes)
        assert run(folder, "--mismatch", lines, "--out", str(out), prompt=False) == 0
        assert row_of(out)["met_again"] is met
    said = f"NOT met again: {chosen} against {chosen}, and in the run {chosen} against"
    assert said in " ".join(capsys.readouterr().out.split())


#
# Histories
#


def test_another_path_has_a_history_of_its_own(folder, tmp_path):
    """Its negative control is `test_what_differs_is_told_by_the_status`."""
    out = tmp_path / "out.jsonl"
    path = ("--verify-path", "flash", "--history", "own", "--cache-length", "20")
    assert run(folder, *path, "--out", str(out)) == 2
    row = row_of(out)
    assert row["history"] == "own" and row["met_again"] is None
    first = row["prefix"]["first"]
    # From the first window on, which begins with the last token of the prompt.
    where = {"layer": 0, "part": "k", "position": len(PROMPT) - 1}
    assert {key: first[key] for key in where} == where
    assert 0 < first["differing"] <= first["elements"] == 16 and first["max_ulp"] > 0
    assert first["differing"] < row["prefix"]["differing"] < row["prefix"]["elements"]
