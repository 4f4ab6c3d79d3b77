"""Trees of drafted tokens, as arrays: parents, ancestors, places and positions.

A tree's nodes are the columns of a window. Column 0 is the root, the pending token;
column `i + 1` is draft `i`, and its parent is a column before it, so that any leading
columns are a tree too. A chain is the tree whose parents are `0, 0, 1, 2, ..`.
Functions here take ONE tree and know arrays only.

    place      where a column's K/V is stored in its slot: start + column
    position   where its token would be in the text: start + depth
    branch     the places of the last `A` keys that a column sees, by their positions:
               its own is last, its parent's before it, the text's before the root's
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax.typing import typed


def chain(num_columns: int) -> np.ndarray:
    """Returns the parents of a chain, `[num_columns] int32`."""
    return np.maximum(np.arange(num_columns, dtype=np.int32) - 1, 0)


@typed
def ancestors(parents: Int[Array, " R"], *, count: int) -> Int[Array, "R {count}"]:
    """Returns the columns that are 0, 1, .. `count - 1` steps above each, int32.

    The root counts as its own parent.

    Args:
      parents: the column of each column's parent, an earlier one; 0 for column 0.
    """
    above = jnp.arange(parents.shape[0], dtype=jnp.int32)[:, None]
    while above.shape[1] < count:
        # Twice as many: the ancestors of the first one that is missing.
        above = jnp.concatenate([above, above[parents[above[:, -1]]]], axis=1)
    return above[:, :count]


@typed
def layout(
    parents: Int[Array, " R"], *, start: Int[Array, ""], width: int
) -> tuple[Int[Array, " R"], Int[Array, "R {width}"]]:
    """Returns the position and the branch of each column, int32, as defined above.

    `branch[r, a]` is the place of the key at position `p - width + 1 + a`, where `p` is
    the column's own position. Entries of negative positions are undefined.

    Args:
      start: place and position of column 0.
      width: at least one more than the depth of the deepest column.
    """
    above = ancestors(parents, count=width)
    depth = jnp.sum(above > 0, axis=1, dtype=jnp.int32)
    steps = jnp.arange(width, dtype=jnp.int32)[None]
    before_root = steps - depth[:, None]
    places = start + jnp.where(before_root > 0, -before_root, above)
    return start + depth, places[:, ::-1]


def check(parents: np.ndarray, *, depth_max: int) -> None:
    """Raises `ValueError` unless these are parents of a tree, on the host.

    Args:
      parents: `[R]` whole numbers, one for each column of a window.
      depth_max: the most drafts on a path.
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
            f"column {at} has parent {parents[at]}: a parent is an earlier column, and "
            "column 0, the root, has 0"
        )
    depth = np.zeros(parents.size, int)
    for at in range(1, parents.size):
        depth[at] = depth[parents[at]] + 1
    if depth.max() > depth_max:
        raise ValueError(
            f"column {int(depth.argmax())} is {depth.max()} deep, and a path has at "
            f"most {depth_max} drafts: allow deeper paths or cut the tree"
        )
