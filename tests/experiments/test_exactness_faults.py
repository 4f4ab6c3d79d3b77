"""The exactness suite with faults planted: each is found, and named."""

import dataclasses

import exactness_commands as commands
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
import wrong_targets

from experiments import exactness
from experiments.lib import suite
from spec_jax.debug import evidence
from spec_jax.engine import scheduler


pytestmark = pytest.mark.usefixtures("needs_native")


@pytest.mark.parametrize(
    ("scales", "status", "field", "words"),
    [
        ({"final_norm": 3e38}, exactness.NOT_EXACT, "nonfinite_logits",
         "hold NaN or infinity: equality means nothing there"),
        ({"others": 0.0}, exactness.EXACT, "constant_logits",
         "are all equal: they prove nothing"),
    ],
)  # fmt: skip
def test_equal_bits_that_mean_nothing(tmp_path, capsys, scales, status, field, words):
    """Fails if a certificate does not warn: logits that are not finite are not exact,
    and constant ones, of weights of zero, are equal whatever went wrong."""
    folders = tiny_pair.write_scaled(tmp_path, **scales)
    found, certificate = commands.certify(folders, tmp_path, "--batch", "2")
    is_exact = status == exactness.EXACT
    assert found == status and certificate["exact"] is is_exact
    (cell,) = certificate["cells"]
    assert set(cell["equal"].values()) == {commands.NUM_PROMPTS}
    assert 0 < cell[field] <= cell["tokens"] and cell["exact"] is is_exact
    assert not is_exact or cell[field] == commands.NUM_PROMPTS * commands.GEN_TOKENS
    (warning,) = certificate["warnings"]
    assert words in warning and warning in capsys.readouterr().out
    assert commands.verify(folders, tmp_path / "run.json") == status
    assert warning in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["1", "2"])
def test_one_ulp_in_one_row_is_caught(folders, tmp_path, monkeypatch, batch):
    """Fails if equal tokens hide it: logits differ at row 1 of the first window."""
    wrong_targets.plant(monkeypatch, wrong_targets.OneUlpOff)
    status, rows = commands.run_one_cell(folders, tmp_path, "--batch", batch)
    assert status == exactness.NOT_EXACT and len(rows) == commands.NUM_PROMPTS
    for row in rows:
        found = {d["what"]: d for d in row["differences"]}
        assert "tokens" not in found and "kv" not in found
        assert found["logits"]["position"] == row["prompt_tokens"] + 1
        assert found["logits"]["row"] == 1
        # Two of the three rows of each window differ.
        assert found["logits"]["count"] == commands.GEN_TOKENS * 2 // 3


def test_stale_values_are_caught(folders, tmp_path, monkeypatch):
    """Fails if their layer and position are not found, whatever tokens follow."""
    wrong_targets.plant(monkeypatch, wrong_targets.StaleValues)
    status, rows = commands.run_one_cell(folders, tmp_path)
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
    """Makes rounds draw with other noise than decoding."""
    real = scheduler.Scheduler.admit

    def admit(self, state, slot, request):
        seed = request.sampling.seed + jnp.uint32(1)
        settings = request.sampling.replace(seed=seed)
        return real(self, state, slot, dataclasses.replace(request, sampling=settings))

    monkeypatch.setattr(scheduler.Scheduler, "admit", admit)


def too_few_tokens(monkeypatch) -> None:
    """Makes rounds end two tokens early."""
    real = scheduler.Scheduler.admit

    def admit(self, state, slot, request):
        request = dataclasses.replace(request, max_tokens=commands.GEN_TOKENS - 2)
        return real(self, state, slot, request)

    monkeypatch.setattr(scheduler.Scheduler, "admit", admit)


def pages_of_a_neighbour(monkeypatch) -> None:
    """Gives each slot of a batch the first page of the other when evidence is read."""
    real = evidence.of_slot

    def of_slot(state, *, num_prompt, slot):
        kv = state.cache.cache
        table = kv.page_table.at[:, 0].set(kv.page_table[::-1, 0])
        cache = state.cache.replace(cache=kv.replace(page_table=table))
        return real(state.replace(cache=cache), num_prompt=num_prompt, slot=slot)

    monkeypatch.setattr(evidence, "of_slot", of_slot)


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
    plant(monkeypatch)
    cell = ("--batch", "2", "--sampling", sampling)
    status, rows = commands.run_one_cell(folders, tmp_path, *cell)
    assert status == exactness.NOT_EXACT
    assert {d["what"] for row in rows for d in row["differences"]} == found


def test_a_slot_is_refilled_while_others_run(folders, tmp_path, monkeypatch):
    """Fails if a slot waits until all prompts of the batch end: three, in two slots."""
    slots, real = [], suite._of_slot
    monkeypatch.setattr(suite, "_of_slot", lambda *a: slots.append(a[1]) or real(*a))
    status, _ = commands.run_one_cell(folders, tmp_path, "--batch", "2")
    assert status == exactness.EXACT and sorted(slots) in ([0, 0, 1], [0, 1, 1])
