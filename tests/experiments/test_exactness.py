"""The exactness suite from its command line: rows, resumption, certificates, faults."""

import dataclasses
import itertools
import json
import pathlib
import re
import subprocess
import sys

import exactness_commands as commands
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
import wrong_targets

from experiments import exactness
from experiments.lib import (
    cell_runs,
    certificates,
    cli,
    mismatches,
    paths,
    records,
    suite,
    suite_plan as plans,
)
from spec_jax import loading
from spec_jax.debug import evidence
from spec_jax.engine import round as round_lib, scheduler
from spec_jax.native import build


NUM_PROMPTS = commands.NUM_PROMPTS


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return commands.write_pair(tmp_path_factory.mktemp("pair"))


def command(folders, *more: str) -> list[str]:
    """The base, and cells of one other value: most share what they compile."""
    several = (
        *("--gamma", "3,2", "--page-size", "8,16", "--drafter", "oracle,always-wrong"),
        *("--sampling", "greedy,sampled", "--batch", "1,2"),
        *("--gamma-policy", "fixed,threshold"),
    )
    return commands.one_cell(folders, *several, *more)


NUM_CELLS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that was exact: its files."""

    out: pathlib.Path
    certificate: pathlib.Path

    def summary(self, **axes) -> dict:
        """The summary of the first cell that has these values."""
        rows = commands.of_kind(self.out, "cell")
        return next(row for row in rows if axes.items() <= row["cell"].items())


@pytest.fixture(scope="module")
def finished(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    out, certificate = folder / "rows.jsonl", folder / "run.json"
    more = ("--out", str(out), *commands.certifying(certificate))
    assert exactness.main(command(folders, *more)) == exactness.EXACT == 0
    return Finished(out=out, certificate=certificate)


def test_every_cell_and_prompt_has_a_row(finished):
    header, *rows = commands.rows_of(finished.out)
    assert header["kind"] == "header" and len(header["cells"]) == NUM_CELLS
    prompts = [row for row in rows if row["kind"] == "prompt"]
    summaries = [row for row in rows if row["kind"] == "cell"]
    assert len(prompts) == NUM_CELLS * NUM_PROMPTS and len(summaries) == NUM_CELLS
    assert len({suite.key(row) for row in prompts}) == len(prompts)
    for row in prompts:
        assert row["differences"] == [] and row["tokens"] == commands.GEN_TOKENS
        assert row["plain_sha256"] == row["spec_sha256"]
    for summary in summaries:
        # Log-probabilities and logits of batches, too.
        assert summary["exact"] and set(summary["equal"]) == set(evidence.WHATS)
        assert set(summary["equal"].values()) == {NUM_PROMPTS}


def test_each_value_does_what_its_name_says(finished):
    """Fails if a cell is another one in disguise: all of them would be equal."""
    base, sampled = finished.summary(), finished.summary(sampling="sampled")
    tokens = {
        name: {
            row["spec_sha256"]["tokens"]
            for row in commands.of_kind(finished.out, "prompt")
            if f" {name} |" in row["cell"]
        }
        for name in ("greedy", "sampled")
    }
    assert not tokens["greedy"] & tokens["sampled"]
    assert sampled["tokens"] == base["tokens"]
    # The same drafts of the same oracle, in fewer forwards; counted by slot.
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
    # Bits depend neither on gamma nor on drafter, pages and batch: of each way to
    # sample one list for each of tokens, log-probabilities, logits and K/V.
    assert len(certificate["lists"]) == 2 * len(evidence.WHATS)
    assert {len(hashes) for hashes in certificate["lists"].values()} == {NUM_PROMPTS}
    assert certificate["warnings"] == []
    # Nothing of the machine's folders.
    assert str(folders[0].parent) not in finished.certificate.read_text()


@pytest.mark.few(1)
@pytest.mark.parametrize("num_rows", [4, 13])
def test_an_interrupted_run_goes_on(
    folders, finished, tmp_path, monkeypatch, capsys, num_rows
):
    """Fails if rows are lost or run twice, half a batch's too."""
    out, certificate = tmp_path / "rows.jsonl", tmp_path / "run.json"
    more = ("--out", str(out), *commands.certifying(certificate))
    real = suite.run

    def interrupted(plan, **options):
        yield from itertools.islice(real(plan, **options), num_rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(suite, "run", interrupted)
        assert exactness.main(command(folders, *more)) == cli.INTERRUPTED == 130
    assert "finished rows are in" in capsys.readouterr().err
    assert len(commands.rows_of(out)) == 1 + num_rows and not certificate.exists()
    assert exactness.main(command(folders, *more)) == exactness.EXACT
    assert f"{num_rows} are there already" in capsys.readouterr().out
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


def other_commit(content: str) -> str:
    header, *rows = content.splitlines(keepends=True)
    header = json.loads(header)
    header["environment"]["git_commit"] = "0" * 40
    return "".join([json.dumps(header) + "\n", *rows[:3]])


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (None, ("--gen-tokens", "13"), ("gen_tokens 12, now 13",)),
        (other_commit, (), ("another run", "environment.git_commit")),
        ('{"kind": "summary"}\n', (), ("something else", "another file")),
        ("{\n", (), ("line 1", "no JSON")),
        ("[1]\n", (), ("line 1", "list")),
    ],
)
def test_rows_of_something_else_are_kept(
    folders, finished, tmp_path, capsys, content, more, words
):
    out, ours = tmp_path / "rows.jsonl", finished.out.read_text()
    if callable(content):
        content = content(ours)
    out.write_text(ours if content is None else content)
    before = out.read_bytes()
    arguments = command(folders, "--out", str(out), *more)
    commands.assert_fails_with(capsys, arguments, "rows.jsonl", *words)
    assert out.read_bytes() == before


