"""Figures: what is in them, that their bytes are fixed, bad input."""

import importlib.util
import json
import math
from xml.etree import ElementTree

import pytest
from script_runs import assert_fails_with, write_rows

from experiments import plot
from experiments.lib import cli, curves as curves_lib, figure_source
from spec_jax.gamma import theory


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing"
)
MAX_BYTES = 60_000
MAX_BYTES_OF_MAP = 180_000  # a number in each of 400 cells


def summary(gamma: int, **changes) -> dict:
    speed = {"speedup_e2e": 1.5, "speedup_e2e_p10": 1.2, "speedup_e2e_p90": 1.9}
    rounds = [3 - (i > 2) for i in range(gamma + 1)]
    return {
        **{"kind": "summary", "impl": "xla", "dtype": "float32", "gamma": gamma},
        **{"prompt_source": "50", "repeats": 1, "acceptance_rate": 0.5},
        "conditional_acceptance": [0.9 - 0.01 * gamma] * (gamma - 1) + [None],
        **{"accepted_hist": rounds, "rounds": sum(rounds), "mean_accepted_length": 2.5},
        **speed,
        **changes,
    }


def step(num_active: int, **changes) -> dict:
    name = "1 active row" if num_active == 1 else f"{num_active} active rows"
    spread = {"ms": 2.0, "ms_p10": 1.5, "ms_p90": 2.5}
    spread |= {"ratio": 1.0, "ratio_p10": 0.9, "ratio_p90": 1.1}
    row = {"kind": "step", "step": name, "num_active": num_active, "impl": "xla"}
    return row | spread | changes


def comparison() -> list[dict]:
    """As large as a comparison gets: four values of K, a drafter more on our side."""
    speed = {"tok_s": 90.0, "tok_s_p10": 80.0, "tok_s_p90": 95.0}
    runs = [
        (side, method, gamma)
        for side in ("spec_jax", "transformers")
        for method in ("plain", "draft model", "prompt lookup")
        for gamma in ((None,) if method == "plain" else (3, 5, 7, 10))
    ]
    return [
        {"kind": "comparison", "length": length, "prompt_tokens": [tokens] * 2}
        | {"side": side, "method": method, "gamma": gamma}
        | speed
        for length, tokens in (("short", 32), ("medium", 128), ("long", 512))
        for side, method, gamma in runs
    ]


def parity(num_layers: int = 28) -> dict:
    def cell(layer: int, operation: int) -> dict | None:
        if (layer, operation) == (1, 1):
            return None
        ulp = 0 if layer < 3 else 2 ** (layer % 20)
        return {
            **{"differing": ulp, "elements": 64, "max_ulp": ulp},
            "relative": 10.0 ** (layer % 20 - 20) if ulp else 0.0,
        }

    return {
        "kind": "parity",
        "operations": [f"operation_{i}" for i in range(14)],
        "layers": list(range(num_layers)),
        "cells": [[cell(i, j) for j in range(14)] for i in range(num_layers)],
        "outside": {name: cell(4, 0) for name in ("embed", "final_norm", "logits")},
        "first": {"layer": 3, "operation": "operation_0", "position": 41},
    }


def cell(drafter: str, gamma: int, category: str | None, **changes) -> dict:
    """Two rounds of a sweep's cell, timed once."""
    kept = (1, *[0] * (gamma - 1), 1)
    counters = {"tokens": 2 + gamma, "rounds": 2, "proposed": 2 * gamma}
    counters |= {"accepted": gamma, "cut": 0, "accepted_hist": kept}
    counters |= {"proposed_at": [2, *[1] * (gamma - 1)], "accepted_at": [1] * gamma}
    row = {
        **{"kind": "sweep", "drafter": drafter, "gamma": gamma, "category": category},
        **{"prompt_source": "data/questions.jsonl", "temperature": 0.0},
        **{"gamma_policy": "fixed", "acceptance_rate": 0.5, "counters": counters},
        **{"prompts": 1, "matched": True, "verify_decode_mismatches": 0},
        "plain_timings": [[[0.1, 0.9, 2 + gamma]]],
        "spec_timings": [[[0.1, 0.4, 2 + gamma]]],
    }
    return row | changes


def cells() -> list[dict]:
    """As large as a sweep gets: eight curves, Spec-Bench's categories."""
    return [
        cell(drafter, gamma, category, gamma_policy=policy)
        for drafter in ("draft-model", "ngram", "suffix", "hybrid")
        for policy in ("fixed", "goodput")
        for gamma in (1, 2, 4, 7)
        for category in (f"category_{i}" for i in range(13))
    ]


