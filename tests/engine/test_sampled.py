"""Slots that sample, beside greedy ones: each writes the stream of its seed.

With the rule "coupled" that is the stream of decoding, bit for bit. The rules that draw
uniforms keep its law: by `tests/rules` for the rules, here for rounds of a real draft.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import ALWAYS, MIXED, SMALL, Ask

from spec_jax import testing
from spec_jax.engine import baseline, round as round_lib
from spec_jax.model import prompt as prompt_lib
from spec_jax.rules import sampling


SLOTS = pytest.mark.parametrize("num_slots", [1, 3])
KINDS = {
    "warm": decoding.WARM,
    "hot": decoding.HOT,
    "min-p": decoding.MIN_P,
    "greedy": decoding.COLD,
}


@pytest.mark.parametrize(
    ("impl", "num_slots"), [("native", 1), ("native", 3), ("xla", 3)]
)
def test_the_stream_is_that_of_decoding(impl, num_slots):
    """Fails if noise is keyed by round, row or slot, or a filter sees other rows."""
    decoding.needs(impl)
    target = dataclasses.replace(SMALL.target, impl=impl)
    setting = dataclasses.replace(SMALL, target=target)
    for kind in KINDS.values():
        for run, gamma in ((0, 4), (1, 1), (3, 3), (ALWAYS, 4), (ALWAYS, 0)):
            asks = [Ask(run=run, gamma=gamma, sampling=kind), *MIXED[:2]][:num_slots]
            state = decoding.run(setting, asks, draws=True)
            decoding.assert_as_decoded(setting, state, asks)
            if (run, gamma) == (ALWAYS, 4):
                one = decoding.slot_of(state)
                assert one.num_rounds == 40 // 5
                assert one.num_accepted == one.num_proposed


def test_settings_are_data():
    """Other seeds give other streams, the same one the same, and nothing compiles."""
    asks = [Ask(sampling=(("temperature", 2.0), ("seed", seed))) for seed in (1, 2, 1)]
    state = decoding.run(SMALL, asks)
    texts = [decoding.text(state, slot) for slot in range(3)]
    assert texts[0] == texts[2] != texts[1]
    compiled = round_lib.generate._cache_size(), baseline.generate._cache_size()
    cold = [Ask(sampling=decoding.COLD), *asks[:2]]
    state = decoding.run(SMALL, cold)
    decoding.assert_as_decoded(SMALL, state, cold)
    found = round_lib.generate._cache_size(), baseline.generate._cache_size()
    assert found == compiled
    # Temperature 0 writes what a program that cannot draw writes.
    greedy = decoding.text(decoding.decoded(SMALL, Ask()))
    assert decoding.text(state) == greedy != texts[0]


@SLOTS
def test_noise_of_another_seed_is_caught(num_slots):
    """Negative control: a stream whose noise is keyed by anything but its position."""
    asks = [Ask(sampling=decoding.HOT), *MIXED[:2]][:num_slots]
    scheduler = SMALL.scheduler(num_slots=num_slots)
    requests = [decoding.scripted(SMALL, ask) for ask in asks]
    state = decoding.admit(scheduler, requests)
    moved = state.slots.sampling.replace(seed=state.slots.sampling.seed + jnp.uint32(1))
    state = state.replace(slots=state.slots.replace(sampling=moved))
    state = decoding.generate(scheduler, state)
    with pytest.raises(AssertionError):
        decoding.assert_as_decoded(SMALL, state, asks)


@pytest.mark.parametrize(
    ("rule", "num_slots", "draws"),
    [
        ("rejection", 1, True),
        ("rejection", 3, True),
        ("rejection", 3, False),
        ("block", 1, True),
        ("block", 3, True),
    ],
)
def test_rules_by_uniforms_are_greedy_at_temperature_zero(rule, num_slots, draws):
    """A target that is certain keeps what it would say, and says the rest itself."""
    scheduler = SMALL.scheduler(num_slots=num_slots, rule=rule)
    for run in (0, 2, ALWAYS):
        asks = [Ask(run=run), decoding.GREEDY[1], decoding.GREEDY[4]][:num_slots]
        state = decoding.run(SMALL, asks, scheduler=scheduler, draws=draws)
        decoding.assert_as_decoded(SMALL, state, asks)
        if run == ALWAYS:
            one = decoding.slot_of(state)
            assert one.num_accepted == one.num_proposed > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_by_uniforms_write_the_same_in_any_slot(rule):
    """Fails if the noise of a round is keyed by its slot, or a slot reads another's."""
    alone, beside = (SMALL.scheduler(num_slots=n, rule=rule) for n in (1, 3))
    asks = MIXED[:3]
    together = decoding.run(SMALL, asks, scheduler=beside, draws=True)
    kept = 0
    for slot, ask in enumerate(asks):
        expected = decoding.run(SMALL, [ask], scheduler=alone, draws=True)
        testing.assert_same_bits(
            decoding.slot_of(together, slot), decoding.slot_of(expected)
        )
        kept += int(expected.slots.num_accepted[0])
    assert kept


