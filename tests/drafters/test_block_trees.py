"""Trees of block drafters: lossless, and their nodes those of an oracle.

The oracle is float64 NumPy, `block_oracle`, told the tokens before each node.
"""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_block as blocks
import test_eagle3 as eagle

from spec_jax.drafters import tree_shapes
from spec_jax.rules import sampling as sampling_lib


FIXED = "2-2-1"


def make(name, tree, impl=decoding.SMALL.target.impl):
    drafter = blocks.make(blocks.HEADS[name], impl)
    return drafter.for_tree(tree_shapes.parse(tree))


def nodes_of(proposal):
    """The tokens on each node's path, by column; that of the root is empty."""
    paths = [()]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*paths[parent], int(token)))
    return paths


def logits_after(head, features, length, path) -> np.ndarray:
    drawn = [*path, *[0] * head.config["block_size"]]
    return blocks.of_oracle(head, features, length, drawn=drawn)[1][len(path)]


@pytest.mark.parametrize("name", ["dspark", "rnn"])
def test_children_are_the_oracles(tmp_path, name, monkeypatch):
    """Fails if a node's children are of another slot, of another node or state."""
    params = blocks.PARAMS[name]
    if params.markov is not None:  # So that the token before decides, and the state.
        markov = params.markov.replace(out=8 * params.markov.out)
        if markov.mix is not None:
            both = 2 * markov.embed.shape[1]
            markov = markov.replace(mix=markov.mix.at[:, :both].multiply(8))
        monkeypatch.setitem(blocks.PARAMS, name, params.replace(markov=markov))
    head, features = blocks.oracle_of(tmp_path, name), blocks.features_of()
    rounds = eagle.rounds_of(
        make(name, FIXED), features, (7, 12), params=blocks.PARAMS[name]
    )
    cousins = []
    for length, proposal in rounds:
        assert proposal.num_drafted == 10
        paths, parents = nodes_of(proposal), proposal.parents.tolist()
        for column in sorted(set(parents)):
            found = [t for t, p in zip(proposal.tokens, parents, strict=True)
                     if p == column]  # fmt: skip
            logits = logits_after(head, features, length, paths[column])
            best = np.argsort(-logits, kind="stable")[: len(found)]
            if "d2t" in head.tensors:
                best = best + head.tensors["d2t"][best]
            assert [int(token) for token in found] == best.tolist()
        cousins.append([t for t, p in zip(proposal.tokens, parents, strict=True)
                        if p in (1, 2)])  # fmt: skip
    # Negative control: it matters after which node, where there is a head.
    is_same = all(four[:2] == four[2:] for four in np.array(cousins).tolist())
    assert is_same == (name == "dflash")


def test_a_tree_of_one_branch_is_the_chain(sampling=eagle.PLAIN):
    """Its tokens are the same integers, drawn with the same noise."""
    features, settings = blocks.features_of(), None
    if sampling:
        one = sampling_lib.make_settings(**dict(sampling))
        settings = jax.tree.map(lambda x: jnp.broadcast_to(x, (2,)), one)
    told = {"params": blocks.PARAMS["rnn"], "sampling": settings}
    chain = blocks.make(blocks.RNN)
    chains = eagle.rounds_of(chain, features, blocks.LENGTHS, **told)
    trees = eagle.rounds_of(make("rnn", "1-1-1"), features, blocks.LENGTHS, **told)
    for (_, one), (_, other) in zip(chains, trees, strict=True):
        assert other.num_drafted == one.num_drafted == 3
        assert other.tokens.tolist() == one.tokens.tolist()
