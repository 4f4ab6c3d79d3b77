"""A block drafter for several sequences.

For a slot with committed tokens `x[0, n)` the context is the features of `[0, n - 1)`;
its keys and values are at these places of the drafter's own cache:

    propose   takes in what the ring holds, then runs the block of the anchor `x[n - 1]`
              and its masks from place n - 1 on, which is forgotten; the sequential head
              goes over its slots, and each slot's token is drawn
    commit    puts the features of what was committed into the ring
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.drafters import draft_slots, draft_trees, features as features_lib
from spec_jax.engine import protocols, rows as rows_lib, windows
from spec_jax.model import block_draft, block_heads, block_params
from spec_jax.ops import dispatch
from spec_jax.paging import allocator, index


if TYPE_CHECKING:
    from spec_jax.drafters import block


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotBlock(features_lib.SlotReader):
    """A `BlockDrafter` for `num_slots` sequences: their blocks are one forward, or as
    few as have room for them.

    Raises:
      NotImplementedError: a block of more rows than the implementation runs at once.
    """

    drafter: "block.BlockDrafter"

    def __post_init__(self) -> None:
        size, impl = self.drafter.head.block_size, self.drafter.model.impl
        most = dispatch.most_rows(impl)
        if most and size > most:
            raise NotImplementedError(
                f"a block of {size} rows does not fit the {most} that {impl=} runs at "
                "once: take a drafter with smaller blocks, or 'xla' or 'native'"
            )

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> features_lib.ReaderMemory:
        """Allocates an empty cache with room for a block after each text, and rings."""
        size = self.drafter.head.block_size
        if num_pages is not None:
            num_pages += self.num_slots * index.pages_for(size, page_size)
        return super().init(
            capacity=capacity + size, page_size=page_size, num_pages=num_pages
        )

    def prefill(
        self,
        params: block_params.BlockParams,
        memory: features_lib.ReaderMemory,
        prompt: list[int],
        *,
        slot: int,
        features: Float[Array, "T taps D"],
    ) -> features_lib.ReaderMemory:
        """Takes in the features of the prompt, but for its last token."""
        end, slot_ = np.int32(len(prompt) - 1), np.int32(slot)
        return _prefill(self, params, memory, features, end, slot_)

    def propose(
        self,
        params: block_params.BlockParams,
        memory: features_lib.ReaderMemory,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        sampling: protocols.Sampling,
    ) -> tuple[features_lib.ReaderMemory, protocols.Proposal]:
        """Drafts `gamma[b]` tokens, or none where the cache has no room for a block."""
        memory, asked, is_full = self._begin(memory, length, gamma)
        ring = memory.ring
        memory = self._take_in(
            params,
            memory,
            functools.partial(features_lib.read, ring, count=self._rows_most),
            goal=jnp.where(asked | is_full, ring.end, ring.first),
            num_rows=self._rows_most,
        )
        asked &= memory.ring.first == memory.ring.end
        anchor = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        draw = functools.partial(
            self._draw, params, anchor[:, 0], length=length, sampling=sampling
        )

        def run(carry):
            kv, _, _ = carry
            kv, hidden, logits = self._run_block(params, kv, anchor, length - 1, asked)
            wanted = jnp.where(asked & ~kv.out_of_pages, gamma, 0)
            return kv, draw(hidden, logits, wanted=wanted), jnp.bool_(False)

        sizes = self.num_slots, self.drafter.head.block_size
        shapes = jax.eval_shape(lambda: draw(*self._empty(*sizes), wanted=gamma))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # One turn, or none where no slot is asked: a branch would copy the cache.
        kv, proposal, _ = jax.lax.while_loop(
            lambda carry: carry[2], run, (memory.kv, nothing, jnp.any(asked))
        )
        asked &= ~kv.out_of_pages
        kv = allocator.truncate_each(
            kv, memory.ring.first, asked=asked, impl=self.drafter.model.cache_impl
        )
        num_drafted = jnp.where(asked, jnp.minimum(gamma, proposal.num_drafted), 0)
        return memory.replace(kv=kv), proposal.replace(num_drafted=num_drafted)

    def _take_in(
        self,
        params: block_params.BlockParams,
        memory: features_lib.ReaderMemory,
        read: Callable[[Int[Array, " B"]], Float[Array, "B R width"]],
        *,
        goal: Int[Array, " B"],
        num_rows: int,
    ) -> features_lib.ReaderMemory:
        """Takes in the context up to `goal`, as far as there is room for it.

        Args:
          read: returns `num_rows` features of each slot from a position on.
          num_rows: that a slot takes in with a forward.
        """
        head, model = self.drafter.head, self.drafter.model
        tokens = jnp.zeros((self.num_slots, num_rows), jnp.int32)  # Not read.

        def forward(kv, rows, features):
            kv = block_draft.append_context(
                params, head, rows, features, kv, impl=model.impl
            )
            return kv, ()

        def step(carry):
            """Takes in up to `num_rows` features of each slot."""
            kv, wanted = carry
            left = jnp.minimum(goal - kv.length, num_rows)
            window = protocols.Window(
                tokens=tokens,
                start=kv.length,
                num_active=jnp.where(wanted, left, 0),
            )
            tile = rows_lib.tile_of(model.impl, model.slab, tokens.size)
            inputs = read(kv.length)
            *_, kv, _ = windows.run(
                forward,
                kv,
                window,
                tile=tile,
                empty=lambda height: (),
                impl=model.cache_impl,
                inputs=inputs,
            )
            wanted &= kv.length > window.start  # Else there is no room, or no slot.
            return kv, wanted & (kv.length < goal)

        kv, _ = jax.lax.while_loop(
            lambda carry: jnp.any(carry[1]), step, (memory.kv, memory.kv.length < goal)
        )
        return memory.replace(kv=kv, ring=memory.ring.replace(first=kv.length))

    def _run_block(self, params, kv, anchor, start, asked):
        """Runs the blocks of the slots that are asked.

        Returns:
          The cache, and hidden states `[B, block, D]` and logits `[B, block, Vd]`.
        """
        head, model, slots = self.drafter.head, self.drafter.model, self.num_slots
        size = head.block_size
        masks = jnp.full((slots, size - 1), head.mask_token_id, jnp.int32)
        window = protocols.Window(
            tokens=jnp.concatenate([anchor, masks], axis=1),
            start=start,
            num_active=jnp.where(asked, size, 0),
        )
        # Whole blocks: the rows of one see each other.
        tile, most = slots * size, dispatch.most_rows(model.impl)
        if model.impl == "native":
            most = rows_lib.NATIVE_TILE
        if most:
            tile = min(tile, max(most // size, 1) * size)

        def forward(kv, rows, inputs):
            del inputs
            kv, *outputs = block_draft.forward_block(
                params, head, rows, kv, impl=model.impl
            )
            return kv, tuple(outputs)

        _, at, kv, outputs = windows.run(
            forward,
            kv,
            window,
            tile=tile,
            empty=self._empty,
            impl=model.cache_impl,
        )
        by_column = lambda rows: rows.at[at].get(mode="fill", fill_value=0)
        hidden, logits = (by_column(rows).reshape(slots, size, -1) for rows in outputs)
        return kv, hidden, logits

    def _empty(self, *sizes: int) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states and logits of no rows yet."""
        head = self.drafter.head
        return (
            jnp.zeros((*sizes, head.hidden_size), head.layer.dtype),
            jnp.zeros((*sizes, head.draft_vocab_size), jnp.float32),
        )

    def _draw(self, params, anchor, hidden, logits, *, length, sampling, wanted):
        """Returns the proposal of whole blocks, of `wanted[b]` drafts at least."""
        drafter, head, count = self.drafter, self.drafter.head, self.gamma_max
        draw = draft_trees.Draw.of(drafter, sampling, length, num_slots=self.num_slots)
        params = block_params.prepare(params, drafter.model.impl)
        used = slice(head.first_slot, head.first_slot + count)
        if dispatch.is_fused(drafter.model.impl):
            tokens, confidence, log_weights = block_heads.run_slots(
                params,
                head,
                anchor,
                hidden[:, : used.stop],
                logits[:, used],
                counts=wanted,
                draws=draw.native(self.vocab_size),
            )
            probs = self._probs(params, log_weights, wanted)
        else:
            tokens, confidence, probs = self._go_over(
                params, anchor, hidden, logits, draw
            )
        survival, num_drafted = None, jnp.full((self.num_slots,), count, jnp.int32)
        if confidence is not None:
            survival = block_heads.survival(head, confidence)
            if drafter.min_confidence:
                num_drafted = _until(survival, drafter.min_confidence)
            # Drafts that were not asked for may not exist.
            is_asked = jnp.arange(count, dtype=jnp.int32)[None] < wanted[:, None]
            survival = jnp.where(is_asked, survival, 0.0)
        return protocols.Proposal(
            tokens=tokens, num_drafted=num_drafted, probs=probs, survival=survival
        )

    def _go_over(self, params, anchor, hidden, logits, draw):
        """Goes over the slots of blocks, one after the other.

        Returns:
          Tokens `[B, W]`, the logits of their confidences, and their distributions;
          None where there are no such.
        """
        head, count = self.drafter.head, self.gamma_max
        widen = draft_slots.widened(params.hot, self.vocab_size)
        correct = functools.partial(
            block_heads.correct,
            params,
            head,
            product=block_heads.row_product(self.drafter.model.impl),
        )
        state = block_heads.first_state(head, (self.num_slots,))
        if head.first_slot:  # Predicts nothing, but a recurrent state passes through.
            state, _, _ = correct(state, anchor, hidden[:, 0])

        def step(carry, slot):
            state, before, probs = carry
            number, hidden, logits = slot
            state, bias, confidence = correct(state, before, hidden)
            if bias is not None:
                logits += bias
            row = widen(logits)[:, None]
            scores = draw.weights(row, level=number, width=1)[:, 0]
            token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
            probs = draw.put(probs, row, number)
            return (state, token, probs), (token, confidence)

        probs = None
        if draw.has_probs:
            shape = self.num_slots, count, self.vocab_size
            probs = jnp.zeros(shape, jnp.float32)
        used = slice(head.first_slot, head.first_slot + count)
        by_slot = lambda rows: jnp.moveaxis(rows[:, used], 1, 0)
        numbers = jnp.arange(count, dtype=jnp.int32)
        (_, _, probs), (tokens, confidence) = jax.lax.scan(
            step, (state, anchor, probs), (numbers, by_slot(hidden), by_slot(logits))
        )
        return tokens.T, None if confidence is None else confidence.T, probs


def _until(survival: Float[Array, "B W"], threshold: float) -> Int[Array, " B"]:
    """Returns the leading drafts of which each is expected to be kept, if those before
    it are, with a chance of at least `threshold`."""
    before = jnp.pad(survival[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)
    goes_on: Bool[Array, "B W"] = survival >= threshold * before
    kept = jnp.cumprod(goes_on.astype(jnp.int32), axis=1)
    return jnp.sum(kept, axis=1, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(slots, params, memory, features, end, slot):
    """Takes the features `[0, end)` of a prompt into a slot."""
    num_rows, read = slots._prompt_rows(features, slot)
    is_slot = jnp.arange(slots.num_slots, dtype=jnp.int32) == slot
    goal = jnp.where(is_slot, end, memory.ring.first)
    memory = slots._take_in(params, memory, read, goal=goal, num_rows=num_rows)
    return memory.replace(
        ring=memory.ring.replace(end=memory.ring.end.at[slot].set(end))
    )