#
# Certificates
#


def line_of(printed: str, label: str) -> list[str]:
    """The cells of a printed row, after its label."""
    (line,) = (row for row in printed.splitlines() if row.startswith(f"{label} "))
    return line.removeprefix(label).split()


def test_a_certificate_is_verified(folders, finished, capsys):
    assert commands.verify(folders, finished.certificate) == exactness.EXACT
    printed = capsys.readouterr().out
    assert line_of(printed, "batch 2") == [str(NUM_PROMPTS), *["equal"] * 4]
    assert "differ" not in printed
    assert "the environment is that of the certificate" in printed


def forge_first_tokens(certificate: dict) -> None:
    """Another hash of the first prompt's tokens, in every cell that has them."""
    hashes = certificate["lists"][certificate["cells"][0]["spec"]["tokens"]]
    hashes[0] = "0" * 64


def forge_batch(certificate: dict) -> None:
    """Other hashes of the batch's logits alone."""
    entry = next(e for e in certificate["cells"] if e["cell"]["batch"] == 2)
    entry["spec"]["logits"] = "own"
    certificate["lists"]["own"] = ["0" * 64] * NUM_PROMPTS


def test_a_forged_certificate_does_not_agree(folders, finished, tmp_path, capsys):
    """Negative control of --verify: it says in what, and exits with 2."""
    for forge, label, differs in (
        (forge_first_tokens, "base", "1 differ equal equal equal"),
        (forge_batch, "batch 2", "equal equal 1 differ equal"),
    ):
        path = commands.edited(finished.certificate, tmp_path / "c.json", forge)
        status = commands.verify(folders, path, "--limit", "1")
        assert status == exactness.NOT_EXACT == 2
        found = line_of(capsys.readouterr().out, label)
        assert " ".join(found) == f"1 {differs}"


def age(certificate: dict) -> None:
    """As those of earlier versions: fewer axes, and batches without logits."""
    first, batch = (
        next(e for e in certificate["cells"] if e["cell"]["batch"] == n) for n in (1, 2)
    )
    for axis in ("sampling", "gamma_policy", "batch"):
        del first["cell"][axis]
    for what in ("log_probs", "logits"):
        batch["spec"][what] = batch["equal"][what] = evidence.NOT_COMPARED
    certificate["cells"] = [first, batch]
    certificate["environment"]["jaxlib_version"] = "0.1.2"
    del certificate["constants"]