def tree() -> dict:
    return {
        **{"kind": "tree", "id": "py-01", "round": 2, "target": "embedded"},
        **{"tokens": [5, 6, 7, 8], "parents": [0, 0, 0, 2], "kept": [2, 3], "own": 9},
        **{"pieces": ["def", "a$", "\n", "<b>"], "own_piece": "c"},
    }


def confidences() -> dict:
    bins = {"rounds": [6, 0, 4], "chance": [0.2, 0.0, 0.9], "kept": [0.5, 0.0, 0.75]}
    found = {"ece": [0.04, 0.02], "ece_before": [0.3, 0.1]}
    for name, values in bins.items():
        found |= {f"bin_{name}": values, f"bin_{name}_before": values[::-1]}
    return {"kind": "confidences", "gamma": 2, "temperature": 0.7} | found


ROWS = {
    "speedup": [summary(1), summary(4), summary(2), summary(2, impl="native")]
    + [summary(4, impl="native", speedup_e2e_p10=None)],
    "acceptance": [summary(4), summary(2)],
    "accepted_lengths": [summary(4), summary(4, impl="native")],
    "step_cost": [step(i, impl=impl) for impl in ("xla", "native") for i in (2, 1)],
    "hugging_face": comparison(),
    "divergence": [parity()],
    "sweep_speedup": cells(),
    "sweep_categories": cells(),
    "sweep_positions": cells(),
    "improvement": theory.improvement_rows(plot.THEORY, gamma_max=plot.GAMMA_MAX),
    "tree": [tree()],
    "reliability": [confidences()],
}


@pytest.mark.few(2)
@needs_matplotlib
@pytest.mark.parametrize("name", plot.FIGURES)
def test_the_same_rows_give_the_same_bytes(name, tmp_path):
    """Fails if a date, a random name or an unlabelled axis is in the file."""
    rows = write_rows(tmp_path / "rows.jsonl", ROWS[name])
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
    units = {
        "speedup": ("times", "gamma (tokens drafted per round)", "native"),
        "acceptance": ("P(kept", "position in the draft (token)"),
        "accepted_lengths": ("rounds (%)", "2.50 tokens a round"),
        "step_cost": ("(ms)", "active rows"),
        "hugging_face": ("tokens/s", "long: 512 tokens", "transformers prompt lookup"),
        "divergence": ("(ULP)", "layer 3, operation_0, position 41", "logits")
        + ("relative difference", "5e5", "128"),
        "sweep_speedup": ("(times)", "tokens a round", "hybrid, goodput"),
        "sweep_categories": ("accepted / proposed", "category_12", "gamma 7"),
        "sweep_positions": ("P(kept", "position (token)", "gamma 7"),
        "improvement": ("expected speed-up (times)", "a = 0.3", "c = 0.05"),
        "tree": ("depth (drafts", "def", "a$", "\\n", "<b>", "target's own token"),
        "reliability": ("before: calibration error 0.200", "share of rounds")
        + ("fitted: calibration error 0.030", "gamma 2, temperature 0.7"),
    }
    for unit in units[name]:
        assert unit in texts, unit


PROVENANCE = {
    **{"target": "models/Qwen3-8B", "draft": "models/Qwen3-0.6B", "dtype": "bfloat16"},
    **{"impl": "native", "native_isa": "avx2", "cpu": "Some CPU", "platform": "cpu"},
    **{"jax_version": "0.10.2", "prompt_source": "somewhere/gsm8k/test.jsonl:50"},
    **{"prompts": 25, "gen_tokens": 64},
}


@needs_matplotlib
@pytest.mark.parametrize("name", plot.FIGURES)
def test_every_figure_says_what_it_is_of(name, tmp_path):
    """Model, machine and prompts, from the rows; and which rows it was drawn from."""
    from experiments.lib import figures

    is_sweep = name.startswith("sweep")
    # The cells of the sweep are of one prompt in each of thirteen categories.
    known = PROVENANCE | ({"prompts": 1} if is_sweep else {})
    rows = [row | known for row in ROWS[name]]
    if name == "speedup":
        rows = rows[:3]  # Of one implementation, as they are now all.
    elif name == "improvement":
        rows = ROWS[name]
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
    assert figures.read_source(path) == figure_source.digests(rows)


