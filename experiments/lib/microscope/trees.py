"""A window verified as a path of a tree, among decoys: the engine's way with trees.

The tree is given by the parents of its columns (`spec_jax.tree`). The window is the
path to the last of them, so that rows are stored apart from their positions. All other
nodes are decoys, tokens that are not the window's at its positions: their rows are run
and stored like any other, and no row of the window may depend on them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib.microscope import scene as scene_lib
from spec_jax import compilation, tree as tree_lib
from spec_jax.engine import protocols, rows as rows_lib
from spec_jax.model import params as params_lib, row_model
from spec_jax.paging import cache


Parents = tuple[int, ...]


def target(model: row_model.RowModel) -> rows_lib.SlotRows:
    """Returns what the engine verifies trees of one sequence with."""
    return rows_lib.SlotRows(model=model, num_slots=1)


def columns(parents: Parents) -> tuple[int, ...]:
    """Returns the columns of the window's rows: the path to the last one."""
    return tree_lib.path_to(parents, len(parents) - 1)


def _depth_max(parents: Parents) -> int:
    depths = [len(tree_lib.path_to(parents, c)) for c in range(len(parents))]
    return max(depths) - 1


def tokens(scene: scene_lib.Scene, parents: Parents, vocab_size: int) -> np.ndarray:
    """Returns the tokens of all columns, int32.

    Raises:
      ValueError: parents of no tree, or a window that is not as long as the path.
    """
    tree_lib.check(np.asarray(parents), depth_max=protocols.MAX_TREE_ROWS)
    window, path = scene.window, columns(parents)
    if len(path) != len(window):
        raise ValueError(
            f"a window of {len(window)} tokens, and the path to the tree's last node "
            f"has {len(path)}, the root's included: draft {len(path) - 1}"
        )
    found = []
    for column in range(len(parents)):
        depth = len(tree_lib.path_to(parents, column)) - 1
        # Another token than the window's at this position, and than its siblings'.
        found.append((window[min(depth, len(window) - 1)] + column) % vocab_size)
    made = np.asarray(found, np.int32)
    made[list(path)] = window
    return made


def calls(
    scene: scene_lib.Scene,
    parents: Parents,
    model: row_model.RowModel,
    *,
    height: int,
) -> Iterator[dict[str, Any]]:
    """Yields the columns in slabs of `height`, and where their rows are.

    A slab has the tokens, `start`, the place of the first one, `num_active`, and
    `layout`, positions and branches of the rows.
    """
    all_tokens = tokens(scene, parents, model.config.vocab_size)
    layout = tree_lib.layout(
        jnp.asarray(parents, jnp.int32),
        start=jnp.int32(scene.start),
        width=_depth_max(parents) + 1,
    )
    for first in range(0, len(parents), height):
        cut = functools.partial(_cut, first=first, height=height)
        yield {
            "tokens": cut(all_tokens),
            "start": jnp.int32(scene.start + first),
            "num_active": jnp.int32(min(height, len(parents) - first)),
            "layout": tuple(cut(np.asarray(part)) for part in layout),
        }


def _cut(values: np.ndarray, *, first: int, height: int) -> np.ndarray:
    part = values[first : first + height]
    padding = [(0, height - len(part))] + [(0, 0)] * (part.ndim - 1)
    return np.pad(part, padding)


def verify(
    model: row_model.RowModel,
    params: params_lib.Params,
    kv: cache.PagedKV,
    scene: scene_lib.Scene,
    parents: Parents,
) -> tuple[cache.PagedKV, jax.Array]:
    """Verifies the tree as a round does, and keeps the window's path.

    Returns:
      The cache, and the logits `[window, V]` of the window's rows.
    """
    window = protocols.Window(
        tokens=jnp.asarray(tokens(scene, parents, model.config.vocab_size))[None],
        start=jnp.full((1,), scene.start, jnp.int32),
        num_active=jnp.full((1,), len(parents), jnp.int32),
        parents=jnp.asarray(parents, jnp.int32)[None],
        depth_max=_depth_max(parents),
    )
    kv, logits = _verify(model, params, kv, window)
    return keep(model, kv, scene, parents), logits[np.asarray(columns(parents))]


@functools.partial(compilation.jit, static_argnames=("model",))
def _verify(model, params, kv, window):
    kv, verified = target(model).verify(params, kv, window)
    return kv, verified.by_column(verified.logits, fill=0.0)[0]


def keep(
    model: row_model.RowModel,
    kv: cache.PagedKV,
    scene: scene_lib.Scene,
    parents: Parents,
) -> cache.PagedKV:
    """Moves the K/V of the window's path to its positions."""
    drafts = jnp.asarray(columns(parents)[1:], jnp.int32)[None]
    kept = jnp.full((1,), drafts.shape[1], jnp.int32)
    start = jnp.full((1,), scene.start, jnp.int32)
    return target(model).keep_path(kv, drafts, kept, start=start)
