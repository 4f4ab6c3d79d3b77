"""Acceptance of trees from their leaves on: block verification of paths.

Functions take ONE sequence and arrays alone, as in `tree_acceptance`.
"""

import jax
import jax.numpy as jnp

from spec_jax.rules import acceptance, tree_acceptance


def traversal_probabilities(
    tree: tree_acceptance.Drafted,
) -> tuple[acceptance.AcceptanceProbabilities, jax.Array]:
    """Tries the nodes of a tree from its leaves upwards, each after its children.

    `accept_traversal` decides by what it returns.

    Returns:
      the chance to keep each draft and those above it, given that no draft that is
      tried earlier was kept, 0 for drafts that are not tried; and each draft's place in
      the order of trial, `W` for those.
    """
    draft_tokens, parents = tree.tokens, tree.parents
    num_drafts = draft_tokens.shape[0]
    columns = jnp.arange(1, num_drafts + 1, dtype=jnp.int32)
    depths = tree_acceptance.depths_of(parents)
    is_tried = tree.is_real & (depths[1:] <= jnp.minimum(tree.wanted, tree.depth_max))

    def next_children(at, entered):
        """Returns which children of a column were not entered yet."""
        return is_tried & (parents == at) & ~entered

    def leave_one(carry, time):
        """Descends to the next leaf of the rest of the tree, and removes it."""
        pair, joint, entered, keep, left, at = carry

        def enter(inner):
            at, joint, entered = inner
            child = jnp.argmax(next_children(at, entered))
            at_target, at_draft = pair.at(at, draft_tokens[child])
            chance = acceptance.ratio(joint[at] * at_target, at_draft)
            column = columns[child]
            return column, joint.at[column].set(chance), entered.at[child].set(True)

        at, joint, entered = jax.lax.while_loop(
            lambda inner: jnp.any(next_children(inner[0], inner[2])),
            enter,
            (at, joint, entered),
        )
        draft, is_root = at - 1, at == 0
        parent = jnp.where(is_root, 0, parents[draft])
        put = jnp.where(is_root, num_drafts, draft)
        keep = keep.at[put].set(joint[at], mode="drop")
        left = left.at[put].set(time, mode="drop")
        pair, lacking = pair.without(
            parent, draft_tokens[draft], joint[parent], ~is_root
        )
        rest = acceptance.ratio(lacking, lacking + (1 - joint[parent]))
        joint = joint.at[parent].set(jnp.where(is_root, joint[parent], rest))
        return (pair, joint, entered, keep, left, parent), None

    start = (
        tree_acceptance.Pair.of(tree),
        jnp.ones((num_drafts + 1,), jnp.float32),
        jnp.zeros((num_drafts,), jnp.bool_),
        jnp.zeros((num_drafts,), jnp.float32),
        jnp.full((num_drafts,), num_drafts, jnp.int32),
        jnp.int32(0),
    )
    times = jnp.arange(num_drafts, dtype=jnp.int32)
    (pair, _, _, keep, left, _), _ = jax.lax.scan(leave_one, start, times)
    own = pair.target.weights
    return acceptance.AcceptanceProbabilities(keep=keep, own=own), left


@tree_acceptance.of_trees
def accept_traversal(
    tree: tree_acceptance.Drafted, *, uniforms, noise
) -> acceptance.Outcome:
    """Keeps a path of a tree, verified as a whole, in the target's distribution.

    Traversal Verification, algorithm 2 of Weng et al. (2025),
    https://arxiv.org/abs/2505.12398, for siblings that are drawn without replacement.
    Nodes are tried from the first leaf on, each after its children, siblings in the
    order of their columns. A node has the weight `min(1, weight of its parent * target
    / draft)`, and its path stays where its uniform is less. Where it does not, the
    parent gets what is left: with `r = max(0, weight * target - draft)`, the row
    `norm(r)` and the weight `sum(r) / (sum(r) + 1 - weight)`; and the draft's row loses
    the token. The own token is drawn from the row of the node whose path stays, or of
    the root. On a chain the rule is `accept_block`; on average it keeps at least as
    many drafts as `accept_tree`.

    Args: as in `accept_tree`; the output is biased under the same conditions.
    """
    probabilities, left = traversal_probabilities(tree)
    stays = uniforms < probabilities.keep
    first = jnp.argmin(jnp.where(stays, left, left.shape[0])).astype(jnp.int32)
    walk = tree.keep_path(jnp.where(jnp.any(stays), first + 1, 0))
    own = jnp.argmax(jnp.log(probabilities.own[walk.last]) + noise)
    return walk.outcome(tree.tokens, own.astype(tree.tokens.dtype))
