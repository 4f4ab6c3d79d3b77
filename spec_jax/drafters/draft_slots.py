"""A draft model for several sequences.

One cache, and the rows of all slots in each forward of the model. For a slot with
committed tokens `x[0, n)` and draft K/V of `[0, m)`:

    propose   rows m .. n-1 (catch-up), then each drafted token but the last;
              afterwards the draft K/V covers [0, n+g-1)
    commit    the draft K/V is cut to [0, min(m', n'-1))

Tokens that a commit kept are caught up in one or two rows. Rounds that ask for nothing
are caught up in the next one that asks for something.

The rows of a tree's level are one forward. They are stored after the text, and are
forgotten at the end of `propose`, which leaves [0, n): what a commit keeps of a tree is
caught up as the first rows of the next one are run, in the same forward.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import pytree
from spec_jax.drafters import draw as draw_lib, slots
from spec_jax.engine import (
    processing as processing_lib,
    protocols,
)
from spec_jax.gamma import confidence
from spec_jax.paging import cache as paged


def goal_of(
    kv: paged.PagedKV, length: Int[Array, " B"], gamma: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Returns the length of the text after drafting, as far as a slot can go.

    The last draft needs no room, as it has no K/V yet. A text that is too long for a
    slot is not caught up on either: that would fail in every round.
    """
    return jnp.maximum(length, jnp.minimum(length + gamma, kv.slot_capacity + 1))


