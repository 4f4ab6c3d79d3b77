"""The exactness suite from its command line: rows, resumption, certificates."""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys

import exactness_commands as commands
import pytest
import tiny_pair

from experiments import exactness, kernels, latency, spec_round
from experiments.lib import cli, records
from experiments.support import (
    exactness_certificate as certificates,
    exactness_evidence as evidence,
    exactness_plan as plans,
    exactness_runs as runs,
    exactness_suite as suite,
)
from spec_jax.native import build


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return commands.write_pair(tmp_path_factory.mktemp("pair"))


def command(folders, *more: str) -> list[str]:
    """Four cells: three share plain decoding, the fourth has other pages."""
    several = ("--gamma", "2,3", "--page-size", "8,16")
    drafters = ("--drafter", "draft-model,always-right")
    return commands.one_cell(folders, *several, *drafters, *more)


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
    assert exactness.main(command(folders, *more)) == exactness.EXACT == 0
    return Finished(out=out, certificate=certificate)


def test_every_cell_and_prompt_has_a_row(finished):
    header, *rows = commands.rows_of(finished.out)
    assert header["kind"] == "header" and len(header["cells"]) == 4
    prompts = [row for row in rows if row["kind"] == "prompt"]
    summaries = [row for row in rows if row["kind"] == "cell"]
    assert len(prompts) == 4 * commands.NUM_PROMPTS and len(summaries) == 4
    assert len({suite.key(row) for row in prompts}) == len(prompts)
    for row in prompts:
        assert row["differences"] == [] and row["tokens"] == commands.GEN_TOKENS
        assert row["plain_sha256"] == row["spec_sha256"]
    for summary in summaries:
        texts = {tuple(row["spec_sha256"]["tokens"]) for row in prompts}
        assert summary["texts"] == len(texts)
        assert summary["exact"] and set(summary["equal"].values()) == {
            commands.NUM_PROMPTS
        }
    # Everything is accepted there, so that every row of a window is committed.
    right = [s for s in summaries if s["cell"]["drafter"] == "always-right"]
    assert right[0]["accepted"] == right[0]["proposed"] > 0


def test_a_certificate_holds_what_was_run(finished, folders):
    certificate = certificates.read(finished.certificate)
    assert (
        certificate["exact"] and certificate["prompts"]["count"] == commands.NUM_PROMPTS
    )
    assert certificate["environment"]["instruction_set"]["native"]
    assert len(certificate["weights"]["float32"]["target"]) == 64
    # Bits depend neither on gamma nor on the drafter nor on pages: one list for each
    # of tokens, log-probabilities, logits and K/V.
    assert len(certificate["lists"]) == len(evidence.WHATS)
    assert all(
        len(hashes) == commands.NUM_PROMPTS for hashes in certificate["lists"].values()
    )
    assert certificate["warnings"] == []
    # Nothing of the machine's folders.
    assert str(folders[0].parent) not in finished.certificate.read_text()


def interrupt_after(monkeypatch, count: int) -> None:
    real = suite.run

    def interrupted(plan, *, done):
        yield from itertools.islice(real(plan, done=done), count)
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "run", interrupted)


def test_an_interrupted_run_goes_on(folders, finished, tmp_path, monkeypatch, capsys):
    """Fails if rows are lost or run twice; the certificate is that of one run."""
    out, certificate = tmp_path / "rows.jsonl", tmp_path / "run.json"
    more = ("--out", str(out), *commands.certifying(certificate))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert exactness.main(command(folders, *more)) == cli.INTERRUPTED == 130
    assert "finished rows are in" in capsys.readouterr().err
    assert len(commands.rows_of(out)) == 1 + 3 and not certificate.exists()
    calls, real = [], runs.run_rounds

    def counted(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(runs, "run_rounds", counted)
    assert exactness.main(command(folders, *more)) == exactness.EXACT
    assert len(calls) == 4 * commands.NUM_PROMPTS - 3
    assert "3 are there already" in capsys.readouterr().out
    assert certificate.read_text() == finished.certificate.read_text()


def test_going_on_cannot_lose_rows(folders, finished, tmp_path, monkeypatch):
    """Whatever interrupts it, and whatever half a line a power cut has left."""
    out = tmp_path / "rows.jsonl"
    lines = finished.out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    more = ("--out", str(out))
    real, calls = records.JsonLines.write, []

    def write_once(self, row):
        calls.append(row)
        if len(calls) > 1:
            raise KeyboardInterrupt
        real(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(records.JsonLines, "write", write_once)
        assert exactness.main(command(folders, *more)) == cli.INTERRUPTED
    assert out.read_bytes() == b"".join(lines[:6])
    assert exactness.main(command(folders, *more)) == exactness.EXACT
    assert out.read_bytes() == finished.out.read_bytes()


def test_rows_of_other_settings_are_not_mixed(folders, finished, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    out.write_bytes(finished.out.read_bytes())
    more = ("--out", str(out), "--gen-tokens", "13")
    commands.assert_fails_with(
        capsys, command(folders, *more), "rows.jsonl", "gen_tokens 12, now 13"
    )
    assert out.read_bytes() == finished.out.read_bytes()


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"kind": "summary"}\n', ("something else", "another file")),
        ("{\n", ("line 1", "no JSON")),
        ("[1]\n", ("line 1", "list")),
    ],
)
def test_a_file_of_something_else_is_kept(folders, tmp_path, capsys, content, words):
    out = tmp_path / "other.jsonl"
    out.write_text(content)
    commands.assert_fails_with(
        capsys, command(folders, "--out", str(out)), "other.jsonl", *words
    )
    assert out.read_text() == content


