"""No proposal can make the output wrong: drafters that break each of their promises.

The proposals of a drafter are data here, so that all lies share an executable.
"""

import dataclasses
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import GAMMA_MAX, SMALL, Ask
from slow_cases import slow_but

from spec_jax.engine import checks, protocols
from spec_jax.rules import acceptance


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


def test_trust_in_a_drafter_is_caught(monkeypatch):
    """Negative control: if all drafts are certain, the checks name the wrong token."""

    class OfThisTest(Liar):
        """A class of this test alone: nothing is compiled for it yet."""

    certain = lambda probs, tokens: jnp.ones(tokens.shape, jnp.float32)
    monkeypatch.setattr(acceptance, "_of_drafts", certain)
    scheduler, ask = SMALL.scheduler(OfThisTest(), rule="rejection"), lots(1)[0][0]
    for name in ("past the vocabulary", "negative tokens"):
        state = decoding.admit(scheduler, [request_of(ask, LIES[name])])
        state = decoding.generate(scheduler, state)
        with pytest.raises(RuntimeError, match=r"outside \[0, 96\)"):
            checks.check_slot(decoding.slot_of(state), vocab_size=VOCAB_SIZE)
