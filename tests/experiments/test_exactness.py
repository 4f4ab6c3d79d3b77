"""The exactness suite from its command line: rows, resumption, certificates, faults."""

import dataclasses
import importlib.util
import itertools
import json
import pathlib
import subprocess
import sys

import exactness_commands as commands
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
import wrong_targets
from script_runs import assert_fails_with, models_of, rows_of

from experiments import exactness
from experiments.lib import certificates, cli, records, suite, suite_plan as plans
from spec_jax.debug import evidence
from spec_jax.engine import scheduler


pytestmark = pytest.mark.usefixtures("needs_native")
NUM_PROMPTS, NUM_CELLS = commands.NUM_PROMPTS, 6


@pytest.fixture(scope="module")
def finished(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    out, certificate = folder / "rows.jsonl", folder / "run.json"
    more = ("--out", str(out), *commands.certifying(certificate))
    given = commands.several_cells(folders, *more)
    assert exactness.main(given) == 0
    return out, certificate


def test_every_cell_and_prompt_has_a_row(finished):
    header, *rows = rows_of(finished[0])
    assert header["kind"] == "header" and len(header["cells"]) == NUM_CELLS
    assert not any("tree" in cell for cell in header["cells"])  # No tree: no such axis.
    prompts, summaries = (
        [row for row in rows if row["kind"] == kind] for kind in ("prompt", "cell")
    )
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

    def summary(**axes) -> dict:
        """Returns the summary of the first cell that has these values."""
        rows = rows_of(finished[0], "cell")
        return next(row for row in rows if axes.items() <= row["cell"].items())

    greedy, sampled = (
        {
            row["spec_sha256"]["tokens"]
            for row in rows_of(finished[0], "prompt")
            if f" {name} |" in row["cell"]
        }
        for name in ("greedy", "sampled")
    )
    assert not greedy & sampled
    base = summary()
    assert summary(sampling="sampled")["tokens"] == base["tokens"]
    # A batch has the same drafts of the same oracle, and counts them by slot.
    for name in ("tokens", "rounds", "proposed", "accepted"):
        assert summary(batch=2)[name] == base[name]
    assert 0 < summary(gamma_policy="threshold")["proposed"] < base["proposed"]
    assert base["accepted"] == base["proposed"] > 0
    assert summary(drafter="always-wrong")["accepted"] == 0


def test_a_certificate_holds_what_was_run(finished, folders):
    _, path = finished
    certificate = certificates.read(path)
    assert certificate["exact"] and certificate["warnings"] == []
    assert certificate["environment"]["instruction_set"]["native"]
    # Bits depend neither on gamma nor on drafter and batch: each way to sample has one
    # list for each of tokens, log-probabilities, logits and K/V.
    assert len(certificate["lists"]) == 2 * len(evidence.WHATS)
    assert {len(hashes) for hashes in certificate["lists"].values()} == {NUM_PROMPTS}
    # The machine's folders are not in it.
    assert str(folders[0].parent) not in path.read_text()


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
    assert exactness.main(given) == 0
    assert f"{num_rows} are there already" in capsys.readouterr().out
    assert certificate.read_text() == finished[1].read_text()


def edited(certificate: pathlib.Path, path: pathlib.Path, edit) -> pathlib.Path:
    """Writes a certificate after `edit`, rehashed as by a forger; returns its path."""
    content = json.loads(certificate.read_text())
    edit(content)
    del content["sha256"]
    content["sha256"] = certificates.sha256_of(content)
    path.write_text(json.dumps(content))
    return path


def forge_first_tokens(certificate: dict) -> None:
    """Changes the hash of the first prompt's tokens, in every cell that has them."""
    hashes = certificate["lists"][certificate["cells"][0]["spec"]["tokens"]]
    hashes[0] = "0" * 64


def of_batch(certificate: dict, batch: int) -> dict:
    return next(c for c in certificate["cells"] if c["cell"]["batch"] == batch)


def forge_batch(certificate: dict) -> None:
    """Changes the hashes of the batch's logits alone."""
    of_batch(certificate, 2)["spec"]["logits"] = "own"
    certificate["lists"]["own"] = ["0" * 64] * NUM_PROMPTS


def age(certificate: dict) -> None:
    """Makes the certificate like those of earlier versions, with fewer axes."""
    first, batch = (of_batch(certificate, n) for n in (1, 2))
    for axis in ("sampling", "gamma_policy", "batch"):
        del first["cell"][axis]
    certificate["cells"] = [first, batch]
    certificate["environment"]["jaxlib_version"] = "0.1.2"
    del certificate["constants"]


EQUAL = "2 equal equal equal equal"
SAME = "the environment is that of the certificate"


@pytest.mark.parametrize(
    ("edit", "status", "base", "batch", "says"),
    [
        (lambda c: None, 0, EQUAL, EQUAL, SAME),
        (age, 0, EQUAL, EQUAL, "jaxlib_version: 0.1.2, now"),
        # Negative controls.
        (forge_first_tokens, 2, "2 1 differ equal equal equal",
         "2 1 differ equal equal equal", SAME),
        (forge_batch, 2, EQUAL, "2 equal equal 2 differ equal", SAME),
    ],
)  # fmt: skip
def test_a_certificate_is_verified(
    folders, finished, tmp_path, capsys, edit, status, base, batch, says
):
    """Fails if a lacking axis gets a new value, or a prompt of a batch is run alone."""
    path = edited(finished[1], tmp_path / "c.json", edit)
    assert commands.verify(folders, path, "--limit", "1") == status
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert f"base {base}" in lines and f"batch 2 {batch}" in lines
    assert says in printed


@pytest.mark.parametrize("prefill", ["rows", "batched"])
def test_products_of_another_processor_are_told(
    folders, finished, tmp_path, capsys, prefill
):
    """Fails if XLA's other bits on another processor are told of kernels, or not."""

    def edit(certificate: dict) -> None:
        forge_batch(certificate)
        of_batch(certificate, 2)["cell"]["prefill"] = prefill
        certificate["environment"]["cpu"] = "another"

    path = edited(finished[1], tmp_path / "c.json", edit)
    assert commands.verify(folders, path, "--limit", "1") == 2
    assert ("differ by processor" in capsys.readouterr().out) == (prefill == "batched")


def test_certificates_that_mean_something_else(folders, finished, tmp_path, capsys):
    for edit, *words in (
        (lambda c: c.update(version=99), "version 99", "version 1"),
        (lambda c: c["constants"]["sampled"].update(temperature=0.8),
         "other constants", "temperature: 0.8 and 0.7"),
        (lambda c: c["cells"][0]["cell"].update(moon="full"),
         "cells of moon", "does not know"),
        (lambda c: c["weights"]["float32"].update(target="0" * 64),
         "other weights", "target: 0000"),
    ):  # fmt: skip
        path = edited(finished[1], tmp_path / "c.json", edit)
        arguments = [*models_of(folders), "--verify", str(path)]
        assert_fails_with(exactness.main, capsys, arguments, *words)


CHANGED = " M spec_jax/load.py\n M experiments/sweep.py\n M README.md"


def test_changed_code_is_not_certified(folders, tmp_path, monkeypatch, capsys):
    """Fails unless changed code is refused at once, or, if allowed, told twice."""
    real, certificate = records._git, tmp_path / "run.json"
    changed = lambda *a: CHANGED if a[0] == "status" else real(*a)
    monkeypatch.setattr(records, "_git", changed)
    given = commands.several_cells(folders, "--certificate", str(certificate))
    words = "names the commit", "sweep.py, ...)", "spec_jax/load.py", "--allow-dirty"
    with monkeypatch.context() as patch:
        patch.setattr(plans, "from_flags", lambda args: pytest.fail("it was planned"))
        assert_fails_with(exactness.main, capsys, given, *words)
    assert not certificate.exists()
    flagged = commands.one_cell(folders, *commands.certifying(certificate))
    assert exactness.main(flagged) == 0
    assert certificates.read(certificate)["environment"]["git_dirty"] is True
    assert commands.verify(folders, certificate) == 0
    assert "made of changed code" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scales", "status", "field", "words"),
    [
        ({"final_norm": 3e38}, 2, "nonfinite_logits",
         "hold NaN or infinity: equality means nothing there"),
        ({"others": 0.0}, 0, "constant_logits",
         "are all equal: they prove nothing"),
    ],
)  # fmt: skip
def test_equal_bits_that_mean_nothing(tmp_path, capsys, scales, status, field, words):
    """Fails if a certificate does not warn of logits of NaN, or of weights of zero."""
    folders = tiny_pair.write_scaled(tmp_path, **scales)
    path = tmp_path / "run.json"
    given = ("--batch", "2", *commands.certifying(path))
    found = exactness.main(commands.one_cell(folders, *given))
    certificate = certificates.read(path)
    is_exact = status == 0
    assert found == status and certificate["exact"] is is_exact
    (cell,) = certificate["cells"]
    assert set(cell["equal"].values()) == {commands.NUM_PROMPTS}
    assert 0 < cell[field] <= cell["tokens"] and cell["exact"] is is_exact
    assert not is_exact or cell[field] == commands.NUM_PROMPTS * commands.GEN_TOKENS
    (warning,) = certificate["warnings"]
    assert words in warning and warning in capsys.readouterr().out
    assert commands.verify(folders, path) == status
    assert warning in capsys.readouterr().out


