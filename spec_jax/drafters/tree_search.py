"""Best-first trees of drafts: what is most likely to be kept, level by level.

    candidates   K children of the root, then K children of each of K expanded nodes a
                 level: C = K + (D - 1) * K * K, numbered in this order
    score        of a candidate: the sum of log_softmax(log weights / tau) on its path
    frontier     the K best candidates of a level, which the next level expands
    nodes        the W best of all candidates, in descending score

A child's score is at most its parent's and its number is higher, so any leading nodes
are a tree: the budget is a number, not a shape. The search is EAGLE-2's (Li et al.
2024, https://arxiv.org/abs/2406.16858), whose scores have tau 1; with tau fitted to
what targets keep (`experiments/fit_scores.py`) the same nodes accept more.

Where the target draws, the log weights include the noise of its own draw for the
position: the children are then the tokens that it is most likely to draw.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from spec_jax import pytree
from spec_jax.engine import protocols
from spec_jax.typing import typed


TAU = 0.4
"""Divides log weights unless another is fitted: sharper than probabilities, since the
target's token is the draft's most probable one more often than its probability says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """How far a search looks, and how many nodes it returns.

    Attributes:
      top_k: children of a node, and nodes expanded a level; `K` above.
      depth: drafts on a path, at most; `D`.
      nodes: drafts of a proposal, at most; `W`.
      tau: divides log weights; 1 scores by probability, as EAGLE-2 does.

    Raises:
      ValueError: a size below one, more nodes than candidates or than a target's
        window takes, or a `tau` that is not above 0.
    """

    top_k: int
    depth: int
    nodes: int
    tau: float = TAU

    def __post_init__(self) -> None:
        for name in ("top_k", "depth", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.nodes > self.num_candidates:
            raise ValueError(
                f"nodes={self.nodes} exceed the {self.num_candidates} candidates "
                f"of top_k={self.top_k} and depth={self.depth}: search wider or deeper"
            )
        if self.nodes >= protocols.MAX_TREE_ROWS:
            raise ValueError(
                f"nodes={self.nodes} and the root are more than the "
                f"{protocols.MAX_TREE_ROWS} rows of a window: ask for fewer"
            )
        if not self.tau > 0:
            raise ValueError(f"tau={self.tau} must be above 0")

    @property
    def num_candidates(self) -> int:
        """Nodes that a search scores."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def depth_max(self) -> int:
        """Drafts on a path of the nodes that are returned, at most."""
        return min(self.depth, self.nodes)

    @property
    def num_columns(self) -> int:
        """Rows of a slot that a search runs: the root and all frontiers."""
        return 1 + (self.depth - 1) * self.top_k

    @classmethod
    def parse(cls, text: str) -> "Tree":
        """Reads `KxD:W` or `KxD:W@tau`, such as `4x12:15` and `4x12:15@0.3`.

        Raises:
          ValueError: another text, or as the class.
        """
        sizes, _, tau = text.partition("@")
        try:
            search, nodes = sizes.split(":")
            top_k, depth = search.split("x")
            numbers = int(top_k), int(depth), int(nodes), float(tau or TAU)
        except ValueError:
            raise ValueError(
                f"{text!r} is no tree: give children x depth : nodes and, after @, a "
                "tau, as in 4x12:15 or 4x12:15@0.3"
            ) from None
        return cls(top_k=numbers[0], depth=numbers[1], nodes=numbers[2], tau=numbers[3])

    def __str__(self) -> str:
        return f"{self.top_k}x{self.depth}:{self.nodes}@{self.tau:g}"


def check_nodes(tree: Tree | None, gamma_max: int) -> None:
    """Raises `ValueError` unless a drafter's `gamma_max` is its tree's nodes."""
    if tree is not None and tree.nodes != gamma_max:
        raise ValueError(
            f"gamma_max={gamma_max} of a tree of {tree.nodes} nodes: give both the same"
        )


Expand = Callable[
    [Any, jax.Array, jax.Array, jax.Array, jax.Array],
    tuple[Any, jax.Array, jax.Array],
]
"""`expand(memory, tokens [B, K], parents [B, num_columns], first, active [B])` runs the
frontier of a level. Its rows are the columns from `first` on of the tree whose parents
are given. Returns the memory, each row's log weights `[B, K, V]`, and which slots were
run; the others grow no further."""


class _Search(pytree.Node):
    """What the loop over levels carries."""

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
    root: Float[Array, "B V"],
    memory: Any,
    *,
    tree: Tree,
    wanted: Int[Array, " B"],
) -> tuple[Any, protocols.Proposal]:
    """Returns the memory, and the best `wanted` nodes below the root of each slot.

    Levels are expanded as long as one of their nodes may be among the best.

    Args:
      root: log weights of the token after the pending one; not normalised.
      wanted: nodes, at most `tree.nodes`; 0: the slot sits out.
    """
    num_slots, K = root.shape[0], tree.top_k
    first_scores, first_tokens = _children(root, tree)

    def pad(values, fill):
        missing = tree.num_candidates - K
        return jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill)

    numbers = jnp.arange(K, dtype=jnp.int32)
    search = _Search(
        level=jnp.int32(1),
        memory=memory,
        score=pad(first_scores, -jnp.inf),
        token=pad(first_tokens, 0),
        parent=jnp.full((num_slots, tree.num_candidates), -1, jnp.int32),
        frontier=jnp.broadcast_to(numbers, (num_slots, K)),
        columns=jnp.zeros((num_slots, tree.num_columns), jnp.int32),
        active=wanted > 0,
    )

    def goes_on(search):
        return (search.level < tree.depth) & jnp.any(_may_grow(search, wanted, tree))

    if tree.depth > 1:
        step = lambda search: _expand_level(expand, search, wanted, tree)
        search = jax.lax.while_loop(goes_on, step, search)
    return search.memory, _best_nodes(search, wanted, tree)


def _children(
    log_weights: Float[Array, "*rows V"], tree: Tree
) -> tuple[Float32[Array, "*rows K"], Int[Array, "*rows K"]]:
    """Returns the scores and tokens of the best children."""
    scores = jax.nn.log_softmax(log_weights.astype(jnp.float32) / tree.tau)
    # NaN where no token has a weight, or a weight is NaN: no draft.
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    return jax.lax.top_k(scores, tree.top_k)


def _may_grow(search: _Search, wanted, tree: Tree) -> Bool[Array, " B"]:
    """Returns where a child of the frontier may be among the best `wanted` nodes."""
    best, _ = jax.lax.top_k(search.score, tree.nodes)
    last = jnp.maximum(wanted, 1)[:, None] - 1
    worst = jnp.take_along_axis(best, last, axis=1)[:, 0]
    # Of equal scores the lower number is better, and children have higher ones.
    highest = _at(search.score, search.frontier)[:, 0]
    return search.active & (highest > worst)


def _expand_level(expand: Expand, search: _Search, wanted, tree: Tree) -> _Search:
    """Runs the frontier, and adds its children to the candidates."""
    num_slots, K = search.frontier.shape
    level = search.level
    first = 1 + (level - 1) * K
    active = _may_grow(search, wanted, tree)
    memory, log_weights, has_run = expand(
        search.memory,
        _at(search.token, search.frontier),
        search.columns,
        first,
        active,
    )
    own, tokens = _children(log_weights, tree)
    scores = _at(search.score, search.frontier)[:, :, None] + own
    scores = jnp.where(has_run[:, None, None], scores, -jnp.inf).reshape(num_slots, -1)
    offset = K + (level - 1) * K**2
    put = lambda all_, new: jax.lax.dynamic_update_slice(
        all_, new.reshape(num_slots, K * K), (jnp.int32(0), offset)
    )
    _, chosen = jax.lax.top_k(scores, K)
    # The rows of the next level, and whose children they are: where there is no next
    # level the update falls on the last columns, which are not read again.
    of_next = first + chosen // K
    return search.replace(
        level=level + 1,
        memory=memory,
        score=put(search.score, scores),
        token=put(search.token, tokens),
        parent=put(search.parent, jnp.repeat(search.frontier, K, axis=1)),
        frontier=offset + chosen,
        columns=jax.lax.dynamic_update_slice(
            search.columns, of_next, (jnp.int32(0), first + K)
        ),
        active=search.active & has_run,
    )


def _best_nodes(search: _Search, wanted, tree: Tree) -> protocols.Proposal:
    """Returns the best nodes, each with its parent's column."""
    scores, chosen = jax.lax.top_k(search.score, tree.nodes)
    num_slots, num_nodes = chosen.shape
    slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    columns = jnp.arange(1, num_nodes + 1, dtype=jnp.int32)
    column_of = jnp.zeros(search.score.shape, jnp.int32)
    column_of = column_of.at[slots, chosen].set(jnp.broadcast_to(columns, chosen.shape))
    parent = _at(search.parent, chosen)
    num_real = jnp.sum(scores > -jnp.inf, axis=1, dtype=jnp.int32)
    return protocols.Proposal(
        tokens=_at(search.token, chosen),
        num_drafted=jnp.minimum(wanted, num_real),
        parents=jnp.where(parent < 0, 0, _at(column_of, jnp.maximum(parent, 0))),
    )


def _at(values: Array, index: Int[Array, "B n"]) -> Array:
    """Returns `values [B, C]` at each slot's own indices."""
    return jnp.take_along_axis(values, index, axis=1)
