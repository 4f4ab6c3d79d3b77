"""Acceptance of trees: which path of drafts stays.

Functions take ONE sequence and arrays alone, as in `acceptance`. The rules:

    coupled       `follow`, on the target's own draws: any tree is lossless.
    rejection     `accept_tree`: siblings are tried in turn, from the root on.
    block         `traversal.accept_traversal`: whole paths are tried, from the leaves
                  on.
    multipath     `multi_path.accept_multi_path`: the best path is tried as a chain.

Under the last three, the tokens drawn for a tree must not decide the tree's shape.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from spec_jax import pytree
from spec_jax.rules import acceptance
from spec_jax.typing import typed


@typed
def follow(
    draft_tokens: Int[Array, " W"],
    own_token: Callable[[jax.Array], jax.Array],
    parents: Int[Array, " W"],
    num_drafted: Int[Array, ""],
    wanted: Int[Array, ""],
    *,
    depth_max: int,
) -> acceptance.Outcome:
    """Walks a tree from its root to the children that hold the target's own tokens.

    On a chain it is `accept_exact`. All children of a node stand for one position of
    the text, which has one target token: the first child that holds it is kept, so
    that the committed tokens do not depend on the tree.

    Args:
      own_token: returns the target's token after a column: 0 is the root, `i + 1` draft
        `i`. It is called once a level, for the columns on the path alone.
      parents: the column of each draft's parent, at most its own index.
      num_drafted: how many drafts are real, in `0 .. W`.
      wanted: drafts to keep, at most.
      depth_max: drafts on a path, at most; deeper ones are not reached.
    """

    def try_children(column):
        own = own_token(column)
        return own, draft_tokens == own

    found = walk(try_children, parents, num_drafted, wanted, depth_max=depth_max)
    return found.outcome(draft_tokens, found.own)


class Drafted(pytree.Node):
    """A tree of drafts and the probabilities of both models, as `accept_tree` takes."""

    tokens: jax.Array  # [W] int32
    parents: jax.Array  # [W] int32
    draft_probs: jax.Array | None  # [W, V] float32
    target_probs: jax.Array  # [W + 1, V] float32
    num_drafted: jax.Array  # [] int32
    wanted: jax.Array  # [] int32
    depth_max: int = pytree.static()
    row_sums: acceptance.RowSums | None = pytree.static(default=None)

    @property
    def is_real(self) -> jax.Array:
        """Whether each draft is real, `[W]` bool."""
        return jnp.arange(self.tokens.shape[0], dtype=jnp.int32) < self.num_drafted

    def walk(self, try_children) -> "_Walk":
        """Walks this tree, see `walk`."""
        at_most = {"depth_max": self.depth_max}
        return walk(
            try_children, self.parents, self.num_drafted, self.wanted, **at_most
        )

    def keep_path(self, end: jax.Array) -> "_Walk":
        """Walks from the root to the column `end`."""

        def mark(on_path, draft):
            """Marks the parent of a draft of the path, later drafts first."""
            parent = jnp.where(on_path[draft + 1], self.parents[draft], end)
            return on_path.at[parent].set(True), None

        (num_drafts,) = self.parents.shape
        on_path = jnp.zeros((num_drafts + 1,), jnp.bool_).at[end].set(True)
        drafts = jnp.arange(num_drafts, dtype=jnp.int32)
        on_path, _ = jax.lax.scan(mark, on_path, drafts, reverse=True)
        return self.walk(lambda _: (jnp.int32(0), on_path[1:]))


def of_trees(decide: Callable[..., acceptance.Outcome]):
    """Lets a rule that takes a `Drafted` tree take the arguments of `accept_tree`."""

    def accept(
        draft_tokens: Int[Array, " W"],
        parents: Int[Array, " W"],
        draft_probs: Float32[Array, "W V"] | None,
        target_probs: Float32[Array, "W+1 V"],
        num_drafted: Int[Array, ""],
        wanted: Int[Array, ""],
        *,
        uniforms: Float32[Array, " W"],
        noise: Float32[Array, " V"],
        depth_max: int,
        row_sums: acceptance.RowSums | None = None,
    ) -> acceptance.Outcome:
        """Decides on the tree of these arguments; has the docstring of `decide`."""
        tree = Drafted(
            tokens=draft_tokens,
            parents=parents,
            draft_probs=draft_probs,
            target_probs=target_probs,
            num_drafted=num_drafted,
            wanted=wanted,
            depth_max=depth_max,
            row_sums=row_sums,
        )
        return decide(tree, uniforms=uniforms, noise=noise)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(accept, name, getattr(decide, name))
    return typed(accept)


def tree_probabilities(tree: Drafted) -> acceptance.AcceptanceProbabilities:
    """Returns the chance to keep each draft if its parent is and no earlier sibling is.

    `accept_tree` decides by them. A node's rows begin as the target's and the draft's.
    After a child that is not kept, the draft's row is subtracted from the target's, the
    child's token is removed from the draft's, and both are normalised.
    """

    def try_child(pair, child):
        """Returns the rows that are left after a child, and the chance to keep it."""
        token, parent, is_real = child
        at_target, at_draft = pair.at(parent, token)
        keep = acceptance.ratio(at_target, at_draft)
        return pair.without(parent, token, jnp.float32(1), is_real)[0], keep

    drafts = tree.tokens, tree.parents, tree.is_real
    pair, keep = jax.lax.scan(try_child, Pair.of(tree), drafts)
    return acceptance.AcceptanceProbabilities(keep=keep, own=pair.target.weights)


class _Left(pytree.Node):
    """The rest of each column's row after the children tried so far."""

    weights: jax.Array  # [W + 1, V] float32
    totals: jax.Array  # [W + 1] float32; 1 before a child is tried, to keep the bits

    @classmethod
    def of(cls, rows: jax.Array) -> "_Left":
        """Returns all of the rows."""
        return cls(weights=rows, totals=jnp.ones(rows.shape[:1], jnp.float32))

    def row(self, column: jax.Array) -> jax.Array:
        """Returns a column's probabilities."""
        return self.weights[column] / self.totals[column]

    def at(self, column: jax.Array, token: jax.Array) -> jax.Array:
        """Returns a token's probability in a column; 0 outside the vocabulary."""
        weight = self.weights.at[column, token].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )
        return weight / self.totals[column]

    def put(self, column: jax.Array, weights: jax.Array, total: jax.Array) -> "_Left":
        """Returns this with other weights of a column, if there is such a column."""
        # Nothing is left to draw where a row had fewer tokens than children.
        total = jnp.where(total > 0, total, 1.0)
        return self.replace(
            weights=self.weights.at[column].set(weights, mode="drop"),
            totals=self.totals.at[column].set(total, mode="drop"),
        )