def test_captions():
    """Several values are listed, many are counted, and GPUs go by their own name."""
    xla = PROVENANCE | {"impl": "xla", "native_isa": None, "prompt_source": "50@7"}
    words = figure_source.caption([PROVENANCE, xla])
    assert "native / xla" in words and "avx2 / chosen by XLA" in words
    assert "gsm8k/test.jsonl:50 / bundled (50@7)" in words
    lengths = [PROVENANCE | {"gen_tokens": n} for n in range(4)]
    assert "4 different tokens each" in figure_source.caption(lengths)
    gpu = PROVENANCE | {"platform": "gpu", "device_kind": "NVIDIA H100"}
    assert "machine: NVIDIA H100, jax 0.10.2" in figure_source.caption([gpu])
    parity_row = parity(2) | {"id": "a/b.jsonl:1", "window": [1, 2], "start": 196}
    words = figure_source.caption([parity_row])
    assert "prompt b.jsonl:1, a window of 2 tokens from 196" in words
    assert figure_source.digests([{"a": 1, "b": 2}]) == figure_source.digests(
        [{"b": 2, "a": 1}]
    )


@needs_matplotlib
def test_differences_near_zero_do_not_drown_the_others(tmp_path):
    """Colours are relative differences: fails if they are ULPs, which saturate."""
    from experiments.lib import divergence

    cells = [
        {"differing": 1, "elements": 64, "max_ulp": ulp, "relative": relative}
        for ulp, relative in ((2**30, 1e-6), (2, 1e-2), (2**30, None), (9, 0.0))
    ]
    scale = divergence._Scale(cells)
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
@pytest.mark.parametrize("name", plot.FIGURES)
def test_another_number_gives_another_figure(name, tmp_path):
    """Negative control: fails if a figure is not drawn from its rows."""
    changed = json.loads(json.dumps(ROWS[name]))
    row = changed[0]
    changes = {
        "speedup": {"speedup_e2e": 1.7},
        "acceptance": {"conditional_acceptance": [0.1, 0.2, 0.3, 0.4]},
        "accepted_lengths": {"accepted_hist": [9, 0, 0, 0, 4]},
        "step_cost": {"ms": 2.2},
        "hugging_face": {"tok_s": 91.0},
        "sweep_speedup": {"plain_timings": [[[0.1, 1.9, 3]]]},
        "sweep_categories": {},
        "improvement": {"improvement": 1.1},
        "tree": {"kept": [1]},
        "reliability": {"bin_kept": [0.4, 0.0, 0.75]},
    }
    if name == "divergence":
        row["cells"][5][3]["max_ulp"] = 1
    elif name == "sweep_categories":
        changed[-1]["acceptance_rate"] = 0.6  # of the largest gamma
    elif name == "sweep_positions":
        none, last = [0] * 7, changed[-1]
        last["counters"] |= {"tokens": 2, "accepted": 0, "accepted_hist": [2, *none]}
        last["counters"] |= {"accepted_at": none, "proposed_at": [2, *none[1:]]}
        for timings in ("plain_timings", "spec_timings"):
            last[timings] = [[[0.1, 0.9, 2]]]
    else:
        row |= changes[name]
    contents = []
    for rows in (ROWS[name], changed):
        (path,) = plot.draw(name, rows, tmp_path)
        contents.append(path.read_bytes())
    assert contents[0] != contents[1]


@needs_matplotlib
def test_all_figures_of_a_mixture(tmp_path, capsys):
    """And rows that are in none are named, with their number, in one line."""
    mixture = [*ROWS["speedup"], *ROWS["step_cost"], *ROWS["divergence"]]
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
def test_one_figure_that_fails_takes_no_other_with_it(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [summary(4)])
    assert plot.main([str(rows), "--out", str(tmp_path)]) == cli.UNUSABLE == 1
    assert (
        "speedup is not drawn: no settings were run with two" in capsys.readouterr().err
    )
    assert (tmp_path / "acceptance.svg").exists()


def test_curves_over_gamma():
    """Sorted by gamma; settings with a single one are no curve."""
    rows = [*ROWS["speedup"], summary(3, dtype="bfloat16")]
    curves = curves_lib.by_gamma(rows)
    assert [curve.label for curve in curves] == ["native", "xla"]
    assert [row["gamma"] for row in curves[1].rows] == [1, 2, 4]
    labelled = curves_lib.by_gamma([*rows, summary(7, dtype="bfloat16")])
    labels = [curve.label for curve in labelled]
    assert labels == ["native, float32", "xla, bfloat16", "xla, float32"]


