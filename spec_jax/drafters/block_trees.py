"""Trees of a block drafter: one pass over the block, and a search over its slots.

A slot's logits are the same whatever is drafted before it, but for what the sequential
head adds by the token before. So the children of a node at depth `d` are the best
tokens of slot `d` as the head corrects it after that node, and a level of the search
costs its rows of the head alone, none of the backbone:

    state, bias = correct(state of the parent, token of the node, hidden of slot d)
    children    the best of U_d + bias, with the noise of the target's draw

Without a head all nodes of a level have the same children. Any such tree is lossless
under the rule "coupled", and one of a fixed shape under "rejection" too.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp

from spec_jax.drafters import (
    block_slots,
    draft_slots,
    draft_trees,
    tree_search,
    tree_shapes,
)
from spec_jax.model import block_heads, block_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotBlockTree(block_slots.SlotBlock):
    """A `BlockDrafter` with a tree, for `num_slots` sequences.

    Raises:
      NotImplementedError: as `SlotBlock`.
    """

    @property
    def _tree(self) -> tree_shapes.AnyTree:
        return cast(tree_shapes.AnyTree, self.drafter.tree)

    def _draw(self, params, anchor, hidden, logits, *, length, sampling, wanted):
        """Returns the proposal of whole blocks, level after level."""
        drafter, head, tree = self.drafter, self.drafter.head, self._tree
        impl, slots = drafter.model.impl, self.num_slots
        draw = draft_trees.Draw.of(drafter, sampling, length, num_slots=slots)
        widen = draft_slots.widened(params.hot, self.vocab_size)
        children = functools.partial(
            draw.children,
            tree=tree,
            vocab_size=self.vocab_size,
            hot=params.hot,
        )
        correct = functools.partial(
            block_heads.correct,
            block_params.prepare(params, impl),
            head,
            product=block_heads.row_product(impl),
        )

        def run(states, before, slot):
            """Returns the states after rows `[B, K]` of a slot, and their logits."""
            count = before.shape[1]
            of_rows = lambda x: jnp.repeat(x[:, slot], count, axis=0)
            flat = states.reshape(slots * count, -1), before.reshape(-1)
            states, bias, _ = correct(*flat, of_rows(hidden))
            rows = of_rows(logits)
            if bias is not None:
                rows += bias
            by_slot = lambda x: x.reshape(slots, count, -1)
            return by_slot(states), by_slot(rows)

        def expand(carry, tokens, parents, first, num_rows):
            """Runs the rows of a level; see `tree_search.Expand`."""
            states, probs = carry
            level = tree_search.level_of(tree, first)
            above = jax.lax.dynamic_slice_in_dim(parents, first, tree.width, axis=1)
            before = states[jnp.arange(slots, dtype=jnp.int32)[:, None], above]
            new, rows = run(before, tokens, head.first_slot + level)
            states = jax.lax.dynamic_update_slice_in_dim(states, new, first, axis=1)
            probs = draw.put(probs, widen(rows), first)
            found = children(rows, level=level, counts=num_rows)
            return (states, probs), found, num_rows > 0

        state = block_heads.first_state(head, (slots,))
        if head.first_slot:  # Predicts nothing, but a recurrent state passes through.
            state, _, _ = correct(state, anchor, hidden[:, 0])
        first = jnp.int32(0)
        after, root = run(state[:, None], anchor[:, None], head.first_slot)
        states = jnp.zeros((slots, tree.num_columns, state.shape[1]), state.dtype)
        states = states.at[:, :1].set(after)
        (_, probs), proposal = tree_search.grow(
            expand,
            children(root, level=first, counts=jnp.minimum(wanted, 1)),
            (states, draw.begin(widen(root), tree)),
            tree=tree,
            wanted=wanted,
        )
        return draft_trees.with_probs(proposal, probs, tree)
