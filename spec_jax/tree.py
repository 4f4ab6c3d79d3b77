"""Trees of drafted tokens, as arrays: parents, depths, branches, paths.

A tree's nodes are the columns of a window. Column 0 is the root, the pending token;
column `i + 1` is draft `i`, and its parent stands in a column before it. A chain is the
tree whose parents are `0, 0, 1, 2, ..`. Functions here take ONE tree and know arrays
only.

    place      where a column's K/V is stored in its slot: start + column
    position   where its token would stand in the text: start + depth
    branch     the places of the last `A` keys that a column sees, by their positions:
               its own last, its parent's before that, and before the root the text's
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax.typing import typed


def chain(num_columns: int) -> np.ndarray:
    """Returns the parents of a chain, `[num_columns] int32`."""
    return np.maximum(np.arange(num_columns, dtype=np.int32) - 1, 0)


@typed
def depths(parents: Int[Array, " R"]) -> Int[Array, " R"]:
    """Returns each column's distance from the root, int32.

    Args:
      parents: column of each column's parent, below its own; column 0 has 0.
    """
    (num_columns,) = parents.shape
    columns = jnp.arange(num_columns, dtype=jnp.int32)

    def climb(_, carry):
        at, depth = carry
        return parents[at], depth + (at > 0).astype(jnp.int32)

    start = columns, jnp.zeros_like(columns)
    # No path is longer than the tree has columns.
    return jax.lax.fori_loop(0, max(num_columns - 1, 0), climb, start)[1]


@typed
def branches(
    parents: Int[Array, " R"], *, start: Int[Array, ""], width: int
) -> Int[Array, "R {width}"]:
    """Returns the branch of each column, int32; see above.

    `branches[r, a]` is the place of the key at position `p - width + 1 + a`, where `p`
    is the column's own position. Entries of negative positions mean nothing.

    Args:
      start: place and position of column 0.
      width: at least the depth of the deepest column, and one more.
    """
    columns = jnp.arange(parents.shape[0], dtype=jnp.int32)

    def climb(carry, _):
        """Moves one key towards the beginning of the text."""
        at, past_root = carry
        place = jnp.where(past_root > 0, start - past_root, start + at)
        past_root = jnp.where(at == 0, past_root + 1, 0)
        return (parents[at], past_root), place

    _, places = jax.lax.scan(climb, (columns, jnp.zeros_like(columns)), length=width)
    return places[::-1].T


@typed
def paths(parents: Int[Array, " R"]) -> Bool[Array, "R R"]:
    """Returns whether column `c` lies on the path from the root to column `r`."""
    (num_columns,) = parents.shape
    columns = jnp.arange(num_columns, dtype=jnp.int32)

    def climb(_, carry):
        at, seen = carry
        return parents[at], seen | (columns[None, :] == at[:, None])

    seen = jnp.zeros((num_columns, num_columns), bool)
    return jax.lax.fori_loop(0, num_columns, climb, (columns, seen))[1]


def check(parents: np.ndarray, *, depth_max: int) -> None:
    """Raises `ValueError` unless these are parents of a tree, on the host.

    Args:
      parents: `[R]` whole numbers, of the columns of a window.
      depth_max: drafts on a path, at most.
    """
    parents = np.asarray(parents)
    if parents.ndim != 1 or parents.dtype.kind not in "iu" or not parents.size:
        raise ValueError(
            f"parents of shape {list(parents.shape)} and dtype {parents.dtype}: give "
            "a row of columns, whole numbers, one for each column of the window"
        )
    columns = np.arange(parents.size)
    wrong = np.flatnonzero((parents < 0) | (parents >= np.maximum(columns, 1)))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(
            f"column {at} has parent {parents[at]}: a parent stands in an earlier "
            "column, and column 0, the root, has 0"
        )
    depth = np.zeros(parents.size, int)
    for at in range(1, parents.size):
        depth[at] = depth[parents[at]] + 1
    if depth.max() > depth_max:
        raise ValueError(
            f"column {int(depth.argmax())} lies {depth.max()} deep, and a path has at "
            f"most {depth_max} drafts: allow deeper paths or cut the tree"
        )
