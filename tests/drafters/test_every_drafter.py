"""Every drafter through the same checks: tokens, contract, schedule, pages and pools.

The rule "coupled" writes the tokens of decoding; the others do at temperature 0. Above
it, their tokens are a function of the request alone: two slots with the same request,
and others between them, write the same tokens.
"""

import dataclasses
import functools
import itertools

import decoding
import head_cases as heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_readme
from decoding import GAMMA_MAX, SMALL, Ask
from slow_cases import slow, slow_but

from spec_jax import testing
from spec_jax.drafters import choice, each, hybrid, ngram, oracle, suffix, tree_shapes
from spec_jax.engine import checks, round as round_lib
from spec_jax.gamma import schedule
from spec_jax.rules import rule as rule_lib


CORPUS = suffix.remember(
    suffix.empty_corpus(64), [1, 2, 3, 4, 8, 8, 9, 9, 60, 7, 3, 500]
)
"""Earlier texts, in which a token outside the vocabulary here follows `7, 3`."""
WEIGHTS = decoding.NEARLY_TARGET
LOOKUP = suffix.SuffixDecoding(gamma_max=GAMMA_MAX)


def draft_model(impl, **changes):
    made = decoding.draft_drafter(impl=impl)
    return dataclasses.replace(made, model=dataclasses.replace(made.model, **changes))


def hybrid_of(draft):
    return lambda impl: hybrid.Hybrid(suffix=LOOKUP, draft=draft(impl), threshold=2.0)


def choice_of(draft):
    return lambda impl: choice.Choice(members=(NGRAM, draft(impl), LOOKUP))


def choice_params(params):
    drafter = choice_of(draft_model)("xla")
    return choice.params_of(drafter, (None, params, CORPUS), draft=0.0, row=0.01)


def alone(drafter):
    """Returns a maker of a drafter that does not depend on the implementation."""
    return lambda impl: drafter


HYBRID_PARAMS = functools.partial(hybrid.HybridParams, corpus=CORPUS)
NGRAM = ngram.PromptLookup(gamma_max=GAMMA_MAX)
WINDOWED = dataclasses.replace(heads.HEADS["eagle3"], window=5)
HEADS = {name: functools.partial(heads.make, name) for name in (*heads.HEADS, WINDOWED)}
EAGLE = heads.PARAMS["eagle3"]
CHAINS = {
    "draft-model": (draft_model, WEIGHTS),
    "ngram": (alone(NGRAM), None),
    "suffix": (alone(LOOKUP), CORPUS),
    "hybrid": (hybrid_of(draft_model), HYBRID_PARAMS(draft=WEIGHTS)),
    "hybrid of eagle3": (hybrid_of(HEADS["eagle3"]), HYBRID_PARAMS(draft=EAGLE)),
    "choice": (choice_of(draft_model), choice_params(WEIGHTS)),
    "choice of eagle3": (choice_of(HEADS["eagle3"]), choice_params(EAGLE)),
    "oracle": (alone(oracle.Oracle(gamma_max=GAMMA_MAX, vocab_size=96)), None),
    "bigram": (alone(test_readme.bigram(gamma_max=GAMMA_MAX, vocab_size=96)), None),
    "static draft-model": (functools.partial(draft_model, cache="static"), WEIGHTS),
    "eagle3 with a window": (HEADS[WINDOWED], EAGLE),
    **{name: (HEADS[name], heads.PARAMS[name]) for name in heads.HEADS},
}
SHAPES = {"searched": tree_shapes.parse("2x3:6@1"), "fixed": tree_shapes.parse("2-2")}
DRAFTERS = [name for name in CHAINS if name not in ("causal", "gated", "anchored")]
DRAFTERS += [
    "draft-model, searched", "draft-model, fixed", "ngram, searched",
    "hybrid, fixed", "hybrid of eagle3, searched",
    "eagle3, searched", "eagle3, fixed", "peagle, searched", "peagle, fixed",
    "eagle3 with a window, searched", "causal, searched", "dflash2, searched",
    "dspark, searched", "rnn, fixed",
]  # fmt: skip