def test_stale_values_are_caught(folders, tmp_path, monkeypatch):
    """Fails if their layer and position are not found, whatever tokens follow."""
    wrong_targets.plant(monkeypatch, wrong_targets.StaleValues)
    status, rows = commands.run_one_cell(folders, tmp_path)
    assert status == 2
    for row in rows:
        (found,) = (d for d in row["differences"] if d["what"] == "kv")
        assert (found["layer"], found["part"]) == (1, "v")
        assert found["position"] == row["prompt_tokens"] - 1


def a_wrong_log_prob(cache, slot):
    at = int(cache.cache.length[slot]) - 2
    wrong = np.nextafter(cache.log_prob[slot, at], np.float32(-99))
    return cache.replace(log_prob=cache.log_prob.at[slot, at].set(wrong))


def pages_of_a_neighbour(cache, slot):
    """Gives each slot of a batch the first page of the other when evidence is read."""
    table = cache.cache.page_table
    table = table.at[:, 0].set(table[::-1, 0])
    return cache.replace(cache=cache.cache.replace(page_table=table))


def another_seed(request):
    """Makes rounds draw with other noise than decoding."""
    seed = request.sampling.seed + jnp.uint32(1)
    settings = request.sampling.replace(seed=seed)
    return dataclasses.replace(request, sampling=settings)


