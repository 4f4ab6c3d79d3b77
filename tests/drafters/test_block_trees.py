"""Trees of block drafters: lossless, and their nodes those of an oracle.

The oracle is float64 NumPy, `block_oracle`, told the tokens before each node.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_block as blocks
import test_eagle3 as eagle

from spec_jax.drafters import each, hybrid, suffix, tree_shapes
from spec_jax.gamma import goodput
from spec_jax.rules import rule as rule_lib, sampling as sampling_lib


SEARCHED, FIXED = "3x3:6@1", "2-2-1"


def make(name, tree, impl=decoding.SMALL.target.impl):
    drafter = blocks.make(blocks.HEADS[name], impl)
    return drafter.for_tree(tree_shapes.parse(tree))


CASES = [
    ("native", 1, "dspark", SEARCHED, (), "coupled"),
    ("native", 4, "dspark", SEARCHED, eagle.PLAIN, "coupled"),
    ("xla", 4, "rnn", SEARCHED, eagle.WARM, "coupled"),
    ("native", 4, "rnn", FIXED, eagle.PLAIN, "coupled"),
    ("native", 4, "dspark", FIXED, eagle.PLAIN, "rejection"),
    ("xla", 1, "dflash", FIXED, eagle.PLAIN, "coupled"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("impl", "num_asks", "name", "tree", "sampling", "rule"), CASES
)
def test_tokens_are_those_of_decoding(impl, num_asks, name, tree, sampling, rule):
    """Fails if a tree can change a token, or the K/V of the target.

    Rejection draws others at a temperature: it runs to its end, with pages in order.
    """
    setting, drafter = eagle.setting_of(impl), make(name, tree, impl)
    asks = eagle.drawn(sampling)[:num_asks] if sampling else eagle.ASKS[:num_asks]
    state = eagle.run(setting, drafter, asks, params=blocks.PARAMS[name], rule=rule)
    if rule == "coupled" or not sampling:
        decoding.assert_as_decoded(setting, state, asks)
    assert int(state.slots.num_proposed[0]) > 0
    decoding.check_cache(state.memory.kv)


def test_budgets_of_nodes_change_no_token():
    """Fails if a tree that goodput cuts can change a token, or is never cut: drawn ones
    beside a greedy one."""
    setting, drafter = eagle.setting_of("native"), make("dspark", SEARCHED)
    policy = goodput.RankGoodput(gamma_max=drafter.gamma_max)
    # A row costs three tenths of a round: no tree is worth all of its rows.
    costs = 1 + 0.3 * np.arange(drafter.gamma_max + 1)
    asks = eagle.drawn(eagle.WARM)
    state = eagle.run(
        setting,
        drafter,
        asks,
        params=blocks.PARAMS["dspark"],
        gamma_policy=policy,
        policy_state=policy.init(costs),
    )
    decoding.assert_as_decoded(setting, state, asks)
    proposed, rounds = state.slots.num_proposed, state.slots.num_rounds
    assert 0 < int(proposed.sum()) < drafter.gamma_max * int(rounds.sum())


def test_a_hybrid_with_a_block_head_changes_no_token():
    """Fails too if a head that sat out, where statistics were sure, misses features."""
    setting, head = eagle.setting_of("native"), blocks.make(blocks.HEADS["dspark"])
    lookup = suffix.SuffixDecoding(gamma_max=head.gamma_max)
    both = hybrid.Hybrid(suffix=lookup, draft=head)
    params = hybrid.HybridParams(
        draft=blocks.PARAMS["dspark"], corpus=suffix.empty_corpus(8)
    )
    state = eagle.run(setting, both, eagle.ASKS, params=params)
    decoding.assert_as_decoded(setting, state, eagle.ASKS)
    assert int(state.slots.num_accepted.sum()) > 0


def nodes_of(proposal):
    """The tokens on each node's path, by column; that of the root is empty."""
    paths = [()]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*paths[parent], int(token)))
    return paths


def logits_after(head, features, length, path) -> np.ndarray:
    drawn = [*path, *[0] * head.config["block_size"]]
    return blocks.of_oracle(head, features, length, drawn=drawn)[1][len(path)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dspark", "rnn", "dflash"])
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


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, eagle.PLAIN], ids=["greedy", "1"])
def test_a_tree_of_one_branch_is_the_chain(sampling):
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


@pytest.mark.slow
def test_nodes_are_drawn_from_the_probabilities_they_state(tmp_path):
    """Fails if rejection judges a node by another row than it was drawn from."""
    head, features = blocks.oracle_of(tmp_path, "dspark"), blocks.features_of()
    drafter = each.lift(make("dspark", FIXED), 2, rule="rejection").drafter
    assert drafter.draws == "independent"
    one = sampling_lib.make_settings(temperature=1.5, seed=5)
    rounds = eagle.rounds_of(
        drafter,
        features,
        (7, 12),
        params=blocks.PARAMS["dspark"],
        sampling=jax.tree.map(lambda x: jnp.broadcast_to(x, (2,)), one),
    )
    for length, proposal in rounds:
        paths = nodes_of(proposal)
        for column in sorted(set(proposal.parents.tolist())):
            logits = logits_after(head, features, length, paths[column])
            expected = np.exp((logits - logits.max()) / 1.5)
            expected /= expected.sum()
            np.testing.assert_allclose(proposal.probs[column], expected, atol=1e-4)
    with pytest.raises(NotImplementedError, match="trees of a search under rule"):
        each.lift(make("dspark", SEARCHED), 2, rule="rejection")
    independent = dataclasses.replace(make("dspark", FIXED), draws="independent")
    assert independent.for_rule(rule_lib.rejection) == independent
