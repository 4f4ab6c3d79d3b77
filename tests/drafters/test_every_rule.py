"""Every rule with every drafter, alone and in slots, greedy and drawn: all of them run.

The rule "coupled" writes what decoding writes; the others do at temperature 0. Above,
what they write is a function of the request alone: the same one in two slots, with
another between them, is written twice.
"""

import dataclasses
import itertools

import decoding
import jax
import pytest
import readme_blocks
from decoding import GAMMA_MAX, SMALL, Ask

from spec_jax.drafters import hybrid, ngram, oracle, suffix
from spec_jax.engine import checks
from spec_jax.rules import rule as rule_lib


CORPUS = suffix.remember(
    suffix.empty_corpus(64), [1, 2, 3, 4, 8, 8, 9, 9, 60, 7, 3, 500]
)
"""Of texts of any tokenizer: what followed `7, 3` there is in no vocabulary here."""
WEIGHTS = decoding.NEARLY_TARGET
DRAFT = decoding.draft_drafter(impl=SMALL.target.impl)
LOOKUP = suffix.SuffixDecoding(gamma_max=GAMMA_MAX)
DRAFTERS = {
    "draft-model": (DRAFT, WEIGHTS),
    "ngram": (ngram.PromptLookup(gamma_max=GAMMA_MAX), None),
    "suffix": (LOOKUP, CORPUS),
    "hybrid": (
        hybrid.Hybrid(suffix=LOOKUP, draft=DRAFT),
        hybrid.HybridParams(draft=WEIGHTS, corpus=CORPUS),
    ),
    "oracle": (oracle.Oracle(gamma_max=GAMMA_MAX, vocab_size=96), None),
    "bigram": (readme_blocks.bigram(gamma_max=GAMMA_MAX, vocab_size=96), None),
}
REPEATS = Ask(prompt=(7, 3, 90, 7, 3, 41, 7, 3), max_tokens=30)
DRAWN = dataclasses.replace(REPEATS, sampling=decoding.WARM, gamma=3)
GREEDY = dataclasses.replace(REPEATS, sampling=decoding.COLD)

QUICK = {
    ("coupled", "suffix", 3),
    ("coupled", "hybrid", 3),
    ("coupled", "oracle", 3),
    ("rejection", "draft-model", 3),
    ("block", "ngram", 1),
    ("block", "bigram", 3),
}
"""Each drafter, rule and number of slots; of these CI runs three.

Compiling a loop that draws takes seconds. The other tests of a drafter run it alone,
and in programs that cannot draw."""

PRODUCT = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(rule_lib.RULES, DRAFTERS, (1, 3))
]


def request_of(name: str, ask: Ask):
    """The request; an oracle's with what decoding writes, now and then wrong."""
    if name != "oracle":
        return ask.request()
    text = decoding.text(decoding.decoded(SMALL, ask))
    return ask.request(draft_params=oracle.make_trace(text, rate=0.75))


@pytest.mark.few(3)
@pytest.mark.parametrize(("rule", "name", "num_slots"), PRODUCT)
def test_every_rule_runs_with_every_drafter(rule, name, num_slots):
    """Fails if a pair has no form for slots, or its tokens are others."""
    drafter, params = DRAFTERS[name]
    scheduler = SMALL.scheduler(
        drafter, num_slots=num_slots, draft_params=params, rule=rule
    )
    lots = [[DRAWN, GREEDY, DRAWN]] if num_slots == 3 else [[DRAWN], [GREEDY]]
    proposed = accepted = 0
    for asks in lots:
        requests = [request_of(name, ask) for ask in asks]
        state = decoding.generate(scheduler, decoding.admit(scheduler, requests))
        checks.check_refused([state.cache, state.memory])
        for slot, ask in enumerate(asks):
            if rule == "coupled" or ask is GREEDY:
                _assert_slot(state, slot, ask)
            one = decoding.slot_of(state, slot)
            checks.check_slot(one, vocab_size=96)
            assert one.length == len(ask.prompt) + ask.max_tokens
        if len(asks) == 3:
            assert decoding.text(state, 0) == decoding.text(state, 2)
        slots = jax.device_get(state.slots)
        proposed += slots.num_proposed.sum()
        accepted += slots.num_accepted.sum()
    assert 0 < proposed and 0 <= accepted <= proposed
    if name == "draft-model":
        assert accepted  # It is nearly the target.


def _assert_slot(state, slot: int, ask: Ask) -> None:
    decoding.assert_as_decoded(SMALL, state, {slot: ask})
