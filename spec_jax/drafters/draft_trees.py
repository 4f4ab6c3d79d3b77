"""Trees that a draft model proposes: the rows of a level are one forward."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import pytree
from spec_jax.drafters import draft_slots, draw, slots, tree_shapes
from spec_jax.engine import protocols
from spec_jax.paging import cache as paged


class Memory(pytree.Node):
    """The draft's cache, and the tree whose rows are stored in it after the text.

    Column 0 is the last token of the text that a tree was drafted after, at place
    `start`; the other columns are the rows that drafted its nodes' children.
    """

    kv: paged.PagedKV
    start: jax.Array  # [B] int32
    tokens: jax.Array  # [B, num_columns] int32
    parents: jax.Array  # [B, num_columns] int32
    is_run: jax.Array  # [B, num_columns] bool: K/V are stored; false for column 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotDraftTree(draft_slots.SlotDraftModel):
    """A `DraftModel` with a tree, for `num_slots` sequences.

    The rows of a tree are stored after the text. The K/V of committed ones
    is moved to their positions when the next tree is drafted, as the target's is: only
    what the draft has not seen is caught up, in one forward. All others are forgotten
    then, or before that where a prompt needs their pages.
    """

    @property
    def _tree(self) -> tree_shapes.AnyTree:
        return cast(tree_shapes.AnyTree, self.drafter.tree)

    def init(self, **sizes: Any) -> Memory:
        """Allocates an empty cache; takes and raises as `SlotRows.new_cache`."""
        kv = super().init(**sizes)
        shape = self.num_slots, self._tree.num_columns
        return Memory(
            kv=kv,
            start=jnp.zeros(shape[:1], jnp.int32),
            tokens=jnp.zeros(shape, jnp.int32),
            parents=jnp.zeros(shape, jnp.int32),
            is_run=jnp.zeros(shape, bool),
        )

    def prefill(self, params, memory, prompt, *, slot, begun=None):
        """Writes the K/V of the prompt but for its last token. Donates `memory`."""
        if bool(memory.is_run.any()):
            memory = self._forget(memory)
        kv = super().prefill(params, memory.kv, prompt, slot=slot, begun=begun)
        return memory.replace(kv=kv)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def _forget(self, memory: Memory) -> Memory:
        """Forgets all rows that are stored after a text."""
        has_rows = jnp.any(memory.is_run, axis=1)
        kv = self._rows.truncate(memory.kv, memory.start + 1, asked=has_rows)
        return memory.replace(kv=kv, is_run=jnp.zeros_like(memory.is_run))

    def _keep_committed(
        self, memory: Memory, text: Int[Array, "B max_len"], length: Int[Array, " B"]
    ) -> paged.PagedKV:
        """Returns the cache with the K/V of rows that were committed, and of no others.

        It covers `[0, length - 1)` at most: the row of the last token drafts.
        """
        depth_max = self._tree.depth - 1
        start, is_run = memory.start, memory.is_run
        committed = slots.windows(text, start + 1, depth_max)
        most = jnp.maximum(length - 2 - start, 0)
        path, num_kept = jax.vmap(_follow)(
            memory.tokens, memory.parents, is_run, committed, most
        )
        kv = self._rows.keep_path(memory.kv, path, num_kept, start=start)
        new_len = jnp.minimum(start + 1 + num_kept, length - 1)
        return self._rows.truncate(kv, new_len, asked=jnp.any(is_run, axis=1))

    def commit(self, params, memory, length, *, asked):
        """Forgets what was not committed; the next `propose` does so for a tree."""
        goes_on = jnp.any(memory.is_run, axis=1) & (length > memory.start + 1)
        held = memory.kv.length
        kept = jnp.where(goes_on, held, jnp.minimum(held, length - 1))
        return memory.replace(
            kv=self._rows.truncate(memory.kv, kept, asked=asked),
            is_run=memory.is_run & (goes_on | ~asked)[:, None],
        )

    def propose(
        self, params, memory, *, tokens, length, gamma, sampling, processing=None
    ):
        """Drafts trees of up to `gamma[b]` nodes; less deep where room is short."""
        tree = self._tree
        kv = self._keep_committed(memory, tokens, length)
        kv = kv.replace(out_of_pages=jnp.zeros_like(kv.out_of_pages))
        asked = (gamma > 0) & (length <= kv.slot_capacity)
        kv = self._catch_up(params, kv, tokens, length, asked=asked)
        kv, logits = self._root(params, kv, tokens, length, asked)
        asked &= kv.length == length
        memory = memory.replace(
            kv=kv, start=length - 1, is_run=jnp.zeros_like(memory.is_run)
        )

        def run(memory, tokens, parents, first, num_rows):
            """Runs the rows of a level; see `draw.Run`."""
            window = protocols.Window(
                tokens=tokens,
                start=length - 1,
                num_active=num_rows,
                parents=parents,
                first=first,
                depth_max=tree.depth - 1,
            )
            kv, verified = self._rows.verify(params, memory.kv, window)
            has_run = (num_rows > 0) & ~self._rows.out_of_pages(kv)
            num_rows = jnp.where(has_run, num_rows, 0)
            memory = _remember(memory, kv, window, first, num_rows)
            return memory, verified.by_column(verified.logits, fill=0.0), has_run

        return draw.grow(
            draw.Draw.of(self.drafter, sampling, length, processing),
            run,
            logits,
            memory,
            tree=tree,
            wanted=jnp.where(asked, gamma, 0),
        )

    def _root(self, params, memory, text, length, asked):
        """Returns the cache with the whole text, and the logits `[B, V]` after it."""

        def run(kv, window):
            kv, verified = self._rows.verify(params, kv, window)
            return kv, verified.at, verified.logits

        logits = jnp.zeros((self.num_slots, self.vocab_size), jnp.float32)
        return slots.take_in(
            run, memory, text, logits, goal=length, num_rows=self._slab, asked=asked
        )


def _remember(memory, kv, window, first, num_rows) -> Memory:
    """Stores the rows of a level that were run, from column `first` on."""
    columns = jnp.arange(window.tokens.shape[1], dtype=jnp.int32)[None]
    put = lambda all_, new: jax.lax.dynamic_update_slice(
        all_, new, (jnp.int32(0), first)
    )
    return memory.replace(
        kv=kv,
        tokens=put(memory.tokens, window.tokens),
        parents=window.parents,
        is_run=put(memory.is_run, columns < num_rows[:, None]),
    )


def _follow(
    tokens: Int[Array, " C"],
    parents: Int[Array, " C"],
    is_run: Bool[Array, " C"],
    committed: Int[Array, " D"],
    most: Int[Array, ""],
) -> tuple[Int[Array, " D"], Int[Array, ""]]:
    """Returns the columns that hold what was committed after column 0, and how many.

    Any of equal siblings will do: they have the same K/V.
    """

    def step(carry, token):
        column, num_kept = carry
        holds = is_run & (parents == column) & (tokens == token)
        # The path ends where no column holds the token.
        goes_on = (column >= 0) & jnp.any(holds) & (num_kept < most)
        column = jnp.where(goes_on, jnp.argmax(holds), -1).astype(jnp.int32)
        return (column, num_kept + goes_on.astype(jnp.int32)), jnp.maximum(column, 0)

    begin = jnp.int32(0), jnp.int32(0)
    (_, num_kept), path = jax.lax.scan(step, begin, committed)
    return path, num_kept
