"""The recorder: what it keeps, and that it moves no bit of what it watches."""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_targets

from spec_jax import autoregressive, rounds, session
from spec_jax.debug import recorder
from spec_jax.native import build
from spec_jax.testing import assert_same_bits, bits


WINDOW = decoding.GAMMA_MAX + 1
NUM_PROMPT = len(decoding.PROMPT)


def recording_of(target) -> recorder.Recorder:
    return recorder.Recorder(target=target, window=WINDOW, top=3)


def begin_plain(target, *, max_tokens=40):
    kv = target.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    return session.begin_plain(
        target, decoding.TARGET_PARAMS, kv, decoding.PROMPT, max_tokens=max_tokens
    )


def generate_plain(watched, state, *, max_steps=10_000):
    return autoregressive.generate(
        watched,
        decoding.TARGET_PARAMS,
        state,
        stop_ids=decoding.NO_STOP,
        max_steps=jnp.int32(max_steps),
    )


def run_plain(target, *, max_tokens=40):
    """Plain decoding with a recorder: the state, with its own cache, and entries."""
    watched = recording_of(target)
    begun = begin_plain(target, max_tokens=max_tokens)
    return watched.detach(generate_plain(watched, watched.attach(begun)))


def run_scripted(target, truth, *, run, gamma=decoding.GAMMA_MAX):
    """Rounds with a recorder, and the drafts of `decoding.script`."""
    watched = recording_of(target)
    begun = decoding.begin_scripted(truth, run=run, target=target)
    return watched.detach(
        decoding.generate(
            decoding.Scripted(), watched.attach(begun), gamma=gamma, target=watched
        )
    )


def decided(recording, state) -> dict[str, np.ndarray]:
    """What the rows that decided the generated tokens saw, as arrays of integers."""
    rows = slice(NUM_PROMPT - 1, int(state.length) - 1)
    names = ("fed", "chosen", "log_prob", "logits_hash", "top_ids", "top_logits")
    names += ("lowest",)
    return {name: bits(np.asarray(getattr(recording, name)))[rows] for name in names}


@pytest.fixture(scope="module")
def native_target():
    try:
        build.load()
    except build.BuildError as error:
        pytest.skip(str(error))
    return decoding.NATIVE


@pytest.fixture(scope="module", params=["xla", "native"])
def target(request):
    if request.param == "native":
        return request.getfixturevalue("native_target")
    return decoding.TARGET


@pytest.fixture(scope="module")
def plain(target):
    return run_plain(target)


@pytest.fixture(scope="module")
def native(native_target):
    """Plain decoding where any target will do: native kernels compile fastest."""
    return run_plain(native_target)


def test_recording_moves_no_bit_of_plain_decoding(native_target, native):
    """Fails if the recorder changes a token, or the K/V."""
    bare = decoding.plain(target=native_target)
    assert_same_bits(native[0], bare)


@pytest.mark.parametrize("run", [0, 2, 9])
def test_recording_moves_no_bit_of_rounds(target, plain, run):
    """Fails if the recorder changes anything at all of the last state."""
    truth = plain[0].tokens
    begun = decoding.begin_scripted(truth, run=run, target=target)
    bare = decoding.generate(decoding.Scripted(), begun, target=target)
    state, _ = run_scripted(target, truth, run=run)
    assert_same_bits(state, bare)


@pytest.mark.parametrize("run", [0, 2, 9])
@pytest.mark.parametrize("gamma", [1, 4])
def test_rounds_record_what_plain_decoding_does(target, plain, run, gamma):
    """Fails if a rolled-back row stays, or an entry stands at another position."""
    state, recording = plain
    rounds_state, rounds_recording = run_scripted(
        target, state.tokens, run=run, gamma=gamma
    )
    assert int(rounds_state.num_rounds) < 40 or run == 0
    assert_same_bits(decided(rounds_recording, rounds_state), decided(recording, state))


def test_entries_are_of_the_logits(plain):
    """Fails if an entry is not that of its own position; the oracle is NumPy's."""
    state, recording = plain
    tokens = np.asarray(state.tokens)
    rows = np.arange(NUM_PROMPT - 1, int(state.length) - 1)
    assert np.array_equal(np.asarray(recording.fed)[rows], tokens[rows])
    assert np.array_equal(np.asarray(recording.chosen)[rows], tokens[rows + 1])
    top_ids, top = np.asarray(recording.top_ids), np.asarray(recording.top_logits)
    assert np.array_equal(top_ids[rows, 0], tokens[rows + 1])
    assert (np.diff(top[rows], axis=-1) <= 0).all()
    lowest = np.asarray(recording.lowest)[rows]
    assert (lowest < top[rows, -1]).all()
    assert (np.asarray(recording.fed)[: NUM_PROMPT - 1] == recorder.NONE).all()


def test_log_probs_and_hashes_are_those_of_one_forward(native_target):
    target, watched = native_target, recording_of(native_target)
    state = decoding.begin_scripted(jnp.zeros((97,), jnp.int32), target=target)
    tokens, start = jnp.asarray([77, 5, 9], jnp.int32), state.length - 1
    forward = jax.jit(watched.forward)
    recording, logits = forward(
        decoding.TARGET_PARAMS,
        watched.attach(state).cache,
        tokens=tokens,
        start=start,
        num_live=jnp.int32(2),
    )
    exact = np.asarray(logits, np.float64)[:2]
    log_probs = exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    rows = slice(NUM_PROMPT - 1, NUM_PROMPT + 1)
    np.testing.assert_allclose(
        np.asarray(recording.log_prob)[rows], log_probs.max(axis=-1), atol=1e-5
    )
    for row in (0, 1):
        assert_same_bits(
            recording.logits_hash[NUM_PROMPT - 1 + row],
            recorder.hash_bits(logits[row]),
        )
    # The third row is dead: it is nowhere.
    assert int(recording.fed[NUM_PROMPT + 1]) == recorder.NONE
    assert int(recording.row[NUM_PROMPT]) == 1
    assert recording.windows[NUM_PROMPT - 1].tolist() == [77, 5, -1, -1, -1]
    assert recording.drafted[rows].tolist() == [-1, 5]