def test_certificates_of_earlier_versions(folders, finished, tmp_path, capsys):
    """What they do not hold is not called equal."""
    path = commands.edited(finished.certificate, tmp_path / "c.json", age)
    assert commands.verify(folders, path, "--limit", "1") == exactness.EXACT
    printed = capsys.readouterr().out
    assert line_of(printed, "base") == ["1", *["equal"] * 4]
    assert line_of(printed, "batch 2") == ["1", "equal", "-", "-", "equal"]
    assert "-: not in the certificate" in printed
    assert "jaxlib_version: 0.1.2, now" in printed


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update(version=99), ("version 99", "version 1")),
        (lambda c: c.update(format="something"), ("no certificate",)),
        (
            lambda c: c["constants"]["sampled"].update(temperature=0.8),
            ("other constants", "temperature: 0.8 and 0.7"),
        ),
        (
            lambda c: c["cells"][0]["cell"].update(moon="full"),
            ("cells of moon", "does not know"),
        ),
        (
            lambda c: c["weights"]["float32"].update(target="0" * 64),
            ("other weights", "target: 0000"),
        ),
        (lambda c: c["prompts"].update(count=4), ("other prompts", "count")),
    ],
)
def test_certificates_that_mean_something_else(
    folders, finished, tmp_path, capsys, edit, words
):
    path = commands.edited(finished.certificate, tmp_path / "c.json", edit)
    arguments = [*commands.models(folders), "--verify", str(path)]
    commands.assert_fails_with(capsys, arguments, *words)


def test_files_that_are_no_certificates(folders, finished, tmp_path, capsys):
    arguments = [*commands.models(folders), "--verify"]
    nowhere, text = tmp_path / "nowhere", tmp_path / "text"
    commands.assert_fails_with(capsys, [*arguments, str(nowhere)], "nowhere")
    text.write_text("text")
    commands.assert_fails_with(capsys, [*arguments, str(text)], "no JSON")
    path = commands.edited(
        finished.certificate, tmp_path / "c.json", forge_first_tokens, signed=False
    )
    commands.assert_fails_with(capsys, [*arguments, str(path)], "c.json", "edited")
    commands.assert_fails_with(
        capsys, ["--verify", str(finished.certificate)], "target", "--target"
    )


def test_a_certificate_of_kernels_that_this_machine_lacks(
    folders, finished, tmp_path, monkeypatch, capsys
):
    """Nor are others taken in their place, unless a flag says so."""

    def other(certificate):
        certificate["environment"]["instruction_set"]["native"] = "avx512bf16"

    path = commands.edited(finished.certificate, tmp_path / "c.json", other)
    monkeypatch.setattr(build, "available_isas", lambda: ("avx2", "portable"))
    arguments = [*commands.models(folders), "--verify", str(path)]
    commands.assert_fails_with(
        capsys, arguments, "c.json", "avx512bf16", "it has avx2, portable", "--isa"
    )
    commands.assert_fails_with(
        capsys, [*arguments, "--isa", "avx512"], "--isa avx512", "it has avx2, portable"
    )


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


CHANGED = " M spec_jax/load.py\n M experiments/plan.py\n M README.md"


def test_changed_code_is_not_certified(folders, tmp_path, monkeypatch, capsys):
    """Refused before anything is loaded, or marked: in the certificate, and where it
    is verified."""
    real, certificate = records._git, tmp_path / "run.json"
    monkeypatch.setattr(
        records, "_git", lambda *a: CHANGED if a[0] == "status" else real(*a)
    )
    with monkeypatch.context() as patch:
        patch.setattr(plans, "from_flags", lambda args: pytest.fail("it was planned"))
        commands.assert_fails_with(
            capsys,
            command(folders, "--certificate", str(certificate)),
            *(
                "names the commit",
                "spec_jax/load.py, experiments/plan.py and 1 more",
            ),
            "--allow-dirty",
        )
    assert not certificate.exists()
    flagged = commands.one_cell(folders, *commands.certifying(certificate))
    assert exactness.main(flagged) == exactness.EXACT
    assert certificates.read(certificate)["environment"]["git_dirty"] is True
    assert commands.verify(folders, certificate) == exactness.EXACT
    assert "made of changed code" in capsys.readouterr().out


