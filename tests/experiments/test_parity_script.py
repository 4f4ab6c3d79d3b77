"""The microscope from its command line: status, row, heat map, bad input."""

import json
import pathlib

import parity_runs
import pytest
import tiny_pair

from experiments import parity
from experiments.lib import cli
from experiments.support import figure_source
from spec_jax.model import fingerprint, load, observe, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))[0]


def test_an_equal_run(folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert parity_runs.run(folder, "--out", str(out)) == 0
    row = parity_runs.row_of(out)
    assert row["kind"] == "parity" and row["equal"] and row["first"] is None
    assert row["operations"] == list(observe.LAYER_OPERATIONS)
    assert row["layers"] == [0, 1] and len(row["cells"]) == 2
    assert set(row["outside"]) == set(observe.OUTSIDE)
    cells = [*row["cells"][0], *row["cells"][1], *row["outside"].values()]
    assert sum(cell["elements"] for cell in cells) == row["num_values"]
    assert {cell["differing"] for cell in cells} == {0}
    assert row["start"] == len(parity_runs.PROMPT) - 1 and len(row["window"]) == 4
    # Plain decoding drafted, and so it agrees with itself.
    chosen = [choice["verify_argmax"] for choice in row["rows"]]
    assert chosen[:3] == row["window"][1:]
    assert row["argmax_flips"] == [] and row["moved_by_recording"] == [0, 0]
    assert f"no difference in {row['num_values']:,d} values" in capsys.readouterr().out


def test_a_planted_fault_is_named_and_drawn(folder, tmp_path, capsys):
    out, drawn = tmp_path / "out.jsonl", tmp_path / "map.svg"
    pytest.importorskip("matplotlib")
    more = ("--inject", "1:gate:zero-head", "--heatmap", str(drawn))
    assert parity_runs.run(folder, *more, "--out", str(out)) == 0
    row = parity_runs.row_of(out)
    first = row["first"]
    assert (first["layer"], first["operation"]) == (1, "gate")
    cell = row["cells"][1][row["operations"].index("gate")]
    assert 0 < first["differing"] <= cell["differing"] <= cell["elements"]
    assert row["fault"] == {"layer": 1, "operation": "gate", "kind": "zero-head"}
    printed = capsys.readouterr().out
    assert "first: layer 1, gate, position 13" in printed
    assert "relative difference" in drawn.read_text()
    assert "model: target" in drawn.read_text() and "machine: " in drawn.read_text()
    from experiments.support import figures

    assert figures.read_source(drawn) == figure_source.digests([row])
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
    assert parity_runs.run(folder, *other, "--out", str(out)) == 2
    assert parity_runs.row_of(out)["first"]["operation"] in observe.OPERATIONS
    assert parity_runs.row_of(out)["verify"]["dtype"] == "bfloat16"
    # Both started from what decoding wrote.
    assert parity_runs.row_of(out)["history"] == "decode"
    assert parity_runs.row_of(out)["prefix"]["differing"] == 0
    printed = capsys.readouterr().out
    assert "growth" in printed and "…" not in printed  # no number is cut off
    # The paths part long before the fault.
    assert parity_runs.run(folder, *other, "--inject", "logits") == 2


def test_cache_lengths_and_drafts(folder, tmp_path):
    """Fails if the prompt is not cut or continued, or a draft is not the one given."""
    out = tmp_path / "out.jsonl"
    windows = {}
    for more in (
        ("--cache-length", "20"),
        ("--cache-length", "20", "--wrong-draft", "2"),
        ("--cache-length", "4"),
    ):
        assert parity_runs.run(folder, *more, "--out", str(out)) == 0
        row = parity_runs.row_of(out)
        assert row["start"] == int(more[1])
        windows[more] = row["window"]
    right, wrong, cut = windows.values()
    assert [a != b for a, b in zip(right, wrong, strict=True)] == [0, 0, 1, 0]
    tokens = tiny_pair.byte_tokenizer().encode(parity_runs.PROMPT).ids
    assert cut[0] == tokens[4]
    given = ("--draft-tokens", "7,8,9", "--target", str(folder), *parity_runs.NATIVE)
    assert parity.main(["--prompt", parity_runs.PROMPT, *given, "--out", str(out)]) == 0
    assert parity_runs.row_of(out)["window"] == [tokens[-1], 7, 8, 9]


#
# Mismatches
#


@pytest.fixture(scope="module")
def mismatch(folder) -> dict:
    """A line as `spec_round.py --dump-verify-mismatches` writes it."""
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
        "acceptance": "verify",
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
        more = ("--mismatch", spec, "--out", str(out))
        assert parity_runs.run(folder, *more, prompt=False) == 0
        row = parity_runs.row_of(out)
        assert (row["start"], row["window"]) == (start, window)
        assert row["verify"]["path"] == "row-loop" and row["verify"]["slab"] == 4
        # By rows, whose windows write what decoding writes.
        assert row["history"] == "decode" and row["prefix"]["differing"] == 0
        assert row["met_again"] is False


def test_a_choice_that_is_met_again(folder, tmp_path, mismatch, capsys):
    """Negative control: the same line, and one other token in it."""
    out, lines = tmp_path / "out.jsonl", write(tmp_path / "lines.jsonl", mismatch)
    parity_runs.run(folder, "--mismatch", lines, "--out", str(out), prompt=False)
    chosen = parity_runs.row_of(out)["rows"][1]["reference_argmax"]
    # No rows differ here: a line that says so tells of no flip.
    none = {"verify_argmax": chosen, "decode_argmax": chosen}
    for changes, met in (
        (none, None),
        ({"decode_argmax": chosen, "verify_argmax": chosen + 1}, False),
    ):
        lines = write(tmp_path / "lines.jsonl", mismatch | changes)
        assert (
            parity_runs.run(
                folder, "--mismatch", lines, "--out", str(out), prompt=False
            )
            == 0
        )
        assert parity_runs.row_of(out)["met_again"] is met
    said = f"NOT met again: {chosen} against {chosen}, and in the run {chosen} against"
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_sha256": "0" * 64}, "is of another model than .*--target"),
        ({"kind": "summary"}, "of kind 'summary', not 'mismatch'"),
        ({"position": 9}, "no row at position 9"),
        ({"window": []}, "empty window"),
        ({"window": [1, "x"]}, "window holds something that is no integer"),
        ({"starts": [3, 4, "6"]}, "starts holds something that is no integer"),
        ({"starts": [3, 5, 4, 6]}, r"starts=\[3, 5, 4, 6\] do not increase"),
        ({"starts": [3, 3, 6]}, r"starts=\[3, 3, 6\] do not increase"),
        ({"starts": [3, 5]}, r"do not go from 3, .* to start=6"),
        ({"starts": [4, 6]}, r"do not go from 3, .* to start=6"),
        ({"starts": []}, "do not go from 3"),
        ({"start": 9}, "start=9 is not where a window can begin: .* at position 6"),
        ({"window_rows": 2}, "window_rows=2, but a window has 3 tokens"),
        ({"starts": [3, 6], "window": [1], "window_rows": 2, "position": 6}, "3 tok"),
        ({"acceptance": "both"}, "acceptance='both' is not one of verify, decode"),
        ({"prefill": "slow"}, "prefill='slow' is not one of batched, rows"),
        ({"slab": "4"}, "slab='4' is not of type int"),
        ({"verify_path": "sideways"}, "path='sideways' is not one of"),
        ({"dtype": "float16"}, "float16"),
        ({"window": [11, 12, 999]}, "999, outside"),
    ],
)
def test_mismatches_that_cannot_be_used(
    folder, tmp_path, mismatch, changes, message, capsys
):
    lines = write(tmp_path / "lines.jsonl", mismatch | changes)
    assert parity_runs.run(folder, "--mismatch", lines, prompt=False) == cli.UNUSABLE
    parity_runs.pattern_found(message, capsys.readouterr().err)