def test_a_gamma_that_is_there_twice_is_refused():
    """Its two values would be joined by an upright line."""
    with pytest.raises(ValueError, match="gamma 2 of xla, .* 2 times"):
        curves_lib.by_gamma([summary(2), summary(2), summary(3)])
    with pytest.raises(ValueError, match="long prompts .* twice"):
        curves_lib.comparison(
            [row for row in comparison() * 2 if row["length"] == "long"]
        )


def test_the_largest_gamma_is_drawn_and_equal_curves_are_one():
    rows = [summary(4), summary(4, page_size=64), summary(2), summary(4, impl="native")]
    curves = curves_lib.of_largest_gamma(rows, "accepted_hist")
    assert [curve.label for curve in curves] == ["native", "xla"]
    assert {curve.rows[0]["gamma"] for curve in curves} == {4}


def test_more_curves_than_colours_are_refused():
    many = [summary(2, accepted_hist=[i, 1, 1], gen_tokens=i) for i in range(9)]
    with pytest.raises(
        ValueError, match="9 curves, .* gen_tokens: choose with --where"
    ):
        curves_lib.of_largest_gamma(many, "accepted_hist")
    assert len(curves_lib.of_largest_gamma(many[:8], "accepted_hist")) == 8


def test_curves_of_a_sweep():
    """All categories together; a file of prompts is called by its name."""
    rows = [cell("ngram", gamma, name) for gamma in (4, 2) for name in ("a", "b")]
    rows += [cell("suffix", 2, None)]
    curves = curves_lib.cells_by_gamma(rows)
    assert [curve.label for curve in curves] == ["ngram", "suffix"]
    assert [row["gamma"] for row in curves[0].rows] == [2, 4]
    assert [row["prompts"] for row in curves[0].rows] == [2, 2]
    assert curves[0].rows[0]["speedup_e2e"] == pytest.approx(2.0)
    names, curves = curves_lib.cells_by_category(rows[:4])
    assert names == ["a", "b"] and [len(curve.rows) for curve in curves] == [2]
    other = cell("ngram", 4, "a", prompt_source="more/prompts.jsonl")
    _, curves = curves_lib.cells_by_category([*rows, other])
    assert [curve.label for curve in curves] == ["prompts.jsonl", "questions.jsonl"]


def test_cells_of_two_sweeps_are_refused():
    rows = [cell("ngram", 4, "a")]
    with pytest.raises(ValueError, match="2 times; name the file of one sweep"):
        curves_lib.cells_by_category(rows * 2)
    with pytest.raises(ValueError, match="2 times; name the file of one sweep"):
        curves_lib.cells_by_gamma(rows * 2)
    with pytest.raises(ValueError, match="no cells of two gammas"):
        curves_lib.cells_by_gamma(rows)


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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        *(
            (["--theory", v], "is not A,C")
            for v in ("0.8", "a,b", "1.2,0.1", "0.8,nan")
        ),
        ([], "--theory"),
        (["rows.jsonl", "--where", "gamma"], "NAME=VALUE"),
        (["rows.jsonl", "--figure", "pie"], "'pie'"),
    ],
)
def test_bad_flags(tmp_path, capsys, more, said):
    assert_fails_with(plot.main, capsys, [*more, "--out", str(tmp_path)], said)


def test_conditions():
    rows = [summary(2), summary(4), {"kind": "prompt"}]
    assert plot.chosen(rows, [("gamma", "4")]) == rows[1:]
    with pytest.raises(ValueError, match="no row has 'gama'"):
        plot.chosen(rows, [("gama", "4")])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["line 1", "no JSON"]),
        ('{"kind": "step"}\n[1]\n', ["line 2", "not a JSON object"]),
        ('{"kind": "weather"}\n', ["no rows for", "weather"]),
        ("", ["none"]),
        (None, ["cannot be read"]),
    ],
)
@needs_matplotlib
def test_bad_files(tmp_path, capsys, content, words):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    assert plot.main([str(path), "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in line


@needs_matplotlib
def test_bad_folder(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS["step_cost"])
    assert plot.main([str(rows), "--out", str(rows)]) == 1
    assert "no folder that can be written to" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    real = importlib.util.find_spec
    found = lambda name: None if name == "matplotlib" else real(name)
    monkeypatch.setattr(plot.importlib.util, "find_spec", found)
    assert plot.main(["rows.jsonl", "--out", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "matplotlib is not installed" in line and "'.[plot]'" in line
