"""Tables and figures of README and docs are of the rows in `experiments/results/`.

A table states rounded numbers of rows, and a figure names the rows that it was drawn
from: both are looked up there, and beside each other where they show the same runs.
"""

import importlib.util
import itertools
import json
import pathlib
import re

import pytest

from experiments import plot
from experiments.lib import figure_source
from spec_jax.gamma import theory


REPO = pathlib.Path(__file__).parents[2]
RESULTS = REPO / "experiments" / "results"
PAGES = [path.read_text() for path in (REPO / "README.md", *REPO.glob("docs/*.md"))]
FIGURE = re.compile(r"\]\((?:\.\./)?(experiments/results/figures/\w+\.svg)\)")
FIGURES = sorted({path for page in PAGES for path in FIGURE.findall(page)})

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing"
)


def rows_of(pattern: str) -> list[dict]:
    """The rows of the files of results of that name, in order."""
    paths = sorted(RESULTS.glob(pattern))
    assert paths, pattern
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def tables_of(command: str) -> list[list[list[str]]]:
    """Of each page that has it, the lines of the table headed by a command."""
    found = []
    for page in PAGES:
        lines = page.split("\n")
        for start, line in enumerate(lines):
            if line.startswith(f"| `{command}"):
                rest = lines[start + 2 :]
                rows = itertools.takewhile(lambda line: line.startswith("|"), rest)
                cells = [row.strip("|").split("|") for row in rows]
                found.append([[cell.strip() for cell in row] for row in cells])
    return found


def table_of(command: str) -> list[list[str]]:
    """The lines of the table headed by a command, the same on every page."""
    first, *others = tables_of(command)
    for other in others:
        assert [row[1:] for row in other] == [row[1:] for row in first], command
    return first


def numbers(cell: str) -> list[str]:
    return re.findall(r"[0-9]+(?:\.[0-9]+)?", cell)


def agree(stated: list[str], values: list[float]) -> bool:
    """Whether each stated number is a value rounded to as many decimals."""
    return len(stated) == len(values) and all(
        abs(float(text) - value) <= 0.5 * 10 ** -len(text.partition(".")[2]) + 1e-9
        for text, value in zip(stated, values, strict=True)
    )


ROUND_FIELDS = (
    *("acceptance_rate", "tokens_per_target_step"),
    *("baseline_e2e_tpot_ms", "spec_e2e_tpot_ms"),
    *("speedup_e2e", "speedup_e2e_p10", "speedup_e2e_p90", "speedup_decode"),
)


def rounds_of_table() -> list[dict]:
    """The one summary of each line of the table of rounds."""
    summaries = [
        row for row in rows_of("spec_round*.jsonl") if row["kind"] == "summary"
    ]
    found = []
    for _, *cells in table_of("python experiments/spec_round.py"):
        stated = [number for cell in cells for number in numbers(cell)]
        same = [
            row for row in summaries if agree(stated, [row[f] for f in ROUND_FIELDS])
        ]
        assert len(same) == 1, f"{cells}: {len(same)} summaries have these numbers"
        found += same
    return found


def test_the_table_of_rounds():
    """Fails if a number was typed, or its row was measured again without it."""
    table = rounds_of_table()
    assert [row["impl"] for row in table] == ["xla", "native"]
    assert all(row["matched"] and row["prompts"] == 50 for row in table)
    # Negative control.
    assert agree(["1.28", "5"], [1.2849, 4.6]) and not agree(["1.28"], [1.2851])


@needs_matplotlib
@pytest.mark.parametrize("path", FIGURES, ids=lambda path: pathlib.Path(path).stem)
def test_figures_are_of_these_rows(path, request):
    """Fails if rows were measured again and the figure was not drawn again."""
    from experiments.lib import figures

    if "divergence" in path:
        # Its row is older than relative differences, and cannot be drawn.
        request.applymarker(pytest.mark.xfail(strict=True, reason="to be run again"))
    drawn = figures.read_source(REPO / path)
    assert drawn, "names no rows"
    rows = rows_of("*.jsonl")
    rows += theory.improvement_rows(plot.THEORY, gamma_max=plot.GAMMA_MAX)
    assert set(drawn) <= set(figure_source.digests(rows))


@needs_matplotlib
@pytest.mark.xfail(strict=True, reason="the rows of the table have one gamma so far")
def test_the_table_of_rounds_is_in_the_figure():
    """Fails if both show other runs of the same thing."""
    from experiments.lib import figures

    (path,) = (path for path in FIGURES if path.endswith("/speedup.svg"))
    drawn = set(figures.read_source(REPO / path))
    assert set(figure_source.digests(rounds_of_table())) <= drawn


def test_the_table_beside_hugging_face():
    rows = [row for row in rows_of("compare_hf.jsonl") if row["kind"] == "comparison"]
    speed = {
        (row["side"], row["method"], row["gamma"], row["length"]): row["vs_hf"]
        for row in rows
    }
    for name, *cells in table_of("python experiments/compare_hf.py"):
        method, _, gamma = name.partition(", K = ")
        key = (method, int(gamma) if gamma else None)
        for length, cell in zip(("short", "medium", "long"), cells, strict=True):
            sides = ("spec_jax", "transformers") if gamma else ("spec_jax",)
            values = [speed[side, *key, length] for side in sides]
            assert agree(numbers(cell), values), (name, cell, values)


def test_the_table_of_designs():
    table = table_of("python experiments/history.py")
    rows = rows_of("history.jsonl")
    for (_, *cells, _), row in zip(table, rows, strict=True):
        values = [row["matched_prompts"], row["prompts"]]
        values += [row["verify_decode_mismatches"], row["tokens_per_target_step"]]
        stated = [number for cell in cells for number in numbers(cell)]
        assert agree(stated, [*values, row["speedup_e2e"]]), (cells, values)


def test_the_table_of_batches():
    rows = rows_of("throughput.jsonl")
    ratios = {(row["batch"], bool(row["gamma"])): row["ratio"] for row in rows}
    for name, *cells in table_of("python experiments/throughput.py"):
        for batch, cell in zip((1, 2, 4, 8, 16), cells, strict=True):
            assert agree(numbers(cell), [ratios[batch, name != "plain"]]), cell


def regrets() -> dict[tuple[str, str, str], dict]:
    return {
        (row["kind"], row["policy"], row["set"]): row
        for row in rows_of("regret.jsonl")
        if "policy" in row
    }


def regret_table() -> list[tuple[str, list[str]]]:
    """The policies under the names of the rows, and their cells."""
    table = table_of("python experiments/regret.py")
    return [(name.replace("always", "fixed"), cells) for name, *cells in table]


def test_the_table_of_regret():
    rows = regrets()
    for policy, cells in regret_table():
        for name, cell in zip(
            ("easy", "hard", "mixed", "adversarial"), cells, strict=False
        ):
            value = 100 * rows["regret", policy, name]["regret"]
            assert agree(numbers(cell), [value]), (policy, name, value)


def test_regret_beside_plain_decoding_is_a_speed_up():
    """As everywhere: above 1 is faster."""
    rows = regrets()
    for policy, (*_, cell) in regret_table():
        row = rows["regret_live", policy, "adversarial"]
        if "speedup" not in row:
            pytest.xfail("rows from before regret.py wrote speed-ups")
        assert agree(numbers(cell), [row["speedup"]]), (policy, cell)
