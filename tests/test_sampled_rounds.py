"""Rounds that sample: the stream of a seed is the same with speculation on or off."""

import decoding
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.ablations import decode_rounds, verify_paths
from spec_jax import autoregressive, rounds, session, testing
from spec_jax.rules import sampling


SETTINGS = {
    "warm": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3},
    "hot": {"temperature": 2.0, "seed": 4},
    "min-p": {"temperature": 1.0, "min_p": 0.05, "seed": 2**32 - 1},
}


def settings_of(name: str, **changes) -> sampling.SamplingSettings:
    return sampling.make_settings(**(SETTINGS[name] | changes))


def plain(settings, *, max_tokens=40, target=decoding.TARGET):
    """Plain decoding that samples."""
    kv = target.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    state = session.begin_plain(
        target,
        decoding.TARGET_PARAMS,
        kv,
        decoding.PROMPT,
        max_tokens=max_tokens,
        settings=settings,
    )
    return autoregressive.generate(
        target,
        decoding.TARGET_PARAMS,
        state,
        stop_ids=decoding.NO_STOP,
        max_steps=decoding.FOREVER,
    )


def speculative(settings, truth, run, *, gamma=4, target=decoding.TARGET):
    """Rounds of a `Scripted` drafter that knows the stream, and is wrong at times."""
    state = decoding.begin_scripted(truth, run=run, target=target)
    return decoding.generate(
        decoding.Scripted(),
        state.replace(settings=sampling.copied(settings)),
        gamma=gamma,
        target=target,
    )


def held(kv):
    return decoding.held(kv, int(kv.length[0]))


@pytest.mark.parametrize(
    "target", [decoding.TARGET, decoding.NATIVE], ids=["xla", "native"]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_stream_is_that_of_plain_decoding(name, target):
    """Fails if noise is keyed by round or row, or a filter sees other rows."""
    settings = settings_of(name)
    expected = plain(settings, target=target)
    for run, gamma in ((0, 4), (1, 1), (1, 4), (3, 3), (100, 4), (100, 0)):
        state = speculative(settings, expected.tokens, run, gamma=gamma, target=target)
        assert decoding.text(state) == decoding.text(expected), (run, gamma)
        testing.assert_same_bits(held(state.cache), held(expected.cache))
        if run == 100 and gamma == 4:
            assert int(state.num_rounds) == 40 // 5
            assert int(state.num_accepted) == int(state.num_proposed)


def test_settings_are_data():
    """Other seeds give other streams, the same one the same, and nothing retraces."""
    texts = [decoding.text(plain(settings_of("hot", seed=seed))) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    compiled = autoregressive.generate._cache_size()
    cold = decoding.text(plain(settings_of("hot", temperature=0.0)))
    assert autoregressive.generate._cache_size() == compiled
    assert cold == decoding.text(decoding.plain())
    assert cold != texts[0]


def test_noise_of_the_round_is_caught():
    """Negative control: a stream whose noise is keyed by anything but position."""
    settings = settings_of("hot")
    expected = plain(settings)
    moved = speculative(
        settings.replace(seed=settings.seed + jnp.uint32(1)), expected.tokens, 100
    )
    assert decoding.text(moved) != decoding.text(expected)


def test_replay_draws_what_plain_decoding_draws():
    settings = settings_of("warm")
    expected = plain(settings)
    kv = decoding.TARGET.new_cache(
        capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE
    )
    kv = session.prefill(decoding.TARGET, decoding.TARGET_PARAMS, kv, decoding.PROMPT)
    n = len(decoding.PROMPT)
    _, chosen = autoregressive.replay(
        decoding.TARGET,
        decoding.TARGET_PARAMS,
        kv,
        tokens=jnp.array(expected.tokens),
        start=jnp.int32(n),
        stop=jnp.int32(n + 40),
        settings=settings,
    )
    testing.assert_same_bits(chosen[: n + 40], expected.tokens[: n + 40])


def test_decoding_decides_the_same_stream():
    settings = settings_of("warm")
    expected = plain(settings)
    inner = decoding.begin_scripted(expected.tokens, run=2)
    inner = inner.replace(settings=sampling.copied(settings))
    kv = decoding.TARGET.new_cache(
        capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE
    )
    kv = session.prefill(decoding.TARGET, decoding.TARGET_PARAMS, kv, decoding.PROMPT)
    state = decode_rounds.generate(
        decoding.TARGET,
        verify_paths.make("flash", decoding.TARGET),
        decoding.Scripted(),
        (decoding.TARGET_PARAMS, None),
        decode_rounds.init_state(inner, commit_cache=kv),
        gamma=jnp.int32(4),
        stop_ids=decoding.NO_STOP,
        max_rounds=decoding.FOREVER,
    )
    assert decoding.text(state.inner) == decoding.text(expected)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_by_odds_at_temperature_zero_are_greedy(rule):
    """A target that is certain keeps what it would say, and says the rest itself."""
    target = decoding.quickest()
    expected = decoding.plain(target=target)
    for run in (0, 2, 100):
        state = decoding.begin_scripted(expected.tokens, run=run, target=target)
        state = rounds.generate(
            target,
            decoding.Scripted(),
            (decoding.TARGET_PARAMS, None),
            state,
            gamma=jnp.int32(4),
            stop_ids=decoding.NO_STOP,
            max_rounds=decoding.FOREVER,
            rule=rule,
        )
        assert decoding.text(state) == decoding.text(expected)
        if run == 100:
            assert int(state.num_accepted) == int(state.num_proposed)
    assert np.asarray(state.tokens).dtype == np.int32


def test_an_unknown_rule():
    state = decoding.begin_scripted(decoding.plain().tokens)
    with pytest.raises(ValueError, match="rule='luck' is not one of sample-path"):
        rounds.run_round(
            decoding.TARGET,
            decoding.Scripted(),
            (decoding.TARGET_PARAMS, None),
            state,
            gamma=jnp.int32(1),
            stop_ids=decoding.NO_STOP,
            rule="luck",
        )