@pytest.mark.parametrize("key", ["start", "starts", "window_rows", "acceptance"])
def test_lines_of_an_earlier_version(folder, tmp_path, mismatch, key, capsys):
    """Fails if the windows before it are guessed."""
    old = {name: value for name, value in mismatch.items() if name != key}
    lines = write(tmp_path / "lines.jsonl", old)
    assert parity_runs.run(folder, "--mismatch", lines, prompt=False) == cli.UNUSABLE
    message = f"line 1: a line without {key}, of an earlier version: write it again"
    parity_runs.pattern_found(message, capsys.readouterr().err)


#
# Flags
#


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--layers", "0,2"), "no layer 2; the model has layers 0 to 1"),
        (("--layers", "x"), "'x' is no layer"),
        (("--inject", "2:v"), "no layer 2 to plant a fault in"),
        (("--inject", "0:v", "--layers", "1"), "--layers 1 leaves out the layer"),
        (("--inject", "1:w"), "operation 'w' is not one of"),
        (("--wrong-draft", "4"), "no draft 4 to make wrong: 3"),
        (("--cache-length", "9000"), "do not fit the model's 2048 positions"),
        (("--verify-slab", "2"), "4 rows does not fit a slab of 2"),
    ],
)
def test_settings_that_cannot_be_used(folder, more, message, capsys):
    assert parity_runs.run(folder, *more) == cli.UNUSABLE
    parity_runs.pattern_found(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--prompts", "3"), "--prompt and --prompts exclude each other"),
        (("--draft-tokens", "1,2"), "--draft-tokens and --gamma exclude each other"),
        (("--draft-tokens", "1,x"), "no list of tokens"),
        (("--mismatch", "lines.jsonl"), "--mismatch says already what --prompt would"),
        (("--bundle", "b.npz"), "--bundle says already what --prompt would"),
        (("--bundle", "b.npz", "--history", "own"), "--bundle says already what"),
        (("--heatmap", "map.txt"), "not a .png or .svg"),
        (("--cache-length", "-1"), "-1 must be at least 0"),
    ],
)
def test_flags_that_contradict(folder, more, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parity_runs.run(folder, *more)
    assert caught.value.code == cli.UNUSABLE
    assert message in capsys.readouterr().err


def test_a_prompt_is_chosen_by_its_index(folder, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    command = [
        "--target",
        str(folder),
        *parity_runs.NATIVE,
        "--gamma",
        "3",
        "--cache-length",
        "3",
    ]
    assert parity.main([*command, "--index", "4", "--out", str(out)]) == 0
    assert parity_runs.row_of(out)["id"] == "py-05"
    assert parity.main([*command, "--prompts", "2", "--index", "2"]) == 1
    assert "--index 2: 2 names 2 prompts, 0 to 1" in capsys.readouterr().err