#
# Faults
#


def certify(folders, tmp_path, *more) -> tuple[int, dict]:
    """One cell: the exit status, and the certificate."""
    certificate = tmp_path / "run.json"
    more = (*more, *commands.certifying(certificate))
    status = exactness.main(commands.one_cell(folders, *more))
    return status, certificates.read(certificate)


def test_logits_that_are_not_finite_are_not_exact(tmp_path, capsys):
    """All bits are equal, and the certificate is of nothing."""
    folders = tiny_pair.write_scaled(tmp_path, final_norm=3e38)
    status, certificate = certify(folders, tmp_path, "--batch", "2")
    assert status == exactness.NOT_EXACT == 2
    assert certificate["exact"] is False
    (cell,) = certificate["cells"]
    assert set(cell["equal"].values()) == {NUM_PROMPTS}
    assert 0 < cell["nonfinite_logits"] <= cell["tokens"] and not cell["exact"]
    (warning,) = certificate["warnings"]
    assert "hold NaN or infinity" in warning
    assert warning in capsys.readouterr().out
    assert commands.verify(folders, tmp_path / "run.json") == exactness.NOT_EXACT
    assert warning in capsys.readouterr().out


def test_constant_logits_prove_nothing(tmp_path, capsys):
    """Weights of zero: equal, whatever went wrong; the certificate says so."""
    folders = tiny_pair.write_scaled(tmp_path, others=0.0)
    status, certificate = certify(folders, tmp_path)
    assert status == exactness.EXACT and certificate["exact"]
    n = NUM_PROMPTS * commands.GEN_TOKENS
    assert certificate["cells"][0]["constant_logits"] == n
    assert certificate["warnings"] == [
        f"{n} of {n} tokens are of logits that are all equal: they prove nothing"
    ]
    assert certificate["warnings"][0] in capsys.readouterr().out


def run_one_cell(folders, tmp_path, *more) -> tuple[int, list[dict]]:
    """The exit status, and the rows of prompts."""
    out = tmp_path / "wrong.jsonl"
    status = exactness.main(commands.one_cell(folders, *more, "--out", str(out)))
    return status, commands.of_kind(out, "prompt")


def around_the_target(monkeypatch, wrong) -> None:
    """Plants a fault in what verifies."""
    real = paths.slot_target
    plant = lambda *arguments: wrong(target=real(*arguments))
    monkeypatch.setattr(paths, "slot_target", plant)


@pytest.mark.parametrize("batch", ["1", "2"])
def test_one_ulp_in_one_row_is_caught(folders, tmp_path, monkeypatch, capsys, batch):
    """The tokens are the same: logits tell, at the second row of the first window."""
    with monkeypatch.context() as patch:
        around_the_target(patch, wrong_targets.OneUlpOff)
        status, rows = run_one_cell(folders, tmp_path, "--batch", batch)
    assert status == exactness.NOT_EXACT and len(rows) == NUM_PROMPTS
    for row in rows:
        found = {d["what"]: d for d in row["differences"]}
        assert "tokens" not in found and "kv" not in found
        assert found["logits"]["position"] == row["prompt_tokens"] + 1
        assert found["logits"]["row"] == 1
        # Two of three rows of each window.
        assert found["logits"]["count"] == commands.GEN_TOKENS * 2 // 3
    printed = capsys.readouterr().out
    assert "row 1 of its window" in printed
    # The window it began in, which the microscope takes up.
    spec = re.search(r"experiments/parity.py --mismatch (\S+:3)", printed)[1]
    found = mismatches.read(spec)
    assert found.position == rows[0]["prompt_tokens"] and len(found.text.window) == 3
    assert (found.acceptance, found.prefill) == ("verify", "rows")
    assert found.starts == (found.position - 1,) and found.window_rows == 4
    # Rows and windows are taken up again as they are.
    first = (tmp_path / "wrong.jsonl").read_bytes()
    status, rows = run_one_cell(folders, tmp_path, "--batch", batch)
    assert status == exactness.NOT_EXACT and len(rows) == NUM_PROMPTS
    assert (tmp_path / "wrong.jsonl").read_bytes() == first


