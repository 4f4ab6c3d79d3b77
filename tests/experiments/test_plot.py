"""Figures: the published ones from the stored rows; curves, captions, the script."""

import functools
import json
import math
from xml.etree import ElementTree

import pytest
from script_runs import write_rows

from experiments import plot
from experiments.lib import curves as curves_lib, figures, files, published


FOLDER = published.RESULTS / "figures"
NUMBERS = {
    "speedup": "speedup_e2e",
    "step_cost": "ms",
    "divergence": "cells",
    "sweep_positions": "conditional_acceptance",
    "sweep_contexts": "mean_accepted_length",
    "drift": "acceptance_rate",
}
"""A number of each published figure."""


def summary(gamma: int, **changes) -> dict:
    """A row of rounds, as `spec_round.py` writes it."""
    rounds = [3 - (i > 2) for i in range(gamma + 1)]
    return {
        **{"kind": "summary", "impl": "xla", "dtype": "float32", "gamma": gamma},
        **{"speedup_e2e": 1.5, "speedup_e2e_p10": 1.2, "speedup_e2e_p90": None},
        "conditional_acceptance": [0.9 - 0.01 * gamma] * (gamma - 1) + [None],
        **{"accepted_hist": rounds, "rounds": sum(rounds), "mean_accepted_length": 2.5},
        **{"prompt_source": "50", "acceptance_rate": 0.5, **changes},
    }


def step(num_active: int) -> dict:
    """A row of a step's time, as `latency.py` writes it."""
    times = dict(zip(("", "_p10", "_p90"), (2.0, 1.5, 2.5), strict=True))
    row = {f"{name}{end}": ms for name in ("ms", "ratio") for end, ms in times.items()}
    name = f"{num_active} active row{'s' * (num_active > 1)}"
    return row | {"kind": "step", "step": name, "num_active": num_active, "impl": "xla"}


def total(drafter: str, gamma: int, source: str) -> dict:
    """A row of all categories of a sweep, as it is published."""
    place = {"temperature": 0.0, "gamma_policy": "fixed", "category": "all"}
    return summary(gamma) | {
        **{"kind": "sweep", "drafter": drafter, "prompt_source": source, **place}
    }


def texts(path) -> str:
    return "\n".join(ElementTree.fromstring(path.read_bytes()).itertext())


@pytest.fixture(scope="module")
def stored() -> dict[str, dict]:
    """The rows of results by their digests."""
    paths = published.RESULTS.glob("*.jsonl")
    rows = [row for path in paths for row in files.read_rows(path)]
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
    path, again = FOLDER / f"{name}.svg", tmp_path / "again.svg"
    make = getattr(figures, name)
    rows = [stored[digest] for digest in figures.read_source(path)]
    assert all(plot.FIGURES[name](row) for row in rows)
    figures.draw(make, rows, again)
    assert texts(again) == texts(path) and b"date" not in again.read_bytes()
    before = again.read_bytes()
    figures.draw(make, rows, again)
    assert again.read_bytes() == before
    # Negative control.
    first, *others = rows
    number = NUMBERS[name]
    figures.draw(make, [first | {number: with_another(first[number])}, *others], again)
    assert again.read_bytes() != before


def test_differences_near_zero_do_not_drown_the_others():
    """Colours are relative differences: fails if they are ULPs, which saturate."""
    cells = [
        {"differing": count, "max_ulp": 2**30, "relative": relative}
        for count, relative in ((1, 1e-6), (1, 1e-2), (1, None), (1, 0.0), (0, None))
    ]
    (found,), lowest, highest = figures.levels([[*cells, None]])
    assert (lowest, highest) == (-12, -2)
    assert found == pytest.approx([-6, -2, -1, -12, -13, math.nan], nan_ok=True)
    assert figures.levels([cells[4:]])[1:] == (-8, 0)


def test_all_figures_of_a_mixture(tmp_path, capsys):
    """Fails if rows of another kind are drawn, a figure is left out, or one that
    cannot be drawn takes others with it."""
    (parity,) = files.read_rows(published.RESULTS / "parity_flash.jsonl")
    one = tmp_path / "parity.json"
    one.write_text(json.dumps(parity | {"first": None}, indent=1))
    mixture = [summary(1), summary(4), step(1), step(2), {"kind": "prompt"}]
    rows, out = write_rows(tmp_path / "rows.jsonl", mixture), tmp_path / "out"
    names = lambda: {path.stem for path in out.iterdir()}
    assert plot.main([str(rows), str(one), str(one), "--out", str(out)]) == 1
    assert names() == {"speedup", "step_cost"}
    assert "divergence is not drawn: 2 parities" in capsys.readouterr().err
    assert plot.main([str(rows), str(one), "--out", str(out)]) == 0
    assert names() == {"speedup", "step_cost", "divergence"}


def test_values_that_are_there_twice_are_refused():
    """Its two values would be joined by an upright line."""
    of_gamma = functools.partial(curves_lib.curves_of, names=("impl",), axis="gamma")
    with pytest.raises(ValueError, match="gamma 2 of xla is there 2 times"):
        of_gamma([summary(2), summary(2), summary(3)])
    with pytest.raises(ValueError, match="gamma 4 of ngram is there 2 times"):
        curves_lib.cells_by_position([total("ngram", 4, "a")] * 2)
    many = [summary(gamma, batch=n) for gamma in (1, 2) for n in range(9)]
    with pytest.raises(ValueError, match="9 curves, .* differ in batch"):
        curves_lib.curves_of(many, curves_lib.RUN, axis="gamma")
