"""Figures: what is in them, that their bytes are fixed, bad input."""

import importlib.util
import json
import math
from xml.etree import ElementTree

import pytest
from figure_rows import FIGURES, PROVENANCE, parity
from script_runs import write_rows

from experiments import plot
from experiments.lib import curves as curves_lib


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing"
)
MAX_BYTES = 60_000
MAX_BYTES_OF_MAP = 180_000  # a number in each of 400 cells


def test_every_figure_is_tested():
    assert list(FIGURES) == list(plot.FIGURES)


@pytest.mark.few(2)
@needs_matplotlib
@pytest.mark.parametrize("name", FIGURES)
def test_the_same_rows_give_the_same_bytes(name, tmp_path):
    """Fails if a date, a random name or an unlabelled axis is in the file."""
    rows = write_rows(tmp_path / "rows.jsonl", FIGURES[name].rows)
    contents = []
    for folder in ("first", "second"):
        out = tmp_path / folder
        arguments = [str(rows), "--out", str(out), "--figure", name]
        assert plot.main(arguments) == plot.DRAWN == 0
        assert [path.name for path in out.iterdir()] == [f"{name}.svg"]
        contents.append((out / f"{name}.svg").read_bytes())
    assert contents[0] == contents[1]
    most = MAX_BYTES_OF_MAP if name == "divergence" else MAX_BYTES
    assert len(contents[0]) < most
    assert b"date" not in contents[0]
    texts = "".join(ElementTree.fromstring(contents[0]).itertext())
    for words in FIGURES[name].says:
        assert words in texts, words


@needs_matplotlib
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_it_is_of(name, tmp_path):
    """Model, machine and prompts, from the rows; and which rows it was drawn from."""
    from experiments.lib import figures

    is_sweep = name.startswith("sweep")
    # The cells of the sweep are of one prompt in each of thirteen categories.
    known = PROVENANCE | ({"prompts": 1} if is_sweep else {})
    rows = [row | known for row in FIGURES[name].rows]
    if name in ("speedup", "step_cost"):
        rows = rows[: len(rows) // 2]  # Of one implementation, as they are now all.
    elif name == "improvement":
        rows = FIGURES[name].rows
    (path,) = plot.draw(name, rows, tmp_path)
    texts = "\n".join(ElementTree.fromstring(path.read_bytes()).itertext())
    said = ["model: target Qwen3-8B, draft Qwen3-0.6B, bfloat16, native"]
    said += ["machine: Some CPU, instruction set avx2, jax 0.10.2"]
    total = 13 if is_sweep else 25
    number = f"{total} prompts" + ", prompt py-01" * (name == "tree")
    said += [f"prompts: gsm8k/test.jsonl:50, {number}, 64 tokens each"]
    if name == "improvement":
        said = ["computed by a formula"]
    for words in said:
        assert words in texts, words
    assert figures.read_source(path) == curves_lib.digests(rows)


@needs_matplotlib
def test_differences_near_zero_do_not_drown_the_others(tmp_path):
    """Colours are relative differences: fails if they are ULPs, which saturate."""
    from experiments.lib import row_figures

    cells = [
        {"differing": 1, "elements": 64, "max_ulp": ulp, "relative": relative}
        for ulp, relative in ((2**30, 1e-6), (2, 1e-2), (2**30, None), (9, 0.0))
    ]
    scale = row_figures._Scale(cells)
    assert (scale.lowest, scale.highest) == (-6, -2)
    levels = [scale.level(cell) for cell in cells]
    assert levels == pytest.approx([-6, -2, -1, -6])
    equal = {"differing": 0, "elements": 64, "max_ulp": 0, "relative": None}
    assert scale.level(equal) == -7 and math.isnan(scale.level(None))
    old = parity(2)
    for row in old["cells"]:
        for cell in row:
            if cell is not None:
                del cell["relative"]
    with pytest.raises(ValueError, match="earlier parity.py did not write"):
        plot.draw("divergence", [old], tmp_path)


@pytest.mark.few(3)
@needs_matplotlib
@pytest.mark.parametrize("name", FIGURES)
def test_another_number_gives_another_figure(name, tmp_path):
    """Negative control: fails if a figure is not drawn from its rows."""
    changed = json.loads(json.dumps(FIGURES[name].rows))
    FIGURES[name].change(changed)
    contents = []
    for rows in (FIGURES[name].rows, changed):
        (path,) = plot.draw(name, rows, tmp_path)
        contents.append(path.read_bytes())
    assert contents[0] != contents[1]


@needs_matplotlib
def test_all_figures_of_a_mixture(tmp_path, capsys):
    """And rows that are in none are named, with their number, in one line."""
    mixture = [
        *FIGURES["speedup"].rows,
        *FIGURES["step_cost"].rows,
        *FIGURES["divergence"].rows,
    ]
    mixture += [{"kind": "prompt"}, {"kind": "prompt"}, {"kind": "weather"}, {"a": 1}]
    mixture += [{"kind": "step", "step": "plain step"}]
    rows = write_rows(tmp_path / "rows.jsonl", mixture)
    assert plot.main([str(rows), "--out", str(tmp_path / "out")]) == 0
    names = {path.stem for path in (tmp_path / "out").iterdir()}
    kinds = ("speedup", "acceptance", "accepted_lengths", "step_cost", "divergence")
    assert names == set(kinds)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("by kind: 1 None, 2 prompt, 1 step, 1 weather")


@needs_matplotlib
def test_a_row_of_parity_is_a_figure_of_its_own(tmp_path):
    path = tmp_path / "parity.json"
    path.write_text(json.dumps(parity(2) | {"first": None}, indent=1))
    both = [str(path), str(path), "--out", str(tmp_path / "out")]
    assert plot.main(both) == 0
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["divergence_1.svg", "divergence_2.svg"]
    assert "nothing differs" in (tmp_path / "out" / names[0]).read_text()


@needs_matplotlib
def test_the_theory_needs_no_rows(tmp_path):
    """Given pairs are drawn in the place of those that it has."""
    out = tmp_path / "out"
    assert plot.main(["--theory", "--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["improvement.svg"]
    default = (out / "improvement.svg").read_text()
    assert plot.main(["--theory", "0.75,0.1", "--out", str(out)]) == 0
    given = (out / "improvement.svg").read_text()
    assert "a = 0.75" in given and "a = 0.75" not in default