def make(name, impl=SMALL.target.impl):
    """Returns the drafter of that name, and its parameters."""
    name, _, shape = name.partition(", ")
    made, params = CHAINS[name]
    drafter = made(impl)
    return drafter.for_tree(SHAPES[shape]) if shape else drafter, params


REPEATS = Ask(prompt=(7, 3, 90, 7, 3, 41, 7, 3), max_tokens=30)
DRAWN = dataclasses.replace(REPEATS, sampling=decoding.WARM, gamma=3)
GREEDY = dataclasses.replace(REPEATS, sampling=decoding.COLD, gamma=None)
SHORT = Ask(prompt=(9,), max_tokens=20, gamma=2, sampling=decoding.COLD)
OTHERS = (
    Ask(max_tokens=24, gamma=None),
    Ask(prompt=(9,), max_tokens=20, gamma=None),
    Ask(prompt=tuple(range(30, 50)), max_tokens=18, gamma=None),
)


QUICK = (
    ("native", "coupled", "hybrid", 4),
    ("native", "multipath", "draft-model, fixed", 4),
    ("native", "rejection", "dspark", 4),
    ("native", "coupled", "eagle3 with a window, searched", 4),
    ("native", "coupled", "peagle, searched", 4),
)
"""Most kinds of drafter; more would compile too long. In `tests/engine`, `test_sampled`
and `test_trees` run the rule "block", and the latter searched trees, too."""


CASES = [
    case
    for case in itertools.product(("native", "xla"), rule_lib.RULES, DRAFTERS, (1, 4))
    # All rules take chains and trees of a fixed shape.
    if case[1] == "coupled" or "," not in case[2] or case[2].endswith("fixed")
    # A path that was looked up is no tree whose siblings are drawn with replacement.
    if case[1] != "multipath" or case[2] != "hybrid, fixed"
]


def request_of(name: str, ask: Ask):
    """Returns the request; an oracle gets decoding's tokens, a quarter made wrong."""
    if name != "oracle":
        return ask.request()
    text = decoding.text(decoding.decoded(SMALL, ask))
    return ask.request(draft_params=oracle.make_trace(text, rate=0.75))


@pytest.mark.parametrize(("impl", "rule", "name", "num_slots"), slow_but(CASES, *QUICK))
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
@pytest.mark.parametrize(("name", "most"), [("dspark", 0.8), ("hybrid", 1.0)])
def test_scheduled_tokens_are_those_of_decoding(name, most):
    """Fails if a schedule changes a token, or K/V, or cannot read survival. Rows cost
    time, so that only some drafts are verified. `engine/test_policies.py` has
    draft models."""
    drafter, params = make(name)
    drawn = (("temperature", 1.0), ("seed", 5))
    asks = [dataclasses.replace(ask, sampling=drawn) for ask in OTHERS]
    chosen = schedule.Schedule(gamma_max=drafter.gamma_max)
    rows = np.arange(len(asks) * (drafter.gamma_max + 1) + 1)
    scheduler = SMALL.scheduler(
        drafter,
        num_slots=len(asks),
        draft_params=params,
        gamma_policy=chosen,
        policy_state=chosen.init(1 + 0.1 * rows, draft_s=0.2),
    )
    state = decoding.rounds(scheduler, asks)
    decoding.assert_as_decoded(SMALL, state, asks)
    drafted = drafter.gamma_max * int(state.slots.num_rounds.sum())
    assert 0 < int(state.slots.num_proposed.sum()) < most * drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name in DRAFTERS if name != "bigram"],  # `test_readme` has it.
)
def test_every_drafter_keeps_the_contract(name):
    """Fails if a clause is broken, or a head misses features while a hybrid is sure."""
    (drafter, params), bench = make(name), heads.BENCH
    slab = max(bench.target.slab, drafter.gamma_max + 1)
    target = dataclasses.replace(bench.target, slab=slab)
    bench = dataclasses.replace(bench, target=target)
    if name == "oracle":
        bench = dataclasses.replace(bench, prompts=bench.prompts[:1])
        params = oracle.make_trace(bench.plain(bench.prompts[0]), rate=0.6)
    assert testing.check_drafter(drafter, params, bench) == tuple(testing.CLAUSES)


