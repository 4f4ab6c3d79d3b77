"""The exactness suite over trees, heads and a target alone; its cells and prompts."""

import argparse
import dataclasses
import json
import pathlib

import exactness_commands as commands
import numpy as np
import pytest
import tiny_pair
import wrong_targets
from script_runs import assert_fails_with, interrupted, models_of, rows_of
from slow_cases import slow

from experiments import exactness
from experiments.lib import (
    certificates,
    exact_cells as cells_lib,
    policies,
    records,
    suite_plan as plans,
)
from spec_jax import loading
from spec_jax.debug import evidence
from spec_jax.drafters import ngram
from spec_jax.model import hub


pytestmark = pytest.mark.usefixtures("needs_native")
FIXED = "[[0],[0,0],[0,1],[0,0,0],[0,1,0],[0,1,1]]"


@pytest.mark.parametrize(
    ("tree", "named", "nodes"),
    [("fixed.json", FIXED, 6), slow("2x4:7", "2x4:7@0.4", 7)],
)
def test_trees_are_exact(folders, tmp_path, monkeypatch, tree, named, nodes):
    """Checks a searched tree and one from a file, with more parents at depth 2."""
    monkeypatch.chdir(tmp_path)
    file, certificate = tmp_path / "fixed.json", tmp_path / "run.json"
    file.write_text(FIXED)
    more = ("--drafter", "draft-model", "--tree", tree, "--batch", "2")
    more += ("--sampling", "sampled", "--out", "rows.jsonl")
    pair = (folders[0], folders[0])  # All that is drafted can be kept.
    arguments = commands.one_cell(pair, *more, *commands.certifying(certificate))
    assert exactness.main(arguments) == 0
    (summary,) = rows_of(tmp_path / "rows.jsonl", "cell")
    assert (summary["cell"]["tree"], summary["cell"]["gamma"]) == (named, nodes)
    assert set(summary["equal"].values()) == {commands.NUM_PROMPTS}
    assert summary["proposed"] > 4 * summary["rounds"]  # Rounds exceed a slab.
    assert summary["accepted"] > summary["rounds"]
    file.unlink()  # The certificate holds the tree.
    assert commands.verify(pair, certificate, "--limit", "2") == 0


def test_a_shipped_head_is_known_by_its_name(folders, tmp_path, monkeypatch):
    """Fails if a certificate of what is shipped names a folder."""
    monkeypatch.setattr(loading, "EMBEDDED_TARGET", folders[0])
    monkeypatch.setattr(loading, "EMBEDDED_DRAFT", folders[1])
    monkeypatch.setattr(loading, "ASSETS", tmp_path)
    tiny_pair.write_head(tmp_path / "dspark", folders[0], kind="dspark")
    pair, cell = models_of(folders), commands.one_cell(folders, "--gamma", "3")
    flags = [one for one in (*cell, "--drafter", "dspark") if one not in pair]
    settings = plans.from_flags(exactness.parse_args(flags)).header["settings"]
    assert settings["head"] == settings["target"] == "embedded"


def test_models_are_found_by_their_names(tmp_path, monkeypatch):
    """Fails if a published certificate asks for folders."""
    monkeypatch.setattr(hub, "cache", lambda: tmp_path)
    (tmp_path / hub.FETCHED["smollm2"]).touch()
    # `_plan` is called when the models are chosen.
    monkeypatch.setattr(plans, "_plan", interrupted)
    for name, target, head in (
        ("dspark", None, "dspark"),
        ("smollm2", pathlib.Path("smollm2"), "smollm2/eagle3"),
    ):
        path = records.RESULTS / "certificates" / f"{name}_native_bfloat16.json"
        found, names = certificates.read(path), ("target", "draft", "head", "prompts")
        given = dict.fromkeys(names) | {"verify": path, "limit": None}
        args = argparse.Namespace(**given)
        with pytest.raises(KeyboardInterrupt):
            plans.from_certificate(args, found)
        assert (args.target, args.head) == (target, loading.ASSETS / head)
    found["settings"]["target"] = "smollm3"
    with pytest.raises(ValueError, match="a certificate of target smollm3"):
        plans.from_certificate(argparse.Namespace(**given), found)


