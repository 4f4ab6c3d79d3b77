"""Trees of draft models: what children are drawn from, and which rows are kept."""

import dataclasses
import itertools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import PROMPT, SMALL
from test_draft_model import NEARLY, as_drafter

from spec_jax import testing
from spec_jax.drafters import draft_trees, draw, each, tree_shapes
from spec_jax.engine import rows as rows_lib


FIXED = tree_shapes.parse("3-2")


def drawn(drafter, text, *, seed=5):
    """Returns a drafter's proposal after one text, for a target that draws."""
    slots, memory = decoding.prefilled(drafter, NEARLY, [text], **SMALL.sizes)
    sampling = decoding.sampling_of(1, temperature=0.8, top_k=20, seed=seed)
    _, proposal = decoding.propose_after(
        slots, NEARLY, memory, [text], sampling=sampling
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], proposal)


def test_what_the_children_of_a_tree_were_drawn_from():
    """Fails if a node has another node's probabilities, or draws a child twice."""
    independent = as_drafter(draws="independent")
    proposal = drawn(independent.for_tree(FIXED), PROMPT)
    probs, inner = proposal.probs, sorted(set(FIXED.parents))
    np.testing.assert_allclose(probs[inner].sum(axis=-1), 1, rtol=1e-5)
    assert not np.delete(probs, inner, axis=0).any()
    children: dict[int, list[int]] = {}
    for token, parent in zip(proposal.tokens, FIXED.parents, strict=True):
        assert probs[parent, token] > 0
        children.setdefault(int(parent), []).append(int(token))
    assert all(len(set(found)) == len(found) for found in children.values())
    # A node's children are drawn from the draft's row after the path to the node.
    for column in inner:
        path = [int(proposal.tokens[column - 1])] if column else []
        alone = drawn(independent, [*PROMPT, *path])
        np.testing.assert_allclose(probs[column], alone.probs[0], rtol=1e-4, atol=1e-7)
    assert (
        drawn(independent.for_tree(FIXED), PROMPT, seed=6).tokens != proposal.tokens
    ).any()


UNEVEN = tree_shapes.parse("[[0],[1],[2],[0,0],[1,0],[2,0],[2,1],[2,1,0]]")


class Immovable(draft_trees.SlotDraftTree):
    """Keeps as many rows as were committed, but moves none of their K/V."""

    @property
    def _rows(self):
        return _Still(model=self.drafter.model, num_slots=self.num_slots)


class _Still(rows_lib.SlotRows):
    def keep_path(self, kv, path, num_kept, *, start):
        return kv


class Careless(draft_trees.SlotDraftTree):
    """Keeps columns 3 and 5 of the tree, whatever was committed."""

    def _keep_committed(self, memory, text, length):
        path = jnp.array([[3, 5]], jnp.int32)
        kept = jnp.full((1,), 2, jnp.int32)
        kv = self._rows.keep_path(memory.kv, path, kept, start=memory.start)
        asked = jnp.ones((1,), bool)
        return self._rows.truncate(kv, memory.start + 3, asked=asked)


def continued(kind, drafter, path):
    """Commits a path of a tree and a token more; returns how many rows the draft holds,
    their K/V and fresh ones, and the next proposal with the kept memory and a new one.

    Args:
      path: nodes that are committed, by their indices; -1: a token of no node.
    """
    slots = kind(drafter=drafter, num_slots=1)
    sampling = decoding.sampling_of(1, temperature=0.8, top_k=20, seed=5)

    def propose(memory, text):
        return decoding.propose_after(slots, NEARLY, memory, [text], sampling=sampling)

    begun = lambda text: slots.prefill(NEARLY, slots.init(**SMALL.sizes), text, slot=0)
    memory, proposal = propose(begun(PROMPT), PROMPT)
    drafts = np.asarray(proposal.tokens[0])
    # Token 95 stands for -1: no child of the parent holds it.
    chosen = [int(drafts[node]) if node >= 0 else 95 for node in path]
    text = [*PROMPT, *chosen, 94]
    asked = jnp.ones((1,), bool)
    memory = decoding.commit(slots, NEARLY, memory, jnp.array([len(text)]), asked=asked)
    tokens = decoding.padded([text], 80)
    kv = jax.jit(slots._keep_committed)(memory, tokens, jnp.array([len(text)]))
    decoding.check_cache(kv)
    held = int(kv.length[0])
    fresh = drafter.model.new_cache(**SMALL.sizes)
    fresh, _ = drafter.model.prefill(NEARLY, fresh, text, by_rows=True)
    both = decoding.held(kv, held), decoding.held(fresh, held)
    again = propose(memory, text)[1], propose(begun(text), text)[1]
    return held, both, again


