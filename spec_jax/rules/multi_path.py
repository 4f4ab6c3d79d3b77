"""Acceptance of one of several paths, verified as a block.

Functions take ONE sequence and arrays alone, as in `tree_acceptance`. Here siblings are
drawn with replacement. The best path is chosen first; the distribution of its tokens is
then not the draft's, but can be computed.
"""

from typing import cast

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.rules import acceptance, tree_acceptance


class Selected(pytree.Node):
    """The highest path: its nodes by depth, and the distributions of its tokens.

    Entries past `length` drafts may hold anything.
    """

    columns: jax.Array  # [D + 1] int32, from the root on
    tokens: jax.Array  # [D] int32
    length: jax.Array  # [] int32
    probs: jax.Array  # [D, V] float32, distribution of each of `tokens`


def select(tree: tree_acceptance.Drafted) -> Selected:
    """Finds the path whose tokens are the highest of its siblings', from the root on.

    `accept_multi_path` verifies it. Nodes whose paths hold the same tokens count as one
    node with all their children. A depth that was not drafted in full is not read.
    """
    draft_tokens, parents, depth_max = tree.tokens, tree.parents, tree.depth_max
    depths, is_real = tree_acceptance.depths_of(parents), tree.is_real
    is_at = depths[None] == jnp.arange(depth_max + 1, dtype=jnp.int32)[:, None]
    of_shape = jnp.sum(is_at, axis=1, dtype=jnp.int32)
    drafted = jnp.sum(is_at[:, 1:] & is_real[None], axis=1, dtype=jnp.int32)
    # Depth 1 need not be full: the drafted nodes are that many children of the root.
    is_whole = (drafted == of_shape)[1:].at[0].set(drafted[1] > 0)
    is_whole &= drafted[1:] > 0
    most = jnp.minimum(jnp.sum(jnp.cumprod(is_whole.astype(jnp.int32))), tree.wanted)
    numbers = jnp.maximum(of_shape[1:] // jnp.maximum(of_shape[:-1], 1), 1)
    numbers = numbers.at[0].set(drafted[1])

    def descend(carry, depth):
        """Goes to the highest child of the nodes that hold the path."""
        holds, at, goes_on = carry
        draft_row = cast(jax.Array, tree.draft_probs)[at]
        draft_row = jnp.where(draft_row > 0, draft_row, 0.0)
        rank, row = _Row.of(tree.target_probs[at], draft_row)
        is_child = is_real & holds[parents] & goes_on & (depth < most)
        # A token outside the vocabulary is the lowest, and is a choice: it was drawn.
        height = rank.at[draft_tokens].get(
            mode="fill", fill_value=-1, wrap_negative_indices=False
        )
        best = jnp.argmax(jnp.where(is_child, height, -2))
        goes_on &= jnp.any(is_child)
        token = draft_tokens[best]
        holds = jnp.append(False, is_child & (draft_tokens == token))
        at = jnp.where(goes_on, best + 1, at).astype(jnp.int32)
        return (holds, at, goes_on), (at, token, goes_on, row)

    start = jnp.zeros((parents.shape[0] + 1,), bool).at[0].set(True)
    _, (columns, tokens, is_kept, rows) = jax.lax.scan(
        descend,
        (start, jnp.int32(0), jnp.bool_(True)),
        jnp.arange(depth_max, dtype=jnp.int32),
    )
    probs = [_of_highest(rows, tokens, numbers, depth) for depth in range(depth_max)]
    return Selected(
        columns=jnp.append(0, columns).astype(jnp.int32),
        tokens=tokens,
        length=jnp.sum(is_kept, dtype=jnp.int32),
        probs=jnp.stack(probs),
    )


class _Row(pytree.Node):
    """A draft's row: the probability of each token, and the sum of all lower ones.

    The last entry is for all tokens outside the vocabulary, which are the lowest.
    """

    own: jax.Array  # [V + 1] float32
    lower: jax.Array  # [V + 1] float32

    @classmethod
    def of(cls, target: jax.Array, draft: jax.Array) -> tuple[jax.Array, "_Row"]:
        """Returns the rank of each token, by target over draft, and the row."""
        ratios = jnp.where(draft > 0, target / jnp.where(draft > 0, draft, 1.0), -1.0)
        order = jnp.argsort(ratios, stable=True)
        rank = jnp.argsort(order)
        higher = jnp.cumsum(draft[order][::-1])[::-1]
        lower = jnp.maximum(1.0 - higher, 0.0)
        return rank, cls(
            own=jnp.append(draft, lower[0]), lower=jnp.append(lower[rank], 0.0)
        )


def _of_highest(rows: _Row, tokens, numbers, depth: int) -> jax.Array:
    """Returns the distribution of the highest path's token at a depth, `[V]`.

    The highest path begins with a prefix with the chance that no path is higher, less
    the chance that all are lower; both are powers, level by level upwards. A difference
    of powers is a multiple of the bases' difference: no digits cancel.
    """
    lower, mass = rows.lower[depth], rows.own[depth]
    upper = lower + mass
    for level in range(depth, -1, -1):
        if level < depth:
            own = rows.own[level, tokens[level]]
            below = rows.lower[level, tokens[level]]
            lower, upper = below + own * lower, below + own * upper
        added, upper, lower = _powers(upper, lower, numbers[level])
        mass *= added
    total = jnp.sum(mass)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 0.0)[:-1]