class _Drafting(pytree.Node):
    """State of the loop of one proposal."""

    kv: paged.PagedKV
    text: jax.Array  # [B, padded] int32, committed tokens and drafts
    known: jax.Array  # [B] int32, their number
    goes_on: jax.Array  # [B] bool: the cache has room, and the draft is confident
    any_left: jax.Array  # [] bool: a slot that goes on is short of its goal
    probs: jax.Array | None  # [B, gamma_max, V] float32, of independent draws
    chances: jax.Array | None  # [B, gamma_max] float32, of each draft; 1: none yet
    processing: processing_lib.Processing | None  # after `text[:known]`


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotDraftModel(slots.OfSlots):
    """A `DraftModel` for `num_slots` sequences. The memory is one cache.

    Each forward takes in what slots are behind by, up to `_rows_most` of each, and
    drafts one token in each slot that is caught up and has not drafted enough. Before
    these, slots that are behind by more are caught up `catch_up_rows` at a time.
    """

    drafter: Any
    reads_processing: ClassVar[bool] = True

    @property
    def _rows_most(self) -> int:
        """Rows of a slot that are taken in at once and draft: of a tree, a round's."""
        slab, tree = self.drafter.model.slab, self.drafter.tree
        return slab if tree is None else max(slab, tree.depth_max + 1)

    @property
    def shares_prompts(self) -> bool:
        """Whether the cache has pages that slots can share."""
        return self.drafter.model.cache == "paged"

    def init(self, **sizes: Any) -> protocols.Memory:
        """Allocates an empty cache; takes and raises as `SlotRows.new_cache`."""
        return slots.new_cache(self._rows, **sizes)

    def prefill(self, params, memory, prompt, *, slot, begun=None):
        """Writes the K/V of the prompt but for its last token. Donates `memory`."""
        length = 0
        if begun is not None:
            # A prefill of whole prompts gives other bits for another length.
            if begun.is_whole or self._rows.prefills_by_rows:
                length = begun.length
            memory = slots.begin(self._rows, memory, begun, slot=slot, length=length)
        if length and length == len(prompt) - 1:
            return memory
        return self._rows.prefill(params, memory, prompt, slot=slot, begun=length)

    def propose(
        self, params, memory, *, tokens, length, gamma, sampling, processing=None
    ):
        """Drafts `gamma[b]` tokens; fewer where the cache has no room, or where the
        draft is not confident. None in a slot whose sequence the cache cannot hold."""
        gamma_max = self.gamma_max
        # Flags of an earlier round do not hold in this one.
        memory = memory.replace(out_of_pages=jnp.zeros_like(memory.out_of_pages))
        goal = goal_of(memory, length, gamma)
        memory = self._catch_up(params, memory, tokens, length, asked=goal > length)
        draw = draw_lib.Draw.of(self.drafter, sampling, length, processing)
        if self.drafter.tree is not None:
            return self._grow(
                params, memory, tokens, draw, asked=goal > length, gamma=gamma
            )
        if self._is_one_call(draw):
            memory, drafts, num_drafted = self._rows.run_chains(
                params,
                memory,
                tokens=slots.windows(tokens, memory.length, self._rows_most),
                pending=length - memory.length,
                counts=goal - length,
                most=gamma_max,
            )
            return memory, protocols.Proposal(tokens=drafts, num_drafted=num_drafted)
        chances = None
        if self.drafter.gives_survival:
            chances = jnp.ones((self.num_slots, gamma_max), jnp.float32)
        drafting = _Drafting(
            kv=memory,
            text=jnp.pad(tokens, ((0, 0), (0, gamma_max))),
            known=length,
            goes_on=jnp.ones((self.num_slots,), bool),
            any_left=jnp.any(length < goal),
            probs=draw.no_probs(gamma_max),
            chances=chances,
            processing=processing,
        )
        drafting = jax.lax.while_loop(
            # The step's kernel computes this, so that it is no extra launch.
            lambda carry: carry.any_left,
            lambda carry: self._step(params, carry, goal, draw),
            drafting,
        )
        survival = None
        if drafting.chances is not None:
            survival = jnp.cumprod(drafting.chances, axis=1)
        return drafting.kv, protocols.Proposal(
            tokens=slots.windows(drafting.text, length, gamma_max),
            num_drafted=drafting.known - length,
            probs=drafting.probs,
            survival=survival,
        )

    def _is_one_call(self, draw: draw_lib.Draw) -> bool:
        """Returns whether all drafts of a proposal are one call of the model.

        The call takes in what `_catch_up` leaves, and drafts the tokens of highest
        logit, as many as are asked for.
        """
        drafter = self.drafter
        is_greedy = draw.sampling is None and draw.processing is None
        all_wanted = not drafter.min_confidence and drafter.catch_up_rows > 0
        all_wanted &= not drafter.gives_survival  # It needs logits.
        return is_greedy and all_wanted and self._rows.runs_chains

    def _step(self, params, carry, goal, draw) -> _Drafting:
        """Runs one forward of every slot that wants one.

        It catches up by at most a slab of rows; at the end of the text, it drafts.
        """
        slab = self._rows_most
        starts, is_each = carry.kv.length, jnp.arange(self.num_slots, dtype=jnp.int32)
        wanted = (carry.known < goal) & carry.goes_on
        num_active = jnp.where(wanted, jnp.minimum(carry.known - starts, slab), 0)
        window = protocols.Window(
            tokens=slots.windows(carry.text, starts, slab),
            start=starts,
            num_active=num_active,
        )
        kv, verified = self._rows.verify(params, carry.kv, window)
        # A slot that does not advance has no page, or no sequence: it is done.
        has_room = ~wanted | (kv.length > starts)
        drafts = wanted & has_room & (starts + num_active == carry.known)
        last = verified.at[is_each, jnp.maximum(num_active - 1, 0)]
        logits = verified.logits.at[last].get(mode="fill", fill_value=0)
        if carry.processing is not None:
            # As if the rows that draft were all that was run.
            logits, last = carry.processing.apply_each(logits), is_each
            verified = verified.replace(
                logits=logits, num_active=jnp.int32(self.num_slots)
            )
        goes_on = carry.goes_on & has_room
        if self.drafter.min_confidence:
            threshold = jnp.float32(self.drafter.min_confidence)
            confident = confidence.confident(logits, threshold=threshold)
            goes_on &= ~drafts | confident
            drafts &= confident
        token, probs = self._draw(verified, last, logits, drafts, carry, draw)
        chances = carry.chances
        if chances is not None:
            # Computed from the distribution: no schedule may look at the token drawn.
            chance = confidence.highest(logits)
            offset = jnp.where(drafts, carry.known - draw.length, self.gamma_max)
            chances = chances.at[is_each, offset].set(chance, mode="drop")
        # One pass, in place: a scatter is three operations of XLA's, and on a GPU as
        # many launches for each token.
        columns = jnp.arange(carry.text.shape[1], dtype=jnp.int32)[None, :]
        is_next = drafts[:, None] & (columns == carry.known[:, None])
        known = carry.known + drafts.astype(jnp.int32)
        processing = carry.processing
        if processing is not None:
            processing = processing.step_each(token, drafts)
        return _Drafting(
            kv=kv,
            text=jnp.where(is_next, token[:, None], carry.text),
            known=known,
            goes_on=goes_on,
            any_left=jnp.any((known < goal) & goes_on),
            probs=probs,
            chances=chances,
            processing=processing,
        )

    def _draw(self, verified, last, logits, drafts, carry, draw):
        """Returns the token that follows each slot's last row, of these logits, and
        `carry.probs` with what it was drawn from."""
        if not draw.has_probs:
            highest = self._rows.choose(verified.logits, verified.num_active)
            token = highest.at[last].get(mode="fill", fill_value=0)
            if draw.sampling is None:
                return token, carry.probs
            samples = drafts & (draw.sampling.temperature != 0)
            drawn = self._rows.draw(
                logits, draw.sampling, positions=carry.known, draws=samples
            )
            return jnp.where(samples, drawn, token), carry.probs

        offset = carry.known - draw.length
        rows, is_each = logits[:, None], jnp.arange(self.num_slots, dtype=jnp.int32)
        weights = draw.weights(rows, columns=offset[:, None])[:, 0]
        token = self._rows.choose(weights, jnp.int32(self.num_slots))
        at = jnp.where(drafts, offset, self.gamma_max)
        probs = draw.distributions(rows)[:, 0]
        return token, carry.probs.at[is_each, at].set(probs, mode="drop")

    def _catch_up(self, params, memory, text, length, *, asked) -> paged.PagedKV:
        """Takes in rows of the slots that are asked until a slab of rows or less is
        left, and never the last row, which drafts."""
        num_rows = self.drafter.catch_up_rows
        if not num_rows:
            return memory
        memory, _ = slots.take_in(
            lambda kv, window: (self._rows.advance(params, kv, window), None, ()),
            memory,
            text,
            goal=length - 1,
            num_rows=num_rows,
            until=length - self._rows_most,
            asked=asked,
        )
        return memory

    def _grow(self, params, memory, text, draw, *, asked, gamma):
        """Returns the memory and the proposal of trees of up to `gamma[b]` nodes; less
        deep where room is short."""
        tree, length = self.drafter.tree, draw.length

        def take_in(kv, window):
            """Runs rows of the text, whose last one drafts; see `slots.Run`."""
            kv, verified = self._rows.verify(params, kv, window)
            return kv, verified.at, verified.logits

        memory, root = slots.take_in(
            take_in,
            memory,
            text,
            jnp.zeros((self.num_slots, self.vocab_size), jnp.float32),
            goal=length,
            num_rows=self._rows_most,
            asked=asked,
        )
        asked &= memory.length == length

        def run(kv, tokens, parents, first, num_rows):
            """Runs the rows of a level; see `draw.Run`."""
            window = protocols.Window(
                tokens=tokens,
                start=length - 1,
                num_active=num_rows,
                parents=parents,
                first=first,
                depth_max=tree.depth - 1,
            )
            kv, verified = self._rows.verify(params, kv, window)
            has_run = (num_rows > 0) & ~self._rows.out_of_pages(kv)
            return kv, verified.by_column(verified.logits, fill=0.0), has_run

        wanted = jnp.where(asked, gamma, 0)
        memory, proposal = draw_lib.grow(
            draw, run, root, memory, tree=tree, wanted=wanted
        )
        return self._rows.truncate(memory, length, asked=asked), proposal

    def commit(self, params, memory, length, *, asked):
        """Forgets drafts that were not committed."""
        kept = jnp.minimum(memory.length, length - 1)
        return self._rows.truncate(memory, kept, asked=asked)
