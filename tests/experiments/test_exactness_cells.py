"""The exactness suite over trees, heads, drafters of others, and bad flags."""

import exactness_commands as commands
import jax.numpy as jnp
import pytest
import tiny_pair
import wrong_targets
from script_runs import models_of, rows_of

from experiments import exactness
from experiments.lib import (
    certificates,
    exact_cells,
    suite_plan as plans,
)
from spec_jax import loading
from spec_jax.engine import round as round_lib


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return commands.write_pair(tmp_path_factory.mktemp("pair"))


FIXED = "[[0],[0,0],[0,1],[0,0,0],[0,1,0],[0,1,1]]"


@pytest.fixture(scope="module")
def of_trees(folders, tmp_path_factory):
    """Chains, a search taller than the slab, and a fixed tree of a file: certified.

    Of the fixed one more nodes have children at depth 2 than at depth 1.
    """
    folder = tmp_path_factory.mktemp("trees")
    (folder / "fixed.json").write_text(FIXED)
    out, certificate = folder / "rows.jsonl", folder / "run.json"
    trees = f"none,2x4:7,{folder / 'fixed.json'}"
    more = ("--drafter", "draft-model", "--tree", trees, "--batch", "2")
    more += ("--sampling", "sampled", "--out", str(out))
    pair = (folders[0], folders[0])  # All that is drafted can be kept.
    arguments = commands.one_cell(pair, *more, *commands.certifying(certificate))
    assert exactness.main(arguments) == exactness.EXACT
    (folder / "fixed.json").unlink()
    return commands.Finished(out=out, certificate=certificate)


def test_trees_are_exact(folders, of_trees, capsys):
    """In tokens, log-probabilities, logits and K/V; chains keep the keys they had."""
    chain, search, fixed = rows_of(of_trees.out, "cell")
    assert "tree" not in chain["cell"]
    assert (search["cell"]["tree"], search["cell"]["gamma"]) == ("2x4:7@0.4", 7)
    assert (fixed["cell"]["tree"], fixed["cell"]["gamma"]) == (FIXED, 6)
    for summary in (chain, search, fixed):
        assert summary["exact"]
        assert set(summary["equal"].values()) == {commands.NUM_PROMPTS}
    assert search["proposed"] > 4 * search["rounds"]  # More rows than a slab has.
    assert search["accepted"] > search["rounds"]
    assert " tree " not in rows_of(of_trees.out, "prompt")[0]["cell"]
    # The file of the tree is gone: the certificate has its paths.
    more = ("--limit", "2")
    pair = (folders[0], folders[0])
    assert commands.verify(pair, of_trees.certificate, *more) == exactness.EXACT
    found = commands.line_of(capsys.readouterr().out, "gamma 7, tree 2x4:7@0.4")
    assert found == ["2", *["equal"] * 4]


def test_a_shipped_head_is_known_by_its_name(folders, tmp_path, monkeypatch, capsys):
    """Fails if its certificate needs more than the package to be verified."""
    monkeypatch.setattr(loading, "EMBEDDED_TARGET", folders[0])
    monkeypatch.setattr(loading, "EMBEDDED_DRAFT", folders[1])
    monkeypatch.setattr(loading, "ASSETS", tmp_path)
    tiny_pair.write_block(tmp_path / "dspark", folders[0])
    certificate = tmp_path / "run.json"
    more = ("--drafter", "dspark", "--gamma", "3", *commands.certifying(certificate))
    pair = models_of(folders)
    arguments = [one for one in commands.one_cell(folders, *more) if one not in pair]
    assert exactness.main(arguments) == exactness.EXACT
    found = certificates.read(certificate)
    assert found["settings"]["head"] == found["settings"]["target"] == "embedded"
    again = ["--verify", str(certificate), "--limit", "2"]
    assert exactness.main(again) == exactness.EXACT
    commands.assert_fails_with(
        capsys, [*arguments, "--drafter", "dflash"], "no such head is shipped"
    )
    heads = [*arguments, "--drafter", f"dspark,{tmp_path / 'dspark'}", "--head"]
    tiny_pair.write_block(tmp_path / "other", folders[0])
    commands.assert_fails_with(
        capsys, [*heads, str(tmp_path / "other")], "2 heads are named"
    )


@pytest.mark.slow
def test_a_head_is_exact(folders, tmp_path, capsys):
    """Chains and a tree of a head, which a certificate names and knows again."""
    head = tiny_pair.write_head(tmp_path / "head", folders[0])
    out, certificate = tmp_path / "rows.jsonl", tmp_path / "run.json"
    more = ("--drafter", str(head), "--tree", "none,2x3:5", "--batch", "2")
    more += ("--sampling", "sampled", "--out", str(out))
    arguments = commands.one_cell(folders, *more, *commands.certifying(certificate))
    assert exactness.main(arguments) == exactness.EXACT
    chain, tree = rows_of(out, "cell")
    for summary in (chain, tree):
        assert summary["cell"]["drafter"] == "eagle3" and summary["proposed"] > 0
        assert set(summary["equal"].values()) == {commands.NUM_PROMPTS}
    assert str(head) not in certificate.read_text()
    assert certificates.read(certificate)["settings"]["head"] == "head"
    again = ("--limit", "2", "--head", str(head))
    assert commands.verify(folders, certificate, *again) == exactness.EXACT
    other = tiny_pair.write_head(tmp_path / "other", folders[0], seed=3)
    for words, named in (
        ("a certificate of head head; give its folder with --head", ()),
        ("was written with other weights", ("--head", str(other))),
    ):
        arguments = [*models_of(folders), "--verify", str(certificate), *named]
        commands.assert_fails_with(capsys, arguments, words)
    arguments = commands.one_cell(folders, "--head", str(head))
    words = "--head is the drafter eagle3's: add that"
    commands.assert_fails_with(capsys, arguments, words)


