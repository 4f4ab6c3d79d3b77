"""Tree search: its nodes are those of EAGLE's published code, or of a fixed tree."""

import functools
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from spec_jax.drafters import ngram, suffix, suffix_match, tree_search, tree_shapes
from spec_jax.engine import protocols


VOCAB = 7


def head_of(rng):
    """Returns a function from paths to random log-probabilities, drawn once each."""
    found = {}

    def head(path):
        if path not in found:
            found[path] = np.log(rng.dirichlet(np.ones(VOCAB) * 0.5)).astype(np.float32)
        return found[path]

    return head


def published(head, tree):
    """Returns the paths of SafeAILab's EAGLE-2 `topK_genrate`, by its arrays and order.
    Scores are cumulated level by level, the best K of a level are expanded, and the
    best nodes of all levels are kept."""
    K = tree.top_k
    scores = head(())
    top = np.argsort(-scores, kind="stable")[:K]
    scores, found = scores[top], [scores[top]]
    paths = [(int(token),) for token in top]
    frontier = list(paths)
    for _ in range(tree.depth - 1):
        logps = np.stack([head(path) for path in frontier])
        tokens = np.argsort(-logps, axis=1, kind="stable")[:, :K]
        total = np.take_along_axis(logps, tokens, 1) + scores[:, None]
        paths += [
            (*frontier[i], int(tokens[i, j]))
            for i, j in itertools.product(range(K), range(K))
        ]
        found.append(total.ravel())
        best = np.argsort(-total.ravel(), kind="stable")[:K]
        frontier = [(*frontier[b // K], int(tokens.ravel()[b])) for b in best]
        scores = total.ravel()[best]
    keep = np.argsort(-np.concatenate(found), kind="stable")[: tree.nodes]
    return {paths[at] for at in keep}


def grower(head, tree, *, size=VOCAB, hot=None):
    """Returns a function from a number of nodes to the paths of `grow`, in its order.
    It is compiled once, and calls the head on the host."""
    paths_of = {}

    def expand(memory, tokens, parents, first, num_rows):
        def ask(tokens, parents, first):
            rows = []
            for k, token in enumerate(tokens[0]):
                path = (*paths_of[int(parents[0, first + k])], int(token))
                paths_of[int(first) + k] = path
                rows.append(head(path))
            return np.stack(rows)[None]

        shape = jax.ShapeDtypeStruct((1, tree.width, size), jnp.float32)
        rows = jax.pure_callback(ask, shape, tokens, parents, first)
        return memory, tree_search.children(rows, tree, hot), num_rows > 0

    grow = jax.jit(functools.partial(tree_search.grow, expand, tree=tree))
    root = tree_search.children(jnp.asarray(head(()))[None, None], tree, hot)

    def of(wanted):
        paths_of.clear()
        paths_of[0] = ()
        _, proposal = grow(root, (), wanted=jnp.array([wanted], jnp.int32))
        return paths(jax.tree.map(lambda leaf: np.asarray(leaf)[0], proposal))

    return of


def grown(head, tree, **how):
    """Returns the paths of all nodes, in the order of `grow`."""
    return grower(head, tree, **how)(tree.nodes)


def paths(proposal: protocols.Proposal) -> list[tuple[int, ...]]:
    """Returns the path of each real node; raises unless its parent is before it."""
    found = [()]
    for node in range(int(proposal.num_drafted)):
        parent = int(proposal.parents[node])
        assert parent < len(found)
        found.append((*found[parent], int(proposal.tokens[node])))
    return found[1:]


@pytest.mark.parametrize("number", (3, 6))
def test_nodes_are_those_of_eagle(number):
    """Fails if a child outranks its parent, or a level expands the wrong nodes."""
    rng = np.random.default_rng(number)
    top_k, depth = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    most = top_k + (depth - 1) * top_k**2
    nodes = int(rng.integers(1, min(most, 20) + 1))
    tree = tree_shapes.Tree(top_k=top_k, depth=depth, nodes=nodes, tau=1.0)
    head = head_of(rng)
    assert set(grown(head, tree)) == published(head, tree)


@pytest.mark.parametrize("text", ["3x4:15@0.5", slow("3-2-1")])
def test_a_vocabulary_of_its_own_drafts_the_same(text):
    """Fails if an entry's number is taken for its token, or mapped twice."""
    hot, tree = np.array([1, 2, 4, 5, 9, 10, 12]), tree_shapes.parse(text)
    inner = head_of(np.random.default_rng(13))

    def wide(path):
        row = np.full(14, -np.inf, np.float32)
        row[hot] = inner(path)
        return row

    mapped = jnp.asarray(hot, jnp.int32)
    narrow = grown(inner, tree, hot=mapped)
    assert narrow == grown(wide, tree, size=14)
    assert narrow != grown(inner, tree)


def test_weights_that_are_none_are_not_drafted():
    """Fails if a token without a weight, or with a weight of NaN, is drafted."""
    tree = tree_shapes.Tree(top_k=2, depth=3, nodes=6)

    def none(path):
        row = np.full(VOCAB, np.nan if path else -np.inf, np.float32)
        if not path:
            row[3] = 0.0
        return row

    assert grown(none, tree) == [(3,)]


FIXED = {
    "medusa": "[[0],[0,0],[1],[0,1],[2],[0,0,0],[1,0],[0,1,0],[1,0,0]]",
    "one wide level": "[[0],[1],[0,0],[1,2],[1,2,0],[0,0,1]]",
}


def ranked(head, path):
    """Returns the tokens of a path that is given by the ranks of its nodes."""
    tokens = ()
    for rank in path:
        tokens += (int(np.argsort(-head(tokens), kind="stable")[rank]),)
    return tokens


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_tree_has_the_same_shape_whatever_the_scores(name):
    """Fails if a node has another parent, a level is missing, or scores matter."""
    tree = tree_shapes.parse(FIXED[name])
    head = head_of(np.random.default_rng(11))
    expected = [ranked(head, path) for path in tree.paths]
    of = grower(head, tree)
    for wanted in (tree.nodes, 1, tree.nodes // 2):
        assert of(wanted) == expected[:wanted]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "at least one"),
        ("[[0],[0]]", "each node's path once"),
        ("[[0],[1,0]]", r"path \[1, 0\] has no parent among the paths: add \[1\]"),
        ("[[]]", "leave the root out"),
        ("[[-1]]", "whole numbers from 0 on"),
        ("[[0]", "is no JSON"),
        ("[" * 100_000, "is no JSON: maximum recursion depth"),
        ("16-16", "nodes=272 and the root are more than the 256 rows"),
        ("3-0-1", "children from 1 on"),
        ("none.json", "none.json: No such file"),
        ("", "is no tree"),
        ("4x12", "is no tree"),
        ("0x12:15", "top_k=0"),
        ("2x2:7", "exceed the 6 candidates"),
        ("8x8:256", "more than the 256 rows"),
        ("4x12:15@0", "tau=0.0 must be above 0"),
        ("2x2:4/likely", "and /greedy for children"),
    ],
)
def test_trees_that_are_none(text, words):
    with pytest.raises(ValueError, match=words):
        tree_shapes.parse(text)


TEXT = [5, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 6, 1, 2]


def looked_up(drafter, params=None, text=TEXT, gamma=None):
    asked = {
        "tokens": decoding.padded([text], 40)[0],
        "length": jnp.int32(len(text)),
        "gamma": jnp.int32(drafter.gamma_max if gamma is None else gamma),
    }
    return paths(decoding.propose(drafter, params, (), **asked)[1])


def test_lookup_drafts_every_continuation():
    """Checks drafts after 1, 2: 3 came twice (then 9 and 7), and 4 once (then 8)."""
    drafter = ngram.PromptLookup(gamma_max=4).for_tree(tree_shapes.parse("3x3:20"))
    found = looked_up(drafter)
    assert found[0] == (3,)
    assert {(4,), (3, 9), (3, 7), (4, 8)} <= set(found)
    assert looked_up(drafter, gamma=2) == found[:2]
    assert looked_up(drafter, text=[1, 2, 3]) == []


def test_suffix_trees_know_the_corpus():
    """Fails if the corpus yields no drafts, or a boundary within it is drafted."""
    corpus = suffix.remember(suffix.empty_corpus(20), [1, 2, 6, 6])
    drafter = suffix.SuffixDecoding(gamma_max=4).for_tree(tree_shapes.parse("3x3:6"))
    found = set(looked_up(drafter, corpus, text=[1, 2, 3, 1, 2]))
    assert {(3,), (6,), (6, 6)} <= found
    assert not any(suffix_match.NONE in path for path in found)


@pytest.mark.parametrize("text", ["50x2:6", slow("50")])
@pytest.mark.parametrize("make", [ngram.PromptLookup, suffix.SuffixDecoding])
def test_more_children_than_places(make, text):
    """Fails if a tree wider than the text ends the trace, or drafts tokens of -1."""
    drafter = make(gamma_max=4).for_tree(tree_shapes.parse(text))
    params = suffix.empty_corpus(3) if make is suffix.SuffixDecoding else None
    found = looked_up(drafter, params)
    assert {(3,), (4,)} <= set(found)
    assert not any(token < 0 for path in found for token in path)
