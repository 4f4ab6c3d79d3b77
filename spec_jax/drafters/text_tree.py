"""Drafts of what followed before, and trees of it: all continuations of a match.

In a body of text those places are marked that follow a match with the end of the
sequence. A token's weight is the sum over the marked places that hold it; the places of
its children are the ones after these. `tree_search.grow` does the rest, with the
logarithm of the weights in the place of a model's logits.

The vocabulary of the search is the body's own places: token `i` is the one at place
`i`, and equal tokens count at the first of them.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from spec_jax.drafters import suffix_match, tree_search, tree_shapes
from spec_jax.engine import protocols
from spec_jax.typing import typed


MATCH_WEIGHT = 8.0
"""Weight of each further token that a place matches: longer matches decide."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDrafter(protocols.Drafter):
    """The base of drafters that have no memory but the text.

    Attributes:
      gamma_max: the most tokens of a proposal; with a tree the number of its nodes.
      tree: of all continuations, in place of chains; None: chains.
    """

    gamma_max: int
    tree: tree_shapes.AnyTree | None = None

    def __post_init__(self):
        tree_shapes.check_nodes(self.tree, self.gamma_max)

    def for_tree(self, tree: tree_shapes.AnyTree) -> Self:
        """Returns the drafter of such trees."""
        return dataclasses.replace(self, tree=tree, gamma_max=tree.nodes)


@typed
def propose(
    text: Int[Array, " size"],
    matched: Int[Array, " size"],
    *,
    tree: tree_shapes.AnyTree,
    gamma: Int[Array, ""],
) -> protocols.Proposal:
    """Returns the tree of the continuations of the places that matched.

    Args:
      text: a body; `suffix_match.NONE` where there is no token.
      matched: how many tokens before each place match the end of the sequence; 0: the
        place is not continued.
      gamma: nodes, at most; a search returns fewer where less followed.
    """
    # `top_k` takes no more than there are; places without a token get no weight.
    missing = (0, max(0, tree.top_k - text.shape[0]))
    text = jnp.pad(text, missing, constant_values=suffix_match.NONE)
    matched = jnp.pad(matched, missing)
    first = _first_of_equals(text)
    is_token = text != suffix_match.NONE
    weights = MATCH_WEIGHT ** (matched - jnp.max(matched)).astype(jnp.float32)
    weights = jnp.where((matched > 0) & is_token, weights, 0.0)
    places = (
        jnp.zeros((tree.num_columns, text.shape[0]), jnp.float32).at[0].set(weights)
    )

    def votes(weights: Float32[Array, "K size"]) -> Float32[Array, "K size"]:
        """Returns the logarithm of each token's weight, at the token's first place."""
        counts = jax.vmap(lambda row: jnp.zeros_like(row).at[first].add(row))(weights)
        return jnp.log(counts)

    def expand(places, tokens, parents, start, num_rows):
        """Marks the places that follow each frontier token."""
        columns = start + jnp.arange(tree.width, dtype=jnp.int32)
        above = places[parents[0][columns]]
        holds = first[None, :] == tokens[0][:, None]
        after = jnp.roll(jnp.where(holds, above, 0.0), 1, axis=1).at[:, 0].set(0.0)
        after = jnp.where(is_token[None, :], after, 0.0)
        places = jax.lax.dynamic_update_slice(places, after, (start, jnp.int32(0)))
        found = tree_search.children(votes(after)[None], tree)
        return places, found, num_rows > 0

    _, proposal = tree_search.grow(
        expand,
        tree_search.children(votes(weights[None])[None], tree),
        places,
        tree=tree,
        wanted=jnp.where(jnp.any(weights > 0), gamma, 0)[None],
    )
    alone = jax.tree.map(lambda leaf: leaf[0], proposal)
    # A fixed tree drafts all its nodes, even where too little followed.
    return alone.replace(tokens=jnp.maximum(text[alone.tokens], 0))


def _first_of_equals(text: Int[Array, " size"]) -> Int[Array, " size"]:
    """Returns the first place that holds the same token as each."""
    _, first, groups = jnp.unique(
        text, return_index=True, return_inverse=True, size=text.shape[0]
    )
    return first[groups].astype(jnp.int32)
