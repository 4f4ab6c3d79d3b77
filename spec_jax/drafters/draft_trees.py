"""Trees that a draft model proposes: the rows of a level are one forward."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.drafters import draft_slots, tree_search, tree_shapes
from spec_jax.engine import protocols
from spec_jax.model import params as params_lib
from spec_jax.paging import cache as paged
from spec_jax.rules import sampling as sampling_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotDraftTree(draft_slots.SlotDraftModel):
    """A `DraftModel` with a tree, for `num_slots` sequences.

    The rows of a tree are stored after the text, and forgotten when it is grown: what
    is kept of them is caught up in the next round, in one forward.
    """

    def propose(
        self,
        params: params_lib.Params,
        memory: paged.PagedKV,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        sampling: protocols.Sampling,
    ) -> tuple[paged.PagedKV, protocols.Proposal]:
        """Drafts trees of `gamma[b]` nodes; less deep where the cache has no room."""
        tree, slab = cast(tree_shapes.AnyTree, self.drafter.tree), self._slab
        width = max(slab, self.drafter.catch_up_rows)
        memory = memory.replace(out_of_pages=jnp.zeros_like(memory.out_of_pages))
        text = jnp.pad(tokens, ((0, 0), (0, width)))
        asked = (gamma > 0) & (length <= memory.slot_capacity)
        memory = self._catch_up(params, memory, text, length, asked=asked)
        memory, logits = self._root(params, memory, text, length, asked)
        asked &= memory.length == length
        draw = Draw.of(self.drafter.draws, sampling, length, num_slots=self.num_slots)

        def expand(carry, tokens, parents, first, num_rows):
            """Runs the rows of a level; see `tree_search.Expand`."""
            kv, probs = carry
            window = protocols.Window(
                tokens=tokens,
                start=length - 1,
                num_active=num_rows,
                parents=parents,
                first=first,
                depth_max=tree.depth - 1,
            )
            kv, verified = self._rows.verify(params, kv, window)
            level = 1 + (first - 1) // tree.width
            rows = verified.by_column(verified.logits, fill=0.0)
            probs = draw.put(probs, rows, first)
            weights = draw.weights(rows, level=level, first=first)
            return (kv, probs), weights, (num_rows > 0) & ~self._rows.out_of_pages(kv)

        first, root = jnp.int32(0), logits[:, None]
        probs = None
        if draw.has_probs:
            # One row more, which is no node's: that of leaves.
            shape = self.num_slots, tree.num_columns + 1, self.vocab_size
            probs = draw.put(jnp.zeros(shape, jnp.float32), root, first)
        (memory, probs), proposal = tree_search.grow(
            expand,
            draw.weights(root, level=first, first=first)[:, 0],
            (memory, probs),
            tree=tree,
            wanted=jnp.where(asked, gamma, 0),
        )
        if probs is not None:
            columns = cast(tree_shapes.FixedTree, tree).columns
            proposal = proposal.replace(probs=probs[:, columns[:-1]])
        return self._rows.truncate(memory, length, asked=asked), proposal

    def _root(self, params, memory, text, length, asked):
        """Returns the memory of the whole text, and the logits `[B, V]` after it."""
        slab = self._slab
        is_each = jnp.arange(self.num_slots, dtype=jnp.int32)

        def step(carry):
            """Takes in a slab of rows of every slot that is behind."""
            kv, logits, wanted = carry
            num_active = jnp.where(wanted, jnp.minimum(length - kv.length, slab), 0)
            window = protocols.Window(
                tokens=draft_slots.windows(text, kv.length, slab),
                start=kv.length,
                num_active=num_active,
            )
            kv, verified = self._rows.verify(params, kv, window)
            wanted &= ~self._rows.out_of_pages(kv)
            last = verified.at[is_each, jnp.maximum(num_active - 1, 0)]
            found = verified.logits.at[last].get(mode="fill", fill_value=0)
            logits = jnp.where((num_active > 0)[:, None], found, logits)
            return kv, logits, wanted & (kv.length < length)

        logits = jnp.zeros((self.num_slots, self.vocab_size), jnp.float32)
        carry = memory, logits, asked & (memory.length < length)
        memory, logits, _ = jax.lax.while_loop(
            lambda carry: jnp.any(carry[2]), step, carry
        )
        return memory, logits


class Draw(pytree.Node):
    """By which weights the children of a tree's nodes are chosen.

    Attributes:
      sampling: of the target's draws; None: by the logits alone.
      length: of the text of each slot.
      has_probs: whether children are drawn with noise of the round's own, another for
        each node, rather than with that of the target's draw for their position.
    """

    sampling: protocols.Sampling
    length: jax.Array  # [B] int32
    has_probs: bool = pytree.static()

    @classmethod
    def of(cls, draws, sampling, length, *, num_slots: int) -> "Draw":
        """Returns how `DraftModel.draws` says it."""
        if draws == "independent" and sampling is None:
            sampling = draft_slots.greedy(num_slots)
        if draws == "greedy":
            sampling = None
        return cls(sampling=sampling, length=length, has_probs=draws == "independent")

    def weights(
        self, logits: Float[Array, "B K V"], *, level: jax.Array, first: jax.Array
    ) -> Float[Array, "B K V"]:
        """Returns what the best children of a level's rows have the highest of.

        Args:
          level: of the rows; that of the root is 0.
          first: the first row's column.
        """
        if self.sampling is None:
            return logits
        columns = first + jnp.arange(logits.shape[1], dtype=jnp.int32)

        def one(slot):
            """Adds noise to the rows of a slot, one by one."""
            rows, settings, length = slot

            def noisy(row):
                logits, column = row
                if self.has_probs:
                    stream = sampling_lib.Stream.DRAFT
                    return sampling_lib.noisy_weights(
                        logits, settings, length, stream=stream, offset=column
                    )
                return sampling_lib.noisy_weights(logits, settings, length + level)

            return jax.lax.map(noisy, (rows, columns))

        return jax.lax.map(one, (logits, self.sampling, self.length))

    def put(
        self, probs: Array | None, logits: Float[Array, "B K V"], first: jax.Array
    ) -> Array | None:
        """Returns `probs` with the distributions of rows from column `first` on."""
        if probs is None:
            return None
        rows = jax.lax.map(
            lambda slot: sampling_lib.distribution(*slot), (logits, self.sampling)
        )
        return jax.lax.dynamic_update_slice(probs, rows, (0, first, 0))