class Pair(pytree.Node):
    """The rest of the target's and of the draft's rows, for the next child."""

    target: _Left
    draft: _Left | None  # None: the drafts were certain
    row_sums: acceptance.RowSums | None = pytree.static()

    @classmethod
    def of(cls, tree: Drafted) -> "Pair":
        """Returns all of the rows of a tree."""
        draft = None
        if tree.draft_probs is not None:
            draft_probs = jnp.pad(tree.draft_probs, ((0, 1), (0, 0)))
            draft = _Left.of(jnp.where(draft_probs > 0, draft_probs, 0.0))
        target = _Left.of(tree.target_probs)
        return cls(target=target, draft=draft, row_sums=tree.row_sums)

    def at(self, column: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a token's probability after a column, in both models."""
        in_target = self.target.at(column, token)
        if self.draft is not None:
            return in_target, self.draft.at(column, token)
        is_token = (token >= 0) & (token < self.target.weights.shape[-1])
        return in_target, jnp.where(is_token, 1.0, 0.0)

    def without(
        self,
        column: jax.Array,
        token: jax.Array,
        joint: jax.Array | float,
        is_real: jax.Array,
    ) -> tuple["Pair", jax.Array]:
        """Removes a child that is not kept from the rows of its parent's column.

        Args:
          joint: factor of the target's row, from which the draft's is then subtracted.

        Returns:
          the rest, unchanged if the child is not real; and the sum of the difference.
        """
        sums = self.row_sums or jnp.sum
        target_row = self.target.row(column)
        if self.draft is None:
            draft_row = jax.nn.one_hot(token, target_row.shape[-1], dtype=jnp.float32)
        else:
            draft_row = self.draft.row(column)
        rest = acceptance.residual(joint * target_row, draft_row)
        weights = acceptance.or_else(rest, target_row)
        total = sums(weights)
        lacking = jnp.where(jnp.any(rest > 0), total, 0.0)
        put = jnp.where(is_real, column, self.target.totals.shape[0])
        target, draft = self.target.put(put, weights, total), self.draft
        if draft is not None:
            others = draft_row.at[token].set(
                0.0, mode="drop", wrap_negative_indices=False
            )
            draft = draft.put(put, others, sums(others))
        return self.replace(target=target, draft=draft), lacking


@of_trees
def accept_tree(tree: Drafted, *, uniforms, noise) -> acceptance.Outcome:
    """Keeps a path of a tree so that the output has the target's distribution.

    Recursive rejection sampling without replacement: Miao et al. (2023), SpecInfer,
    https://arxiv.org/abs/2305.09781, algorithm 2, with draws without replacement as in
    Jeon et al. (2024), https://arxiv.org/abs/2402.14160. From the root on, the children
    of a node are tried in the order of their columns, and the first that stays is the
    next node. Where none stays, the own token is drawn from what they left of the
    target's row. On a chain the rule is `accept_rejection`.

    The output is biased where the drafts' own tokens decide how many children are
    tried: random drafts need a tree whose shape is given beforehand. With
    `draft_probs=None` the drafts were certain, and the tree may have any shape.

    Args:
      parents: the column of each draft's parent, at most its own index.
      draft_probs: row `c` is what the first child of column `c` was drawn from, and the
        others without replacement, in the order of their columns. Rows sum to one.
      target_probs: after each column: the root, then the drafts; rows sum to one.
      num_drafted: how many drafts are real, in `0 .. W`.
      wanted: drafts to keep, at most.
      uniforms, noise: as in `accept_rejection`; `row_sums` as in `accept_block`.
      depth_max: drafts on a path, at most; deeper ones are not reached.
    """
    probabilities = tree_probabilities(tree)
    stays = uniforms < probabilities.keep
    found = tree.walk(lambda _: (jnp.int32(0), stays))
    # No child was tried if no more drafts were wanted, or none so deep.
    weights = jnp.where(
        found.is_cut, tree.target_probs[found.last], probabilities.own[found.last]
    )
    own = jnp.argmax(jnp.log(weights) + noise).astype(tree.tokens.dtype)
    return found.outcome(tree.tokens, own)


class _Walk(pytree.Node):
    """Where a walk from the root of a tree went."""

    path: jax.Array  # [D] int32, columns; past the end the last one again
    is_kept: jax.Array  # [D] bool, leading ones
    reached: jax.Array  # [D] bool
    last: jax.Array  # [] int32, the column where it ended
    own: jax.Array  # [] int32, the token that `try_children` returned there
    is_cut: jax.Array  # [] bool: the path may not grow, and no child was tried

    def outcome(self, draft_tokens: jax.Array, own: jax.Array) -> acceptance.Outcome:
        """Returns the drafts of the path, and the target's `own` token after them."""
        depths = jnp.arange(self.path.shape[0] + 1, dtype=jnp.int32)
        num_accepted = jnp.sum(self.is_kept, dtype=jnp.int32)
        pad = acceptance.PAD
        drafts = jnp.where(self.is_kept, draft_tokens[self.path - 1], pad)
        tokens = jnp.where(depths == num_accepted, own, jnp.append(drafts, pad))
        return acceptance.Outcome(
            num_accepted=num_accepted,
            tokens=tokens,
            path=self.path,
            reached=self.reached,
        )


def depths_of(parents: Int[Array, " W"]) -> Int[Array, " W+1"]:
    """Returns the depth of each column; 0 is the root's."""
    (num_drafts,) = parents.shape
    return jax.lax.fori_loop(
        1,
        num_drafts + 1,
        lambda column, depths: depths.at[column].set(depths[parents[column - 1]] + 1),
        jnp.zeros((num_drafts + 1,), jnp.int32),
    )


def walk(
    try_children: Callable[[jax.Array], tuple[jax.Array, Bool[Array, " W"]]],
    parents: Int[Array, " W"],
    num_drafted: Int[Array, ""],
    wanted: Int[Array, ""],
    *,
    depth_max: int,
) -> _Walk:
    """Descends to the first child that stays, while one does and the path may grow.

    The path has at most `wanted` drafts, and at most `depth_max`.

    Args:
      try_children: takes a column; returns the target's token after it, and which
        drafts stay if they are its children.
    """
    columns = jnp.arange(1, parents.shape[0] + 1, dtype=jnp.int32)
    is_real = columns <= num_drafted
    most = jnp.minimum(wanted, depth_max)

    def descend(carry, depth):
        at, own, goes_on = carry
        own, stays = jax.lax.cond(
            goes_on, try_children, lambda _: (own, jnp.zeros_like(is_real)), at
        )
        is_child = is_real & (parents == at) & goes_on & (depth < most)
        found = is_child & stays
        goes_on = jnp.any(found)
        at = jnp.where(goes_on, columns[jnp.argmax(found)], at)
        return (at, own, goes_on), (at, goes_on, jnp.any(is_child))

    # depth_max + 1 steps: the last one adds the last node's own token.
    start = jnp.int32(0), jnp.int32(0), jnp.bool_(True)
    depths = jnp.arange(depth_max + 1, dtype=jnp.int32)
    (last, own, _), steps = jax.lax.scan(descend, start, depths)
    path, is_kept, reached = (step[:depth_max] for step in steps)
    is_cut = jnp.sum(is_kept, dtype=jnp.int32) >= most
    return _Walk(
        path=path, is_kept=is_kept, reached=reached, last=last, own=own, is_cut=is_cut
    )