def test_stale_values_are_caught(folders, tmp_path, monkeypatch):
    """Located by layer and position, whatever they do to the tokens after them."""
    around_the_target(monkeypatch, wrong_targets.StaleValues)
    status, rows = run_one_cell(folders, tmp_path)
    assert status == exactness.NOT_EXACT
    for row in rows:
        (found,) = (d for d in row["differences"] if d["what"] == "kv")
        assert (found["layer"], found["part"]) == (1, "v")
        assert found["position"] == row["prompt_tokens"] - 1


def a_wrong_log_prob(monkeypatch) -> None:
    real = evidence.of_slot

    def of_slot(state, *, num_prompt, slot):
        at = int(state.slots.length[slot]) - 3
        log_prob = state.cache.log_prob
        wrong = np.nextafter(log_prob[slot, at], np.float32(-99))
        cache = state.cache.replace(log_prob=log_prob.at[slot, at].set(wrong))
        return real(state.replace(cache=cache), num_prompt=num_prompt, slot=slot)

    monkeypatch.setattr(evidence, "of_slot", of_slot)


def another_seed(monkeypatch) -> None:
    """Rounds draw with other noise than decoding."""
    real = scheduler.Scheduler.admit

    def admit(self, state, slot, request):
        seed = request.sampling.seed + jnp.uint32(1)
        settings = request.sampling.replace(seed=seed)
        return real(self, state, slot, dataclasses.replace(request, sampling=settings))

    monkeypatch.setattr(scheduler.Scheduler, "admit", admit)


def too_few_tokens(monkeypatch) -> None:
    """Rounds of an adaptive gamma end before their time."""
    real = scheduler.Scheduler.admit

    def admit(self, state, slot, request):
        if self.policy_state is not None:
            request = dataclasses.replace(request, max_tokens=commands.GEN_TOKENS - 2)
        return real(self, state, slot, request)

    monkeypatch.setattr(scheduler.Scheduler, "admit", admit)


def pages_of_a_neighbour(monkeypatch) -> None:
    """Each slot of a batch has the first page of the other when it is looked at."""
    real = evidence.of_slot

    def of_slot(state, *, num_prompt, slot):
        kv = state.cache.cache
        table = kv.page_table.at[:, 0].set(kv.page_table[::-1, 0])
        cache = state.cache.replace(cache=kv.replace(page_table=table))
        return real(state.replace(cache=cache), num_prompt=num_prompt, slot=slot)

    monkeypatch.setattr(evidence, "of_slot", of_slot)


@pytest.mark.parametrize(
    ("plant", "cell", "found"),
    [
        (a_wrong_log_prob, (), {"log_probs"}),
        (another_seed, ("--sampling", "sampled"), {"tokens"}),
        (too_few_tokens, ("--gamma-policy", "threshold"), {"tokens"}),
        (pages_of_a_neighbour, ("--batch", "2"), {"kv"}),
    ],
)
def test_a_fault_is_found(folders, tmp_path, monkeypatch, plant, cell, found):
    plant(monkeypatch)
    status, rows = run_one_cell(folders, tmp_path, *cell)
    assert status == exactness.NOT_EXACT
    assert {d["what"] for row in rows for d in row["differences"]} == found
    out = tmp_path / "wrong.jsonl"
    lines = [
        number
        for number, row in enumerate(commands.rows_of(out), start=1)
        if row["kind"] == "mismatch"
    ]
    if plant is pages_of_a_neighbour:
        assert not lines  # It differs from the prompt on.
        return
    assert len(lines) == len([row for row in rows if row["differences"]]) > 0
    for number in lines:
        line = mismatches.read(f"{out}:{number}")
        # Both saw the same logits: what follows from them is at fault.
        assert line.verify_argmax == line.decode_argmax


def test_a_slot_is_refilled_while_others_run(folders, tmp_path, monkeypatch):
    """Fails if a batch is a group that ends together: three prompts in two slots."""
    slots, real = [], cell_runs._of_slot
    monkeypatch.setattr(
        cell_runs, "_of_slot", lambda *a: slots.append(a[1]) or real(*a)
    )
    status, _ = run_one_cell(folders, tmp_path, "--batch", "2")
    assert status == exactness.EXACT and sorted(slots) in ([0, 0, 1], [0, 1, 1])