def test_a_certificate_is_verified(folders, finished, capsys):
    assert commands.verify(folders, finished.certificate) == exactness.EXACT
    printed = capsys.readouterr().out
    assert "equal" in printed and "differ" not in printed
    assert "the environment is that of the certificate" in printed
    assert (
        commands.verify(folders, finished.certificate, "--limit", "1")
        == exactness.EXACT
    )


CHANGED = " M spec_jax/rounds.py\n M experiments/plan.py\n M README.md"


@pytest.fixture
def changed(monkeypatch):
    """A checkout with changes that were not committed."""
    real = records._git
    monkeypatch.setattr(
        records, "_git", lambda *a: CHANGED if a[0] == "status" else real(*a)
    )


def test_changed_code_is_not_certified(folders, changed, tmp_path, monkeypatch, capsys):
    """Refused before anything is loaded, or marked: in the certificate, and where it
    is verified."""
    certificate = tmp_path / "run.json"
    one = ("--gamma", "2", "--page-size", "8", "--drafter", "draft-model")
    with monkeypatch.context() as patch:
        patch.setattr(plans, "from_flags", lambda args: pytest.fail("it was planned"))
        commands.assert_fails_with(
            capsys,
            command(folders, "--certificate", str(certificate)),
            *("names the commit", "spec_jax/rounds.py, experiments/plan.py and 1 more"),
            "--allow-dirty",
        )
    assert not certificate.exists()
    flagged = command(folders, *one, *commands.certifying(certificate))
    assert exactness.main(flagged) == exactness.EXACT
    assert certificates.read(certificate)["environment"]["git_dirty"] is True
    assert commands.verify(folders, certificate) == exactness.EXACT
    assert "made of changed code" in capsys.readouterr().out


def test_rows_of_another_commit_are_not_certified(folders, finished, tmp_path, capsys):
    """A certificate names one commit: rows of another one are not taken up."""
    header, *rows = finished.out.read_text().splitlines(keepends=True)
    header = json.loads(header)
    header["environment"]["git_commit"] = "0" * 40
    out = tmp_path / "rows.jsonl"
    out.write_text("".join([json.dumps(header) + "\n", *rows[:3]]))
    before = out.read_bytes()
    more = ("--out", str(out), *commands.certifying(tmp_path / "run.json"))
    commands.assert_fails_with(
        capsys, command(folders, *more), "another run", "environment.git_commit"
    )
    assert out.read_bytes() == before


def test_a_certificate_of_kernels_that_this_machine_lacks(
    folders, finished, tmp_path, monkeypatch, capsys
):
    """Nor are others taken in their place, unless a flag says so."""

    def other(certificate):
        certificate["environment"]["instruction_set"]["native"] = "avx512bf16"

    path = commands.edited(
        finished.certificate, tmp_path / "c.json", other, signed=True
    )
    monkeypatch.setattr(build, "available_isas", lambda: ("avx2", "portable"))
    arguments = [*commands.models(folders), "--verify", str(path)]
    commands.assert_fails_with(
        capsys, arguments, "c.json", "avx512bf16", "it has avx2, portable", "--isa"
    )
    commands.assert_fails_with(
        capsys, [*arguments, "--isa", "avx512"], "--isa avx512", "it has avx2, portable"
    )


@pytest.mark.parametrize("script", [exactness, kernels, latency, spec_round])
def test_a_flag_chooses_the_instructions(monkeypatch, script):
    chosen = []
    monkeypatch.setattr(build, "choose", chosen.append)
    script.parse_args(["--isa", "portable"])
    assert chosen == ["portable"]


@pytest.mark.slow
def test_a_certificate_of_narrower_kernels_is_verified(folders, tmp_path):
    """In processes of their own: the kernels of one are those of its first model."""
    certificate, isa = tmp_path / "run.json", build.available_isas()[-1]
    cell = commands.one_cell(folders, *commands.certifying(certificate), "--isa", isa)
    verify = [*commands.models(folders), "--verify", str(certificate)]
    for arguments in (cell, verify):
        done = subprocess.run(
            [sys.executable, exactness.__file__, *arguments],
            capture_output=True,
            text=True,
        )
        assert done.returncode == exactness.EXACT, done.stderr
    assert "the environment is that of the certificate" in done.stdout
    found = certificates.read(certificate)["environment"]["instruction_set"]
    assert found == {"native": isa}


