"""The exactness suite from its command line: rows, resumption, certificates, faults."""

import itertools

import exactness_commands as commands
import pytest
from script_runs import models_of, rows_of

from experiments import exactness
from experiments.lib import certificates, cli, records, suite, suite_plan as plans
from spec_jax.debug import evidence


pytestmark = pytest.mark.usefixtures("needs_native")
NUM_PROMPTS, NUM_CELLS = commands.NUM_PROMPTS, 6


@pytest.fixture(scope="module")
def finished(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    out, certificate = folder / "rows.jsonl", folder / "run.json"
    more = ("--out", str(out), *commands.certifying(certificate))
    given = commands.several_cells(folders, *more)
    assert exactness.main(given) == exactness.EXACT == 0
    return commands.Finished(out=out, certificate=certificate)


def test_every_cell_and_prompt_has_a_row(finished):
    header, *rows = rows_of(finished.out)
    assert header["kind"] == "header" and len(header["cells"]) == NUM_CELLS
    assert not any("tree" in cell for cell in header["cells"])  # No tree: no such axis.
    prompts = [row for row in rows if row["kind"] == "prompt"]
    summaries = [row for row in rows if row["kind"] == "cell"]
    assert len(prompts) == NUM_CELLS * NUM_PROMPTS and len(summaries) == NUM_CELLS
    assert len({suite.key(row) for row in prompts}) == len(prompts)
    for row in prompts:
        assert row["differences"] == [] and row["tokens"] == commands.GEN_TOKENS
        assert row["plain_sha256"] == row["spec_sha256"]
    for summary in summaries:
        # Batches have log-probabilities and logits, too.
        assert summary["exact"] and set(summary["equal"]) == set(evidence.WHATS)
        assert set(summary["equal"].values()) == {NUM_PROMPTS}


def test_each_value_does_what_its_name_says(finished):
    """Fails if a value of an axis changes nothing: such cells would be equal, too."""
    base, sampled = finished.summary(), finished.summary(sampling="sampled")
    tokens = {
        name: {
            row["spec_sha256"]["tokens"]
            for row in rows_of(finished.out, "prompt")
            if f" {name} |" in row["cell"]
        }
        for name in ("greedy", "sampled")
    }
    assert not tokens["greedy"] & tokens["sampled"]
    assert sampled["tokens"] == base["tokens"]
    # A batch has the same drafts of the same oracle, and counts them by slot.
    counts = ("tokens", "rounds", "proposed", "accepted")
    batch = finished.summary(batch=2)
    assert [batch[name] for name in counts] == [base[name] for name in counts]
    adaptive = finished.summary(gamma_policy="threshold")
    assert 0 < adaptive["proposed"] < base["proposed"]
    assert base["accepted"] == base["proposed"] > 0
    assert finished.summary(drafter="always-wrong")["accepted"] == 0


def test_a_certificate_holds_what_was_run(finished, folders):
    certificate = certificates.read(finished.certificate)
    assert certificate["exact"] and certificate["prompts"]["count"] == NUM_PROMPTS
    assert certificate["environment"]["instruction_set"]["native"]
    assert len(certificate["weights"]["float32"]["target"]) == 64
    assert certificate["constants"]["sampled"]["temperature"] == 0.7
    # Bits depend neither on gamma nor on drafter and batch: each way to sample has one
    # list for each of tokens, log-probabilities, logits and K/V.
    assert len(certificate["lists"]) == 2 * len(evidence.WHATS)
    assert {len(hashes) for hashes in certificate["lists"].values()} == {NUM_PROMPTS}
    assert certificate["warnings"] == []
    # The machine's folders are not in it.
    assert str(folders[0].parent) not in finished.certificate.read_text()


def test_an_interrupted_run_goes_on(folders, finished, tmp_path, monkeypatch, capsys):
    """Fails if rows are lost or run twice, those of half a batch, too."""
    out, certificate = tmp_path / "rows.jsonl", tmp_path / "run.json"
    more = ("--out", str(out), *commands.certifying(certificate))
    given = commands.several_cells(folders, *more)
    real, num_rows = suite.rows_of, 4

    def interrupted(plan, cells):
        yield from itertools.islice(real(plan, cells), num_rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(suite, "rows_of", interrupted)
        assert exactness.main(given) == cli.INTERRUPTED == 130
    assert "finished rows are in" in capsys.readouterr().err
    assert len(rows_of(out)) == 1 + num_rows and not certificate.exists()
    assert exactness.main(given) == exactness.EXACT
    assert f"{num_rows} are there already" in capsys.readouterr().out
    assert certificate.read_text() == finished.certificate.read_text()


def forge_first_tokens(certificate: dict) -> None:
    """Changes the hash of the first prompt's tokens, in every cell that has them."""
    hashes = certificate["lists"][certificate["cells"][0]["spec"]["tokens"]]
    hashes[0] = "0" * 64


def forge_batch(certificate: dict) -> None:
    """Changes the hashes of the batch's logits alone."""
    entry = next(e for e in certificate["cells"] if e["cell"]["batch"] == 2)
    entry["spec"]["logits"] = "own"
    certificate["lists"]["own"] = ["0" * 64] * NUM_PROMPTS


def age(certificate: dict) -> None:
    """Makes the certificate like those of earlier versions, which had fewer axes."""
    first, batch = (
        next(e for e in certificate["cells"] if e["cell"]["batch"] == n) for n in (1, 2)
    )
    for axis in ("sampling", "gamma_policy", "batch"):
        del first["cell"][axis]
    certificate["cells"] = [first, batch]
    certificate["environment"]["jaxlib_version"] = "0.1.2"
    del certificate["constants"]


EQUAL = "equal equal equal equal"
SAME = "the environment is that of the certificate"


@pytest.mark.parametrize(
    ("edit", "status", "base", "batch", "says"),
    [
        (lambda c: None, exactness.EXACT, EQUAL, EQUAL, SAME),
        (age, exactness.EXACT, EQUAL, EQUAL, "jaxlib_version: 0.1.2, now"),
        # Negative controls.
        (forge_first_tokens, exactness.NOT_EXACT, "1 differ equal equal equal",
         "1 differ equal equal equal", SAME),
        (forge_batch, exactness.NOT_EXACT, EQUAL, "equal equal 2 differ equal", SAME),
    ],
)  # fmt: skip
def test_a_certificate_is_verified(
    folders, finished, tmp_path, capsys, edit, status, base, batch, says
):
    """Fails if an axis that it lacks gets another value than it had then, or the first
    prompt is run alone, without its neighbour in the batch."""
    path = commands.edited(finished.certificate, tmp_path / "c.json", edit)
    assert commands.verify(folders, path, "--limit", "1") == status
    printed = capsys.readouterr().out
    assert " ".join(commands.line_of(printed, "base")) == f"2 {base}"
    assert " ".join(commands.line_of(printed, "batch 2")) == f"2 {batch}"
    assert says in printed


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update(version=99), ("version 99", "version 1")),
        (lambda c: c["constants"]["sampled"].update(temperature=0.8),
         ("other constants", "temperature: 0.8 and 0.7")),
        (lambda c: c["cells"][0]["cell"].update(moon="full"),
         ("cells of moon", "does not know")),
        (lambda c: c["weights"]["float32"].update(target="0" * 64),
         ("other weights", "target: 0000")),
    ],
)  # fmt: skip
def test_certificates_that_mean_something_else(
    folders, finished, tmp_path, capsys, edit, words
):
    path = commands.edited(finished.certificate, tmp_path / "c.json", edit)
    arguments = [*models_of(folders), "--verify", str(path)]
    commands.assert_fails_with(capsys, arguments, *words)


CHANGED = " M spec_jax/load.py\n M experiments/plan.py\n M README.md"


def test_changed_code_is_not_certified(folders, tmp_path, monkeypatch, capsys):
    """Fails unless changed code is refused before anything is loaded, or, if allowed,
    marked in the certificate and when that is verified."""
    real, certificate = records._git, tmp_path / "run.json"
    monkeypatch.setattr(
        records, "_git", lambda *a: CHANGED if a[0] == "status" else real(*a)
    )
    given = commands.several_cells(folders, "--certificate", str(certificate))
    named = "spec_jax/load.py, experiments/plan.py, ...)"
    with monkeypatch.context() as patch:
        patch.setattr(plans, "from_flags", lambda args: pytest.fail("it was planned"))
        words = ("names the commit", named, "--allow-dirty")
        commands.assert_fails_with(capsys, given, *words)
    assert not certificate.exists()
    flagged = commands.one_cell(folders, *commands.certifying(certificate))
    assert exactness.main(flagged) == exactness.EXACT
    assert certificates.read(certificate)["environment"]["git_dirty"] is True
    assert commands.verify(folders, certificate) == exactness.EXACT
    assert "made of changed code" in capsys.readouterr().out