def too_few_tokens(request):
    """Makes rounds end two tokens early."""
    return dataclasses.replace(request, max_tokens=commands.GEN_TOKENS - 2)


@pytest.mark.parametrize(
    ("plant", "sampling", "found"),
    [
        (a_wrong_log_prob, "greedy", {"log_probs"}),
        (another_seed, "sampled", {"tokens"}),
        (too_few_tokens, "greedy", {"tokens"}),
        (pages_of_a_neighbour, "greedy", {"kv"}),
    ],
)
def test_a_fault_is_found(folders, tmp_path, monkeypatch, plant, sampling, found):
    """Fails if it is missed; cells differ in sampling alone, to share programs."""
    of_slot, admit = evidence.of_slot, scheduler.Scheduler.admit

    def admitted(self, state, slot, request):
        return admit(self, state, slot, plant(request))

    def spoilt(state, *, num_prompt, slot):
        state = state.replace(cache=plant(state.cache, slot))
        return of_slot(state, num_prompt=num_prompt, slot=slot)

    if plant in (another_seed, too_few_tokens):
        monkeypatch.setattr(scheduler.Scheduler, "admit", admitted)
    else:
        monkeypatch.setattr(evidence, "of_slot", spoilt)
    cell = ("--batch", "2", "--sampling", sampling)
    status, rows = commands.run_one_cell(folders, tmp_path, *cell)
    assert status == 2
    assert {d["what"] for row in rows for d in row["differences"]} == found


def test_a_slot_is_refilled_while_others_run(folders, tmp_path, monkeypatch):
    """Fails if a slot waits until all prompts of the batch end: three, in two slots."""
    slots, real = [], suite._of_slot
    monkeypatch.setattr(suite, "_of_slot", lambda *a: slots.append(a[1]) or real(*a))
    status, _ = commands.run_one_cell(folders, tmp_path, "--batch", "2")
    assert status == 0 and sorted(slots) in ([0, 0, 1], [0, 1, 1])


CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=2, include_dashboard=False)
print("at", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
"""A program that starts a cluster, which ends with its standard input."""


@pytest.mark.slow
def test_workers_of_ray_write_the_same_certificate(folders, tmp_path):
    """Fails if a cell is lost or run twice; needs the extra `cluster`."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray: pip install -e '.[cluster]'")
    grid = commands.one_cell(folders, "--gamma", "2,1", "--sampling", "greedy,sampled")
    out, alone, shared = (tmp_path / name for name in ("rows", "alone", "shared"))
    assert exactness.main([*grid, *commands.certifying(alone)]) == 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], **pipes) as cluster:
        lines = (line for line in cluster.stdout if line.startswith("at "))
        address = next(lines).removeprefix("at ").strip()
        more = ["--out", str(out), "--ray", address, *commands.certifying(shared)]
        assert exactness.main([*grid, *more]) == 0
    assert shared.read_bytes() == alone.read_bytes()
    prompts = {(row["cell"], row["index"]) for row in rows_of(out, "prompt")}
    assert len(prompts) == len(rows_of(out, "prompt")) == 3 * NUM_PROMPTS
