"""Figures: the published ones from the stored rows, and that their bytes are fixed."""

import importlib.util
import json
import math
from xml.etree import ElementTree

import figure_rows as made
import pytest
from script_runs import write_rows

from experiments import plot
from experiments.lib import curves as curves_lib, files, published
from spec_jax.gamma import theory


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing"
)
FOLDER = published.RESULTS / "figures"
NUMBERS = {
    "speedup": "speedup_e2e",
    "acceptance": "conditional_acceptance",
    "accepted_lengths": "mean_accepted_length",
    "step_cost": "ms",
    "hugging_face": "tok_s",
    "divergence": "cells",
    "sweep_positions": "conditional_acceptance",
    "ablations": "conditional_acceptance",
    "improvement": "improvement",
    "reliability": "bin_kept",
}
"""A number of each published figure."""


def texts(path) -> str:
    return "\n".join(ElementTree.fromstring(path.read_bytes()).itertext())


@pytest.fixture(scope="module")
def stored() -> dict[str, dict]:
    """The rows of results by their digests."""
    paths = published.RESULTS.glob("*.jsonl")
    rows = [row for path in paths for row in files.read_rows(path).values()]
    rows += theory.improvement_rows(plot.THEORY, gamma_max=plot.GAMMA_MAX)
    return dict(zip(curves_lib.digests(rows), rows, strict=True))


def with_another(value):
    """Half of all numbers in a JSON value."""
    if isinstance(value, dict):
        return {name: with_another(one) for name, one in value.items()}
    if isinstance(value, list):
        return [with_another(one) for one in value]
    return value if value is None or isinstance(value, str) else value / 2


def test_every_published_figure_is_here():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_published_figures_are_of_the_stored_rows(name, stored, tmp_path):
    """Fails if rows were measured again and the figure was not, or if it says or draws
    something else; the bytes of the same rows are the same."""
    from experiments.lib import figures

    path = FOLDER / f"{name}.svg"
    rows = [stored[digest] for digest in figures.read_source(path)]
    assert all(plot.FIGURES[name](row) for row in rows)
    (again,) = plot.draw(name, rows, tmp_path)
    assert texts(again) == texts(path) and b"date" not in again.read_bytes()
    before = again.read_bytes()
    plot.draw(name, rows, tmp_path)
    assert again.read_bytes() == before
    # Negative control.
    first, *others = rows
    number = NUMBERS[name]
    plot.draw(name, [first | {number: with_another(first[number])}, *others], tmp_path)
    assert again.read_bytes() != before


CELLS = [
    made.cell(drafter, gamma, category)
    for drafter in ("ngram", "suffix")
    for gamma in (1, 4)
    for category in ("code", "prose")
]


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("sweep_speedup", CELLS, ("(times)", "tokens a round", "suffix")),
        ("sweep_categories", CELLS, ("accepted / proposed", "prose", "gamma 4")),
        ("tree", [made.tree()], ("depth (drafts", "def", "a$", "\\n", "<b>")),
    ],
)
def test_other_figures(name, rows, words, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", rows)
    assert plot.main([str(source), "--out", str(tmp_path), "--figure", name]) == 0
    said = texts(tmp_path / f"{name}.svg")
    for word in words:
        assert word in said


def test_each_position_has_the_rounds_of_its_share():
    """Fails if a round counts where it drafted nothing, or the count of a curve that
    has more of them is shown."""
    from experiments.lib import figures

    # 60 of 100 rounds drafted, and then 20 of the 30 that kept it; 5, and then none.
    names = ("accepted_hist", "conditional_acceptance")
    lookup = dict(zip(names, ([70, 25, 5, 0], [0.5, 0.25, 0]), strict=True))
    model = dict(zip(names, ([90_000, 9, 9, 9], [3e-4, 0.2, 1]), strict=True))
    rows = [made.summary(3, **lookup), made.summary(3, impl="native", **model)]
    for shown, drawn in (("60 20 \u22645", rows), ("90k 90 9", rows[1:])):
        (axes,) = figures.acceptance(drawn).axes
        labels = [label.get_text() for label in axes.get_xticklabels()]
        counted = enumerate(shown.split(), start=1)
        assert labels == [f"{at}\n{count}" for at, count in counted]
        assert axes.get_xlabel() == "position, fewest rounds"
        assert not any(line.get_clip_on() for line in axes.lines[: len(drawn)])


def test_differences_near_zero_do_not_drown_the_others():
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


def test_all_figures_of_a_mixture(tmp_path, capsys):
    """And rows that are in none are named, with their number, in one line."""
    (parity,) = files.read_rows(published.RESULTS / "parity_flash.jsonl").values()
    one = tmp_path / "parity.json"
    one.write_text(json.dumps(parity | {"first": None}, indent=1))
    mixture = [made.summary(1), made.summary(4), made.step(1), made.step(2), parity]
    mixture += [{"kind": "prompt"}, {"kind": "prompt"}, {"kind": "weather"}, {"a": 1}]
    rows, out = write_rows(tmp_path / "rows.jsonl", mixture), tmp_path / "out"
    assert plot.main([str(rows), str(one), "--out", str(out)]) == 0
    names = {path.stem for path in out.iterdir()}
    kinds = ("speedup", "acceptance", "accepted_lengths", "step_cost")
    assert names == {*kinds, "divergence_1", "divergence_2"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("by kind: 1 None, 2 prompt, 1 weather")


def test_the_theory_needs_no_rows(tmp_path):
    """Given pairs are drawn in the place of those that it has."""
    assert plot.main(["--theory", "0.75,0.1", "--out", str(tmp_path)]) == 0
    assert "a = 0.75" in texts(tmp_path / "improvement.svg")