def test_a_gpu_runs_what_another_process_repeats(folders, monkeypatch, tmp_path):
    """Fails if a certificate made on a GPU depends on products chosen by timing."""
    monkeypatch.setattr(plans.dispatch, "backend", lambda: "gpu")
    # This only plans: no kernel for a GPU runs here.
    certifying = commands.certifying(tmp_path / "run.json")
    for more in ((), ("--full",)):
        flags = [*models_of(folders), "--prompts", "4", "--gen-tokens", "8"]
        args = exactness.parse_args([*flags, *more, *certifying])
        cells = plans.from_flags(args).cells
        for cell in cells:
            assert (cell.prefill, cell.impl) == ("rows", "triton")
            assert (cell.dtype, cell.slab) == ("bfloat16", 16)
    for axis, value, named in (
        ("--prefill", "batched", "impl=triton and prefill=batched"),
        ("--impl", "triton,xla", "impl=xla and prefill=rows"),
    ):
        asked = [*flags, axis, value]
        with pytest.raises(ValueError, match=f"{named}: on a GPU.*chosen by timing"):
            plans.from_flags(exactness.parse_args([*asked, *certifying]))
        # Without a certificate both runs are in one process, with the same products.
        assert plans.from_flags(exactness.parse_args(asked)).cells


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "what", "row"),
    [
        (wrong_targets.OneUlpOff, "logits", 1),
        (wrong_targets.ForgetsPaths, "kv", None),
    ],
)
def test_a_fault_of_trees_is_caught(folders, tmp_path, monkeypatch, wrong, what, row):
    """Fails if the fault is missed, or wrong logits are not placed by depth."""
    wrong_targets.plant(monkeypatch, wrong)
    pair = (folders[0], folders[0])  # All that is drafted can be kept.
    more = ("--drafter", "draft-model", "--tree", "2x4:7")
    status, found = commands.run_one_cell(pair, tmp_path, *more)
    assert status == 2
    for one in found:
        differences = {d["what"]: d for d in one["differences"]}
        assert differences[what]["row"] == row
        if wrong is wrong_targets.OneUlpOff:  # Equal tokens do not hide it.
            assert "tokens" not in differences
            assert differences[what]["position"] == one["prompt_tokens"] + 1


def test_a_certificate_of_a_target_alone(folders, tmp_path, monkeypatch, capsys):
    """Fails if a draft is loaded, or is needed to verify the certificate."""
    certificate, main = tmp_path / "run.json", exactness.main
    monkeypatch.chdir(tmp_path)
    prompts = pathlib.Path("some/folder/below/prompts.txt")
    prompts.parent.mkdir(parents=True)
    prompts.write_text("def f(x):\nimport os\n")
    arguments = ["--target", str(folders[0])]
    flags = [one for one in commands.one_cell(folders) if one not in models_of(folders)]
    at = flags.index("--drafter")
    more = [*flags[:at], *flags[at + 2 :], "--prompts", str(prompts)]
    assert main([*arguments, *more, *commands.certifying(certificate)]) == 0
    written = json.loads(certificate.read_text())
    assert written["settings"]["draft"] is None
    assert [*written["weights"]["float32"]] == ["target"]
    drafters = [cell["cell"]["drafter"] for cell in written["cells"]]
    assert drafters == ["oracle", "ngram"]
    arguments += ["--verify", str(certificate)]
    assert main(arguments) == 0
    prompts.rename("elsewhere.txt")
    words = ("some/folder/below/prompts.txt: no such file", "--prompts")
    assert_fails_with(main, capsys, arguments, *words)
    assert main([*arguments, "--prompts", "elsewhere.txt"]) == 0


AXES = plans.default_axes(is_full=False) | {"impl": ("native", "xla")}


def test_a_star_varies_one_axis_at_a_time():
    found = cells_lib.of_axes(AXES)
    assert len(found) == len(set(found)) == 1 + sum(len(v) - 1 for v in AXES.values())
    base = found[0]
    assert all(getattr(base, axis) == values[0] for axis, values in AXES.items())
    for cell in found[1:]:
        assert sum(getattr(cell, a) != getattr(base, a) for a in AXES) == 1


def test_names_of_axes_stand_for_what_the_certificate_says():
    greedy, *others = cells_lib.of_axes(AXES)
    sampled = next(cell for cell in others if cell.sampling == "sampled")
    settings = dataclasses.asdict(sampled.settings)
    found = {name: value.item() for name, value in settings.items()}
    assert found.pop("min_p") == 0 and greedy.settings is None
    assert found == pytest.approx(cells_lib.CONSTANTS["sampled"])
    drafter = ngram.PromptLookup(gamma_max=3)
    fixed, by_share, by_speed, leads = (
        dataclasses.replace(greedy, gamma_policy=name).policy(drafter)
        for name in policies.POLICIES
    )
    assert fixed == (None, None)
    assert by_share[0].ladder == (0, 1, 2, 3)
    for _, state in (by_speed, leads):
        np.testing.assert_array_equal(state.round_s, [1, 1.25, 1.5, 1.75])
    assert cells_lib.constants_of([greedy]) == {}
    for cell, name in (
        (sampled, "sampled"),
        (dataclasses.replace(greedy, gamma_policy="schedule"), "schedule"),
    ):
        assert cells_lib.constants_of([cell]) == {name: cells_lib.CONSTANTS[name]}
    with pytest.raises(ValueError, match="'mood' is not one of fixed"):
        dataclasses.replace(greedy, gamma_policy="mood").policy(drafter)


def test_plain_bits_may_not_depend_on_pages():
    """Negative control: the K/V of one prompt differ between two page sizes."""
    axes = {axis: values[:1] for axis, values in AXES.items()} | {"page_size": (8, 64)}
    small, large = cells_lib.of_axes(axes)
    hashes = dict.fromkeys(evidence.WHATS, "1")
    rows = [
        {"cell": cell.name, "index": number, "plain_sha256": hashes}
        for cell in (small, large)
        for number in range(3)
    ]
    assert certificates.across_pages([small, large], rows) == []
    rows[4]["plain_sha256"] = hashes | {"kv": "0"}
    (told,) = certificates.across_pages([small, large], rows)
    assert told.startswith("1 prompts of decoding (dtype bfloat16, weights dense, ")