def test_a_gpu_runs_what_another_process_repeats(folders, monkeypatch, tmp_path):
    """Fails if a certificate made on a GPU depends on what was fastest there."""
    monkeypatch.setattr(plans.dispatch, "backend", lambda: "gpu")
    # The planning alone: no kernel for a GPU runs here.
    certifying = commands.certifying(tmp_path / "run.json")
    for more in ((), ("--full",)):
        flags = [*models_of(folders), "--prompts", "4", "--gen-tokens", "8"]
        args = exactness.parse_args([*flags, *more, *certifying])
        cells = plans.from_flags(args).plan.cells
        assert {cell.prefill for cell in cells} == {"rows"}
        assert {cell.impl for cell in cells} == {"triton"}
        assert {cell.dtype for cell in cells} == {"bfloat16"}
        assert {cell.slab for cell in cells} == {16}
    for axes, named in (
        (("--prefill", "batched"), "impl=triton and prefill=batched"),
        (("--impl", "triton,xla"), "impl=xla and prefill=rows"),
    ):
        asked = [*flags, *axes, *certifying]
        with pytest.raises(ValueError, match=f"{named}: on a GPU.*chosen by timing"):
            plans.from_flags(exactness.parse_args(asked))
        # Within a process both runs have the same products.
        assert plans.from_flags(exactness.parse_args([*flags, *axes])).plan.cells


@pytest.mark.parametrize(
    ("axes", "trees"),
    [
        ((), ["none", "2x4:7@0.4"]),
        (("--gamma", "2,1,3", "--product"), ["none"] * 3 + ["2x4:7@0.4"]),
    ],
)
def test_a_tree_has_its_own_gamma(folders, axes, trees):
    """Fails if one tree is run once for each gamma of the chains."""
    more = ("--drafter", "draft-model", "--tree", "none,2x4:7,2x4:7@0.4", *axes)
    args = exactness.parse_args(commands.one_cell(folders, *more))
    cells = plans.from_flags(args).plan.cells
    assert sorted((cell.tree for cell in cells), reverse=True) == trees


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(wrong_targets.OneUlpOff, "logits"), (wrong_targets.ForgetsPaths, "kv")],
)
def test_a_fault_of_trees_is_caught(
    folders, tmp_path, monkeypatch, capsys, wrong, what
):
    """By the depth of the row; no window is offered that was none."""
    wrong_targets.plant(monkeypatch, wrong)
    pair = (folders[0], folders[0])  # All that is drafted can be kept.
    more = ("--drafter", "draft-model", "--tree", "2x4:7")
    status, found = commands.run_one_cell(pair, tmp_path, *more)
    assert status == exactness.NOT_EXACT
    for row in found:
        differences = {d["what"]: d for d in row["differences"]}
        assert what in differences
        assert differences[what]["row"] == (1 if what == "logits" else None)
    assert not rows_of(tmp_path / "wrong.jsonl", "mismatch")
    assert "parity.py looks into chains alone" in capsys.readouterr().out


#
# Flags
#


class FromOutside:
    """A drafter of another package: it repeats the last token."""

    def __init__(self, gamma_max: int):
        self.gamma_max = gamma_max

    def __hash__(self):
        return hash(self.gamma_max)

    def __eq__(self, other):
        return isinstance(other, FromOutside) and other.gamma_max == self.gamma_max

    def init(self, *, capacity, page_size):
        del capacity, page_size
        return ()

    def prefill(self, params, memory, prompt):
        del params, prompt
        return memory

    def propose(self, params, memory, *, tokens, length, gamma):
        del params
        drafts = jnp.broadcast_to(tokens[length - 1], (self.gamma_max,))
        return memory, round_lib.protocols.Proposal(tokens=drafts, num_drafted=gamma)

    def commit(self, params, memory, length):
        del params, length
        return memory


@pytest.mark.slow
def test_every_kind_of_drafter_has_batches(folders, tmp_path):
    """One from outside beside a draft model."""
    outside = f"{__name__}:FromOutside"
    cells = ("--drafter", f"{outside},draft-model")
    status, rows = commands.run_one_cell(folders, tmp_path, *cells, "--batch", "2")
    assert status == exactness.EXACT and len(rows) == 2 * commands.NUM_PROMPTS
    assert sum(row["proposed"] for row in rows[: commands.NUM_PROMPTS]) > 0


def test_a_schedule_is_exact(folders, tmp_path):
    """With stated times, that a certificate names: the same drafts anywhere."""
    cells = ("--drafter", "draft-model", "--gamma-policy", "schedule", "--batch", "2")
    certificate = tmp_path / "run.json"
    more = ("--sampling", "sampled", *commands.certifying(certificate))
    status, rows = commands.run_one_cell(folders, tmp_path, *cells, *more)
    assert status == exactness.EXACT and len(rows) == commands.NUM_PROMPTS
    assert sum(row["proposed"] for row in rows) > 0
    stated = certificates.read(certificate)["constants"]["schedule"]
    assert stated == exact_cells.CONSTANTS["schedule"]