#
# Trees
#


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
    return Finished(out=out, certificate=certificate)


def test_trees_are_exact(folders, of_trees, capsys):
    """In tokens, log-probabilities, logits and K/V; chains keep the keys they had."""
    chain, search, fixed = commands.of_kind(of_trees.out, "cell")
    assert "tree" not in chain["cell"]
    assert (search["cell"]["tree"], search["cell"]["gamma"]) == ("2x4:7@0.4", 7)
    assert (fixed["cell"]["tree"], fixed["cell"]["gamma"]) == (FIXED, 6)
    for summary in (chain, search, fixed):
        assert summary["exact"]
        assert set(summary["equal"].values()) == {NUM_PROMPTS}
    assert search["proposed"] > 4 * search["rounds"]  # More rows than a slab has.
    assert search["accepted"] > search["rounds"]
    assert " tree " not in commands.of_kind(of_trees.out, "prompt")[0]["cell"]
    # The file of the tree is gone: the certificate has its paths.
    more = ("--limit", "2")
    pair = (folders[0], folders[0])
    assert commands.verify(pair, of_trees.certificate, *more) == exactness.EXACT
    found = line_of(capsys.readouterr().out, "gamma 7, tree 2x4:7@0.4")
    assert found == ["2", *["equal"] * 4]


def test_a_shipped_head_is_known_by_its_name(folders, tmp_path, monkeypatch, capsys):
    """Fails if its certificate needs more than the package to be verified."""
    monkeypatch.setattr(loading, "EMBEDDED_TARGET", folders[0])
    monkeypatch.setattr(loading, "EMBEDDED_DRAFT", folders[1])
    monkeypatch.setattr(loading, "ASSETS", tmp_path)
    tiny_pair.write_block(tmp_path / "dspark", folders[0])
    certificate = tmp_path / "run.json"
    more = ("--drafter", "dspark", "--gamma", "3", *commands.certifying(certificate))
    pair = commands.models(folders)
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


def test_a_head_is_exact(folders, tmp_path, capsys):
    """Chains and a tree of a head, which a certificate names and knows again."""
    head = tiny_pair.write_head(tmp_path / "head", folders[0])
    out, certificate = tmp_path / "rows.jsonl", tmp_path / "run.json"
    more = ("--drafter", str(head), "--tree", "none,2x3:5", "--batch", "2")
    more += ("--sampling", "sampled", "--out", str(out))
    arguments = commands.one_cell(folders, *more, *commands.certifying(certificate))
    assert exactness.main(arguments) == exactness.EXACT
    chain, tree = commands.of_kind(out, "cell")
    for summary in (chain, tree):
        assert summary["cell"]["drafter"] == "eagle3" and summary["proposed"] > 0
        assert set(summary["equal"].values()) == {NUM_PROMPTS}
    assert str(head) not in certificate.read_text()
    assert certificates.read(certificate)["settings"]["head"] == "head"
    again = ("--limit", "2", "--head", str(head))
    assert commands.verify(folders, certificate, *again) == exactness.EXACT
    other = tiny_pair.write_head(tmp_path / "other", folders[0], seed=3)
    for words, named in (
        ("a certificate of head head; give its folder with --head", ()),
        ("was written with other weights", ("--head", str(other))),
    ):
        arguments = [*commands.models(folders), "--verify", str(certificate), *named]
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
        flags = [*commands.models(folders), "--prompts", "4", "--gen-tokens", "8"]
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
    around_the_target(monkeypatch, wrong)
    pair = (folders[0], folders[0])  # All that is drafted can be kept.
    more = ("--drafter", "draft-model", "--tree", "2x4:7")
    status, found = run_one_cell(pair, tmp_path, *more)
    assert status == exactness.NOT_EXACT
    for row in found:
        differences = {d["what"]: d for d in row["differences"]}
        assert what in differences
        assert differences[what]["row"] == (1 if what == "logits" else None)
    assert not commands.of_kind(tmp_path / "wrong.jsonl", "mismatch")
    assert "parity.py looks into chains alone" in capsys.readouterr().out


