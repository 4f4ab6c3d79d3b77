"""Drafts that are drawn: with the target's noise kept more often, lawful with any."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import autoregressive, rounds, session
from spec_jax.drafters import draft_model
from spec_jax.model import params as params_lib
from spec_jax.rules import sampling


TARGET = decoding.quickest()
# A draft that is nearly the target: its weights, slightly moved.
DRAFT_PARAMS = jax.tree.map(
    lambda x: x + 0.02 * jax.random.normal(jax.random.key(7), x.shape, x.dtype),
    decoding.TARGET_PARAMS,
)
WARM = {"temperature": 1.5, "top_k": 40}
RULES = {
    "sample-path": "sample-path",
    "rejection": "independent",
    "block": "independent",
}


def drafter_of(draws: draft_model.Draws) -> draft_model.DraftModel:
    model = dataclasses.replace(TARGET, slab=2)
    return draft_model.DraftModel(
        model=model, gamma_max=decoding.GAMMA_MAX, draws=draws
    )


def draft_params(draws, settings) -> params_lib.Params | draft_model.SampledParams:
    if draws == "highest":
        return DRAFT_PARAMS
    return draft_model.SampledParams(weights=DRAFT_PARAMS, settings=settings)


def speculative(draws, settings, *, rule="sample-path", max_tokens=60):
    """All rounds of a drafter that draws."""
    drafter = drafter_of(draws)
    sizes = {"capacity": decoding.CAPACITY, "page_size": decoding.PAGE_SIZE}
    params = (decoding.TARGET_PARAMS, draft_params(draws, settings))
    state = session.begin(
        TARGET,
        drafter,
        params,
        TARGET.new_cache(**sizes),
        drafter.init(**sizes),
        decoding.PROMPT,
        max_tokens=max_tokens,
        settings=settings,
    )
    return rounds.generate(
        TARGET,
        drafter,
        params,
        state,
        gamma=jnp.int32(decoding.GAMMA_MAX),
        stop_ids=decoding.NO_STOP,
        max_rounds=decoding.FOREVER,
        rule=rule,
    )


@pytest.mark.parametrize("draws", draft_model.DRAWS)
def test_the_stream_does_not_depend_on_how_drafts_are_drawn(draws):
    for seed in (1, 2):
        settings = sampling.make_settings(**WARM, seed=seed)
        kv = TARGET.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
        plain = session.begin_plain(
            TARGET,
            decoding.TARGET_PARAMS,
            kv,
            decoding.PROMPT,
            max_tokens=60,
            settings=settings,
        )
        plain = autoregressive.generate(
            TARGET,
            decoding.TARGET_PARAMS,
            plain,
            stop_ids=decoding.NO_STOP,
            max_steps=decoding.FOREVER,
        )
        state = speculative(draws, settings)
        assert decoding.text(state) == decoding.text(plain)


def test_the_targets_noise_raises_acceptance():
    """Close distributions and the same noise: mostly the same token."""
    accepted = {}
    for draws in draft_model.DRAWS:
        states = [
            speculative(draws, sampling.make_settings(**WARM, seed=seed))
            for seed in range(4)
        ]
        proposed = sum(int(state.num_proposed) for state in states)
        accepted[draws] = sum(int(state.num_accepted) for state in states) / proposed
    assert accepted["sample-path"] > accepted["highest"] + 0.1
    assert accepted["sample-path"] > accepted["independent"] + 0.1


def test_greedy_draws_are_the_highest():
    cold = sampling.make_settings(temperature=0.0)
    expected = speculative("highest", cold)
    for draws, rule in (("sample-path", "sample-path"), ("independent", "rejection")):
        state = speculative(draws, cold, rule=rule)
        assert decoding.text(state) == decoding.text(expected)
        assert int(state.num_accepted) == int(expected.num_accepted)


def test_an_unknown_kind_of_draws():
    with pytest.raises(ValueError, match="draws='lowest' is not one of highest"):
        drafter_of("lowest")


SEEDS = 2048
"""Rounds from one state: a frequency of 0.1 is then known to 0.007."""


def first_tokens(rule: str, draws: str, *, target_settings=None) -> np.ndarray:
    """The first two tokens of two rounds, for each seed: `[SEEDS, 2]`.

    Two rounds commit two tokens, whatever they keep: which texts are looked at must
    not depend on what was kept.

    Args:
      target_settings: changes of what the target is told, to plant a bias.
    """
    drafter = drafter_of(draws)
    settings = sampling.make_settings(**WARM)
    sizes = {"capacity": decoding.CAPACITY, "page_size": decoding.PAGE_SIZE}
    state = session.begin(
        TARGET,
        drafter,
        (decoding.TARGET_PARAMS, draft_params(draws, settings)),
        TARGET.new_cache(**sizes),
        drafter.init(**sizes),
        decoding.PROMPT,
        max_tokens=40,
    )
    told = sampling.make_settings(**(WARM | (target_settings or {})))
    n = len(decoding.PROMPT)

    def one(seed):
        params = (
            decoding.TARGET_PARAMS,
            draft_params(draws, settings.replace(seed=seed)),
        )
        after = state.replace(settings=told.replace(seed=seed))
        for _ in range(2):
            after = rounds.run_round(
                TARGET,
                drafter,
                params,
                after,
                gamma=jnp.int32(2),
                stop_ids=decoding.NO_STOP,
                rule=rule,
            )
        return jax.lax.dynamic_slice_in_dim(after.tokens, n, 2)

    seeds = jnp.arange(SEEDS, dtype=jnp.uint32)
    return np.asarray(jax.jit(lambda seeds: jax.lax.map(one, seeds))(seeds))


def law(prefix: list[int]) -> np.ndarray:
    """The target's distribution after a text, `[V]` float64."""
    kv = TARGET.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    kv = session.prefill(TARGET, decoding.TARGET_PARAMS, kv, prefix)
    _, logits = TARGET.forward(
        decoding.TARGET_PARAMS,
        kv,
        tokens=jnp.asarray(prefix[-1:], jnp.int32),
        start=jnp.int32(len(prefix) - 1),
        num_live=jnp.int32(1),
    )
    probs = sampling.distribution(logits[0], sampling.make_settings(**WARM))
    return np.asarray(probs, np.float64)


def sigmas(tokens: np.ndarray, probs: np.ndarray) -> float:
    """How far the worst frequency is off, in standard errors; cells of 20 or more."""
    n = len(tokens)
    counts = np.bincount(tokens, minlength=len(probs))
    assert (counts[probs == 0] == 0).all(), "a token that is filtered out was drawn"
    large = n * probs >= 20
    error = np.abs(counts - n * probs)[large]
    return float((error / np.sqrt(n * probs * (1 - probs))[large]).max())


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_round_has_the_law_of_the_target(rule):
    """2048 seeds: the first token, and the second after the commonest first one.

    Within 5 standard errors in each cell.
    """
    tokens = first_tokens(rule, RULES[rule])
    assert sigmas(tokens[:, 0], law(decoding.PROMPT)) < 5
    commonest = int(np.bincount(tokens[:, 0]).argmax())
    after = tokens[tokens[:, 0] == commonest, 1]
    assert len(after) > 100
    assert sigmas(after, law([*decoding.PROMPT, commonest])) < 5


@pytest.mark.slow
def test_a_temperature_on_one_side_only_is_caught():
    """Negative control: 2048 seeds are enough to see it."""
    biased = first_tokens(
        "rejection", "independent", target_settings={"temperature": 1.1}
    )
    assert sigmas(biased[:, 0], law(decoding.PROMPT)) > 8
