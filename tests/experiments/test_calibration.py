"""Calibration: scalings that fits must find, and rounds that are recorded."""

import decoding
import jax.numpy as jnp
import numpy as np

from experiments.lib import calibration


TRUE = calibration.Scaling(
    temperatures=np.array([3.0, 1.5, 0.6]), shifts=np.array([-0.7, 0.0, 0.4])
)
"""The scaling that turns the logits of each draft into those of its chance."""


def judged(rng, *, size=12_000):
    """Makes rounds whose drafts are kept with chances that their logits exaggerate."""
    logits = rng.normal(0.8, 1.2, size=(size, len(TRUE.shifts)))
    is_kept = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    accepted = np.sum(np.cumprod(is_kept, axis=1), axis=1)
    logits = (logits - TRUE.shifts) * TRUE.temperatures
    return calibration.Rounds(logits=logits, num_accepted=accepted)


def test_the_scaling_of_confidences_is_found(rng):
    """Fits one half; on the other, other scalings, or a part of one, must be worse."""
    found = calibration.fit_platt(*judged(rng))
    np.testing.assert_allclose(found.temperatures, TRUE.temperatures, rtol=0.1)
    np.testing.assert_allclose(found.shifts, TRUE.shifts, atol=0.1)
    other, none = judged(rng), calibration.Scaling(np.ones(3), np.zeros(3))
    before = calibration.report(other, none)
    after = calibration.report(other, found)
    assert sum(after["ece"]) < 0.15 * sum(before["ece"]) and max(after["ece"]) < 0.02
    assert after["roc_auc"] == before["roc_auc"] and min(after["roc_auc"]) > 0.7
    for wrong in (
        calibration.Scaling(*(x[::-1] for x in found)),
        found._replace(shifts=none.shifts),
        found._replace(temperatures=none.temperatures),
    ):
        made = calibration.report(other, wrong)
        assert sum(made["ece"]) > 5 * sum(after["ece"])
        assert made["roc_auc"] == before["roc_auc"]


class Marked(decoding.Scripted):
    """A drafter whose first chance encodes the place; it drafts two at each fifth."""

    def propose(self, params, memory, *, tokens, length, gamma):
        memory, proposal = super().propose(
            params, memory, tokens=tokens, length=length, gamma=gamma
        )
        halves = jnp.exp2(-jnp.arange(self.gamma_max, dtype=jnp.float32))
        survival = (length + 1).astype(jnp.float32) / 128 * halves
        fewer = jnp.minimum(gamma, jnp.where(length % 5 == 0, 2, self.gamma_max))
        return memory, proposal.replace(survival=survival, num_drafted=fewer)


def rounds_of(ask):
    """Returns where a text's rounds of four drafts begin, and how many they keep."""
    at, end, found = len(ask.prompt), len(ask.prompt) + ask.max_tokens, []
    while at < end:
        drafted = min(4 if at % 5 else 2, end - at)
        right = [(at + i) % (ask.run + 1) != ask.run for i in range(drafted)]
        kept = (right + [False]).index(False)
        if at % 5 and end - at > 5:  # Near the end rounds ask for fewer.
            found.append((at, kept))
        at += kept + 1
    return found


def test_recorded_rounds_have_the_verdicts_of_their_own_drafts():
    """Fails if chances go with drafts of another round, or short rounds count."""
    asks = [decoding.Ask(run=2), decoding.Ask(prompt=(60, 2, 60), run=3)]
    scheduler = decoding.SMALL.scheduler(Marked(), num_slots=2)
    requests = [decoding.scripted(decoding.SMALL, ask) for ask in asks]
    state = decoding.admit(scheduler, requests)
    found = calibration.record_rounds(scheduler.speculator, state, max_rounds=40)
    first = 1 / (1 + np.exp(-found.logits[:, 0].astype(np.float64)))
    begins = np.rint(128 * first - 1).astype(int)
    np.testing.assert_allclose(found.logits[:, 1:], 0, atol=1e-5)  # chances of a half
    pairs = list(zip(begins.tolist(), found.num_accepted.tolist(), strict=True))
    split = int(np.argmax(np.diff(begins) < 0)) + 1  # where the second slot begins
    for own, ask in zip((pairs[:split], pairs[split:]), asks, strict=True):
        right, end = rounds_of(ask), len(ask.prompt) + ask.max_tokens
        assert [pair for pair in own if end - pair[0] > 5] == right
        assert len(right) > 4 and len({kept for _, kept in right}) > 1
        assert all(end - at >= 4 for at, _ in own)
