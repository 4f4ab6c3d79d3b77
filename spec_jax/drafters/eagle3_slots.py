"""An EAGLE-3 head for several sequences.

For a slot with committed tokens `x[0, n)`, pair `i` is the feature of position `i` and
token `x[i + 1]`; it is at place `i` of the head's own cache, and predicts `x[i + 2]`:

    propose   takes in the pairs of the ring, up to n - 2, whose last row drafts;
              then the rows of drafts, level by level: token and the hidden state of the
              row before it. They are stored after the pairs, and forgotten at the end
    commit    puts the features of what was committed into the ring

The first round of a text of one token drafts nothing, as no position has features yet.
What is proposed, chain or tree, is grown by `tree_search`; chains are one call of the
head where an implementation has that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.drafters import (
    draft_slots,
    draft_trees,
    features as features_lib,
    tree_search,
    tree_shapes,
)
from spec_jax.engine import protocols, rows as rows_lib, windows
from spec_jax.model import eagle3, eagle3_params
from spec_jax.paging import allocator, cache


if TYPE_CHECKING:
    from spec_jax.drafters import eagle3 as eagle3_lib


class _Chain(tree_shapes.FixedTree):
    """A tree without branches, that grows no deeper than is asked."""

    def may_grow(
        self,
        score: Float[Array, "B C"],
        frontier: Int[Array, "B K"],
        wanted: Int[Array, " B"],
    ) -> Bool[Array, " B"]:
        """Returns where the frontier's node, which is also its number, has a child."""
        return frontier[:, 0] + 1 < wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotEagle3(features_lib.SlotReader):
    """An `Eagle3` for `num_slots` sequences: the rows of a level are one forward."""

    drafter: "eagle3_lib.Eagle3"

    @property
    def _tree(self) -> tree_shapes.AnyTree:
        chain = _Chain.of_branching((1,) * self.gamma_max)
        return self.drafter.tree or chain

    def prefill(
        self,
        params: eagle3_params.Eagle3Params,
        memory: features_lib.ReaderMemory,
        prompt: list[int],
        *,
        slot: int,
        features: Float[Array, "T taps D"],
    ) -> features_lib.ReaderMemory:
        """Takes in all pairs of the prompt but the last, which drafts."""
        tokens = np.zeros((features.shape[0] + 1,), np.int32)
        tokens[: len(prompt)] = prompt
        end, slot_ = np.int32(len(prompt) - 1), np.int32(slot)
        return _prefill(self, params, memory, tokens, features, end, slot_)

    def propose(
        self,
        params: eagle3_params.Eagle3Params,
        memory: features_lib.ReaderMemory,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        sampling: protocols.Sampling,
    ) -> tuple[features_lib.ReaderMemory, protocols.Proposal]:
        """Drafts `gamma[b]` tokens; fewer where the cache has no room."""
        memory, asked, is_full = self._begin(memory, length, gamma)
        ring = memory.ring
        asked &= ring.end > ring.first
        spared = jnp.where(is_full, ring.end - 1, ring.first)
        goal = jnp.where(asked, ring.end, spared)
        draw = draft_trees.Draw.of(
            self.drafter, sampling, length, num_slots=self.num_slots
        )
        if self._is_one_call:
            return self._run_chains(params, memory, tokens, asked, goal, gamma, draw)
        memory, hidden, logits = self._take_in(
            params,
            memory,
            tokens,
            functools.partial(features_lib.read, ring, count=self._rows_most),
            goal=goal,
            num_rows=self._rows_most,
        )
        asked &= memory.ring.first == memory.ring.end
        memory, proposal = self._grow(
            params,
            memory,
            (hidden, logits),
            wanted=jnp.where(asked, gamma, 0),
            draw=draw,
        )
        kv = allocator.truncate_each(
            memory.kv,
            memory.ring.first,
            asked=asked,
            impl=self.drafter.model.cache_impl,
        )
        return memory.replace(kv=kv), proposal

    @property
    def _is_one_call(self) -> bool:
        """Whether a round's features and all drafts after them are one call."""
        drafter = self.drafter
        return drafter.tree is None and drafter.model.impl in eagle3.CHAIN_IMPLS

    def _run_chains(self, params, memory, tokens, asked, goal, gamma, draw):
        """Returns the memory and the proposal of `propose`.

        Pages are handed out as if all slots took in a round's features at a time, and
        then drafted token by token.
        """
        ring, size = memory.ring, self._rows_most
        kv, reached = _reserve(memory.kv, ring.first, goal, size=size)
        drafts = asked & (reached == ring.end)
        # The last pending row drafts; more than a round's rows go before.
        first = jnp.where(ring.end - ring.first > size, ring.end - 1, ring.first)
        memory, _, _ = self._take_in(
            params,
            memory.replace(kv=kv),
            tokens,
            functools.partial(features_lib.read, ring, count=size),
            goal=jnp.where(drafts, first, reached),
            num_rows=size,
        )
        # Earlier rows found their pages; others may not have.
        kv = memory.kv.replace(out_of_pages=kv.out_of_pages)
        starts, end = kv.length, ring.end
        after = end + jnp.minimum(gamma, self.gamma_max) - 1  # The last has no row.
        kv, reached = _reserve(kv, end, jnp.where(drafts, after, end), size=1)
        counts = jnp.where(drafts, reached + 1 - end, 0)
        text = jnp.pad(tokens, ((0, 0), (0, size + 1)))
        kv, found, log_weights = eagle3.run_chains(
            params,
            self.drafter.head,
            kv,
            tokens=draft_slots.windows(text, starts + 1, size),
            features=features_lib.read(ring, starts, count=size),
            starts=starts,
            pending=jnp.where(drafts, end - starts, 0),
            counts=counts,
            most=self.gamma_max,
            draws=draw.native(self.vocab_size),
        )
        kv = allocator.extend_each(kv, end, asked=drafts)
        kv = allocator.truncate_each(kv, end, asked=drafts)
        memory = memory.replace(kv=kv, ring=ring.replace(first=kv.length))
        return memory, protocols.Proposal(
            tokens=found,
            num_drafted=counts,
            probs=self._probs(params, log_weights, counts),
        )

    def _take_in(
        self,
        params: eagle3_params.Eagle3Params,
        memory: features_lib.ReaderMemory,
        tokens: Int[Array, "B max_len"],
        read: Callable[[Int[Array, " B"]], Float[Array, "B R width"]],
        *,
        goal: Int[Array, " B"],
        num_rows: int,
    ) -> tuple[features_lib.ReaderMemory, Float[Array, "B D"], Float[Array, "B Vd"]]:
        """Takes in pairs up to `goal`, as far as there is room for them.

        Args:
          read: returns `num_rows` features of each slot from a position on.
          num_rows: pairs that a slot takes in with a forward.

        Returns:
          The memory, and the hidden state and the logits of the last pair.
        """
        head = self.drafter.head
        text = jnp.pad(tokens, ((0, 0), (0, num_rows + 1)))
        is_each = jnp.arange(self.num_slots, dtype=jnp.int32)

        def step(carry):
            """Takes in up to `num_rows` pairs of each slot."""
            kv, (hidden, logits), wanted = carry
            num_active = jnp.where(wanted, jnp.minimum(goal - kv.length, num_rows), 0)
            window = protocols.Window(
                tokens=draft_slots.windows(text, kv.length + 1, num_rows),
                start=kv.length,
                num_active=num_active,
            )
            at, kv, found = self._run(params, kv, window, read(kv.length))
            wanted &= kv.length > window.start  # Else there is no room, or no slot.
            last = at[is_each, jnp.maximum(num_active - 1, 0)]

            def keep(new, old):
                new = new.at[last].get(mode="fill", fill_value=0)
                return jnp.where((num_active > 0)[:, None], new, old)

            kept = jax.tree.map(keep, found, (hidden, logits))
            return kv, kept, wanted & (kv.length < goal)

        outputs = (
            jnp.zeros((self.num_slots, head.hidden_size), head.layer.dtype),
            jnp.zeros((self.num_slots, head.draft_vocab_size), jnp.float32),
        )
        kv, (hidden, logits), _ = jax.lax.while_loop(
            lambda carry: jnp.any(carry[2]),
            step,
            (memory.kv, outputs, memory.kv.length < goal),
        )
        ring = memory.ring.replace(first=kv.length)
        return memory.replace(kv=kv, ring=ring), hidden, logits

    def _grow(self, params, memory, root, *, wanted, draw):
        """Returns the memory with the rows of drafts, and the proposal after `root`:
        hidden state `[B, D]` and logits `[B, Vd]` of the last pair."""
        tree, length = self._tree, draw.length
        is_chain = self.drafter.tree is None
        widen = draft_slots.widened(params.hot, self.vocab_size)
        children = functools.partial(
            draw.children,
            tree=tree,
            vocab_size=self.vocab_size,
            hot=params.hot,
        )

        def expand(carry, tokens, parents, first, num_rows):
            """Runs the rows of a level; see `tree_search.Expand`."""
            kv, hidden, probs = carry
            # Column 0 is the last pair.
            window = protocols.Window(
                tokens=tokens, start=length - 2, num_active=num_rows
            )
            above = jax.lax.dynamic_slice_in_dim(parents, first, tree.width, axis=1)
            if is_chain:
                window = window.replace(start=length - 2 + first)
            else:
                window = window.replace(
                    parents=parents, first=first, depth_max=tree.depth - 1
                )
            states = jnp.take_along_axis(hidden, above[:, :, None], axis=1)
            at, kv, (new, logits) = self._run(params, kv, window, states)
            by_column = lambda rows: rows.at[at].get(mode="fill", fill_value=0)
            hidden = jax.lax.dynamic_update_slice_in_dim(
                hidden, by_column(new), first, axis=1
            )
            level = tree_search.level_of(tree, first)
            logits = by_column(logits)
            probs = draw.put(probs, widen(logits), first)
            found = children(logits, level=level, counts=num_rows)
            return (kv, hidden, probs), found, (num_rows > 0) & ~kv.out_of_pages

        states, logits = root
        first, logits = jnp.int32(0), logits[:, None]
        hidden = jnp.zeros((self.num_slots, tree.num_columns, states.shape[1]))
        hidden = hidden.astype(states.dtype).at[:, 0].set(states)
        probs = draw.begin(widen(logits), tree)
        (kv, _, probs), proposal = tree_search.grow(
            expand,
            children(logits, level=first, counts=jnp.minimum(wanted, 1)),
            (memory.kv, hidden, probs),
            tree=tree,
            wanted=wanted,
        )
        proposal = draft_trees.with_probs(proposal, probs, tree)
        if is_chain:
            # Without room the chain ends where the last row was run.
            num_run = jnp.maximum(kv.length - memory.kv.length + 1, 0)
            num_drafted = jnp.minimum(proposal.num_drafted, num_run)
            proposal = proposal.replace(parents=None, num_drafted=num_drafted)
        return memory.replace(kv=kv), proposal

    def _run(self, params, kv, window, features):
        """Runs a window with features `[B, R, width]`; see `windows.run`.

        Returns:
          Where each column went, the cache, and hidden states and logits by row.
        """
        head, model = self.drafter.head, self.drafter.model

        def forward(kv, rows, features):
            kv, *outputs = eagle3.forward_rows(
                params, head, rows, features, kv, impl=model.impl
            )
            return kv, tuple(outputs)

        def empty(height):
            return (
                jnp.zeros((height, head.hidden_size), head.layer.dtype),
                jnp.zeros((height, head.draft_vocab_size), jnp.float32),
            )

        tile = rows_lib.tile_of(model.impl, model.slab, window.tokens.size)
        _, at, kv, outputs = windows.run(
            forward,
            kv,
            window,
            tile=tile,
            empty=empty,
            impl=model.cache_impl,
            inputs=features,
        )
        return at, kv, outputs


