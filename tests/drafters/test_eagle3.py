"""EAGLE-3 heads of random weights: their proposals are those of a fresh head.

The oracle of proposals is the head run over whole sequences, `eagle3.forward_sequence`.
"""

import dataclasses
import shutil

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import SMALL

import spec_jax as sj
from spec_jax import loading, testing
from spec_jax.drafters import (
    each,
    eagle3 as drafting,
    features as features_lib,
    registry,
    tree_shapes,
)
from spec_jax.engine import forward
from spec_jax.model import eagle3, eagle3_files, eagle3_params, head_dialects, row_model


HOT = jnp.arange(0, 96, 2, dtype=jnp.int32)
HEAD = eagle3_params.Eagle3Config(
    layer=decoding.make_config(num_layers=1),
    draft_vocab_size=len(HOT),
    target_hidden_size=48,
    taps=(1, 0),  # of two layers
).validate()
PARAMS = eagle3_params.init(
    jax.random.key(3), HEAD, embed=decoding.TARGET_PARAMS.embed, hot=HOT, stddev=0.3
)


def make(impl=SMALL.target.impl, *, head=HEAD, **changes) -> drafting.Eagle3:
    model = row_model.RowModel(config=head.layer, impl=impl, slab=4)
    return drafting.Eagle3(**{"head": head, "model": model, "gamma_max": 4} | changes)


CHAIN = make()
BENCH = testing.Bench(
    target=dataclasses.replace(SMALL.target, slab=5),
    params=decoding.TARGET_PARAMS,
    prompts=((7, 3, 90, 7, 3, 41, 7, 3), (5,)),
    max_tokens=16,
)


TEXT = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77, 30, 9, 51, 62, 11, 40, 3, 17, 80]


def features_of(taps=HEAD.taps) -> np.ndarray:
    """Returns the target's features of the text."""
    return np.asarray(BENCH.features(TEXT[:-1], taps))


_sequence = jax.jit(eagle3.forward_sequence, static_argnames=("config",))


def of_sequences(text, features, gamma) -> list[int]:
    """Returns the head's greedy drafts, by whole sequences and without a cache.

    Pairs after the last one are padding, which a causal head does not see.
    """
    last, size = len(text) - 2, len(TEXT) - 1
    pairs = jnp.asarray(features[:size].reshape(1, size, -1))
    tokens, earlier, drafts = np.zeros((1, size), np.int32), [], []
    tokens[0, : last + 1] = text[1:]
    for _ in range(gamma):
        step = _sequence(PARAMS, HEAD, jnp.asarray(tokens), pairs, earlier=earlier)
        drafts.append(int(HOT[jnp.argmax(step.logits[0, last])]))
        tokens = np.roll(tokens, -1, axis=1)
        tokens[0, last] = drafts[-1]
        pairs = step.hidden
        earlier.append(step)
    return drafts


def rounds_of(
    drafter,
    features,
    lengths,
    *,
    params=PARAMS,
    gammas=None,
    num_slots=2,
    slot=1,
    sampling=None,
):
    """Yields a slot's proposals after prefixes of `TEXT`; other slots sit out."""
    slots = each.lift(drafter, num_slots)
    memory = slots.init(capacity=32, page_size=8)
    memory = slots.prefill(
        params, memory, TEXT[: lengths[0]], slot=slot, features=features
    )
    # NumPy on the host: jax would compile a program for each shape.
    is_slot = np.arange(num_slots) == slot
    tokens = decoding.padded([TEXT] * num_slots, 33)
    most = 1 + slots.gamma_max
    for number, length in enumerate(lengths):
        gamma = slots.gamma_max if gammas is None else gammas[number]
        asked = {
            "tokens": tokens,
            "length": np.where(is_slot, length, 1).astype(np.int32),
            "gamma": np.where(is_slot, gamma, 0).astype(np.int32),
            "sampling": sampling,
        }
        memory, proposal = decoding.propose(slots, params, memory, **asked)
        yield length, jax.tree.map(lambda leaf: np.asarray(leaf)[slot], proposal)
        if number + 1 < len(lengths):
            after = lengths[number + 1]
            handed = np.zeros((num_slots, most, *features.shape[1:]), np.float32)
            handed[slot, : after - length] = features[length - 1 : after - 1]
            told = {"asked": is_slot, "features": jnp.asarray(handed)}
            length = np.where(is_slot, after, 1).astype(np.int32)
            memory = decoding.commit(slots, params, memory, length, **told)


def count_passes(monkeypatch, slots: type, name: str) -> list[int]:
    """Returns a list that grows with each run of a method that is traced anew."""
    passes, real = [], getattr(slots, name)

    def counted(self, *inputs):
        jax.debug.callback(lambda: passes.append(1))
        return real(self, *inputs)

    monkeypatch.setattr(slots, name, counted)
    return passes


