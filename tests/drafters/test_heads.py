"""Heads of random weights: their proposals are those of a float64 oracle.

Heads with a window keep K/V in rings of pages, however long a text is.
"""

import dataclasses

import decoding
import head_cases as heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import HEADS, PARAMS
from model import head_layouts as layouts
from slow_cases import slow

from spec_jax import testing
from spec_jax.drafters import (
    block,
    each,
    eagle3,
    features as features_lib,
    peagle,
    tree_shapes,
)
from spec_jax.engine import checks
from spec_jax.paging import static
from spec_jax.rules import sampling as sampling_lib


LENGTHS = (7, 8, 11, 12)


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("dspark", "xla"), ("dflash2", "native"), ("mixed", "native"),
        ("eagle3", "native"), ("peagle", "xla"),
        *(slow(*case) for case in (
            ("dflash", "xla"), ("rnn", "native"), ("dflash2", "xla"), ("mixed", "xla"),
            ("anchored", "native"), ("gated", "native"), ("causal", "native"),
            ("peagle", "native"), ("eagle3", "xla"),
        )),
    ],
)  # fmt: skip
def test_drafts_are_the_oracles(tmp_path, name, impl, monkeypatch):
    """Fails if context, a pair or a mask is at another place, a feature one position
    early or late, or a slot predicts another token. A block and all masks must run once
    for each proposal, and not at all for gamma 0."""
    decoding.needs(impl)
    head, oracle = HEADS[name], heads.Oracle(tmp_path, name)
    place = (block.SlotBlock, "_run_block")
    if name == "peagle":
        place = (peagle.SlotParallel, "_forward")
    drafter, runs = heads.counted(monkeypatch, heads.make(name, impl), *place)
    gamma = drafter.gamma_max
    # With XLA many pairs of a round need several slabs.
    runs_once = heads.is_block(head) or (name, impl) == ("peagle", "native")
    places, found = [], []
    for lengths in ((7, 8, 9 + gamma, 10 + gamma, 11 + gamma), (1, 2, 4, 5)):
        gammas = [gamma] * (len(lengths) - 1) + [0]
        rounds = heads.rounds_of(drafter, PARAMS[name], lengths, gammas=gammas)
        for number, (length, proposal) in enumerate(rounds):
            jax.effects_barrier()
            is_asked = gammas[number] > 0
            # Before the first round a prompt is taken in.
            assert number == 0 or len(runs) == is_asked or (is_asked and not runs_once)
            runs.clear()
            # A text of one token has no context: a block drafts, pairs do not.
            if not is_asked or (length == 1 and not heads.is_block(head)):
                assert not proposal.num_drafted
                continue
            tokens, _, survival = oracle.after(length)
            assert proposal.num_drafted == len(tokens) == gamma
            assert proposal.tokens.tolist() == tokens
            if getattr(head, "has_confidence", False):
                np.testing.assert_allclose(proposal.survival, survival, rtol=1e-3)
            else:
                assert proposal.survival is None
            places.append(length)
            found.append(tokens)
    # Negative controls: other features, and rows that see all of a block.
    for late in (-1, 1):
        assert [oracle.after(length, late=late)[0] for length in places] != found
    if name in ("mixed", "anchored", "causal"):
        whole = heads.Oracle(tmp_path, "dflash", PARAMS[name])
        assert [whole.after(length)[0] for length in places] != found


@pytest.mark.parametrize("name", ["eagle3", slow("peagle")])
def test_a_slot_that_sits_out_takes_in_before_its_ring_is_full(
    tmp_path, name, monkeypatch
):
    """Fails if features are lost while a slot sits out and its ring fills up."""
    monkeypatch.setattr(features_lib, "RING_ROWS", 4)  # and 5 more for a round
    oracle = heads.Oracle(tmp_path, name)
    lengths, gammas = (1, 2, 3, 7, 9, 10, 14, 17), (4, 0, 4, 0, 0, 0, 0, 4)
    made = list(heads.rounds_of(heads.make(name), PARAMS[name], lengths, gammas=gammas))
    assert [int(p.num_drafted) for _, p in made] == [0, 0, 4, 0, 0, 0, 0, 4]
    for number in (2, 7):
        length, proposal = made[number]
        assert proposal.tokens.tolist() == oracle.after(length)[0]


