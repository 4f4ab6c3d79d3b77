"""Suffix statistics first, a draft model otherwise: which one drafts, at what cost."""

import dataclasses

import decoding
import pytest

from spec_jax import testing
from spec_jax.drafters import draft_model, hybrid, suffix, tree_shapes


GAMMA_MAX = 4
BENCH = decoding.quickest_bench(GAMMA_MAX)
DRAFT = draft_model.DraftModel(
    model=dataclasses.replace(BENCH.target, slab=2), gamma_max=GAMMA_MAX
)
HYBRID = hybrid.Hybrid(
    suffix=suffix.SuffixDecoding(gamma_max=GAMMA_MAX), draft=DRAFT, threshold=2.0
)
PARAMS = hybrid.HybridParams(
    draft=decoding.perturbed(BENCH.params, 0.02), corpus=suffix.empty_corpus(8)
)
SURE, UNSURE = [1, 2, 3, 4] * 3, [1, 2, 3, 4, 5, 6, 7]


def after(drafter, params, texts):
    """Returns memory and proposal after texts that were prefilled, one in each slot."""
    slots, memory = decoding.prefilled(drafter, params, texts, **BENCH.sizes)
    size = BENCH.capacity + 1
    return decoding.propose_after(slots, params, memory, texts, size=size)


def test_the_draft_model_is_asked_only_where_statistics_are_not_sure():
    """Fails if both drafters run, the wrong one drafts, or slots decide together."""
    texts = [SURE, UNSURE, SURE]
    memory, proposal = after(HYBRID, PARAMS, texts)
    alone, expected = after(DRAFT, PARAMS.draft, [UNSURE])
    for slot, text in enumerate(texts):
        assert int(proposal.num_drafted[slot]) == GAMMA_MAX
        length = int(memory.length[slot])
        if text is SURE:
            assert proposal.tokens[slot].tolist() == [1, 2, 3, 4]
            assert length == len(text) - 1  # No row was run.
            continue
        testing.assert_same_bits(proposal.tokens[slot], expected.tokens[0])
        assert length == int(alone.length[0]) == len(text) - 1 + GAMMA_MAX
        testing.assert_same_bits(
            decoding.held(memory, length, slot=slot), decoding.held(alone, length)
        )


def test_the_survival_of_a_draft_is_that_of_whoever_drafted_it():
    """Fails if a draft has the other drafter's survival, or any without a schedule."""
    texts = [SURE, UNSURE, SURE]
    _, proposal = after(HYBRID.for_schedule(), PARAMS, texts)
    _, expected = after(DRAFT.for_schedule(), PARAMS.draft, [UNSURE])
    assert proposal.survival[0].tolist() == [1.0] * GAMMA_MAX  # No other continuation.
    testing.assert_same_bits(proposal.survival[1], expected.survival[0])
    assert 0 < float(proposal.survival[1, 0]) < 1
    _, unasked = after(HYBRID, PARAMS, texts)
    assert unasked.survival is None


def test_hybrids_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="gamma_max=3 and the draft model gamma_max=4"):
        hybrid.Hybrid(suffix=suffix.SuffixDecoding(gamma_max=3), draft=DRAFT)
    with pytest.raises(ValueError, match="threshold=0.0 must be above 0"):
        dataclasses.replace(HYBRID, threshold=0.0)
    tree = tree_shapes.parse("2x3:4")
    lookup = dataclasses.replace(HYBRID.suffix, tree=tree)
    for branching in ({"draft": DRAFT.for_tree(tree)}, {"suffix": lookup}):
        with pytest.raises(ValueError, match="a hybrid drafts chains, and one of its"):
            dataclasses.replace(HYBRID, **branching)
