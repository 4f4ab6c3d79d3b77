"""Best-first trees of drafts: what is most likely to be kept, level by level.

    candidates   K children of the root, then K children of each of K expanded nodes a
                 level: C = K + (D - 1) * K * K, numbered in this order: rank r below
                 the row of column c is candidate c * K + r
    score        of a candidate: the sum of log_softmax(log weights / tau) on its path
    frontier     the K best candidates of a level, which the next level expands
    nodes        the W best of all candidates, in descending score

A child's score is at most its parent's and its number is higher, so any leading nodes
are a tree: the budget is a number, not a shape. The search is EAGLE-2's (Li et al.
2024, https://arxiv.org/abs/2406.16858), whose scores have tau 1; with tau fitted to
what targets keep (docs/trees.md) the same nodes accept more.

With coupled draws the log weights include the noise of the target's own draw for the
position: the children are then the tokens that it is most likely to draw.

A tree that is given beforehand (`tree_shapes.FixedTree`) takes the same loop over
levels; no score decides on its frontiers and nodes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from spec_jax import pytree
from spec_jax.drafters import tree_shapes
from spec_jax.engine import protocols
from spec_jax.typing import typed


Children = tuple[jax.Array, jax.Array]
"""The scores and tokens `[.., K]` of the best children of rows, best first; -inf: no
draft."""

Expand = Callable[
    [Any, jax.Array, jax.Array, jax.Array, jax.Array],
    tuple[Any, Children, jax.Array],
]
"""`expand(memory, tokens [B, K], parents [B, num_columns], first, num_rows [B])` runs
the frontier of a level. Its rows are the columns from `first` on of the tree whose
parents are given; what is found of rows from `num_rows` on is not used, and the next
level may have their columns. Returns the memory, the children of each row, and which
slots were run; the others grow no further."""


def level_of(tree: tree_shapes.AnyTree, first: Int[Array, ""]) -> Int[Array, ""]:
    """Returns the level whose rows are the columns from `first` on; 0 is the root."""
    levels = jnp.arange(1, tree.depth, dtype=jnp.int32)
    return jnp.sum(tree.first(levels) <= first, dtype=jnp.int32)


class _Search(pytree.Node):
    """State of the loop over levels."""

    level: jax.Array  # [] int32, levels that have candidates
    memory: Any
    score: jax.Array  # [B, C] float32; -inf where there is no candidate
    token: jax.Array  # [B, C] int32
    parent: jax.Array  # [B, C] int32, a candidate's number; -1: the root
    frontier: jax.Array  # [B, K] int32, numbers of the candidates to expand
    columns: jax.Array  # [B, num_columns] int32, parents of the rows run
    active: jax.Array  # [B] bool


@typed
def grow(
    expand: Expand,
    root: tuple[Float32[Array, "B 1 K"], Int[Array, "B 1 K"]],
    memory: Any,
    *,
    tree: tree_shapes.AnyTree,
    wanted: Int[Array, " B"],
) -> tuple[Any, protocols.Proposal]:
    """Returns the memory, and the best `wanted` nodes below the root of each slot.

    Levels are expanded as long as one of their nodes may be among the best.

    Args:
      root: the `Children` of the pending token.
      wanted: nodes, at most `tree.nodes`; 0: the slot sits out.
    """
    scores, tokens = (values[:, 0] for values in root)
    shape = scores.shape[0], tree.num_candidates

    def pad(values, fill):
        missing = shape[1] - values.shape[1]
        return jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill)

    search = _Search(
        level=jnp.int32(1),
        memory=memory,
        score=pad(scores, -jnp.inf),
        token=pad(tokens, 0),
        parent=jnp.full(shape, -1, jnp.int32),
        frontier=tree.frontier(scores, jnp.int32(1)),
        columns=jnp.zeros((shape[0], tree.num_columns), jnp.int32),
        active=wanted > 0,
    )

    def may_grow(search):
        return search.active & tree.may_grow(search.score, search.frontier, wanted)

    def step(search):
        return _expand_level(expand, search, may_grow(search), tree)

    if tree.depth > 1:
        search = jax.lax.while_loop(
            lambda search: (search.level < tree.depth) & jnp.any(may_grow(search)),
            step,
            search,
        )
    chosen, parents, num_real = tree.choose(search.score, search.parent)
    return search.memory, protocols.Proposal(
        tokens=_at(search.token, chosen),
        num_drafted=jnp.minimum(wanted, num_real),
        parents=parents,
    )


@typed
def children(
    log_weights: Float[Array, "*rows V"],
    tree: tree_shapes.AnyTree,
    hot: Int[Array, " V"] | None = None,
    *,
    log_softmax: Callable[[jax.Array], jax.Array] = jax.nn.log_softmax,
) -> tuple[Float32[Array, "*rows K"], Int[Array, "*rows K"]]:
    """Returns the best children of rows, by log weights that are not normalised.

    Args:
      hot: token of each entry of the log weights, if these are of a vocabulary of the
        drafter's own: the best are found there, and named afterwards.
      log_softmax: of each row.
    """
    scores = log_softmax(log_weights.astype(jnp.float32) / tree.tau)
    # NaN where no token has a weight, or a weight is NaN: no draft.
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    scores, tokens = jax.lax.top_k(scores, tree.top_k)
    return scores, tokens if hot is None else hot[tokens]


def _expand_level(
    expand: Expand, search: _Search, active: Bool[Array, " B"], tree
) -> _Search:
    """Runs the frontier, and adds its children to the candidates."""
    num_slots, K = search.frontier.shape[0], tree.top_k
    level = search.level
    first = tree.first(level)
    memory, (own, tokens), has_run = expand(
        search.memory,
        _at(search.token, search.frontier),
        search.columns,
        first,
        jnp.where(active, tree.rows(level), 0),
    )
    scores = _at(search.score, search.frontier)[:, :, None] + own
    scores = jnp.where(has_run[:, None, None], scores, -jnp.inf).reshape(num_slots, -1)
    put = lambda all_, new: jax.lax.dynamic_update_slice(
        all_, new.reshape(num_slots, -1), (jnp.int32(0), first * K)
    )
    chosen = tree.frontier(scores, level + 1)
    # The rows of the next level, and whose children they are: where there is no next
    # level the update falls on the last columns, which are not read again.
    of_next = first + chosen // K
    return search.replace(
        level=level + 1,
        memory=memory,
        score=put(search.score, scores),
        token=put(search.token, tokens),
        parent=put(search.parent, jnp.repeat(search.frontier, K, axis=1)),
        frontier=first * K + chosen,
        columns=jax.lax.dynamic_update_slice(
            search.columns, of_next, (jnp.int32(0), tree.first(level + 1))
        ),
        active=search.active & has_run,
    )


def _at(values: Array, index: Int[Array, "B n"]) -> Array:
    """Returns `values [B, C]` at each slot's own indices."""
    return jnp.take_along_axis(values, index, axis=1)