UNEVEN = {"tree": tree_shapes.parse("[[0],[1],[0,0]]"), "gamma_max": 3}
REFUSED = [
    ("draft-model, searched", {}, "rejection", "fixed shape such as '4-2-1'"),
    ("eagle3, searched", {}, "block", "fixed shape such as '4-2-1'"),
    ("dspark, searched", {}, "rejection", "fixed shape such as '4-2-1'"),
    ("draft-model, fixed", UNEVEN, "multipath", "branching such as '4-1-1'"),
    ("draft-model, fixed", {"draws": "greedy"}, "multipath", "siblings that are drawn"),
    ("ngram, searched", {}, "multipath", "drawn with replacement"),
    ("hybrid, fixed", {}, "multipath", "drawn with replacement"),
    ("hybrid of eagle3, searched", {}, "rejection", "fixed shape such as '4-2-1'"),
]


@pytest.mark.parametrize(("name", "changes", "rule", "words"), REFUSED)
def test_rules_without_these_trees(name, changes, rule, words):
    """Fails if a rule by uniforms takes trees whose shape depends on their tokens, or
    "multipath" siblings that are not drawn with replacement."""
    drafter = dataclasses.replace(make(name)[0], **changes)
    with pytest.raises(NotImplementedError, match=words):
        each.lift(drafter, 2, rule=rule)


@pytest.mark.parametrize("name", ["draft-model, fixed", "eagle3", "dspark"])
def test_what_each_rule_draws(name):
    """Fails if a rule by uniforms gets coupled drafts, which have no probabilities, or
    "multipath" siblings that are drawn without replacement."""
    drafter, _ = make(name)
    for rule in rule_lib.RULES:
        lifted = each.lift(drafter, 2, rule=rule).drafter
        draws = "coupled" if rule == "coupled" else "independent"
        assert lifted.draws == draws
        if drafter.tree:
            assert lifted.tree.replaces == (rule == "multipath")
            assert str(lifted.tree) == str(drafter.tree) == "2-2"


POOLED = ("hybrid", "draft-model", "eagle3", "dspark", "peagle")


@pytest.mark.parametrize("name", slow_but(POOLED, "hybrid"))
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


@pytest.mark.parametrize("name", slow_but(POOLED, "draft-model"))
def test_the_pool_of_a_drafter_is_not_copied(name):
    """Fails if a proposal copies the pool of the drafter."""
    drafter, params = make(name)
    slots = each.lift(drafter, 3)
    memory = slots.init(capacity=20_000, page_size=8)
    decoding.assert_proposes_in_place(
        slots, params, memory, getattr(memory, "kv", memory)
    )


@pytest.mark.parametrize("name", ["draft-model", "hybrid", "oracle"])
def test_a_draft_of_another_vocabulary_is_refused(name):
    """Fails if a lifted drafter does not tell the size of its vocabulary."""
    config = decoding.make_config(vocab_size=50)
    target = dataclasses.replace(decoding.TARGET, config=config)
    with pytest.raises(ValueError, match="different vocabularies: 96 and 50 entries"):
        decoding.Setting(target=target).scheduler(make(name)[0], num_slots=3)


WIDE = [
    ("suffix, searched", "coupled", {}),
    ("draft-model, fixed", "rejection", {}),
    ("dspark, fixed", "rejection", {}),
    slow("ngram", "coupled", {}),
    slow("draft-model", "block", {"min_confidence": 0.01}),
    slow("dspark", "coupled", {"min_confidence": 0.3}),
]


@pytest.mark.parametrize(("name", "rule", "changes"), WIDE)
def test_rounds_are_traced_with_wide_defaults(name, rule, changes):
    """Fails if rounds of two slots write a value that is wider than its array, or a
    leaf of their state has more than the 32 bits that the loops are written for."""
    drafter, params = make(name)
    drafter = dataclasses.replace(drafter, **changes)
    # 64-bit types and jax's standard promotion, as users may have them.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert jnp.asarray(0).dtype == "int64"
        scheduler = SMALL.scheduler(
            drafter, num_slots=2, draft_params=params, rule=rule
        )
        state = scheduler.empty(draws=rule != "coupled")
        assert max(leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) <= 4
        round_lib.generate.trace(
            scheduler.speculator, state, max_rounds=decoding.FOREVER
        )
