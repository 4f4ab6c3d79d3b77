"""Every drafter through the same checks: tokens, contract, schedule, pages and pools.

The rule "coupled" writes the tokens of decoding; the others do at temperature 0. Above
it, their tokens are a function of the request alone: two slots with the same request,
and others between them, write the same tokens.
"""

import dataclasses
import functools
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import readme_blocks
import test_block as blocks
import test_eagle3 as eagle
import test_peagle as parallel
from decoding import GAMMA_MAX, SMALL, Ask
from slow_cases import slow

from spec_jax import testing
from spec_jax.drafters import choice, each, hybrid, ngram, oracle, suffix, tree_shapes
from spec_jax.engine import checks
from spec_jax.gamma import schedule
from spec_jax.rules import rule as rule_lib


CORPUS = suffix.remember(
    suffix.empty_corpus(64), [1, 2, 3, 4, 8, 8, 9, 9, 60, 7, 3, 500]
)
"""Earlier texts, in which a token outside the vocabulary here follows `7, 3`."""
WEIGHTS = decoding.NEARLY_TARGET
LOOKUP = suffix.SuffixDecoding(gamma_max=GAMMA_MAX)
SEARCHED, FIXED = tree_shapes.parse("2x3:6@1"), tree_shapes.parse("2-2")


def draft_model(impl):
    return decoding.draft_drafter(impl=impl)


def static_model(impl):
    made = draft_model(impl)
    return dataclasses.replace(
        made, model=dataclasses.replace(made.model, cache="static")
    )


def hybrid_of(draft):
    return lambda impl: hybrid.Hybrid(suffix=LOOKUP, draft=draft(impl), threshold=2.0)


def choice_of(draft):
    lookup = ngram.PromptLookup(gamma_max=GAMMA_MAX)
    return lambda impl: choice.Choice(members=(lookup, draft(impl), LOOKUP))


def choice_params(params):
    drafter = choice_of(draft_model)("xla")
    return choice.params_of(drafter, (None, params, CORPUS), draft=0.0, row=0.01)


def windowed(impl):
    return eagle.make(impl, head=dataclasses.replace(eagle.HEAD, window=5))


def block(name):
    return lambda impl: blocks.make(blocks.HEADS[name], impl)


def tree(make, shape):
    return lambda impl: make(impl).for_tree(shape)


def alone(drafter):
    """Returns a maker of a drafter that does not depend on the implementation."""
    return lambda impl: drafter


HYBRID_PARAMS = functools.partial(hybrid.HybridParams, corpus=CORPUS)
NGRAM = ngram.PromptLookup(gamma_max=GAMMA_MAX)
DRAFTERS = {
    "draft-model": (draft_model, WEIGHTS),
    "draft-model, searched": (tree(draft_model, SEARCHED), WEIGHTS),
    "draft-model, fixed": (tree(draft_model, FIXED), WEIGHTS),
    "ngram": (alone(NGRAM), None),
    "ngram, searched": (alone(NGRAM.for_tree(SEARCHED)), None),
    "suffix": (alone(LOOKUP), CORPUS),
    "hybrid": (hybrid_of(draft_model), HYBRID_PARAMS(draft=WEIGHTS)),
    "hybrid of eagle3": (hybrid_of(eagle.make), HYBRID_PARAMS(draft=eagle.PARAMS)),
    "choice": (choice_of(draft_model), choice_params(WEIGHTS)),
    "choice of eagle3": (choice_of(eagle.make), choice_params(eagle.PARAMS)),
    "oracle": (alone(oracle.Oracle(gamma_max=GAMMA_MAX, vocab_size=96)), None),
    "bigram": (alone(readme_blocks.bigram(gamma_max=GAMMA_MAX, vocab_size=96)), None),
    "static draft-model": (static_model, WEIGHTS),
    "eagle3": (eagle.make, eagle.PARAMS),
    "eagle3, searched": (tree(eagle.make, SEARCHED), eagle.PARAMS),
    "eagle3, fixed": (tree(eagle.make, FIXED), eagle.PARAMS),
    "peagle": (parallel.make, parallel.PARAMS),
    "peagle, searched": (tree(parallel.make, SEARCHED), parallel.PARAMS),
    "peagle, fixed": (tree(parallel.make, FIXED), parallel.PARAMS),
    "eagle3 with a window": (windowed, eagle.PARAMS),
    "eagle3 with a window, searched": (tree(windowed, SEARCHED), eagle.PARAMS),
    "dflash": (block("dflash"), blocks.PARAMS["dflash"]),
    "dflash with windows": (block("mixed"), blocks.PARAMS["mixed"]),
    "causal dflash, searched": (
        tree(block("causal"), SEARCHED),
        blocks.PARAMS["causal"],
    ),
    "dflash2": (block("dflash2"), blocks.PARAMS["dflash2"]),
    "dflash2, searched": (tree(block("dflash2"), SEARCHED), blocks.PARAMS["dflash2"]),
    "dspark": (block("dspark"), blocks.PARAMS["dspark"]),
    "rnn": (block("rnn"), blocks.PARAMS["rnn"]),
    "dspark, searched": (tree(block("dspark"), SEARCHED), blocks.PARAMS["dspark"]),
    "rnn, fixed": (tree(block("rnn"), FIXED), blocks.PARAMS["rnn"]),
}
REPEATS = Ask(prompt=(7, 3, 90, 7, 3, 41, 7, 3), max_tokens=30)
DRAWN = dataclasses.replace(REPEATS, sampling=decoding.WARM, gamma=3)
GREEDY = dataclasses.replace(REPEATS, sampling=decoding.COLD, gamma=None)
SHORT = Ask(prompt=(9,), max_tokens=20, gamma=2, sampling=decoding.COLD)
OTHERS = (
    Ask(max_tokens=24, gamma=None),
    Ask(prompt=(9,), max_tokens=20, gamma=None),
    Ask(prompt=tuple(range(30, 50)), max_tokens=18, gamma=None),
)


