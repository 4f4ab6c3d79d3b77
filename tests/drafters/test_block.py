"""DFlash and DSpark of random weights: their proposals are those of an oracle.

The oracle is float64 NumPy, `block_oracle`, on the files of the same drafter.
"""

import dataclasses
import json

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import test_eagle3 as eagle
from decoding import SMALL
from model import block_oracle as oracle
from slow_cases import slow

from spec_jax import testing
from spec_jax.drafters import block, each
from spec_jax.model import block_files, block_params, head_dialects, row_model
from spec_jax.rules import sampling as sampling_lib


LAYER = decoding.make_config(num_layers=2, tie_word_embeddings=False)
DFLASH = block_params.BlockConfig(
    layer=LAYER,
    draft_vocab_size=96,
    taps=(1, 0),  # of two layers
    block_size=4,
    slots="fill-in",
    mask_token_id=95,
).validate()
DSPARK = dataclasses.replace(
    DFLASH, slots="anchor-first", head="vanilla", markov_rank=8, has_confidence=True,
    confidence_with_markov=True,
).validate()  # fmt: skip
RNN = dataclasses.replace(DSPARK, slots="fill-in", head="rnn", draft_vocab_size=64)
GATED = dataclasses.replace(DSPARK, head="gated", confidence_with_markov=False)
_Sees = block_params.LayerAttention
MIXED = dataclasses.replace(
    DFLASH, attention=(_Sees(window=5, is_causal=True), _Sees())
).validate()
ANCHORED = dataclasses.replace(
    DFLASH, attention=(_Sees(window=4, from_anchor=True),) * 2
).validate()
CAUSAL = dataclasses.replace(DFLASH, attention=(_Sees(is_causal=True),) * 2).validate()
DFLASH2 = dataclasses.replace(
    DFLASH, head="selector", markov_rank=8, top_k=5, conv_group=16
).validate()
TARGET = decoding.TARGET_PARAMS


def params_of(head) -> block_params.BlockParams:
    """Returns random weights, norms and biases too, so that a missing one shows."""
    made = block_params.init(
        jax.random.key(3), head, embed=TARGET.embed, lm_head=TARGET.head, stddev=0.3
    )
    shared = {name: getattr(made, name) for name in ("hot", "embed", "lm_head")}
    rng = np.random.default_rng(5)

    def moved(leaf):
        return (
            leaf
            if leaf.ndim > 1
            else leaf + jnp.float32(rng.normal(0.1, 0.3, leaf.shape))
        )

    own = jax.tree.map(moved, made.replace(**dict.fromkeys(shared)))
    return own.replace(**shared)


def make(head, impl=SMALL.target.impl, **changes) -> block.BlockDrafter:
    model = row_model.RowModel(config=head.layer, impl=impl, slab=head.block_size)
    own = {"head": head, "model": model, "gamma_max": head.num_drafts}
    return block.BlockDrafter(**own | changes)


HEADS = {"dflash": DFLASH, "dspark": DSPARK, "rnn": RNN, "gated": GATED}
HEADS |= {"dflash2": DFLASH2, "mixed": MIXED, "anchored": ANCHORED, "causal": CAUSAL}
DIALECTS = {
    "dflash": "z-lab", "dspark": "deepspec", "rnn": "speculators", "gated": "specforge",
    "dflash2": "z-lab", "mixed": "z-lab", "anchored": "speculators", "causal": "z-lab",
}  # fmt: skip
"""The layout that each head is saved in."""
PARAMS = {name: params_of(head) for name, head in HEADS.items()}


def oracle_of(folder, name) -> oracle.Head:
    origin = head_dialects.Origin(target=SMALL.target.config)
    block_files.save(
        folder, HEADS[name], PARAMS[name], dialect=DIALECTS[name], origin=origin
    )
    return oracle.Head(
        config=json.loads((folder / "config.json").read_text()),
        tensors=safetensors.numpy.load_file(folder / "model.safetensors"),
        embed=np.asarray(TARGET.embed),
        lm_head=np.asarray(TARGET.head),
    )


def of_oracle(head, features, length, **drawn):
    flat = features.reshape(len(features), -1)[: length - 1]
    return oracle.draft(head, flat, eagle.TEXT[length - 1], **drawn)


def drafts_of(head, params, features, lengths, *, impl=SMALL.target.impl, **asked):
    """Returns the proposals of a drafter after prefixes of a text."""
    drafter = make(head, impl)
    rounds = eagle.rounds_of(drafter, features, lengths, params=params, **asked)
    return [proposal for _, proposal in rounds]


