"""The microscope from its command line: status, row, heat map, mismatches."""

import shlex

import pytest
from script_runs import rows_of, write_rows

from experiments import parity, plot
from experiments.lib import files, mismatches, sight
from experiments.lib.microscope import compare
from spec_jax.model import fingerprint, load, observe, tokenizer


PROMPT = "def double(x):"
START = len(PROMPT) - 1


@pytest.fixture(scope="module")
def look(folders, tmp_path_factory):
    """Runs flags: the exit status and the row; each is run once."""
    folder, found = tmp_path_factory.mktemp("parity"), {}
    (folder / "prompts.txt").write_text(PROMPT)

    def run(flags: str) -> tuple[int, dict]:
        if flags not in found:
            out = folder / f"{len(found)}.jsonl"
            given = f"--target {folders[0]} --impl native {flags} --out {out}"
            if "--mismatch" not in flags:
                given += f" --prompts {folder / 'prompts.txt'}"
            status = parity.main(shlex.split(given))
            (row,) = rows_of(out)
            found[flags] = status, row
        return found[flags]

    return run


OTHER = "--gamma 3 --verify-path flash --verify-dtype bfloat16"


@pytest.mark.parametrize(
    ("flags", "status", "first"),
    [
        ("--gamma 3", 0, None),
        ("--tree 2-2", 0, None),
        ("--gamma 3 --inject 1:gate", 0, (1, "gate")),
        ("--tree 2-2 --inject 1:attention:parent", 0, (1, "attention")),
        # The paths part long before the fault.
        (f"{OTHER} --inject logits", 2, ...),
        (OTHER, 2, ...),
    ],
)
def test_the_first_difference_is_named(look, flags, status, first):
    """Fails if equal runs differ, or a fault is named elsewhere or not at all."""
    found, row = look(flags)
    assert found == status and row["kind"] == "parity"
    assert row["equal"] == (row["first"] is None) == (first is None)
    if first is not None:
        where = row["first"]["layer"], row["first"]["operation"]
        assert where == first or (first is ... and where[1] in observe.OPERATIONS)
        assert 0 < row["first"]["differing"] <= row["first"]["elements"]
    # Both start from what decoding wrote.
    assert row["history"] == "decode" and row["prefix"]["differing"] == 0


def test_a_row_holds_every_value(look):
    _, row = look("--gamma 3")
    assert row["operations"] == list(observe.LAYER_OPERATIONS)
    assert row["layers"] == [0, 1] and len(row["cells"]) == 2
    assert set(row["outside"]) == set(observe.OUTSIDE)
    cells = [*row["cells"][0], *row["cells"][1], *row["outside"].values()]
    assert sum(cell["elements"] for cell in cells) == row["num_values"]
    assert {cell["differing"] for cell in cells} == {0}
    assert row["start"] == START and len(row["window"]) == 4
    # Decoding drafted, and so it agrees with itself.
    assert [one["verify_argmax"] for one in row["rows"]][:3] == row["window"][1:]
    assert row["argmax_flips"] == [] and row["moved_by_recording"] == [0, 0]
    assert look(OTHER)[1]["verify"]["dtype"] == "bfloat16"


def test_a_path_of_a_tree(look):
    """Fails if siblings are not run."""
    _, row = look("--tree 2-2")
    assert row["verify"]["tree"] == [0, 0, 0, 1, 1, 2, 2]
    assert row["reference"]["tree"] is None and len(row["window"]) == 3


def test_a_difference_is_drawn_with_its_texts(look, folders, tmp_path):
    pytest.importorskip("matplotlib")
    _, row = look("--gamma 3 --inject 1:gate")
    write_rows(tmp_path / "row.jsonl", [row])
    assert plot.main([str(tmp_path / "row.jsonl"), "--out", str(tmp_path)]) == 0
    assert "first: layer 1, gate" in (tmp_path / "divergence.svg").read_text()
    assert row["fault"] == {"layer": 1, "operation": "gate", "kind": "ulp"}
    cell = row["cells"][1][row["operations"].index("gate")]
    assert row["first"]["differing"] <= cell["differing"] and cell["relative"] > 0
    assert row["cells"][0][0]["relative"] == 0.0
    words = tokenizer.load(folders[0])  # Of single bytes.
    for choice in row["rows"]:
        for side in ("reference", "verify"):
            texts = [words.decode([token]) for token, _ in choice[f"{side}_top"]]
            assert choice[f"{side}_texts"] == texts and len(texts) == 5


#
# Mismatches
#


@pytest.fixture(scope="module")
def mismatch(folders) -> dict:
    """A line as `history.py --dump-verify-mismatches` writes it."""
    _, params = load.load(folders[0])
    return {
        "kind": "mismatch",
        **{"prompt_ids": [5, 6, 7, 8], "tokens": [9, 10], "starts": [3, 4, 6]},
        **{"start": 6, "window": [11, 12, 13], "window_rows": 4, "position": 7},
        **{"verify_argmax": 14, "decode_argmax": 15, "verify_path": "paged-decode"},
        **{"prefill": "rows", "impl": "native", "dtype": "float32", "slab": 4},
        **{"page_size": 16, "weights_sha256": fingerprint.of_params(params)},
    }


FIRST = {"tokens": [], "window": [8, 12, 13], "position": 4, "start": 3, "starts": [3]}
"""The first window begins with the prompt's last token."""


@pytest.mark.parametrize("changes", [{}, FIRST, {"verify_path": "flash"}])
def test_a_mismatch_is_taken_up(look, tmp_path, mismatch, changes):
    """Fails if it is not run as the line says, on its own text and K/V."""
    line = mismatch | changes
    is_own = line["verify_path"] == "flash"
    path = write_rows(tmp_path / "lines.jsonl", [{"kind": "other"}, line])
    status, row = look(f"--mismatch {path}:2")
    assert status == (2 if is_own else 0)
    assert (row["start"], row["window"]) == (line["start"], line["window"])
    assert row["verify"]["path"] == line["verify_path"] and row["verify"]["slab"] == 4
    assert row["met_again"] is False
    assert row["history"] == ("own" if is_own else "decode")
    first = row["prefix"]["first"]
    if is_own:
        # From the first window on, which begins with the last token of the prompt.
        assert (first["layer"], first["part"], first["position"]) == (0, "k", 3)
        assert 0 < first["differing"] <= first["elements"] == 16
        assert first["differing"] < row["prefix"]["differing"]
    else:
        assert first is None


def test_a_choice_that_is_met_again(look, tmp_path, mismatch):
    """Negative control: the same line, and one other token in it."""

    def met(name: str, **choices) -> dict:
        path = write_rows(tmp_path / f"{name}.jsonl", [mismatch | choices])
        return look(f"--mismatch {path}")[1]

    chosen = met("as_it_is")["rows"][1]["reference_argmax"]
    # No rows differ here: a line that says so tells of no flip.
    assert met("none", verify_argmax=chosen, decode_argmax=chosen)["met_again"] is None
    one = {"decode_argmax": chosen, "verify_argmax": chosen + 1}
    assert met("another", **one)["met_again"] is False


def test_a_flip_that_is_met_again(mismatch):
    """Fails if it is sought in another row, or the two sides are exchanged."""
    line = files.checked(mismatch, mismatches.Mismatch, "here")
    same, one, other = (
        compare.Choice(top=((token, 1.0),), margin_ulp=None) for token in (3, 15, 14)
    )
    for pair, met in (((one, other), True), ((other, one), False)):
        rows = ((same, same), pair)
        found = compare.Comparison(cells={}, first=None, choices=rows)
        assert sight.is_met_again(line, 6, found) is met