def test_drafts_are_those_of_whole_sequences():
    """Fails if a pair is at another place, or a feature one position early or late."""
    features = features_of()
    right, wrong = [], []
    for length, proposal in rounds_of(CHAIN, features, (3, 4, 7, 12, 13)):
        found = proposal.tokens[: proposal.num_drafted].tolist()
        assert found == of_sequences(TEXT[:length], features, CHAIN.gamma_max)
        late = np.roll(features, 1, axis=0)
        wrong.append(of_sequences(TEXT[:length], late, CHAIN.gamma_max))
        right.append(found)
    assert right != wrong


def test_first_children_are_the_chain():
    """Fails if a branch has another parent, or a row another node's hidden state."""
    features = features_of()
    wide = CHAIN.for_tree(tree_shapes.parse("2-2-2"))
    chains, trees = (rounds_of(d, features, (3, 6, 11)) for d in (CHAIN, wide))
    for (_, chain), (_, tree) in zip(chains, trees, strict=True):
        # The first children of the root, of node 0, and of node 2.
        assert tree.tokens[[0, 2, 6]].tolist() == chain.tokens[:3].tolist()


def test_a_slot_that_sits_out_takes_in_before_its_ring_is_full(monkeypatch):
    """Fails if features are lost while a slot sits out and its ring fills up."""
    monkeypatch.setattr(features_lib, "RING_ROWS", 4)  # and 5 more for a round
    features = features_of()
    lengths = (3, 4, 7, 9, 10, 14, 15, 17)
    gammas = (0, 0, 0, 0, 0, 0, 0, 4)
    *_, (length, proposal) = rounds_of(CHAIN, features, lengths, gammas=gammas)
    found = proposal.tokens[: proposal.num_drafted].tolist()
    assert found == of_sequences(TEXT[:length], features, 4)


def test_one_token_has_no_features_and_no_drafts():
    features = features_of()
    (_, first), (_, second) = rounds_of(CHAIN, features, (1, 2))
    assert first.num_drafted == 0 and second.num_drafted == 4
    assert second.tokens.tolist() == of_sequences(TEXT[:2], features, 4)


def test_loads_by_name_and_by_folder(tmp_path, monkeypatch):
    """Fails if a head is not found by its folder, or is loaded for another target.

    The name alone stands for the shipped head, for the embedded target only.
    """
    folder = tmp_path / "eagle3"
    lm = sj.load(gamma_max=3)
    target = lm.target.config
    layer = dataclasses.replace(target, num_layers=1, intermediate_size=64)
    head = eagle3_params.Eagle3Config(
        layer=dataclasses.replace(layer, tie_word_embeddings=False),
        draft_vocab_size=64,
        target_hidden_size=target.hidden_size,
        taps=eagle3_params.default_taps(target.num_layers),
    )
    params = eagle3_params.init(jax.random.key(0), head, embed=lm.params.embed)
    origin = head_dialects.Origin(target=target)
    eagle3_files.save(folder, head, params, dialect="midlayer", origin=origin)
    by_folder = sj.load(drafter=str(folder), gamma_max=3)
    by_name = sj.load(drafter="eagle3", draft=folder, gamma_max=3)
    monkeypatch.setattr(loading, "ASSETS", tmp_path)
    for target in (None, loading.EMBEDDED_TARGET):
        shipped = sj.load(target, drafter="eagle3", gamma_max=3)
        assert shipped.drafter == by_folder.drafter == by_name.drafter
        testing.assert_same_bits(shipped.drafter_params.fc, by_folder.drafter_params.fc)
    assert by_folder.drafter.taps == head.taps
    mixed = sj.load(drafter="hybrid", draft=folder, gamma_max=3)
    assert mixed.drafter.draft == by_name.drafter and mixed.drafter.taps == head.taps
    with pytest.raises(ValueError, match="none is given nor shipped for"):
        sj.load(drafter="dspark")
    other = shutil.copytree(loading.EMBEDDED_TARGET, tmp_path / "other")
    with pytest.raises(ValueError, match="nor shipped for this target: name a"):
        sj.load(other, drafter="eagle3")
    with pytest.raises(ValueError, match="is no dialect of EAGLE-3"):
        sj.load(drafter="eagle3", draft=loading.EMBEDDED_DRAFT)
    with pytest.raises(ValueError, match="is no head that drafts"):
        sj.load(drafter=str(loading.EMBEDDED_DRAFT))
    parts = registry.Parts(gamma_max=3, vocab_size=96, load_draft=lambda: None)
    with pytest.raises(ValueError, match="reads the features of a target"):
        registry.build(str(folder), parts)


def test_a_forward_function_has_no_features():
    silent = forward.ForwardTarget(
        forward_rows=None, init_cache=None, config=SMALL.target.config
    )
    with pytest.raises(ValueError, match=r"and ForwardTarget has taps=\(\)"):
        SMALL.scheduler(CHAIN, target=silent, draft_params=PARAMS)
