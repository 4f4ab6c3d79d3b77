"""No proposal can make the output wrong: drafters that break each of their promises.

The proposals of a drafter are data here, so that all lies share an executable.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import GAMMA_MAX, SMALL, Ask
from slow_cases import slow

from spec_jax.engine import checks, protocols, round as round_lib
from spec_jax.rules import acceptance


VOCAB_SIZE = SMALL.target.config.vocab_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lie:
    """The faults of a proposal, which are the memory of `Liar`."""

    text: jax.Array  # [max_len] int32, what decoding writes
    more: jax.Array  # [] int32, drafts more than it was asked for
    start: jax.Array  # [] int32, the first draft that is wrong
    moved: jax.Array  # [] int32, added to the drafts from there on
    prob: jax.Array  # [] float32, in place of the probabilities from there on


def lie(text, *, more=0, start=0, moved=0, prob=1.0) -> Lie:
    return Lie(
        text=jnp.array(text),
        more=jnp.int32(more),
        start=jnp.int32(start),
        moved=jnp.int32(moved),
        prob=jnp.float32(prob),
    )


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
    """Drafts the text of its request, with the faults of its `Lie`."""

    has_probs: bool = False
    gamma_max: int = GAMMA_MAX

    def init(self, *, capacity, page_size):
        return lie(np.zeros(capacity + 1, np.int32))

    def prefill(self, params, memory, prompt):
        return jax.tree.map(jnp.copy, params)

    def propose(self, params, memory, *, tokens, length, gamma):
        offsets = jnp.arange(self.gamma_max, dtype=jnp.int32)
        right = memory.text.at[length + offsets].get(mode="fill", fill_value=0)
        is_wrong = offsets >= memory.start
        drafts = right + jnp.where(is_wrong, memory.moved, 0)
        probs = None
        if self.has_probs:
            probs = jax.nn.one_hot(drafts, VOCAB_SIZE, dtype=jnp.float32)
            probs = probs * jnp.where(is_wrong, memory.prob, 1.0)[:, None]
        return memory, protocols.Proposal(
            tokens=drafts, num_drafted=gamma + memory.more, probs=probs
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


# The cheapest cases of an exact rule and of one that draws uniforms; the others are
# slow.
QUICK = [
    ("rejection", True, 4, "native"),
    ("coupled", False, 1, "native"),
]
OTHERS = [
    (rule, has_probs, num_slots, impl)
    for rule in ("coupled", "rejection", "block")
    for has_probs in ((False,) if rule == "coupled" else (False, True))
    for num_slots in (1, 4)
    for impl in ("native", "xla")
    if (rule, has_probs, num_slots, impl) not in QUICK
]


@pytest.mark.parametrize(
    ("rule", "has_probs", "num_slots", "impl"),
    [*QUICK, *(slow(*case) for case in OTHERS)],
)
def test_no_proposal_makes_the_output_wrong(rule, has_probs, num_slots, impl):
    """Fails if any rule trusts a proposal's number of drafts, or its tokens.

    At temperature 0 every rule writes the text of decoding. Above it, a rule that draws
    uniforms must write as many tokens as decoding, all within the vocabulary.
    """
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


TRUSTED = {
    "number": {"too many": "past the limit of 17"},
    "_of_drafts": {
        "past the vocabulary": r"outside \[0, 96\)",
        "negative tokens": r"outside \[0, 96\)",
    },
}


@pytest.mark.parametrize("fault", TRUSTED)
def test_trust_in_a_drafter_is_caught(fault, monkeypatch):
    """Negative control: without a bound the checks name the wrong tokens or length."""

    class OfThisTest(Liar):
        """A class of this test alone: nothing is compiled for it yet."""

    ask = lots(1)[0][0]
    rule = "coupled" if fault == "number" else "rejection"
    scheduler = SMALL.scheduler(OfThisTest(), rule=rule)
    if fault == "number":
        unbounded = _Patched(round_lib.jnp, clip=lambda x, low, high: x)
        monkeypatch.setattr(round_lib, "jnp", unbounded)
    else:
        certain = lambda probs, tokens: jnp.ones(tokens.shape, jnp.float32)
        monkeypatch.setattr(acceptance, fault, certain)
    for name, message in TRUSTED[fault].items():
        state = decoding.admit(scheduler, [request_of(ask, LIES[name])])
        state = decoding.generate(scheduler, state)
        with pytest.raises(RuntimeError, match=message):
            checks.check_slot(decoding.slot_of(state), vocab_size=VOCAB_SIZE)


class _Patched:
    """A module with some of its functions replaced."""

    def __init__(self, module, **names):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)
