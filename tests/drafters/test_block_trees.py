"""Trees of block drafters: their nodes are those of an oracle.

The oracle is float64 NumPy, `block_oracle`, and is given the tokens before each node.
"""

import decoding
import numpy as np
import pytest
import test_block as blocks
import test_eagle3 as eagle
from slow_cases import slow

from spec_jax.drafters import tree_shapes


FIXED = "2-2-1"


def make(name, tree, impl=decoding.SMALL.target.impl):
    drafter = blocks.make(blocks.HEADS[name], impl)
    return drafter.for_tree(tree_shapes.parse(tree))


def nodes_of(proposal):
    """Returns the tokens on the path of each column; the root's path is empty."""
    paths = [()]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*paths[parent], int(token)))
    return paths


def logits_after(head, features, length, path) -> np.ndarray:
    drawn = [*path, *[0] * head.config["block_size"]]
    return blocks.of_oracle(head, features, length, drawn=drawn)[1][len(path)]


@pytest.mark.parametrize("name", [slow("dspark"), "rnn"])
def test_children_are_the_oracles(tmp_path, name, monkeypatch):
    """Fails if a node's children come from another slot, node or state."""
    params = blocks.PARAMS[name]
    # Larger weights make the children depend on the token before, and on the state.
    markov = params.markov.replace(out=8 * params.markov.out)
    if markov.mix is not None:
        both = 2 * markov.embed.shape[1]
        markov = markov.replace(mix=markov.mix.at[:, :both].multiply(8))
    monkeypatch.setitem(blocks.PARAMS, name, params.replace(markov=markov))
    head, features = blocks.oracle_of(tmp_path, name), eagle.features_of()
    rounds = eagle.rounds_of(
        make(name, FIXED), features, (7, 12), params=blocks.PARAMS[name]
    )
    cousins = []
    for length, proposal in rounds:
        assert proposal.num_drafted == 10
        paths, parents = nodes_of(proposal), proposal.parents.tolist()
        of = lambda *columns, p=proposal: p.tokens[np.isin(p.parents, columns)].tolist()
        for column in sorted(set(parents)):
            found = of(column)
            logits = logits_after(head, features, length, paths[column])
            best = np.argsort(-logits, kind="stable")[: len(found)]
            if "d2t" in head.tensors:
                best = best + head.tensors["d2t"][best]
            assert found == best.tolist()
        cousins.append(of(1, 2))
    # Negative control: children depend on the node that they follow.
    assert any(four[:2] != four[2:] for four in cousins)


@pytest.mark.slow
def test_a_tree_of_one_branch_is_the_chain():
    """Compares its tokens with the chain's, which are drawn with the same noise."""
    features = eagle.features_of()
    settings = decoding.sampling_of(2, temperature=1.0, seed=5)
    told = {"params": blocks.PARAMS["rnn"], "sampling": settings}
    chain = blocks.make(blocks.RNN)
    chains = eagle.rounds_of(chain, features, blocks.LENGTHS, **told)
    trees = eagle.rounds_of(make("rnn", "1-1-1"), features, blocks.LENGTHS, **told)
    for (_, one), (_, other) in zip(chains, trees, strict=True):
        assert other.num_drafted == one.num_drafted == 3
        assert other.tokens.tolist() == one.tokens.tolist()
