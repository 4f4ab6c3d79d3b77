"""Several drafters in one: which one drafts, at what cost, by what it may know.

A hybrid asks its draft model where statistics are not sure; a choice goes by counts.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.drafters import (
    choice,
    draft_model,
    each,
    hybrid,
    ngram,
    suffix,
    tree_shapes,
)
from spec_jax.engine import forward
from spec_jax.rules import rule as rule_lib


GAMMA_MAX = 4
BENCH = decoding.quickest_bench(GAMMA_MAX)
DRAFT = draft_model.DraftModel(
    model=dataclasses.replace(BENCH.target, slab=2), gamma_max=GAMMA_MAX
)
LOOKUP = ngram.PromptLookup(gamma_max=GAMMA_MAX)
STATISTICS = suffix.SuffixDecoding(gamma_max=GAMMA_MAX)
CHOICE = choice.Choice(members=(LOOKUP, STATISTICS, DRAFT))
MEMBERS = (None, suffix.empty_corpus(8), decoding.perturbed(BENCH.params, 0.02))
PARAMS = choice.params_of(CHOICE, MEMBERS, draft=0.05, row=0.1)
NGRAM, DRAFTED = 0, 2
HYBRID = hybrid.Hybrid(suffix=STATISTICS, draft=DRAFT, threshold=2.0)
OF_HYBRID = hybrid.HybridParams(draft=MEMBERS[2], corpus=MEMBERS[1])
REPEATS, NEW = [1, 2, 3, 4] * 3, [1, 2, 3, 4, 5, 6, 7]


def begun(texts, params=PARAMS, drafter=CHOICE):
    """Returns the slots of a drafter, and their memory after prompts."""
    return decoding.prefilled(drafter, params, texts, **BENCH.sizes)


def drafted(slots, memory, texts, *, params=PARAMS, behind=0, sampling=None):
    """Returns memory and proposal after texts, with meaningless tokens behind them."""
    told = {"size": BENCH.capacity + 1, "behind": behind, "sampling": sampling}
    return decoding.propose_after(slots, params, memory, texts, **told)


def after(drafter, params, texts):
    """Returns memory and proposal after prompts, one in each slot."""
    return drafted(*begun(texts, params, drafter), texts, params=params)


def test_the_draft_model_is_asked_only_where_statistics_are_not_sure():
    """Fails if both drafters run, the wrong one drafts, or slots decide together."""
    texts = [REPEATS, NEW, REPEATS]
    memory, proposal = after(HYBRID, OF_HYBRID, texts)
    alone, expected = after(DRAFT, MEMBERS[2], [NEW])
    assert proposal.num_drafted.tolist() == [GAMMA_MAX] * 3
    assert proposal.tokens[::2].tolist() == [[1, 2, 3, 4]] * 2
    held = len(NEW) - 1 + GAMMA_MAX
    # No row was run where statistics are sure.
    assert memory.length.tolist() == [len(REPEATS) - 1, held, len(REPEATS) - 1]
    testing.assert_same_bits(proposal.tokens[1], expected.tokens[0])
    kv = decoding.held(memory, held, slot=1), decoding.held(alone, held)
    testing.assert_same_bits(*kv)


def test_a_hybrid_of_trees_drafts_one_path_where_statistics_are_sure():
    """Fails if a path is no tree, or is deeper than the trees of the draft model."""
    made = HYBRID.for_tree(TREE)
    assert (made.gamma_max, made.depth_max, made.suffix.gamma_max) == (4, 2, 2)
    made = dataclasses.replace(made, threshold=1.5)
    _, proposal = after(made, OF_HYBRID, [REPEATS, NEW])
    _, expected = after(DRAFT.for_tree(TREE), MEMBERS[2], [NEW])
    assert proposal.num_drafted.tolist() == [2, 4]
    assert proposal.tokens[0, :2].tolist() == [1, 2]
    assert proposal.parents[0].tolist() == [0, 1, 2, 3]
    for name in ("tokens", "parents"):
        found = getattr(proposal, name)[1]
        testing.assert_same_bits(found, getattr(expected, name)[0])
    assert expected.parents[0].tolist() != [0, 1, 2, 3]


def test_the_survival_of_a_draft_is_that_of_whoever_drafted_it():
    """Fails if a draft has the other drafter's survival, or any without a schedule."""
    texts = [REPEATS, NEW]
    _, of_draft = after(DRAFT.for_schedule(), MEMBERS[2], [NEW])
    pair = choice.Choice(members=(STATISTICS, DRAFT))
    costs = choice.params_of(pair, MEMBERS[1:], draft=0.05, row=0.1)
    for drafter, params in ((HYBRID, OF_HYBRID), (pair, costs)):
        _, proposal = after(drafter.for_schedule(), params, texts)
        assert proposal.survival[0].tolist() == [1.0] * GAMMA_MAX  # It has no rival.
        count = int(proposal.num_drafted[1])
        found, expected = proposal.survival[1, :count], of_draft.survival[0, :count]
        testing.assert_same_bits(found, expected)
        assert 0 < float(found[0]) < 1
        assert after(drafter, params, texts)[1].survival is None
    # `ngram` gives none.
    assert after(CHOICE.for_schedule(), PARAMS, texts)[1].survival is None