def make(name, impl=SMALL.target.impl):
    made, params = DRAFTERS[name]
    return made(impl), params


QUICK = (
    ("native", "coupled", "hybrid", 4),
    ("native", "multipath", "draft-model, fixed", 4),
    ("native", "rejection", "dspark", 4),
    ("native", "coupled", "eagle3 with a window, searched", 4),
    ("native", "coupled", "peagle, searched", 4),
)
"""Most kinds of drafter; more would compile too long. `test_sampled` and `test_trees`
run the rule "block", `test_wide_windows` searched trees, all in `tests/engine`."""


def is_possible(impl, rule, name, num_slots):
    """Returns whether a rule takes this drafter's trees."""
    del impl, num_slots
    return rule == "coupled" or "," not in name or name.endswith("fixed")


PRODUCT = itertools.product(("native", "xla"), rule_lib.RULES, DRAFTERS, (1, 4))
REST = [slow(*case) for case in PRODUCT if case not in QUICK and is_possible(*case)]


def request_of(name: str, ask: Ask):
    """Returns the request; an oracle gets decoding's tokens, a quarter made wrong."""
    if name != "oracle":
        return ask.request()
    text = decoding.text(decoding.decoded(SMALL, ask))
    return ask.request(draft_params=oracle.make_trace(text, rate=0.75))


@pytest.mark.parametrize(("impl", "rule", "name", "num_slots"), [*QUICK, *REST])
def test_tokens_are_those_of_decoding(impl, rule, name, num_slots):
    """Fails if a drafter has no form for slots, or changes a token or target K/V."""
    setting, (drafter, params) = decoding.setting_of(impl), make(name, impl)
    scheduler = setting.scheduler(
        drafter, num_slots=num_slots, draft_params=params, rule=rule
    )
    lots = [[DRAWN, SHORT, DRAWN, GREEDY]] if num_slots == 4 else [[DRAWN], [GREEDY]]
    proposed = accepted = 0
    for asks in lots:
        requests = [request_of(name, ask) for ask in asks]
        state = decoding.generate(
            scheduler, decoding.admit(scheduler, requests, draws=True)
        )
        checks.check_refused([state.cache, state.memory])
        for slot, ask in enumerate(asks):
            if rule == "coupled" or ask is not DRAWN:
                decoding.assert_as_decoded(setting, state, {slot: ask})
            one = decoding.slot_of(state, slot)
            checks.check_slot(one, vocab_size=96)
            assert one.length == len(ask.prompt) + ask.max_tokens
        if num_slots == 4:
            assert decoding.text(state, 0) == decoding.text(state, 2)
        if hasattr(state.memory, "kv"):
            decoding.check_cache(state.memory.kv)
        slots = jax.device_get(state.slots)
        proposed += slots.num_proposed.sum()
        accepted += slots.num_accepted.sum()
    assert 0 < proposed and 0 <= accepted <= proposed
    if name.startswith("draft-model"):
        assert accepted  # It is nearly the target.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "name", "most"), [("native", "dspark", 0.8), ("native", "hybrid", 1.0)]
)
def test_scheduled_tokens_are_those_of_decoding(impl, name, most):
    """Fails if a schedule changes a token, or K/V.

    Rows cost time, so that only some drafts are verified, and fewer with an account.
    `engine/test_scheduled_rounds.py` has draft models.
    """
    setting, (drafter, params) = decoding.setting_of(impl), make(name, impl)
    drawn = (("temperature", 1.0), ("seed", 5))
    asks = [dataclasses.replace(ask, sampling=drawn) for ask in OTHERS]
    asks.append(Ask(prompt=(7, 3, 90), max_tokens=9, gamma=None))
    proposed = {}
    for credit in (np.inf, 8.0):
        chosen = schedule.Schedule(gamma_max=drafter.gamma_max, credit=credit)
        rows = np.arange(4 * (drafter.gamma_max + 1) + 1)
        scheduler = setting.scheduler(
            drafter,
            num_slots=len(asks),
            draft_params=params,
            gamma_policy=chosen,
            policy_state=chosen.init(1 + 0.1 * rows, draft_s=0.2),
        )
        state = decoding.rounds(scheduler, asks)
        decoding.assert_as_decoded(setting, state, asks)
        proposed[credit] = int(state.slots.num_proposed.sum())
        if credit == np.inf:
            drafted = drafter.gamma_max * int(state.slots.num_rounds.sum())
    always, weighed = proposed.values()
    assert 0 < weighed <= most * always < most * drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name in DRAFTERS if name != "bigram"],  # `test_readme` has it.
)
def test_every_drafter_keeps_the_contract(name):
    """Fails if a clause is broken, or a head misses features while a hybrid is sure."""
    (drafter, params), bench = make(name), eagle.BENCH
    slab = max(bench.target.slab, drafter.gamma_max + 1)
    target = dataclasses.replace(bench.target, slab=slab)
    bench = dataclasses.replace(bench, target=target)
    if name == "oracle":
        bench = dataclasses.replace(bench, prompts=bench.prompts[:1])
        params = oracle.make_trace(bench.plain(bench.prompts[0]), rate=0.6)
    assert testing.check_drafter(drafter, params, bench) == tuple(testing.CLAUSES)


