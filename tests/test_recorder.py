"""The recorder, which changes no bit of what it watches, and comparing evidence."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_targets
from decoding import Ask, Setting
from slow_cases import slow

from spec_jax.debug import evidence, recorder
from spec_jax.engine import baseline, state as states
from spec_jax.testing import assert_same_bits, bits


NUM_PROMPT = len(decoding.PROMPT)
Origin = states.Origin


def run_scripted(target, asks, *, wrong=None):
    """Runs rounds with a recorder, a slot an `Ask`; returns the state and entries."""
    setting = Setting(target=target)
    made = setting.scheduler(num_slots=len(asks))
    state = decoding.admit(made, [decoding.scripted(setting, ask) for ask in asks])
    inner = made.target if wrong is None else wrong(target=made.target)
    watched = recorder.Recorder(target=inner)
    watching = setting.scheduler(num_slots=len(asks), target=watched)
    return watched.detach(decoding.generate(watching, watched.attach(state)))


def decided(recording, length, *, slot=0):
    """Returns entries of the rows that decided the generated tokens, as integers."""
    at = slice(NUM_PROMPT - 1, int(length) - 1)
    names = ("log_prob", "logits_hash", "constant")
    return {n: bits(np.asarray(getattr(recording, n)))[slot, at] for n in names}


@pytest.fixture(scope="module", params=["native", slow("xla")])
def target(request):
    decoding.needs(request.param)
    return decoding.TARGET if request.param == "xla" else decoding.NATIVE


@pytest.fixture(scope="module")
def plain(target):
    """Returns the state of decoding with a recorder, and the entries."""
    watched = recorder.Recorder(target=target)
    state = watched.attach(decoding.begun(Setting(target=target), Ask()))
    how = {"max_steps": decoding.FOREVER}
    return watched.detach(
        baseline.generate(watched, decoding.TARGET_PARAMS, state, **how)
    )


ASKS = (Ask(run=2), Ask(run=0, gamma=1), Ask(run=9, gamma=4))


@pytest.fixture(scope="module")
def rounds(target):
    return run_scripted(target, ASKS)


def test_recording_moves_no_bit(target, plain, rounds):
    """Fails if the recorder changes any bit of the last states."""
    setting = Setting(target=target)
    assert_same_bits(plain[0], decoding.decoded(setting, Ask()))
    assert_same_bits(rounds[0], decoding.run(setting, ASKS))


def test_rounds_record_what_decoding_does(plain, rounds):
    """Fails if a rolled-back row stays, or an entry stands at another position, or in
    another slot."""
    state, recording = plain
    expected = decided(recording, state.length)
    for slot in range(len(ASKS)):
        length = rounds[0].slots.length[slot]
        assert_same_bits(decided(rounds[1], length, slot=slot), expected)
    assert int(rounds[0].slots.num_rounds[2]) < 40


def test_entries_are_of_the_rows_that_decided(plain):
    """Fails if an entry is not of its own position: others are as they were made."""
    state, recording = plain
    row, constant = np.asarray(recording.row[0]), np.asarray(recording.constant[0])
    at = np.arange(NUM_PROMPT - 1, int(state.length) - 1)
    assert not row[at].any() and not constant[at].any()
    assert (np.delete(row, at) == recorder.NONE).all()


def test_the_hash_sees_every_bit(rng):
    """Negative control of "equal hashes": one bit, or the order, changes both words."""
    logits = rng.standard_normal(64).astype(np.float32)
    expected = np.asarray(recorder.hash_bits(jnp.asarray(logits)))
    flipped = np.broadcast_to(logits.view(np.uint32), (64 * 32, 64)).copy()
    at = np.arange(64 * 32)
    flipped[at, at // 32] ^= np.uint32(1) << (at % 32).astype(np.uint32)
    exchanged = np.stack([np.roll(logits, shift) for shift in range(1, 64)])
    signs = np.tile(logits, (63, 1))  # two sign bits at once cancel in plain sums
    signs[:, 0] *= -1
    signs[np.arange(63), np.arange(1, 64)] *= -1
    others = np.concatenate([flipped.view(np.float32), exchanged, signs])
    found = np.asarray(jax.vmap(recorder.hash_bits)(jnp.asarray(others)))
    assert (found != expected).all()
    assert len(np.unique(found[: 64 * 32], axis=0)) == 2048


def test_one_ulp_in_one_row_is_recorded(target, rounds):
    """Negative control: the hash differs where such a row decided, and only there."""
    state, right = rounds
    wrong, entries = run_scripted(target, ASKS, wrong=wrong_targets.OneUlpOff)
    assert decoding.text(wrong) == decoding.text(state)
    at = slice(NUM_PROMPT - 1, int(state.slots.length[0]) - 1)
    differs = np.asarray(entries.logits_hash != right.logits_hash)[0].any(axis=-1)
    assert np.array_equal(differs[at], np.asarray(entries.row)[0, at] >= 1)
    assert differs[at].any() and not differs[at].all()


def make_evidence(**changes) -> evidence.Evidence:
    """Returns evidence of three prompt tokens and five generated, in two layers."""
    rng = np.random.default_rng(3)
    kv = [rng.integers(0, 99, (2, 7, 1, 4), np.uint16) for _ in range(2)]
    made = evidence.Evidence(
        num_prompt=3,
        tokens=np.arange(5, dtype=np.int32),
        log_probs=np.arange(5, dtype=np.uint32),
        logits=np.arange(10, dtype=np.uint32).reshape(5, 2),
        row=np.array([0, 1, 2, 0, 1], np.int32),
        constant=np.zeros(5, bool),
        kv=kv,
    )
    return dataclasses.replace(made, **changes)


def with_change(name: str, at, value) -> evidence.Evidence:
    made = make_evidence()
    if name == "kv":
        made.kv[at[0]][at[1:]] = value
    else:
        getattr(made, name)[at] = value
    return made


@pytest.mark.parametrize(
    "wrong, expected",
    [
        (make_evidence(), []),
        (with_change("tokens", 2, 77), [("tokens", 5, 2, None)]),
        (make_evidence(tokens=np.arange(4, dtype=np.int32)), [("tokens", 7, 1, None)]),
        (with_change("log_probs", 3, 77), [("log_probs", 6, 0, None)]),
        (with_change("logits", (4, 1), 77), [("logits", 7, 1, None)]),
        (with_change("kv", (1, 0, 5, 0, 2), 777), [("kv", 5, None, 1)]),
        (with_change("kv", (0, 1, 0, 0, 0), 777), [("kv", 0, None, 0)]),
    ],
)
def test_differences_are_located(wrong, expected):
    found = evidence.compare(make_evidence(), wrong)
    assert [(d.what, d.position, d.row, d.layer) for d in found] == expected
    hashes = wrong.hashes(), make_evidence().hashes()
    differing = {what for what in evidence.WHATS if hashes[0][what] != hashes[1][what]}
    assert differing == {d.what for d in found}


def test_nothing_is_compared_past_another_token():
    """Fails if logits or K/V after another token count: they hide where it began."""
    wrong = with_change("tokens", 1, 77)
    wrong.log_probs[2:] += 1
    wrong.logits[2:] += 1
    for layer in wrong.kv:
        layer[:, 4:] += 1
    (found,) = evidence.compare(make_evidence(), wrong)
    assert (found.what, found.position) == ("tokens", 4)
    wrong.kv[0][0, 3] += 1  # in the row that chose the token
    found = evidence.compare(make_evidence(), wrong)
    assert [one.what for one in found] == ["tokens", "kv"]


def arrays(value, dtype="float32"):
    return {"a": [np.asarray([1.0, value], dtype)]}


ULP = np.nextafter(np.float32(1), np.float32(2))
PAIRS = ((0.0, -0.0), (np.nan, -np.nan), (np.inf, -np.inf), (1.0, ULP), (0.0, 1e-45))


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_one_other_bit_is_told(left, right):
    """Fails if zeros, NaNs or infinities of other bits pass, or a number an ULP off."""
    for dtype in ("float32", "float64"):
        assert_same_bits(arrays(left, dtype), arrays(left, dtype))
    message = r"here\['a'\]\[0\]: 1 of 2 elements differ"
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(arrays(left), arrays(right), what="here")


def test_other_kinds_of_arrays_are_told():
    for other, words in (
        ([np.ones(2, np.float32)], "different structures"),
        (arrays(1, "float64"), "float32 against .* float64"),
        ({"a": [np.ones(3, np.float32)]}, r"\(2,\) .* against \(3,\)"),
    ):
        with pytest.raises(AssertionError, match=words):
            assert_same_bits(arrays(1), other)