def who(memory, slot=0):
    """Returns the members that drafted for a slot, with their numbers of drafts."""
    return [tuple(x) for x in np.argwhere(memory.known.rounds[slot] > 0).tolist()]


def taught(memory, **counts):
    """Returns a memory of 50 rounds in which members had such shares of drafts kept."""
    known = memory.known
    reached = jnp.full_like(known.reached, 50.0)
    kept = [50.0 * counts.get(name, 0.0) for name in ("ngram", "suffix", "draft")]
    kept = jnp.broadcast_to(jnp.array(kept, jnp.float32)[:, None], reached.shape)
    return memory.replace(known=known.replace(reached=reached, kept=kept))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"ngram": 0.9, "draft": 0.5}, (NGRAM, GAMMA_MAX)),
        ({"ngram": 0.5, "draft": 0.95}, (DRAFTED, GAMMA_MAX)),
        ({"draft": 0.2}, (DRAFTED, 1)),
        ({"draft": 0.05}, (NGRAM, 0)),
    ],
    ids=["lookup", "model", "a single draft", "nobody"],
)
def test_the_best_by_what_is_known_drafts(counts, expected):
    """Fails if a member that was not chosen drafts, or runs rows."""
    texts = [REPEATS] * 3
    slots, memory = begun(texts)
    before = int(memory.members[DRAFTED].length[0])
    memory, proposal = drafted(slots, taught(memory, **counts), texts)
    member, number = expected
    assert int(proposal.num_drafted[0]) == number
    assert who(memory) == [expected]
    assert (int(memory.members[DRAFTED].length[0]) > before) == (member == DRAFTED)
    if member == NGRAM and number:
        assert proposal.tokens[0].tolist() == [1, 2, 3, 4]


def test_each_slot_has_its_own_choice():
    """Fails if slots decide together: a text in which lookups find nothing asks the
    model, whatever is known of its neighbours."""
    texts = [REPEATS, NEW, REPEATS]
    slots, memory = begun(texts)
    memory = taught(memory, ngram=0.9, draft=0.8)
    memory, proposal = drafted(slots, memory, texts)
    assert [who(memory, slot)[0][0] for slot in range(3)] == [NGRAM, DRAFTED, NGRAM]
    alike, only = begun([NEW] * 3)
    _, expected = drafted(alike, taught(only, draft=0.8), [NEW] * 3)
    testing.assert_same_bits(proposal.tokens[1], expected.tokens[0])


def test_lookups_are_known_of_rounds_that_went_to_others():
    """Fails if a lookup is judged by tokens that it did not draft, or a member that did
    not draft is judged at all."""
    texts = [REPEATS] * 3
    slots, memory = begun(texts)
    memory, _ = drafted(slots, taught(memory, draft=0.95), texts)
    assert who(memory)[0][0] == DRAFTED
    cleared = jax.tree.map(jnp.zeros_like, memory.known)
    kept_from = {"length", "tokens", "num_drafted"}
    last = {name: getattr(memory.known, name) for name in kept_from}
    memory = memory.replace(known=cleared.replace(**last))
    text = [*REPEATS, 1, 2, 9]  # Two of its drafts, and another token.
    memory, _ = drafted(slots, memory, [text] * 3)
    known = memory.known
    assert known.reached[0, NGRAM].tolist() == [1, 1, 1, 0]
    assert known.kept[0, NGRAM].tolist() == [1, 1, 0, 0]
    after, _ = drafted(slots, memory, [[*text, 1]] * 3)
    asked = {member for member, number in who(memory) if number}
    assert DRAFTED not in asked
    assert after.known.reached[0, DRAFTED, 0] < known.reached[0, DRAFTED, 0]