#
# Flags
#


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gamma", "0"), ("--gamma", "0 must be at least 1")),
        (("--gamma", "2,x"), ("--gamma", "2,x")),
        (("--gamma", "4"), ("gamma=4", "slab of 5", "one of 4")),
        (("--impl", "native,cuda"), ("--impl", "cuda", "triton")),
        (("--impl", "triton"), ("triton",)),
        (("--dtype", "float16"), ("--dtype", "float16")),
        (("--drafter", "medusa"), ("--drafter", "medusa", "always-right")),
        (("--drafter", "nowhere:Medusa"), ("nowhere:Medusa", "No module")),
        (("--verify-path", "x"), ("--verify-path", "x")),
        (("--cache", "x"), ("--cache", "x")),
        (("--prefill", "x"), ("--prefill", "x")),
        (("--sampling", "warm"), ("--sampling", "'warm'", "greedy, sampled")),
        (("--gamma-policy", "random"), ("--gamma-policy", "'random'", "threshold")),
        (("--batch", "0"), ("--batch", "0 must be at least 1")),
        (("--batch", "4"), ("batch=4 needs 4 prompts", "3 are to be run")),
        (("--verify-path", "flash"), ("batch=2", "verify_path=flash")),
        (("--rule", "block"), ("--rule block", "distribution", "coupled")),
        (("--prompts", "0"), ("--prompts 0",)),
        (("--prompts", "1000"), ("1000 prompts", "at most")),
        (("--prompts", "nowhere.jsonl"), ("nowhere.jsonl",)),
        (("--gen-tokens", "2048"), ("py-01", "holds 0")),
        (("--out", "/nowhere/out.jsonl"), ("/nowhere",)),
        (("--certificate", "/nowhere/c.json"), ("/nowhere",)),
        (("--certificate", "."), ("directory",)),
        (("--isa", "sse"), ("--isa", "sse", "portable")),
        (("--tree", "4x12"), ("--tree", "'4x12' is no tree", "4x12:15")),
        (("--tree", "[[0],[0,0]]"), ("--tree", "commas", "NAME.json")),
        (("--tree", "nowhere.json"), ("nowhere.json", "No such file")),
        (("--tree", "2x2:4"), ("2x2:4", "gamma_policy=threshold", "run them apart")),
        (
            ("--tree", "2x2:4", "--gamma-policy", "fixed", "--drafter", "oracle"),
            ("Oracle drafts chains alone",),
        ),
        (
            ("--tree", "2-1", "--verify-path", "row-loop", "--batch", "1"),
            ("verify_path=row-loop", "of chains"),
        ),
        (("--tree", "2-1", "--draft-cache", "round"), ("draft_cache=round",)),
        (("--drafter", "eagle3"), ("needs a head", "none is given")),
        (("--head", "."), ("--drafter: config.json", "No such file")),
        (("--limit", "1"), ("--limit", "--verify")),
        (("--verify", "c.json"), ("--verify", "certificate alone")),
    ],
)
def test_unusable_flags(folders, capsys, more, words):
    commands.assert_fails_with(capsys, command(folders, *more), *words)


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
    """One from outside, and a draft cache of one round; what came before, alone."""
    outside = f"{__name__}:FromOutside"
    cells = ("--drafter", f"{outside},draft-model", "--draft-cache", "round")
    status, rows = run_one_cell(folders, tmp_path, *cells, "--batch", "2")
    assert status == exactness.EXACT and len(rows) == 2 * NUM_PROMPTS
    assert sum(row["proposed"] for row in rows[:NUM_PROMPTS]) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("path", ["row-loop", "library-rows"])
def test_verify_paths(folders, tmp_path, path):
    """By rows bits are equal; negative control: the library's rows are not."""
    status, rows = run_one_cell(folders, tmp_path, "--verify-path", path)
    is_rows = path == "row-loop"
    assert status == (exactness.EXACT if is_rows else exactness.NOT_EXACT)
    assert any(row["differences"] for row in rows) != is_rows
