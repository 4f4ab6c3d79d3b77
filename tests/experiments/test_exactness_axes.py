"""Sampling, adaptive gamma and batches in the exactness suite, each with a fault."""

import dataclasses
import itertools
import json
import pathlib

import exactness_commands as commands
import jax.numpy as jnp
import pytest
from spec_jax.batch import rounds as batch_rounds

from experiments import exactness
from experiments.lib import cli
from experiments.support import (
    exactness_certificate as certificates,
    exactness_evidence as evidence,
    exactness_suite as suite,
    parity_inputs,
)
from spec_jax import rounds, session


NUM_PROMPTS = 3  # In batches of two: one prompt has a neighbour that is there already.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return commands.write_pair(tmp_path_factory.mktemp("pair"))


def command(folders, *more: str) -> list[str]:
    """One greedy cell of a fixed gamma, alone, unless `more` says otherwise."""
    own = ("--drafter", "oracle", "--gamma", "3", "--prompts", str(NUM_PROMPTS))
    return commands.one_cell(folders, *own, *more)


def all_axes(folders, *more: str) -> list[str]:
    """The base, and a cell of each other value."""
    axes = (
        *("--sampling", "greedy,sampled", "--batch", "1,2"),
        *("--gamma-policy", "fixed,threshold"),
    )
    return command(folders, *axes, *more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that was exact: its files."""

    out: pathlib.Path
    certificate: pathlib.Path


@pytest.fixture(scope="module")
def finished(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    out, certificate = folder / "rows.jsonl", folder / "run.json"
    more = ("--out", str(out), *commands.certifying(certificate))
    assert exactness.main(all_axes(folders, *more)) == exactness.EXACT
    return Finished(out=out, certificate=certificate)


def summary_of(out: pathlib.Path, **axes) -> dict:
    """The summary of the cell that has these values."""
    (found,) = (
        row
        for row in commands.of_kind(out, "cell")
        if axes.items() <= row["cell"].items()
    )
    return found


def test_each_value_does_what_its_name_says(finished):
    """Fails if a cell is another one in disguise: all of them would be equal."""
    base = summary_of(finished.out, sampling="greedy", gamma_policy="fixed", batch=1)
    sampled = summary_of(finished.out, sampling="sampled")
    batch = summary_of(finished.out, batch=2)
    tokens = {
        name: [
            row["spec_sha256"]["tokens"]
            for row in commands.of_kind(finished.out, "prompt")
            if f" {name} |" in row["cell"]
        ]
        for name in ("greedy", "sampled")
    }
    assert not {*tokens["greedy"]} & {*tokens["sampled"]}
    assert sampled["exact"] and sampled["tokens"] == base["tokens"]
    # The same drafts of the same oracle, in fewer forwards; counted by slot.
    counts = ("tokens", "rounds", "proposed", "accepted")
    assert [batch[name] for name in counts] == [base[name] for name in counts]
    adaptive = summary_of(finished.out, gamma_policy="threshold")
    assert 0 < adaptive["proposed"] < base["proposed"]


def test_what_a_batch_does_not_record_is_never_called_equal(folders, finished, capsys):
    unknown = {"log_probs": "not compared", "logits": "not compared"}
    batch = summary_of(finished.out, batch=2)
    assert batch["equal"] == {"tokens": NUM_PROMPTS, "kv": NUM_PROMPTS} | unknown
    rows = [
        row
        for row in commands.of_kind(finished.out, "prompt")
        if row["cell"].endswith("batch 2")
    ]
    assert len(rows) == NUM_PROMPTS
    for row in rows:
        assert unknown.items() <= row["spec_sha256"].items()
        assert not {*unknown.values()} & {*row["plain_sha256"].values()}
    certificate = certificates.read(finished.certificate)
    entry = next(e for e in certificate["cells"] if e["cell"]["batch"] == 2)
    assert unknown.items() <= entry["spec"].items() and entry["exact"]
    assert evidence.NOT_COMPARED not in certificate["lists"]
    assert certificate["constants"]["sampled"]["temperature"] == 0.7
    more = ("--limit", "2")
    assert commands.verify(folders, finished.certificate, *more) == exactness.EXACT
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("batch 2 "))
    assert line.split()[2:] == ["2", "equal", "-", "-", "equal"]
    assert "-: not compared; rows of a batch are not recorded" in lines


def test_a_forged_batch_does_not_agree(folders, finished, tmp_path, capsys):
    """Negative control: of what a batch is compared in."""

    def forge(certificate):
        entry = next(e for e in certificate["cells"] if e["cell"]["batch"] == 2)
        own = ["0" * 64] * NUM_PROMPTS
        entry["spec"]["kv"] = "own"
        certificate["lists"]["own"] = own

    path = commands.edited(
        finished.certificate, tmp_path / "c.json", forge, signed=True
    )
    assert commands.verify(folders, path, "--limit", "1") == exactness.NOT_EXACT
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("batch 2 "))
    assert line.split()[2:] == ["1", "equal", "-", "-", "1", "differ"]


def test_a_certificate_of_before_there_were_these_axes(folders, finished, tmp_path):
    def age(certificate):
        first = certificate["cells"][0]
        for axis in ("sampling", "gamma_policy", "batch"):
            del first["cell"][axis]
        certificate["cells"] = [first]
        del certificate["constants"]

    path = commands.edited(finished.certificate, tmp_path / "c.json", age, signed=True)
    assert commands.verify(folders, path) == exactness.EXACT


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda c: c["constants"]["sampled"].update(temperature=0.8),
            ("other constants", "temperature: 0.8 and 0.7"),
        ),
        (
            lambda c: c["cells"][0]["cell"].update(moon="full"),
            ("cells of moon", "does not know"),
        ),
    ],
)
def test_certificates_that_mean_something_else(
    folders, finished, tmp_path, capsys, edit, words
):
    path = commands.edited(finished.certificate, tmp_path / "c.json", edit, signed=True)
    commands.assert_fails_with(
        capsys, [*commands.models(folders), "--verify", str(path)], *words
    )


def test_a_batch_that_was_interrupted_goes_on(folders, finished, tmp_path, monkeypatch):
    """Fails if a prompt of half a batch is lost, or has two rows."""
    out, certificate = tmp_path / "rows.jsonl", tmp_path / "run.json"
    more = ("--out", str(out), *commands.certifying(certificate))
    real = suite.run

    def interrupted(plan, *, done):
        rows = real(plan, done=done)
        is_of_batch = lambda row: row["cell"].endswith("batch 2")
        yield from itertools.takewhile(lambda row: not is_of_batch(row), rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(suite, "run", interrupted)
        status = exactness.main(all_axes(folders, *more))
        assert status == cli.INTERRUPTED
    # The first prompt of the first batch is there, the second one is not.
    first = next(
        line
        for line in finished.out.read_text().splitlines()
        if json.loads(line).get("cell", "")[-7:] == "batch 2"
    )
    with out.open("a") as file:
        file.write(f"{first}\n")
    assert exactness.main(all_axes(folders, *more)) == exactness.EXACT
    ours, theirs = map(certificates.read, (certificate, finished.certificate))
    for part in ("cells", "lists"):
        assert ours[part] == theirs[part]


#
# Faults: of data, so that nothing is compiled again
#


def another_seed(monkeypatch) -> None:
    """Rounds draw with other noise than plain decoding."""
    real = session.begin

    def begin(*args, settings, **kwargs):
        if settings is not None:
            settings = settings.replace(seed=settings.seed + jnp.uint32(1))
        return real(*args, settings=settings, **kwargs)

    monkeypatch.setattr(session, "begin", begin)


TOO_FEW = 3


def too_few_rounds(monkeypatch) -> None:
    """Rounds of an adaptive gamma end as those of the largest one might."""
    real = rounds.generate

    def generate(*args, max_rounds, gamma_policy, **kwargs):
        if gamma_policy is not None:
            max_rounds = jnp.int32(TOO_FEW)
        return real(*args, max_rounds=max_rounds, gamma_policy=gamma_policy, **kwargs)

    monkeypatch.setattr(rounds, "generate", generate)


def pages_of_a_neighbour(monkeypatch) -> None:
    """Each slot of a batch ends with the first page of the other."""
    real = batch_rounds.generate

    def generate(*args, **kwargs):
        state = real(*args, **kwargs)
        table = state.cache.page_table
        table = table.at[:, 0].set(table[::-1, 0])
        return state.replace(cache=state.cache.replace(page_table=table))

    monkeypatch.setattr(batch_rounds, "generate", generate)


@pytest.mark.parametrize(
    ("plant", "cell", "found"),
    [
        (another_seed, ("--sampling", "sampled"), {"tokens"}),
        (too_few_rounds, ("--gamma-policy", "threshold"), {"tokens"}),
        (pages_of_a_neighbour, ("--batch", "2"), {"kv"}),
    ],
)
def test_a_fault_is_found(folders, tmp_path, monkeypatch, capsys, plant, cell, found):
    out = tmp_path / "wrong.jsonl"
    plant(monkeypatch)
    more = ("--out", str(out))
    assert exactness.main(command(folders, *cell, *more)) == exactness.NOT_EXACT
    rows = commands.of_kind(out, "prompt")
    assert {d["what"] for row in rows for d in row["differences"]} == found
    printed = capsys.readouterr().out
    lines = [
        number
        for number, row in enumerate(commands.rows_of(out), start=1)
        if row["kind"] == "mismatch"
    ]
    if "--batch" in cell:
        assert not lines and "does --batch 1 differ?" in printed
        return
    assert len(lines) == len([row for row in rows if row["differences"]]) > 0
    for number in lines:
        line = parity_inputs.read_mismatch(f"{out}:{number}")
        # Both saw the same logits: what follows from them is at fault.
        assert line.verify_argmax == line.decode_argmax
        assert (line.window_rows, line.acceptance, line.prefill) == (
            4,
            "verify",
            "rows",
        )
        if plant is too_few_rounds:
            assert len(line.starts) == TOO_FEW


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--sampling", "warm"), ("--sampling", "'warm'", "greedy, sampled")),
        (("--gamma-policy", "random"), ("--gamma-policy", "'random'", "threshold")),
        (("--batch", "0"), ("--batch", "0 must be at least 1")),
        (("--batch", "two"), ("--batch", "no list of whole numbers")),
        (("--batch", "4"), ("batch=4 needs 4 prompts", "3 are to be run")),
        (("--batch", "2", "--drafter", "always-wrong"), ("batch=2", "always-wrong")),
        (("--batch", "2", "--draft-cache", "round"), ("batch=2", "draft_cache=round")),
        (("--batch", "2", "--verify-path", "flash"), ("batch=2", "verify_path=flash")),
    ],
)
def test_unusable_values(folders, capsys, more, words):
    commands.assert_fails_with(capsys, command(folders, *more), *words)