def test_a_text_begins_with_what_those_before_it_taught():
    """Fails if a slot begins with another's counts, with too many rounds, or with any
    under a rule whose tokens depend on the member that drafts."""
    _, memory = begun([REPEATS, NEW, NEW])
    memory = taught(memory, ngram=0.9, draft=0.6)
    for rule, worth in (("coupled", CHOICE.text_weight), ("rejection", 0.0)):
        slots = each.lift(CHOICE.for_rule(rule_lib.of(rule)), 3)
        held = jax.tree.map(jnp.array, memory)
        known = slots.prefill(PARAMS, held, REPEATS, slot=0).known
        np.testing.assert_allclose(known.reached[0], worth)
        chances = memory.known.kept[0] / memory.known.reached[0]
        np.testing.assert_allclose(known.kept[0], worth * chances, rtol=1e-6)
        testing.assert_same_bits(known.kept[1], memory.known.kept[1])
        assert not known.length[0].any() and not known.rounds[0].any()


def test_tokens_that_are_not_committed_teach_nothing():
    """Fails if tokens behind the text decide which drafts count as kept."""
    slots, memory = begun([REPEATS] * 3)
    memory, _ = drafted(slots, memory, [REPEATS] * 3)
    texts = [[*REPEATS, 1]] * 3
    found = [drafted(slots, memory, texts, behind=token) for token in (0, 2, 90)]
    first, expected = found[0]
    number = int(expected.num_drafted[0])
    for memory, proposal in found[1:]:
        for name in ("reached", "kept", "rounds", "num_drafted"):
            counts = [getattr(one.known, name) for one in (memory, first)]
            testing.assert_same_bits(*counts)
        drafts = [one.tokens[0, :number] for one in (proposal, expected)]
        testing.assert_same_bits(*drafts)


def test_no_draw_of_the_round_decides_who_drafts():
    """Fails if the choice depends on the noise, or on tokens drawn with it."""
    texts = [NEW] * 3
    slots, memory = begun(texts)
    memory, tokens = taught(memory, draft=0.9), set()
    for seed in range(6):
        sampling = decoding.sampling_of(3, temperature=1.5, seed=seed)
        after, proposal = drafted(slots, memory, texts, sampling=sampling)
        assert who(after) == [(DRAFTED, GAMMA_MAX)]
        tokens.add(tuple(proposal.tokens[0].tolist()))
    assert len(tokens) > 1  # The noise changes the drafts themselves.


TREE = tree_shapes.parse("2x2:4")
REFUSED = {
    "a choice among no drafters": (CHOICE, {"members": ()}),
    "give none of them twice": (CHOICE, {"members": (LOOKUP, DRAFT, LOOKUP)}),
    "chains, and one of them": (CHOICE, {"members": (LOOKUP.for_tree(TREE), DRAFT)}),
    r"have gamma_max \[4, 3\]": (
        CHOICE,
        {"members": (LOOKUP, ngram.NGram(gamma_max=3))},
    ),
    "prior=1.0 and decay": (CHOICE, {"prior": 1.0}),
    "text_weight=-1 must be 0 or": (CHOICE, {"text_weight": -1}),
    "prior_weight=0 above 0": (CHOICE, {"prior_weight": 0}),
    "gamma_max=3 and paths of the draft model have up to 4": (
        HYBRID,
        {"suffix": suffix.SuffixDecoding(gamma_max=3)},
    ),
    "threshold=0.0 must be above 0": (HYBRID, {"threshold": 0.0}),
    "gamma_max=4 and paths of the draft model have up to 2": (
        HYBRID,
        {"draft": DRAFT.for_tree(TREE)},
    ),
    "has tree=2x2:4@0.4, and a hybrid looks": (
        HYBRID,
        {"suffix": dataclasses.replace(STATISTICS, tree=TREE)},
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_parts_that_do_not_fit_together_are_refused(words):
    drafter, changes = REFUSED[words]
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(drafter, **changes)


def test_a_member_that_reads_features_needs_a_target_that_gives_them():
    import head_cases as heads  # Here, as it takes seconds to import.

    drafter = choice.Choice(members=(LOOKUP, heads.make("eagle3", "xla")))
    assert drafter.taps == drafter.members[1].taps
    silent = forward.ForwardTarget(
        forward_rows=None, init_cache=None, config=decoding.SMALL.target.config
    )
    words = r"Choice reads the target's features .* and ForwardTarget has taps=\(\)"
    with pytest.raises(ValueError, match=words):
        decoding.SMALL.scheduler(drafter, target=silent, draft_params=PARAMS)
