"""Logits that are not finite: counted by every loop, and raised at the edge."""

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_targets
from spec_jax.batch import lookups, queue, rows

from spec_jax import autoregressive, rounds, session
from spec_jax.drafters import ngram
from spec_jax.model import row_model
from spec_jax.ops import dispatch
from spec_jax.rules import sampling


PROMPT, MAX_TOKENS = decoding.PROMPT, 12
START = len(PROMPT)
CONFIG, PARAMS = decoding.DRAFT_CONFIG, decoding.DRAFT_PARAMS
SIZES = {"capacity": decoding.CAPACITY, "page_size": decoding.PAGE_SIZE}
CASES = {
    "nothing": ((), np.nan, -1, 0),
    "one NaN": ((START + 3,), np.nan, 40, 1),
    "a NaN at the end": ((START,), np.nan, CONFIG.vocab_size - 1, 1),
    "one inf": ((START + 2,), np.inf, 7, 1),
    "all -inf": ((START + 5,), -np.inf, -1, 1),
    "one -inf, which masks": ((START + 5,), -np.inf, 7, 0),
    "several": ((START - 1, START + 4, START + 10), np.nan, 0, 3),
    "past the last token": ((START + MAX_TOKENS - 1,), np.nan, 0, 0),
}
"""Positions of the rows, the value, the token (-1: all), and how many to count."""


def make_target(impl: str) -> row_model.RowModel:
    try:
        dispatch.resolve(impl)
    except NotImplementedError as error:
        pytest.skip(str(error))
    return row_model.RowModel(config=CONFIG, impl=impl, slab=decoding.GAMMA_MAX + 1)


def spoilt(name: str) -> wrong_targets.Spoilt:
    positions, value, only, _ = CASES[name]
    # As many for all cases, so that they share an executable.
    padded = [*positions, *[-1] * (3 - len(positions))]
    return wrong_targets.Spoilt(
        params=PARAMS,
        positions=jnp.asarray(padded, jnp.int32),
        value=jnp.float32(value),
        only=jnp.int32(only),
    )


def plain(model, params, settings):
    kv = model.new_cache(**SIZES)
    state = session.begin_plain(
        model, PARAMS, kv, PROMPT, max_tokens=MAX_TOKENS, settings=settings
    )
    return autoregressive.generate(
        wrong_targets.SpoiltLogits(target=model),
        params,
        state,
        stop_ids=decoding.NO_STOP,
        max_steps=decoding.FOREVER,
    )


def speculative(model, params, settings, text, *, run, rule):
    state = rounds.init_state(
        jnp.asarray(np.pad(PROMPT, (0, decoding.CAPACITY + 1 - START)), jnp.int32),
        length=jnp.int32(START),
        limit=jnp.int32(START + MAX_TOKENS),
        cache=session.prefill(model, PARAMS, model.new_cache(**SIZES), PROMPT),
        memory=decoding.script(text, run=run),
        gamma_max=decoding.GAMMA_MAX,
        settings=settings,
    )
    return rounds.generate(
        wrong_targets.SpoiltLogits(target=model),
        decoding.Scripted(),
        (params, None),
        state,
        gamma=jnp.int32(4),
        stop_ids=decoding.NO_STOP,
        max_rounds=decoding.FOREVER,
        rule=rule,
    )


@pytest.mark.parametrize("impl", ["xla", "native"])
def test_each_token_from_such_logits_is_counted(impl):
    """Greedily and drawn, in plain decoding and in rounds: the same number."""
    model = make_target(impl)
    for name, (*_, count) in CASES.items():
        params = spoilt(name)
        for temperature in (0.0, 0.8):
            settings = sampling.make_settings(temperature=temperature)
            expected = plain(model, params, settings)
            assert int(expected.num_nonfinite) == count, (name, temperature)
            for run in (2, decoding.ALWAYS):
                state = speculative(
                    model,
                    params,
                    settings,
                    expected.tokens,
                    run=run,
                    rule="sample-path",
                )
                assert decoding.text(state) == decoding.text(expected)
                assert int(state.num_nonfinite) == count, (name, temperature, run)
                assert state.num_nonfinite.dtype == jnp.int32
            if count:
                message = f"{count} tokens were chosen from logits that hold NaN or inf"
                for found in (expected, state):
                    with pytest.raises(FloatingPointError, match=message):
                        session.check_state(found)
            else:
                session.check_state(state)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_by_odds_count_them_too(rule):
    model = make_target("native")
    greedy = sampling.make_settings(temperature=0.0)
    for name, (*_, count) in CASES.items():
        params = spoilt(name)
        text = plain(model, params, greedy).tokens
        state = speculative(model, params, greedy, text, run=decoding.ALWAYS, rule=rule)
        assert int(state.num_nonfinite) == count, name


@pytest.mark.parametrize("draws", [False, True])
def test_slots_count_their_own(draws):
    """A NaN that one request meets, in its prompt, is no other request's."""
    model = make_target("native")
    poisoned = 60
    params = PARAMS.replace(
        embed=PARAMS.embed.at[poisoned].set(jnp.nan), lm_head=PARAMS.embed
    )
    settings = sampling.make_settings(temperature=0.8) if draws else None
    requests = [
        queue.Request(prompt=prompt, max_tokens=6, settings=settings)
        for prompt in ([3, 4, 5], [3, poisoned, 5], [7, 8])
    ]
    drafter = ngram.PromptLookup(gamma_max=decoding.GAMMA_MAX)
    batch = queue.Batch(
        target=rows.RowBatch(model=model, num_slots=2),
        drafter=lookups.EachSlot(drafter=drafter, num_slots=2),
        params=(params, None),
        **SIZES,
    )
    for one in batch.run(requests):
        if one.number == 1:
            assert int(one.state.num_nonfinite) == 6
            with pytest.raises(FloatingPointError, match="6 tokens were chosen"):
                _ = one.tokens
        elif poisoned not in np.asarray(one.state.tokens):
            assert int(one.state.num_nonfinite) == 0 and len(one.tokens) == 6