def test_drafts_and_windows_are_those_of_the_last_round(native):
    """Fails if a position keeps the draft of a round that did not decide it."""
    state, _ = native
    truth = np.asarray(state.tokens)
    rounds_state, recording = run_scripted(decoding.NATIVE, state.tokens, run=2)
    drafted, row = np.asarray(recording.drafted), np.asarray(recording.row)
    windows = np.asarray(recording.windows)
    origins = np.asarray(rounds_state.origins)
    for at in range(NUM_PROMPT, int(rounds_state.length)):
        origin = rounds.Origin(origins[at])
        if origin == rounds.Origin.BONUS:
            assert drafted[at] == recorder.NONE
        else:
            is_kept = origin == rounds.Origin.ACCEPTED
            assert (drafted[at] == truth[at]) == is_kept
        window = windows[at - 1 - row[at - 1]]
        assert window[row[at - 1]] == truth[at - 1]


def test_a_round_without_room_records_nothing(native_target):
    """A starved call leaves every entry as it was."""
    target, watched = native_target, recording_of(native_target)
    state, _ = run_plain(target, max_tokens=200)  # until the cache is full
    full = int(state.length) - 1
    before = watched.attach(state).cache
    after, _ = jax.jit(watched.forward)(
        decoding.TARGET_PARAMS,
        before,
        tokens=jnp.asarray([1], jnp.int32),
        start=jnp.int32(full),
        num_live=jnp.int32(1),
    )
    assert bool(target.is_starved(after.cache))
    assert_same_bits(after.replace(cache=None), before.replace(cache=None))


def test_several_calls_record_as_one(native):
    """Fails if an entry is lost when the loop is left and entered again."""
    state, recording = native
    begun = begin_plain(decoding.NATIVE)
    watched = recording_of(decoding.NATIVE)
    again = watched.attach(begun)
    for _ in range(4):
        again = generate_plain(watched, again, max_steps=13)
    assert_same_bits(decided(again.cache, again), decided(recording, state))


def test_the_hash_sees_every_bit(rng):
    """Negative control of "equal hashes": one bit, or an exchange, changes both."""
    logits = rng.standard_normal(64).astype(np.float32)
    expected = np.asarray(recorder.hash_bits(jnp.asarray(logits)))
    flipped = np.broadcast_to(logits.view(np.uint32), (64 * 32, 64)).copy()
    at = np.arange(64 * 32)
    flipped[at, at // 32] ^= np.uint32(1) << (at % 32).astype(np.uint32)
    exchanged = np.stack([np.roll(logits, shift) for shift in range(1, 64)])
    signs = np.tile(logits, (63, 1))  # two sign bits at once cancel in plain sums
    signs[:, 0] *= -1
    signs[np.arange(63), np.arange(1, 64)] *= -1
    hashes = jax.vmap(recorder.hash_bits)
    for name, others in {
        "a bit": flipped.view(np.float32),
        "the order": exchanged,
        "two signs": signs,
    }.items():
        found = np.asarray(hashes(jnp.asarray(others)))
        assert (found != expected).all(axis=-1).all(), name
    assert len(np.unique(np.asarray(hashes(flipped.view(np.float32))), axis=0)) == 2048


def test_the_hash_tells_nans_and_zeros_apart():
    """Fails if values and not bits are hashed."""
    nan = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
    zeros = np.array([0.0, -0.0], np.float32)
    hashes = [
        tuple(np.asarray(recorder.hash_bits(jnp.asarray([x])))) for x in (*nan, *zeros)
    ]
    assert len(set(hashes)) == 5


def test_one_ulp_in_one_row_is_recorded(native):
    """Negative control: the hash differs where such a row decided, and only there."""
    state, recording = native
    watched = recording_of(wrong_targets.OneUlpOff(target=decoding.NATIVE))
    begun = decoding.begin_scripted(state.tokens, run=2, target=decoding.NATIVE)
    wrong, entries = watched.detach(
        decoding.generate(decoding.Scripted(), watched.attach(begun), target=watched)
    )
    assert decoding.text(wrong) == decoding.text(state)
    rows = slice(NUM_PROMPT - 1, int(state.length) - 1)
    differs = np.asarray(entries.logits_hash != recording.logits_hash).any(axis=-1)
    assert np.array_equal(differs[rows], np.asarray(entries.row)[rows] >= 1)
    assert differs[rows].any() and not differs[rows].all()


@pytest.mark.parametrize("name", ["window", "top"])
def test_sizes_below_one_are_refused(name):
    sizes = {"window": 5, "top": 5} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        recorder.Recorder(target=decoding.TARGET, **sizes)


def test_a_window_that_does_not_fit_is_refused():
    watched = recorder.Recorder(target=decoding.TARGET, window=2)
    state = watched.attach(decoding.begin_scripted(jnp.zeros((97,), jnp.int32)))
    with pytest.raises(ValueError, match="3 rows do not fit a recorder of window=2"):
        watched.forward(
            decoding.TARGET_PARAMS,
            state.cache,
            tokens=jnp.zeros((3,), jnp.int32),
            start=state.length - 1,
            num_live=jnp.int32(3),
        )