@pytest.mark.parametrize("name", ["eagle3", "rnn", slow("dspark"), slow("peagle")])
def test_children_are_the_oracles(tmp_path, name):
    """Fails if a node's children come from another slot, node or state."""
    head, params = HEADS[name], PARAMS[name]
    if heads.is_block(head):
        # Larger weights make children depend on the token before, and on the state.
        markov = params.markov.replace(out=8 * params.markov.out)
        if markov.mix is not None:
            both = 2 * markov.embed.shape[1]
            markov = markov.replace(mix=markov.mix.at[:, :both].multiply(8))
        params = params.replace(markov=markov)
    oracle = heads.Oracle(tmp_path, name, params)
    drafter = heads.make(name).for_tree(tree_shapes.parse("2-2-1"))
    cousins = []
    for length, proposal in heads.rounds_of(drafter, params, (8, 10)):
        assert proposal.num_drafted == 10
        paths = [()]  # The tokens before the children of each column.
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            paths.append((*paths[parent], int(token)))
        for column in range(1 + 2 + 4):
            found = proposal.tokens[proposal.parents == column]
            drawn = [*paths[column], *[0] * heads.GAMMA]
            logits = oracle.after(length, drawn=drawn)[1][len(paths[column])]
            best = np.argsort(-logits, kind="stable")[: len(found)]
            if "d2t" in oracle.head.tensors:
                best = best + oracle.head.tensors["d2t"][best]
            assert found.tolist() == best.tolist()
        cousins.append(proposal.tokens[np.isin(proposal.parents, (1, 2))].tolist())
    # Negative control: children depend on the node that they follow, but for masks.
    assert any(four[:2] != four[2:] for four in cousins) == (name != "peagle")


@pytest.mark.slow
def test_a_tree_of_one_branch_is_the_chain():
    """Compares its tokens with the chain's, which are drawn with the same noise."""
    settings = decoding.sampling_of(2, temperature=1.0, seed=5)
    chain = heads.make("rnn")
    found = []
    for drafter in (chain, chain.for_tree(tree_shapes.parse("1-1-1"))):
        rounds = heads.rounds_of(drafter, PARAMS["rnn"], LENGTHS, sampling=settings)
        found.append([proposal.tokens.tolist() for _, proposal in rounds])
    assert found[0] == found[1] and all(len(tokens) == 3 for tokens in found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "impl"), [("dspark", "xla"), ("dspark", "native"), ("dflash2", "native")]
)
def test_independent_draws_are_from_the_probabilities_they_state(tmp_path, name, impl):
    """Fails if a token is not drawn from the probabilities that the rule reads."""
    decoding.needs(impl)
    drafter = each.lift(heads.make(name, impl), 2, rule="rejection").drafter
    testing.CLAUSES["proposals"](drafter, PARAMS[name], heads.BENCH)
    oracle, seed = heads.Oracle(tmp_path, name), 5
    settings = decoding.sampling_of(2, temperature=1.5, seed=seed)
    rounds = heads.rounds_of(drafter, PARAMS[name], LENGTHS, sampling=settings)
    greedy = []
    for length, proposal in rounds:
        for i, token in enumerate(proposal.tokens):
            at = jnp.uint32(seed), jnp.int32(length)
            drafts = {"stream": sampling_lib.Stream.DRAFT, "offset": i}
            noise = sampling_lib.noise(*at, vocab_size=96, **drafts)
            assert token == np.argmax(jnp.log(proposal.probs[i]) + noise)
        _, logits, survival = oracle.after(length, drawn=proposal.tokens)
        expected = np.exp((logits - logits.max(axis=1, keepdims=True)) / 1.5)
        expected /= expected.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(proposal.probs, expected, atol=1e-4)
        if HEADS[name].has_confidence:
            np.testing.assert_allclose(proposal.survival, survival, rtol=1e-3)
        greedy.append(oracle.after(length)[0] == proposal.tokens.tolist())
    assert not all(greedy)  # Some were drawn.


