"""EAGLE-3: one layer drafts from the target's features (Li et al. 2025,
https://arxiv.org/abs/2503.01840).

For a slot with committed tokens `x[0, n)`, pair `i` is the feature of position `i` and
token `x[i + 1]`; it is at place `i` of the head's own cache, and predicts `x[i + 2]`:

    propose   takes in the pairs of the ring, up to n - 2, whose last row drafts;
              then the rows of drafts, level by level: token and the hidden state of the
              row before it. They are stored after the pairs, and forgotten at the end
    commit    puts the features of what was committed into the ring

The first round of a text of one token drafts nothing, as no position has features yet.
`tree_search` grows chains and trees; a chain is one call of the head where an
implementation has that. A parallel head drafts as `peagle` says.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters import (
    draw as draw_lib,
    features as features_lib,
    peagle,
    slots as slots_lib,
    tree_shapes,
)
from spec_jax.engine import protocols
from spec_jax.model import eagle3, eagle3_files, eagle3_params
from spec_jax.ops import dispatch
from spec_jax.paging import allocator, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(features_lib.FeatureDrafter):
    """An EAGLE-3 head; its parameters are an `Eagle3Params`. `for_slots` drafts.

    Attributes:
      catch_up_rows: pairs of a prompt that are taken in at once, at least.

    Raises:
      ValueError: as a draft model; another `model`, or a confidence.
    """

    head: eagle3_params.Eagle3Config
    files: ClassVar[Any] = eagle3_files

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_confidence:
            raise ValueError(
                f"min_confidence={self.min_confidence}: an EAGLE-3 head has no rule "
                "that ends a draft early, leave it out"
            )

    def for_slots(self, num_slots: int) -> features_lib.SlotReader:  # type: ignore[override]
        """Returns the head for `num_slots` sequences; raises as `SlotBlock`."""
        kind = peagle.SlotParallel if self.head.is_parallel else SlotEagle3
        return kind(drafter=self, num_slots=num_slots)


class _Chain(tree_shapes.FixedTree):
    """A tree without branches, that grows no deeper than is asked."""

    def may_grow(self, score, frontier, wanted):
        """Returns where a child of the frontier is wanted: candidate i is draft i."""
        return frontier[:, 0] + 1 < wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotEagle3(peagle.PairReader):
    """An `Eagle3` for `num_slots` sequences: the rows of a level are one forward."""

    drafter: Eagle3

    @property
    def _tree(self) -> tree_shapes.AnyTree:
        return self.drafter.tree or _Chain.of_branching((1,) * self.gamma_max)

    def _draft(self, params, memory, tokens, draw, *, gamma, asked, is_full):
        """Drafts by one call, if there is such a kernel, or level by level."""
        ring = memory.ring
        spared = jnp.where(is_full, ring.end - 1, ring.first)
        goal = jnp.where(asked, ring.end, spared)
        has_call = dispatch.is_fused(self.drafter.model.impl)
        if self.drafter.tree is None and draw.processing is None and has_call:
            return self._run_chains(params, memory, tokens, asked, goal, gamma, draw)
        memory, root = self._take_in_ring(params, memory, tokens, goal=goal)
        asked &= memory.ring.first == memory.ring.end
        wanted = jnp.where(asked, gamma, 0)
        memory, proposal = self._grow(params, memory, root, wanted=wanted, draw=draw)
        return self._without_drafts(memory, asked), proposal

    def _run_chains(self, params, memory, tokens, asked, goal, gamma, draw):
        """Returns the memory and the proposal of `propose`."""
        ring, size = memory.ring, self._rows_most
        kv, reached = _reserve(memory.kv, ring.first, goal)
        drafts = asked & (reached == ring.end)
        # The last pending row drafts; more than a round's rows go before.
        first = jnp.where(ring.end - ring.first > size, ring.end - 1, ring.first)
        goal = jnp.where(drafts, first, reached)
        memory = memory.replace(kv=kv)
        memory, _ = self._take_in_ring(params, memory, tokens, goal=goal)
        # Earlier rows found their pages; others may not have.
        kv = memory.kv.replace(out_of_pages=kv.out_of_pages)
        starts, end = kv.length, ring.end
        after = end + jnp.minimum(gamma, self.gamma_max) - 1  # The last has no row.
        after = jnp.where(drafts, jnp.minimum(after, kv.slot_capacity), end)
        kv, reached = _reserve(kv, end, after)
        counts = jnp.where(drafts, reached + 1 - end, 0)
        kv, found, log_weights = eagle3.run_chains(
            params,
            self.drafter.head,
            kv,
            tokens=slots_lib.windows(tokens, starts + 1, size),
            features=ring.read(starts, count=size),
            starts=starts,
            pending=jnp.where(drafts, end - starts, 0),
            counts=counts,
            most=self.gamma_max,
            draws=draw.native(),
        )
        kv = allocator.extend_each(kv, end, asked=drafts)
        kv = allocator.truncate_each(kv, end, asked=drafts)
        memory = memory.replace(kv=kv, ring=ring.replace(first=kv.length))
        probs = draw.given(log_weights, counts)
        return memory, protocols.Proposal(tokens=found, num_drafted=counts, probs=probs)

    def _grow(self, params, memory, root, *, wanted, draw):
        """Returns the memory with the rows of drafts, and the proposal after `root`:
        hidden state `[B, D]` and logits `[B, Vd]` of the last pair."""
        tree, length = self._tree, draw.length
        is_chain = self.drafter.tree is None

        def run(carry, tokens, parents, first, num_rows):
            """Runs the rows of a level; see `draw.Run`."""
            kv, hidden = carry
            # Column 0 is the last pair.
            above = jax.lax.dynamic_slice_in_dim(parents, first, tree.width, axis=1)
            start, branches = length - 2 + first, {}
            if not is_chain:
                start, branches = length - 2, {"parents": parents, "first": first}
                branches["depth_max"] = tree.depth - 1
            window = protocols.Window(
                tokens=tokens, start=start, num_active=num_rows, **branches
            )
            states = jnp.take_along_axis(hidden, above[:, :, None], axis=1)
            kv, at, (new, logits) = self._run(params, kv, window, states)
            by_column = lambda rows: rows.at[at].get(mode="fill", fill_value=0)
            hidden = jax.lax.dynamic_update_slice_in_dim(
                hidden, by_column(new), first, axis=1
            )
            has_run = (num_rows > 0) & ~kv.out_of_pages
            return (kv, hidden), by_column(logits), has_run

        states, logits = root
        hidden = jnp.zeros((self.num_slots, tree.num_columns, states.shape[1]))
        hidden = hidden.astype(states.dtype).at[:, 0].set(states)
        (kv, _), proposal = draw_lib.grow(
            draw,
            run,
            logits,
            (memory.kv, hidden),
            tree=tree,
            wanted=wanted,
        )
        if is_chain:
            # Without room the chain ends where the last row was run.
            num_run = jnp.maximum(kv.length - memory.kv.length + 1, 0)
            num_drafted = jnp.minimum(proposal.num_drafted, num_run)
            proposal = proposal.replace(parents=None, num_drafted=num_drafted)
        return memory.replace(kv=kv), proposal


def _reserve(
    kv: cache.PagedKV, start: Int[Array, " B"], goal: Int[Array, " B"]
) -> tuple[cache.PagedKV, Int[Array, " B"]]:
    """Reserves pages for the positions from `start` to `goal` of each slot.

    Returns:
      The cache, and how far each slot can go: its own pages, where too few are free.
    """
    kv = allocator.reserve_each(kv, goal, asked=start < goal)
    return kv, jnp.clip(kv.num_owned * kv.page_size, start, goal)