def forge_first_tokens(certificate: dict) -> None:
    """Another hash of the first prompt's tokens, in every cell."""
    hashes = certificate["lists"][certificate["cells"][0]["spec"]["tokens"]]
    hashes[0] = "0" * 64


def test_an_edited_certificate_is_refused(folders, finished, tmp_path, capsys):
    path = commands.edited(
        finished.certificate, tmp_path / "c.json", forge_first_tokens, signed=False
    )
    commands.assert_fails_with(
        capsys, [*commands.models(folders), "--verify", str(path)], "c.json", "edited"
    )


def test_a_forged_certificate_does_not_agree(folders, finished, tmp_path, capsys):
    """Negative control of --verify: it says in what, and exits with 2."""
    path = commands.edited(
        finished.certificate, tmp_path / "c.json", forge_first_tokens, signed=True
    )
    assert commands.verify(folders, path) == exactness.NOT_EXACT == 2
    base = next(
        line for line in capsys.readouterr().out.splitlines() if "base " in line
    )
    assert base.split()[2:] == ["1", "differ", "equal", "equal", "equal"]


def test_another_environment_is_named(folders, finished, tmp_path, capsys):
    def age(certificate):
        certificate["environment"]["jaxlib_version"] = "0.1.2"

    path = commands.edited(finished.certificate, tmp_path / "c.json", age, signed=True)
    assert commands.verify(folders, path, "--limit", "1") == exactness.EXACT
    assert "jaxlib_version: 0.1.2, now" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": 99}, ("version 99", "version 1")),
        ({"format": "something"}, ("no certificate",)),
    ],
)
def test_certificates_of_other_kinds(
    folders, finished, tmp_path, capsys, change, words
):
    path = commands.edited(
        finished.certificate,
        tmp_path / "c.json",
        lambda c: c.update(change),
        signed=True,
    )
    commands.assert_fails_with(
        capsys, [*commands.models(folders), "--verify", str(path)], *words
    )


def test_files_that_are_no_certificates(folders, tmp_path, capsys):
    arguments = [*commands.models(folders), "--verify"]
    commands.assert_fails_with(
        capsys, [*arguments, str(tmp_path / "nowhere")], "nowhere"
    )
    (tmp_path / "text").write_text("text")
    commands.assert_fails_with(capsys, [*arguments, str(tmp_path / "text")], "no JSON")


def test_a_certificate_of_other_models(folders, finished, tmp_path, capsys):
    commands.assert_fails_with(
        capsys, ["--verify", str(finished.certificate)], "target", "--target"
    )
    other = tiny_pair.write_model(
        tmp_path / "target", tiny_pair.config(num_layers=2), seed=7
    )
    commands.assert_fails_with(
        capsys,
        [*commands.models((other, folders[1])), "--verify", str(finished.certificate)],
        "other weights",
        "target",
    )


def test_a_certificate_of_other_prompts(folders, finished, capsys):
    arguments = [*commands.models(folders), "--verify", str(finished.certificate)]
    commands.assert_fails_with(
        capsys, [*arguments, "--prompts", "3"], "other prompts", "count"
    )


@pytest.mark.parametrize(
    "more, words",
    [
        (("--gamma", "0"), ("--gamma", "0 must be at least 1")),
        (("--gamma", "2,x"), ("--gamma", "2,x")),
        (("--gamma", "4"), ("gamma=4", "slab of 5", "one of 4")),
        (("--impl", "native,cuda"), ("--impl", "cuda", "triton")),
        (("--impl", "triton"), ("triton",)),
        (("--dtype", "float16"), ("--dtype", "float16")),
        (("--drafter", "medusa"), ("--drafter", "medusa")),
        (("--verify-path", "x"), ("--verify-path", "x")),
        (("--cache", "x"), ("--cache", "x")),
        (("--prefill", "x"), ("--prefill", "x")),
        (("--prompts", "0"), ("--prompts 0",)),
        (("--prompts", "1000"), ("1000 prompts", "at most")),
        (("--prompts", "nowhere.jsonl"), ("nowhere.jsonl",)),
        (("--gen-tokens", "2048"), ("py-01", "holds 0")),
        (("--out", "/nowhere/out.jsonl"), ("/nowhere",)),
        (("--certificate", "/nowhere/c.json"), ("/nowhere",)),
        (("--certificate", "."), ("directory",)),
        (("--allow-dirty",), ("--allow-dirty", "--certificate")),
        (("--isa", "sse"), ("--isa", "sse", "portable")),
        (("--limit", "1"), ("--limit", "--verify")),
        (("--verify", "c.json"), ("--verify", "certificate alone")),
    ],
)
def test_unusable_flags(folders, capsys, more, words):
    commands.assert_fails_with(capsys, command(folders, *more), *words)
