"""Slots that sample, beside greedy ones: each writes the stream of its seed.

With the rule "coupled" this stream is that of decoding, bit for bit. Rules that draw
uniforms keep its distribution alone: see `test_sequential_law` and `tests/rules`.
"""

import decoding
import pytest
from decoding import ALWAYS, MIXED, SMALL, Ask
from slow_cases import slow

from spec_jax import testing
from spec_jax.engine import baseline


@pytest.mark.parametrize(("impl", "num_slots"), [("native", 3), slow("native", 1)])
def test_the_stream_is_that_of_decoding(impl, num_slots):
    """Fails if noise is keyed by round, row or slot, or a filter sees other rows."""
    setting = decoding.setting_of(impl)
    for kind in (decoding.WARM, decoding.HOT, decoding.MIN_P, decoding.COLD):
        for run, gamma in ((0, 4), (1, 1), (3, 3), (ALWAYS, 4), (ALWAYS, 0)):
            asks = [Ask(run=run, gamma=gamma, sampling=kind), *MIXED[:2]][:num_slots]
            state = decoding.checked(setting, asks, draws=True)
            if (run, gamma) == (ALWAYS, 4):
                one = decoding.slot_of(state)
                assert one.num_rounds == 40 // 5
                assert one.num_accepted == one.num_proposed


def test_settings_are_data():
    """Checks that the seed decides the stream, and that a setting compiles nothing."""

    def write(**sampling):
        ask = Ask(sampling=tuple(sampling.items()))
        return decoding.text(decoding.decoded(SMALL, ask))

    first = write(temperature=2.0, seed=1)
    compiled = baseline.generate._cache_size()
    assert write(temperature=2.0, seed=2) != first
    cold = write(temperature=0.0, seed=1)
    assert baseline.generate._cache_size() == compiled
    # Temperature 0 writes the tokens of a program that cannot draw.
    assert cold == decoding.text(decoding.decoded(SMALL, Ask()))


@pytest.mark.parametrize("rule", [slow("rejection"), "block"])
def test_rules_by_uniforms_write_the_same_in_any_slot(rule):
    """Fails if the noise of a round is keyed by its slot, or a slot reads another's."""
    scheduler = SMALL.scheduler(num_slots=3, rule=rule)
    asks = MIXED[:3]
    together = decoding.run(SMALL, asks, scheduler=scheduler, draws=True)
    kept = 0
    for slot, ask in enumerate(asks):
        other = 2 - slot if slot != 1 else 0
        one = decoding.run(SMALL, {other: ask}, scheduler=scheduler, draws=True)
        testing.assert_same_bits(
            decoding.slot_of(together, slot), decoding.slot_of(one, other)
        )
        kept += int(one.slots.num_accepted[other])
    assert kept