def _reserve(
    kv: cache.PagedKV, start: Int[Array, " B"], goal: Int[Array, " B"], *, size: int
) -> tuple[cache.PagedKV, Int[Array, " B"]]:
    """Reserves pages for the positions from `start` to `goal` of each slot, as if all
    slots ran `size` rows at a time: a slot that finds too few pages in a turn stops.

    Returns:
      The cache, and how far each slot can go.
    """
    is_none = (start < goal) & ~kv.registered
    kv = kv.replace(refused=kv.refused | is_none)
    goal = jnp.where(is_none, start, goal)

    def waits(carry):
        """Returns the slots that lack a page, and the turns that they lack it in."""
        kv, stopped = carry
        room = kv.num_owned * kv.page_size
        return (start < goal) & (room < goal) & ~stopped, (room - start) // size

    def turn(carry):
        """Serves the slots that lack a page first."""
        kv, stopped = carry
        waiting, number = waits(carry)
        number = jnp.where(waiting, number, jnp.iinfo(jnp.int32).max)
        asked = waiting & (number == jnp.min(number))
        up_to = jnp.minimum(start + (jnp.min(number) + 1) * size, goal)
        kv = allocator.reserve_each(kv, up_to, asked=asked)
        return kv, stopped | (asked & kv.out_of_pages)

    kv, stopped = jax.lax.while_loop(
        lambda carry: jnp.any(waits(carry)[0]), turn, (kv, jnp.zeros(start.shape, bool))
    )
    number = (kv.num_owned * kv.page_size - start) // size
    return kv, jnp.where(stopped, start + number * size, goal)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(slots, params, memory, tokens, features, end, slot):
    """Takes the pairs `[0, end - 1)` of a prompt into a slot, and the last feature into
    its ring."""
    num_rows, read = slots._prompt_rows(features, slot)
    num_slots = slots.num_slots
    is_slot = jnp.arange(num_slots, dtype=jnp.int32) == slot
    first = jnp.maximum(end - 1, 0)
    before = memory.ring
    memory, _, _ = slots._take_in(
        params,
        memory,
        jnp.broadcast_to(tokens, (num_slots, *tokens.shape)),
        read,
        goal=jnp.where(is_slot, first, before.first),
        num_rows=num_rows,
    )
    ring, last = memory.ring, features[first].reshape(-1).astype(before.features.dtype)
    return memory.replace(
        ring=ring.replace(
            features=ring.features.at[slot, first % ring.size].set(last),
            end=ring.end.at[slot].set(end),
        )
    )