def _powers(upper, lower, number) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the powers' difference divided by the bases', and both powers."""

    def multiply(_, carry):
        added, above, below = carry
        return added * upper + below, above * upper, below * lower

    one = jnp.ones_like(upper)
    return jax.lax.fori_loop(0, number, multiply, (jnp.zeros_like(one), one, one))


def multi_path_probabilities(
    tree: tree_acceptance.Drafted,
) -> acceptance.AcceptanceProbabilities:
    """Returns the chance of each draft of the highest path to stay with those above it,
    given that no deeper draft stays; 0 for all other drafts.

    `accept_multi_path` decides by them.
    """
    found = select(tree)
    block = acceptance.block_probabilities(
        found.tokens,
        found.probs,
        tree.target_probs[found.columns],
        found.length,
        row_sums=tree.row_sums,
    )
    (width,) = tree.tokens.shape
    is_on = jnp.arange(tree.depth_max + 1, dtype=jnp.int32) <= found.length
    columns = jnp.where(is_on, found.columns, width + 1)
    keep = jnp.zeros((width,), jnp.float32).at[columns[1:] - 1]
    return acceptance.AcceptanceProbabilities(
        keep=keep.set(block.keep, mode="drop"),
        own=tree.target_probs.at[columns].set(block.own, mode="drop"),
    )


@tree_acceptance.of_trees
def accept_multi_path(
    tree: tree_acceptance.Drafted, *, uniforms, noise
) -> acceptance.Outcome:
    """Keeps a prefix of the best path of a tree, in the target's distribution.

    Greedy multi-path block verification (GBV), Thomas and Pal (2026),
    https://arxiv.org/abs/2602.16961. The tokens after a prefix are ordered by `target /
    draft`, and paths lexicographically by their tokens; `accept_block` verifies the
    highest path, against the distribution of the highest of so many paths. The paper's
    trees branch at the root alone, "4-1-1"; here each depth has a number of children
    of its own, and on a chain the rule is `accept_block`.

    It need not keep more than `accept_block` does on one of the paths: where draft and
    target agree, the highest path is not what the target would draw.

    Args: as in `accept_tree`, but siblings are drawn with replacement, and all nodes of
      a depth have equally many children: otherwise the output is biased.
    """
    probabilities = multi_path_probabilities(tree)
    stays = jnp.append(False, uniforms < probabilities.keep)
    depths = tree_acceptance.depths_of(tree.parents)
    end = jnp.argmax(jnp.where(stays, depths, 0)).astype(jnp.int32)
    weights = acceptance.or_else(probabilities.own[end], tree.target_probs[end])
    own = jnp.argmax(jnp.log(weights) + noise)
    return tree.keep_path(end).outcome(tree.tokens, own.astype(tree.tokens.dtype))