def test_an_unknown_rule():
    scheduler = SMALL.scheduler()
    state = decoding.admit(scheduler, [decoding.scripted(SMALL, Ask())])
    with pytest.raises(ValueError, match="rule='luck' is not one of coupled"):
        round_lib.run_round(scheduler.speculator.replace(rule="luck"), state)


# The law of rounds with a draft model, whose draws are its own.

TARGET = decoding.quickest()
WARM = {"temperature": 1.5, "top_k": 40}
SEEDS = 2048
"""Rounds from one state: a frequency of 0.1 is then known to 0.007."""


def first_tokens(rule, *, num_slots=1, told=WARM, gamma=2) -> np.ndarray:
    """The first two tokens of two rounds, for each seed: `[SEEDS, 2]`.

    Two rounds commit two tokens, whatever they keep: which texts are looked at must
    not depend on what was kept. Of several slots, each has seeds of its own.

    Args:
      told: settings of the target; a draft that is told `WARM` plants a bias.
    """
    drafter = decoding.draft_drafter(TARGET.config, impl=TARGET.impl)
    scheduler = decoding.Setting().scheduler(
        _Told(drafter=drafter) if told != WARM else drafter,
        num_slots=num_slots,
        draft_params=decoding.NEARLY_TARGET,
        rule=rule,
    )
    ask = Ask(gamma=gamma, sampling=tuple(WARM.items()))
    state = decoding.admit(scheduler, [ask.request()] * num_slots)
    settings = sampling.make_settings(**told)
    n = len(decoding.PROMPT)

    def one(seeds):
        spread = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_slots,)), settings)
        slots = state.slots.replace(sampling=spread.replace(seed=seeds))
        after = state.replace(slots=slots)
        for _ in range(2):
            after, _ = round_lib.run_round(scheduler.speculator, after)
        return after.slots.tokens[:, n : n + 2]

    seeds = jnp.arange(SEEDS, dtype=jnp.uint32).reshape(-1, num_slots)
    found = jax.jit(lambda seeds: jax.lax.map(one, seeds))(seeds)
    return np.asarray(found).reshape(SEEDS, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Told:
    """A draft model that is always told `WARM`, whatever the target's settings."""

    drafter: object

    gamma_max = decoding.GAMMA_MAX
    vocab_size = 96

    def for_rule(self, rule):
        return dataclasses.replace(self, drafter=self.drafter.for_rule(rule))

    def for_slots(self, num_slots):
        slots, warm = self.drafter.for_slots(num_slots), sampling.make_settings(**WARM)

        class Told(type(slots)):
            def propose(self, *arguments, sampling, **rest):
                told = jax.tree.map(
                    lambda leaf: jnp.broadcast_to(leaf, (num_slots,)), warm
                ).replace(seed=sampling.seed)
                return super().propose(*arguments, sampling=told, **rest)

        return Told(
            **{f.name: getattr(slots, f.name) for f in dataclasses.fields(slots)}
        )


def law(prefix: list[int]) -> np.ndarray:
    """The target's distribution after a text, `[V]` float64."""
    kv = TARGET.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    kv = prompt_lib.prefill(TARGET, decoding.TARGET_PARAMS, kv, prefix[:-1])
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
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_round_has_the_law_of_the_target(rule, num_slots):
    """2048 seeds: the first token, and the second after the commonest first one.

    Within 5 standard errors in each cell.
    """
    tokens = first_tokens(rule, num_slots=num_slots)
    assert sigmas(tokens[:, 0], law(decoding.PROMPT)) < 5
    commonest = int(np.bincount(tokens[:, 0]).argmax())
    after = tokens[tokens[:, 0] == commonest, 1]
    assert len(after) > 100
    assert sigmas(after, law([*decoding.PROMPT, commonest])) < 5


@pytest.mark.slow
def test_a_temperature_on_one_side_only_is_caught():
    """Negative control: 2048 seeds are enough to see it."""
    biased = first_tokens("rejection", told=WARM | {"temperature": 1.1})
    assert sigmas(biased[:, 0], law(decoding.PROMPT)) > 8