@pytest.mark.parametrize(
    ("path", "rows_kept"),
    [
        ([2, 6, 7], 2),  # The last one is a leaf: it was not run.
        ([1, 4], 1),
        ([0], 1),
        ([2, -1], 1),
        ([-1], 0),
        ([], 0),
    ],
)
def test_of_a_tree_the_committed_rows_are_kept(path, rows_kept):
    """Fails if a committed row is not kept, if K/V differ from those of decoding, or if
    the next proposal is not that of a memory that never held the tree."""
    decoding.needs("native")  # Its K/V is the same however rows are grouped.
    drafter = as_drafter(draws="independent").for_tree(UNEVEN)
    kind = draft_trees.SlotDraftTree
    held, both, again = continued(kind, drafter, path)
    assert held == len(PROMPT) + rows_kept
    testing.assert_same_bits(*both)
    # Tokens and the probabilities that they were drawn from are the same bits.
    testing.assert_same_bits(*again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Immovable, Careless])
def test_rows_that_are_wrongly_kept_are_caught(kind):
    """Negative controls: K/V that are not moved, and K/V of uncommitted rows."""
    drafter = as_drafter(draws="independent").for_tree(UNEVEN)
    path = [2, 6] if kind is Immovable else [1, 4]
    _, both, again = continued(kind, drafter, path)
    for pair in (both, again):
        with pytest.raises(AssertionError):
            testing.assert_same_bits(*pair)


def test_a_prompt_takes_the_pages_of_rows_that_nothing_was_committed_of():
    """Fails if a tree's rows outlive the admission of another sequence."""
    drafter = as_drafter().for_tree(UNEVEN)
    slots = each.lift(drafter, 2)
    memory = slots.prefill(NEARLY, slots.init(**SMALL.sizes), PROMPT, slot=0)
    texts, gamma = [PROMPT, [0]], [drafter.gamma_max, 0]
    memory, _ = decoding.propose_after(slots, NEARLY, memory, texts, gamma=gamma)
    asked = jnp.array([True, False])
    length = jnp.array([len(PROMPT) + 2, 1])
    memory = decoding.commit(slots, NEARLY, memory, length, asked=asked)
    assert int(memory.kv.length[0]) > len(PROMPT)
    memory = slots.prefill(NEARLY, memory, PROMPT[:5], slot=1)
    assert memory.kv.length.tolist() == [len(PROMPT), 4]
    decoding.check_cache(memory.kv)
    # A slot that is released keeps nothing.
    memory = decoding.commit(slots, NEARLY, memory, length * 0 + 1, asked=asked | True)
    assert memory.kv.length.tolist() == [0, 0] and not memory.is_run.any()


@pytest.mark.parametrize("replaces", (True, False))
def test_siblings_drawn_with_replacement_are_independent(replaces):
    """Compares frequencies of pairs of nodes, over seeds, with independent draws.
    Negative control: without replacement two siblings are never the same."""
    tree = dataclasses.replace(FIXED, replaces=replaces)
    num_slots, chances = 2000, np.array([0.5, 0.3, 0.2])
    settings = decoding.sampling_of(num_slots)
    settings = settings.replace(seed=jnp.arange(num_slots, dtype=jnp.uint32))
    length = jnp.full((num_slots,), 5, jnp.int32)
    made = draw.Draw(sampling=settings, length=length, impl="xla", has_probs=True)

    def tokens(level, count):
        logits = jnp.log(jnp.asarray(chances, jnp.float32))
        shape = num_slots, count, 3
        found = made.children(
            jnp.broadcast_to(logits, shape),
            level=jnp.int32(level),
            counts=jnp.full((num_slots,), count, jnp.int32),
            tree=tree,
            vocab_size=3,
        )
        return np.asarray(found[1]).reshape(num_slots, -1)

    nodes = np.concatenate([tokens(0, 1), tokens(1, 3)], axis=1).T
    gaps = [
        np.abs(
            np.histogram2d(one, other, bins=[range(4)] * 2)[0] / num_slots
            - np.outer(chances, chances)
        ).max()
        for one, other in itertools.combinations(nodes, 2)
    ]
    assert (max(gaps) < 0.04) == replaces
