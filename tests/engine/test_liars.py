"""No proposal can make the output wrong: drafters that break each of their promises.
Logits that are not finite are counted by every loop, and the host raises.

Proposals of drafters and faults of logits are data, so that all share an executable.
"""

import dataclasses
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_targets
from decoding import GAMMA_MAX, PROMPT, SMALL, Ask
from slow_cases import slow_but

from spec_jax.drafters import ngram
from spec_jax.engine import baseline, checks, protocols, rows


VOCAB_SIZE = SMALL.target.config.vocab_size


def lie(text, *, more=0, start=0, moved=0, prob=1.0) -> dict[str, jax.Array]:
    """Returns the faults of a proposal, which are the memory of `Liar`.

    Args:
      text: what decoding writes.
      more: drafts more than it was asked for.
      start: the first draft that is wrong.
      moved: added to the drafts from there on.
      prob: in place of the probabilities from there on.
    """
    numbers = {"more": more, "start": start, "moved": moved}
    numbers = {name: jnp.int32(number) for name, number in numbers.items()}
    return numbers | {"text": jnp.array(text), "prob": jnp.float32(prob)}


LIES = {
    "none": {},
    "too many": {"more": 3},
    "far too many": {"more": 2**30},
    "negative": {"more": -100},
    "past the vocabulary": {"moved": VOCAB_SIZE},
    "past it, late": {"moved": VOCAB_SIZE, "start": 2},
    "negative tokens": {"moved": -VOCAB_SIZE},
    "negative tokens, late": {"moved": -VOCAB_SIZE, "start": 1, "more": 2},
    "far outside": {"moved": 2**30, "start": 1},
    "NaN probabilities": {"prob": np.nan},
    "NaN probabilities of wrong drafts": {"prob": np.nan, "moved": 1, "start": 1},
    "probabilities of 0": {"prob": 0.0, "start": 1},
    "negative probabilities": {"prob": -1.0, "moved": 1},
    "infinite probabilities": {"prob": np.inf},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Liar:
    """Drafts the text of its request, with the faults of its `lie`."""

    has_probs: bool = False
    gamma_max: int = GAMMA_MAX

    def init(self, *, capacity, page_size):
        return lie(np.zeros(capacity + 1, np.int32))

    def prefill(self, params, memory, prompt):
        return jax.tree.map(jnp.copy, params)

    def propose(self, params, memory, *, tokens, length, gamma):
        offsets = jnp.arange(self.gamma_max, dtype=jnp.int32)
        right = memory["text"].at[length + offsets].get(mode="fill", fill_value=0)
        is_wrong = offsets >= memory["start"]
        drafts = right + jnp.where(is_wrong, memory["moved"], 0)
        probs = None
        if self.has_probs:
            probs = jax.nn.one_hot(drafts, VOCAB_SIZE, dtype=jnp.float32)
            probs = probs * jnp.where(is_wrong, memory["prob"], 1.0)[:, None]
        return memory, protocols.Proposal(
            tokens=drafts, num_drafted=gamma + memory["more"], probs=probs
        )

    def commit(self, params, memory, length):
        return memory


def lots(num_slots: int) -> list[list[Ask]]:
    """Returns batches of sequences that end by their limit, or by a full cache."""
    ends = [(6, None, 0.0), (6, 1, 1.0), (200, None, 0.0), (200, None, 1.0)]
    made = [
        Ask(max_tokens=most, gamma=gamma, sampling=(("temperature", temperature),))
        for most, gamma, temperature in ends
    ]
    return [made] if num_slots == 4 else [[made[0]], [made[1]]]


def request_of(ask: Ask, what: dict, setting=SMALL):
    """Returns a request whose drafts are the greedy text, changed by a lie."""
    greedy = dataclasses.replace(ask, sampling=decoding.COLD, max_tokens=200)
    text = decoding.decoded(setting, greedy).tokens
    return ask.request(draft_params=lie(text, **what))


RULES = [("coupled", False), *itertools.product(("rejection", "block"), (False, True))]
CASES = [
    (*rule, num_slots, impl)
    for rule in RULES
    for num_slots in (1, 4)
    for impl in ("native", "xla")
]
# The cheapest cases of an exact rule and of one that draws uniforms.
QUICK = ("rejection", True, 4, "native"), ("coupled", False, 1, "native")


@pytest.mark.parametrize(
    ("rule", "has_probs", "num_slots", "impl"), slow_but(CASES, *QUICK)
)
def test_no_proposal_makes_the_output_wrong(rule, has_probs, num_slots, impl):
    """Fails if any rule trusts a proposal's number of drafts, or its tokens. At
    temperature 0 every rule writes the text of decoding. Above it, a rule that draws
    uniforms must write as many tokens as decoding, all within the vocabulary."""
    setting = decoding.setting_of(impl)
    scheduler = setting.scheduler(
        Liar(has_probs=has_probs), num_slots=num_slots, rule=rule
    )
    for name, what in LIES.items():
        for wanted in lots(num_slots):
            requests = [request_of(ask, what, setting) for ask in wanted]
            state = decoding.admit(scheduler, requests, draws=True)
            state = decoding.generate(scheduler, state)
            for slot, ask in enumerate(wanted):
                one = decoding.slot_of(state, slot)
                is_greedy = ask.sampling == decoding.COLD
                if is_greedy or rule == "coupled":
                    decoding.assert_as_decoded(setting, state, {slot: ask})
                    if name == "none" and is_greedy:
                        assert one.num_accepted == one.num_proposed > 0
                    continue
                checks.check_slot(one, vocab_size=VOCAB_SIZE)
                assert one.length == decoding.decoded(setting, ask).length, name


MAX_TOKENS, START = 12, len(PROMPT)
SPOILT = {
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
    positions, value, only, _ = SPOILT[name]
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
    for (name, (*_, count)), sampling in itertools.product(SPOILT.items(), DRAWS[rule]):
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
    asked = ((3, 4, 5), ()), ((3, poisoned, 5), decoding.WARM), ((7,), ())
    requests = [Ask(prompt=x, max_tokens=6, sampling=y).request() for x, y in asked]
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
