"""Figures: the published ones from the stored rows; curves, captions, the script."""

import functools
import json
import math
from xml.etree import ElementTree

import pytest
from script_runs import write_rows

from experiments import plot
from experiments.lib import figures, files, published


FOLDER = published.RESULTS / "figures"
NUMBERS = {
    "speedup": "speedup_e2e",
    "step_cost": "ms",
    "divergence": "cells",
    "sweep_positions": "conditional_acceptance",
    "sweep_contexts": "mean_accepted_length",
    "drift": "acceptance_rate",
}
"""Fields from which the published figures are drawn, one of each."""


def stored(*names: str) -> list[dict]:
    """Returns the published rows of files."""
    return [
        row
        for name in names
        for row in files.read_rows(published.RESULTS / f"{name}.jsonl")
    ]


@functools.cache
def by_digest() -> dict[str, dict]:
    rows = stored(*(path.stem for path in published.RESULTS.glob("*.jsonl")))
    return dict(zip(figures.digests(rows), rows, strict=True))


def texts(path) -> str:
    return "\n".join(ElementTree.fromstring(path.read_bytes()).itertext())


def with_another(value):
    """Returns a JSON value with half of each of its numbers."""
    if isinstance(value, dict):
        return {name: with_another(one) for name, one in value.items()}
    if isinstance(value, list):
        return [with_another(one) for one in value]
    return value if value is None or isinstance(value, str) else value / 2


def test_every_published_figure_is_here():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_published_figures_are_of_the_stored_rows(name, tmp_path):
    """Fails if a figure is older than its rows, or the same rows give other bytes."""
    path, again = FOLDER / f"{name}.svg", tmp_path / "again.svg"
    make = getattr(figures, name)
    rows = [by_digest()[digest] for digest in figures.read_source(path)]
    assert all(plot.FIGURES[name](row) for row in rows)
    figures.draw(make, rows, again)
    assert texts(again) == texts(path) and b"date" not in again.read_bytes()
    before = again.read_bytes()
    figures.draw(make, rows, again)
    assert again.read_bytes() == before
    # Negative control: another number gives another figure.
    first, *others = rows
    number = NUMBERS[name]
    figures.draw(make, [first | {number: with_another(first[number])}, *others], again)
    assert again.read_bytes() != before


def test_differences_near_zero_do_not_drown_the_others():
    """Fails if colours show ULPs, which saturate, and not relative differences."""
    cells = [
        {"differing": count, "max_ulp": 2**30, "relative": relative}
        for count, relative in ((1, 1e-6), (1, 1e-2), (1, None), (1, 0.0), (0, None))
    ]
    (found,), lowest, highest = figures.levels([[*cells, None]])
    assert (lowest, highest) == (-12, -2)
    assert found == pytest.approx([-6, -2, -1, -12, -13, math.nan], nan_ok=True)
    assert figures.levels([cells[4:]])[1:] == (-8, 0)


def test_all_figures_of_a_mixture(tmp_path, capsys):
    """Fails if rows of another kind are drawn, or a figure prevents others."""
    (parity,) = stored("parity_flash")
    one = tmp_path / "parity.json"
    one.write_text(json.dumps(parity | {"first": None}, indent=1))
    names = "spec_round_native_gamma1 spec_round_native_gamma4 latency_embedded_native"
    mixture = stored(*names.split())
    rows, out = write_rows(tmp_path / "rows.jsonl", mixture), tmp_path / "out"
    names = lambda: {path.stem for path in out.iterdir()}
    assert plot.main([str(rows), str(one), str(one), "--out", str(out)]) == 1
    assert names() == {"speedup", "step_cost"}
    assert "divergence is not drawn: 2 parities" in capsys.readouterr().err
    assert plot.main([str(rows), str(one), "--out", str(out)]) == 0
    assert names() == {"speedup", "step_cost", "divergence"}


def test_values_that_are_there_twice_are_refused():
    """Fails if they are drawn: an upright line would join the two values."""
    of_one, of_four = (stored(f"spec_round_native_gamma{n}")[-1] for n in (1, 4))
    axes = {"names": figures.RUN, "axis": "gamma"}
    of_gamma = lambda rows: figures.curves_of(rows, **axes)
    with pytest.raises(ValueError, match="gamma 1 of native is there 2 times"):
        of_gamma([of_one, of_one, of_four])
    greedy = [row for row in stored("evaluation") if not row["temperature"]]
    with pytest.raises(ValueError, match="gamma 7 of .*hybrid is there 2 times"):
        figures.cells_by_position(2 * greedy)
    many = [row | {"batch": n} for row in (of_one, of_four) for n in range(9)]
    with pytest.raises(ValueError, match="9 curves, .* differ in batch"):
        of_gamma(many)