def test_a_draft_ends_before_a_token_without_confidence(tmp_path):
    oracle, threshold, counts = heads.Oracle(tmp_path, "dspark"), 0.6, set()
    drafter = heads.make("dspark", min_confidence=threshold)
    for length, proposal in heads.rounds_of(drafter, PARAMS["dspark"], LENGTHS):
        survival = oracle.after(length)[2]
        kept = survival / np.concatenate([[1.0], survival[:-1]])
        assert proposal.num_drafted == int(np.cumprod(kept >= threshold).sum())
        counts.add(int(proposal.num_drafted))
    assert len(counts) > 1


WINDOW = 7
IN_RINGS = (3, 7, 8, 11, 12, 16, 19)
EAGLE = heads.make(dataclasses.replace(HEADS["eagle3"], window=WINDOW))
BLOCK = heads.make(heads.of_two_layers(layouts.seeing(window=8)))
DRAFTERS = {
    "eagle3": (EAGLE, PARAMS["eagle3"]),
    "eagle3, tree": (EAGLE.for_tree(tree_shapes.parse("2-2-1")), PARAMS["eagle3"]),
    "dflash": (BLOCK, PARAMS["dflash"]),
}


def drafts(drafter, params=PARAMS["eagle3"]):
    """Returns the drafts after prefixes of a text."""
    rounds = heads.rounds_of(drafter, params, IN_RINGS)
    return [made.tokens[: made.num_drafted].tolist() for _, made in rounds]


@pytest.mark.parametrize("name", [slow("eagle3"), "eagle3, tree", slow("dflash")])
def test_a_ring_drafts_what_all_pages_do(name, monkeypatch):
    """Fails if a key that rows see is overwritten, or read from another place."""
    whole = drafts(*DRAFTERS[name])  # All 32 positions are kept.
    monkeypatch.setattr(features_lib.SlotReader, "_kept", 16)
    assert all(whole) and drafts(*DRAFTERS[name]) == whole
    # Negative control: too small a ring.
    monkeypatch.setattr(features_lib.SlotReader, "_kept", 8)
    assert drafts(*DRAFTERS[name]) != whole


def test_a_chain_with_a_window_is_one_native_call(monkeypatch):
    """Compares it, and one in a ring, with a tree of one branch: level by level."""
    decoding.needs("native")
    levels = heads.make(EAGLE.head, "native").for_tree(tree_shapes.parse("1-1-1-1"))
    expected = drafts(levels)
    # Negative control: without a window.
    assert drafts(heads.make("eagle3", "native")) != expected
    made = heads.make(EAGLE.head, "native")
    chain, calls = heads.counted(monkeypatch, made, eagle3.SlotEagle3, "_run_chains")
    for kept in (32, 16):
        monkeypatch.setattr(features_lib.SlotReader, "_kept", kept)
        assert drafts(chain) == expected
    jax.effects_barrier()
    assert len(calls) == 2 * len(IN_RINGS)


def test_a_ring_has_pages_for_its_window_alone():
    """Fails if a ring grows with the text, or the check misses a page that is wrong."""
    slots = each.lift(EAGLE, 3)
    kv = slots.init(capacity=4000, page_size=16, num_pages=9).kv
    assert kv.num_pages < kv.page_table.size and kv.slot_capacity == 4000
    reach = kv.num_pages // 3 * 16
    assert WINDOW < reach < 600
    decoding.check_cache(kv)
    with pytest.raises(AssertionError, match="slots do not own their own pages"):
        decoding.check_cache(kv.replace(page_table=kv.page_table.at[1, 5].set(0)))
    mixed = each.lift(heads.make("mixed"), 3)
    assert not isinstance(mixed.init(capacity=4000, page_size=16).kv, static.StaticKV)


@pytest.mark.filterwarnings("error")
def test_positions_past_those_of_a_head():
    """Fails if a head's few positions limit its pages, or do not lead to a warning. A
    head with a window sees no distance that it was not trained for: no warning."""
    layer = dataclasses.replace(HEADS["eagle3"].layer, max_position_embeddings=16)

    def drafter(window):
        return heads.make(
            dataclasses.replace(HEADS["eagle3"], layer=layer, window=window)
        )

    for window in (0, 17):
        with pytest.warns(UserWarning, match="16 positions.*few may be accepted"):
            checks.warn_positions(drafter(window), 20)
    checks.warn_positions(drafter(WINDOW), 20)
    each.lift(drafter(0), 1).init(capacity=96, page_size=2048)