@pytest.mark.parametrize("name", ["draft-model", "eagle3", "dspark"])
def test_rules_without_these_trees(name):
    """Fails if a rule by uniforms takes trees whose shape depends on their tokens."""
    drafter, _ = make(f"{name}, searched")
    for rule in ("rejection", "block"):
        with pytest.raises(NotImplementedError, match="fixed shape such as '4-2-1'"):
            each.lift(drafter, 2, rule=rule)


def test_trees_whose_siblings_are_drawn_with_replacement():
    """Fails if "multipath" takes siblings that are not drawn with replacement."""
    fixed, _ = make("draft-model, fixed")
    drawn = each.lift(fixed, 2, rule="multipath").drafter
    assert drawn.tree.replaces and not fixed.tree.replaces
    assert str(drawn.tree) == str(fixed.tree) == "2-2"
    paths = tree_shapes.parse("[[0],[1],[0,0]]")
    uneven = draft_model(SMALL.target.impl).for_tree(paths)
    certain = dataclasses.replace(fixed, draws="greedy")
    lookup, _ = make("ngram, searched")
    for drafter, words in (
        (uneven, "a branching such as '4-1-1'"),
        (certain, "siblings that are drawn"),
        (lookup, "drawn with replacement"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            each.lift(drafter, 2, rule="multipath")


@pytest.mark.parametrize("name", ["draft-model", "eagle3", "dspark"])
def test_what_each_rule_draws(name):
    """Fails if a rule by uniforms gets coupled drafts, which have no probabilities."""
    drafter, _ = make(name)
    for rule in rule_lib.RULES:
        draws = "coupled" if rule == "coupled" else "independent"
        assert each.lift(drafter, 2, rule=rule).drafter.draws == draws


def first_of(first, *others):
    """Parametrizes `name`: the first drafter, and others that are slow."""
    later = [slow(name) for name in others]
    return pytest.mark.parametrize("name", [first, *later])


@first_of("hybrid", "draft-model", "eagle3", "dspark", "peagle")
def test_where_pages_run_out_fewer_drafts_are_made(name):
    """Fails if a slot waits for a page, drafts without one, or takes another slot's."""
    drafter, params = make(name)
    scheduler = SMALL.scheduler(drafter, num_slots=4, draft_params=params)
    asks = [*OTHERS, dataclasses.replace(DRAWN, gamma=None)]
    counts = []
    for num_free in (None, 1):
        state = decoding.admit(scheduler, [ask.request() for ask in asks], draws=True)
        if num_free is not None:
            kv = getattr(state.memory, "kv", state.memory)
            few = kv.replace(num_free=jnp.int32(num_free))
            memory = few if kv is state.memory else state.memory.replace(kv=few)
            state = state.replace(memory=memory)
        state = decoding.generate(scheduler, state)
        decoding.assert_as_decoded(SMALL, state, asks)
        counts.append(int(state.slots.num_proposed.sum()))
    assert 0 < counts[1] < counts[0]


@first_of("draft-model", "hybrid", "eagle3", "dspark", "peagle")
def test_the_pool_of_a_drafter_is_not_copied(name):
    """Fails if a proposal copies the pool of the drafter."""
    drafter, params = make(name)
    slots = each.lift(drafter, 3)
    memory = slots.init(capacity=20_000, page_size=8)
    decoding.assert_proposes_in_place(
        slots, params, memory, getattr(memory, "kv", memory)
    )
