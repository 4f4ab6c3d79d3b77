"""Logits that are not finite: every loop counts them, and the host raises."""

import dataclasses
import itertools

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_targets
from decoding import PROMPT, SMALL, Ask

from spec_jax.drafters import ngram
from spec_jax.engine import baseline, rows


MAX_TOKENS, START = 12, len(PROMPT)
VOCAB_SIZE = SMALL.target.config.vocab_size
CASES = {
    "nothing": ((), np.nan, -1, 0),
    "one NaN": ((START + 3,), np.nan, 40, 1),
    "a NaN at the end": ((START,), np.nan, VOCAB_SIZE - 1, 1),
    "one inf": ((START + 2,), np.inf, 7, 1),
    "all -inf": ((START + 5,), -np.inf, -1, 1),
    "one -inf, which masks": ((START + 5,), -np.inf, 7, 0),
    "several": ((START - 1, START + 4, START + 10), np.nan, 0, 3),
    "past the last token": ((START + MAX_TOKENS - 1,), np.nan, 0, 0),
}
"""Positions of the rows, the value, the token (-1: all), and the right count."""


def spoilt(name: str) -> wrong_targets.Spoilt:
    positions, value, only, _ = CASES[name]
    # All cases have three positions, so that they share an executable.
    padded = [*positions, *[-1] * (3 - len(positions))]
    return wrong_targets.Spoilt(
        params=SMALL.weights,
        positions=jnp.asarray(padded, jnp.int32),
        value=jnp.float32(value),
        only=jnp.int32(only),
    )


def rounds(params, ask, text, *, num_slots, rule):
    """Returns the first and the last slot after all rounds of the same sequence."""
    target = rows.SlotRows(model=SMALL.target, num_slots=num_slots)
    scheduler = SMALL.scheduler(
        num_slots=num_slots,
        rule=rule,
        target=wrong_targets.SpoiltLogits(target=target),
        params=(params, None),
    )
    request = ask.request(draft_params=decoding.script(text, run=ask.run))
    state = decoding.admit(scheduler, {0: request, num_slots - 1: request}, draws=True)
    state = decoding.generate(scheduler, state)
    return [decoding.slot_of(state, slot) for slot in {0, num_slots - 1}]


# Where a rule draws uniforms, the drawn tokens are not known.
DRAWS = {"coupled": (decoding.COLD, decoding.WARM), "rejection": (decoding.COLD,)}


@pytest.mark.parametrize(("num_slots", "rule"), [(1, "coupled"), (3, "rejection")])
def test_each_token_from_such_logits_is_counted(num_slots, rule):
    """Fails if decoding or rounds, greedy or drawn, count another number of tokens."""
    target = wrong_targets.SpoiltLogits(target=rows.of(SMALL.target, 1))
    for (name, (*_, count)), sampling in itertools.product(CASES.items(), DRAWS[rule]):
        params, ask = spoilt(name), Ask(max_tokens=MAX_TOKENS, sampling=sampling)
        begun, how = decoding.begun(SMALL, ask), {"max_steps": decoding.FOREVER}
        expected = baseline.generate(target, params, begun, **how)
        assert int(expected.num_nonfinite) == count, name
        for run in (2, decoding.ALWAYS):
            ask = dataclasses.replace(ask, run=run)
            for one in rounds(
                params, ask, expected.tokens, num_slots=num_slots, rule=rule
            ):
                if rule == "coupled":
                    np.testing.assert_array_equal(one.tokens, expected.tokens)
                assert int(one.num_nonfinite) == count, (name, run)


def test_slots_count_their_own():
    """Fails if a NaN in the prompt of one request is counted for another request."""
    poisoned, weights = 60, SMALL.weights
    params = weights.replace(
        embed=weights.embed.at[poisoned].set(jnp.nan), lm_head=weights.embed
    )
    requests = [
        Ask(prompt=prompt, max_tokens=6, sampling=sampling).request()
        for prompt, sampling in (
            ((3, 4, 5), ()),
            ((3, poisoned, 5), decoding.WARM),
            ((7,), ()),
        )
    ]
    scheduler = SMALL.scheduler(
        ngram.PromptLookup(gamma_max=4), num_slots=2, params=(params, None)
    )
    for one in scheduler.run(requests):
        if one.number == 1:
            assert int(one.slot.num_nonfinite) == 6
            with pytest.raises(FloatingPointError, match="6 tokens were chosen"):
                _ = one.tokens
        elif poisoned not in np.asarray(one.slot.tokens):
            assert int(one.slot.num_nonfinite) == 0 and len(one.tokens) == 6