LENGTHS = (7, 8, 11, 12)
FROM_ONE = (1, 3, 4)  # A text of one token has no context, but drafts.


class Counted(block.BlockDrafter):
    """A class of this file alone: nothing is compiled for it yet."""


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("dspark", "xla"), ("dflash2", "native"), ("mixed", "native"),
        *(slow(*case) for case in (
            ("dflash", "xla"), ("rnn", "native"), ("dflash2", "xla"), ("mixed", "xla"),
            ("anchored", "native"), ("gated", "native"), ("causal", "native"),
        )),
    ],
)  # fmt: skip
def test_drafts_are_the_oracles(tmp_path, name, impl, monkeypatch):
    """Fails if context is at another place, or a slot predicts another token.

    The backbone must run once for each proposal, and not at all for gamma 0.
    """
    decoding.needs(impl)
    passes = eagle.count_passes(monkeypatch, block.SlotBlock, "_run_block")
    head, features = oracle_of(tmp_path, name), eagle.features_of()
    made, gamma = [], HEADS[name].num_drafts
    drafter = Counted(**vars(make(HEADS[name], impl)))
    for lengths in (LENGTHS, FROM_ONE):
        *found, (_, last) = eagle.rounds_of(
            drafter,
            features,
            (*lengths, lengths[-1] + 1),
            params=PARAMS[name],
            gammas=(*[gamma] * len(lengths), 0),
        )
        assert not last.num_drafted
        made += found
    jax.effects_barrier()
    assert len(passes) == len(made)
    for length, proposal in made:
        tokens, _, survival = of_oracle(head, features, length)
        assert proposal.num_drafted == len(tokens) == HEADS[name].num_drafts
        assert proposal.tokens.tolist() == tokens
        if HEADS[name].has_confidence:
            np.testing.assert_allclose(proposal.survival, survival, rtol=1e-3)
        else:
            assert proposal.survival is None


@pytest.mark.parametrize("name", ["mixed", "anchored", "causal"])
def test_what_rows_see_matters(tmp_path, name):
    """Negative control: without windows and masks a drafter drafts other tokens."""
    head, features = oracle_of(tmp_path, name), eagle.features_of()
    made = drafts_of(DFLASH, PARAMS[name], features, LENGTHS)
    expected = [of_oracle(head, features, length)[0] for length in LENGTHS]
    assert [proposal.tokens.tolist() for proposal in made] != expected


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["xla", slow("native")])
def test_independent_draws_are_from_the_probabilities_they_state(tmp_path, impl):
    """Fails if a token is not drawn from the probabilities that the rule reads."""
    decoding.needs(impl)
    drafter = each.lift(make(DSPARK, impl), 2, rule="rejection").drafter
    testing.CLAUSES["proposals"](drafter, PARAMS["dspark"], eagle.BENCH)
    head, features, seed = oracle_of(tmp_path, "dspark"), eagle.features_of(), 5
    settings = decoding.sampling_of(2, temperature=1.5, seed=seed)
    rounds = eagle.rounds_of(
        drafter, features, LENGTHS, params=PARAMS["dspark"], sampling=settings
    )
    greedy = []
    for length, proposal in rounds:
        for i, token in enumerate(proposal.tokens):
            at = jnp.uint32(seed), jnp.int32(length)
            drafts = {"stream": sampling_lib.Stream.DRAFT, "offset": i}
            noise = sampling_lib.noise(*at, vocab_size=96, **drafts)
            assert token == np.argmax(np.log(proposal.probs[i]) + noise)
        _, logits, survival = of_oracle(head, features, length, drawn=proposal.tokens)
        expected = np.exp((logits - logits.max(axis=1, keepdims=True)) / 1.5)
        expected /= expected.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(proposal.probs, expected, atol=1e-4)
        np.testing.assert_allclose(proposal.survival, survival, rtol=1e-3)
        greedy.append(of_oracle(head, features, length)[0] == proposal.tokens.tolist())
    assert not all(greedy)  # Some were drawn.


def test_a_draft_ends_before_a_token_without_confidence(tmp_path):
    head, features, threshold = oracle_of(tmp_path, "dspark"), eagle.features_of(), 0.6
    drafter = make(DSPARK, min_confidence=threshold)
    rounds = eagle.rounds_of(drafter, features, LENGTHS, params=PARAMS["dspark"])
    counts = set()
    for length, proposal in rounds:
        survival = of_oracle(head, features, length)[2]
        each_ = survival / np.concatenate([[1.0], survival[:-1]])
        expected = int(np.cumprod(each_ >= threshold).sum())
        assert proposal.num_drafted == expected
        counts.add(expected)
    assert len(counts) > 1
