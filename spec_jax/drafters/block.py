"""DFlash, DSpark and DFlash2: a block of tokens is drafted from one pass over the
target's features (https://arxiv.org/abs/2602.06036, https://arxiv.org/abs/2607.05147).

They differ in their heads: DFlash has no head, so no slot's logits depend on a draft;
DSpark has a sequential head, a confidence head, or both; DFlash2 a selector. For a slot
with committed tokens `x[0, n)` the context is the features of `[0, n - 1)`; its keys
and values are at these places of the drafter's own cache:

    propose   takes in what the ring holds, then runs the block of the anchor `x[n - 1]`
              and its masks from place n - 1 on, which is forgotten; the sequential head
              goes over its slots, and each slot's token is drawn; or a search of
              `tree_search` goes over them
    commit    puts the features of what was committed into the ring

Any tree is lossless under the rule "coupled", and one of a fixed shape under
"rejection" too.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, Self, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.drafters import (
    draw as draw_lib,
    features as features_lib,
    tree_search,
    tree_shapes,
)
from spec_jax.engine import protocols, rows as rows_lib, windows
from spec_jax.model import (
    block_draft,
    block_files,
    block_heads,
    block_params,
    head_params,
)
from spec_jax.ops import dispatch
from spec_jax.paging import index


Kind = Literal["dflash", "dspark"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafter(features_lib.FeatureDrafter):
    """A block drafter; its parameters are a `BlockParams`. `for_slots` drafts.

    All rows of a block are always run: fewer are another input, and predict worse.

    Attributes:
      gamma_max: the most tokens of a proposal; for a chain, at most a block's drafts.
      min_confidence: a draft ends before the first token of which the confidence head
        expects less than this, given that all before it are kept; 0 never ends one.

    Raises:
      ValueError: as a draft model; another `model`, a chain longer or a tree deeper
        than a block's drafts, or a `min_confidence` without a confidence head.
    """

    head: block_params.BlockConfig
    files: ClassVar[Any] = block_files

    def __post_init__(self) -> None:
        super().__post_init__()
        name, depth = "gamma_max", self.gamma_max
        if self.tree is not None:
            name, depth = f"depth of tree {self.tree}", self.tree.depth
        if not 1 <= depth <= self.head.num_drafts:
            raise ValueError(
                f"{name}={depth} of a drafter whose block of {self.head.block_size} "
                f"rows drafts {self.head.num_drafts} tokens: give one from 1 to "
                f"{self.head.num_drafts}"
            )
        if self.min_confidence and not self.head.has_confidence:
            raise ValueError(
                f"min_confidence={self.min_confidence} of a drafter without a "
                "confidence head: leave it out"
            )

    @classmethod
    def of_head(cls, head, target, *, gamma_max, slab=None) -> Self:
        """Returns the drafter of a head, whose model runs whole blocks at least."""
        most = min(gamma_max, head.num_drafts)
        slab = slab or head.block_size
        return super().of_head(head, target, gamma_max=most, slab=slab)

    @property
    def kind(self) -> Kind:
        """The name of such a drafter in the registry; DFlash2's is "dflash"."""
        return "dspark" if self.head.has_dspark_heads else "dflash"

    def for_slots(self, num_slots: int) -> "SlotBlock":  # type: ignore[override]
        """Returns the drafter for `num_slots` sequences; raises as `SlotBlock`."""
        return SlotBlock(drafter=self, num_slots=num_slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotBlock(features_lib.SlotReader):
    """A `BlockDrafter` for `num_slots` sequences: their blocks are one forward, or as
    few as have room for them.

    Raises:
      NotImplementedError: a block of more rows than the implementation runs at once.
    """

    drafter: Any  # a BlockDrafter; in a subclass, another FeatureDrafter
    reads_tokens = False

    @property
    def _head(self) -> block_params.BlockConfig:
        """The head whose slots are gone over."""
        return self.drafter.head

    def __post_init__(self) -> None:
        size, impl = self._head.block_size, self.drafter.model.impl
        most = dispatch.most_rows(impl)
        if most and size > most:
            raise NotImplementedError(
                f"a block of {size} rows does not fit the {most} that {impl=} runs at "
                "once: take a drafter with smaller blocks, or 'xla' or 'native'"
            )

    def init(self, **sizes: Any) -> features_lib.ReaderMemory:
        """Allocates an empty cache with room for a block after each text, and rings."""
        size = self._head.block_size
        sizes["capacity"] += size
        if sizes.get("num_pages") is not None:
            pages = index.pages_for(size, sizes["page_size"])
            sizes["num_pages"] += self.num_slots * pages
        return super().init(**sizes)

    def _draft(self, params, memory, tokens, draw, *, gamma, asked, is_full):
        """Drafts from one block for each slot; none where a block finds no room."""
        params = head_params.prepare(params, self.drafter.model.impl)
        ring = memory.ring
        goal = jnp.where(asked | is_full, ring.end, ring.first)
        memory, _ = self._take_in_ring(params, memory, tokens, goal=goal)
        asked &= memory.ring.first == memory.ring.end
        last = draw.length - 1
        anchor = jnp.take_along_axis(tokens, last[:, None], axis=1)
        kv, proposal = self._one_turn(
            lambda kv: self._run_block(params, kv, anchor, last, asked),
            functools.partial(self._draw, params, anchor[:, 0], draw),
            memory.kv,
            memory.ring.first,
            asked=asked,
            gamma=gamma,
        )
        return memory.replace(kv=kv), proposal

    def _one_turn(self, run_block, draw, kv, end, *, asked, gamma):
        """Runs a block and draws from it, unless no slot is asked.

        Args:
          run_block: takes the cache, and returns it with hidden states and logits.
          end: the length that the cache keeps, in slots that are asked.

        Returns:
          The cache, and the proposal.
        """

        def run(carry):
            kv, hidden, logits = run_block(carry[0])
            wanted = jnp.where(asked & ~kv.out_of_pages, gamma, 0)
            return kv, draw(hidden, logits, wanted=wanted), jnp.bool_(False)

        sizes = self.num_slots, self._head.block_size
        shapes = jax.eval_shape(lambda: draw(*self._no_rows(*sizes), wanted=gamma))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # One turn, or none: a branch would copy the cache.
        kv, proposal, _ = jax.lax.while_loop(
            lambda carry: carry[2], run, (kv, nothing, jnp.any(asked))
        )
        asked &= ~kv.out_of_pages
        num_drafted = jnp.where(asked, jnp.minimum(gamma, proposal.num_drafted), 0)
        kv = self._rows.truncate(kv, end, asked=asked)
        return kv, proposal.replace(num_drafted=num_drafted)

    def _forward(self, params, kv, rows, features):
        """Writes the keys and values of features; there are no outputs."""
        head, impl = self._head, self.drafter.model.impl
        kv = block_draft.append_context(params, head, rows, features, kv, impl=impl)
        return kv, ()

    def _run_block(self, params, kv, anchor, start, asked):
        """Runs the blocks of the slots that are asked.

        Returns:
          The cache, and hidden states `[B, block, D]` and logits `[B, block, Vd]`.
        """
        head, model, slots = self._head, self.drafter.model, self.num_slots
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
            empty=self._no_rows,
            impl=model.cache_impl,
        )
        by_column = lambda rows: rows.at[at].get(mode="fill", fill_value=0)
        hidden, logits = (by_column(rows).reshape(slots, size, -1) for rows in outputs)
        return kv, hidden, logits

    def _draw(self, params, anchor, draw, hidden, logits, *, wanted):
        """Returns the proposal of blocks; drafts after `wanted[b]` mean nothing."""
        drafter, head, count = self.drafter, self._head, self.gamma_max
        logits = block_heads.candidates(head, logits)
        if drafter.tree is not None:
            return self._grow(params, anchor, hidden, logits, draw, wanted=wanted)
        used = slice(head.first_slot, head.first_slot + count)
        is_native = dispatch.is_fused(drafter.model.impl)
        is_native &= draw.processing is None and head.head != "selector"
        if is_native:
            tokens, confidence, log_weights = block_heads.run_slots(
                params,
                head,
                anchor,
                hidden[:, : used.stop],
                logits[:, used],
                counts=wanted,
                draws=draw.native(),
            )
            probs = draw.given(log_weights, wanted)
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
          Tokens `[B, W]`; the logits of their confidences, None without that head; and
          their distributions, None unless draws are independent.
        """
        head, count = self._head, self.gamma_max
        widen = draw_lib.widened(draw.hot, self.vocab_size)
        correct, state = self._begin_head(params, anchor, hidden)

        def step(carry, slot):
            """Draws the draft of one slot of each block."""
            state, before, probs, processing = carry
            number, hidden, logits = slot
            state, bias, confidence = correct(state, before, hidden)
            if bias is not None:
                logits += bias
            row = widen(logits)
            if processing is not None:
                row = processing.apply_each(row)
            row = row[:, None]
            scores = draw.weights(row, level=number, width=1)[:, 0]
            token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
            probs = draw.put(probs, row, number)
            if processing is not None:
                processing = processing.step_each(token, jnp.ones(token.shape, bool))
            return (state, token, probs, processing), (token, confidence)

        used = slice(head.first_slot, head.first_slot + count)
        by_slot = lambda rows: jnp.moveaxis(rows[:, used], 1, 0)
        numbers = jnp.arange(count, dtype=jnp.int32)
        (_, _, probs, _), (tokens, confidence) = jax.lax.scan(
            step,
            (state, anchor, draw.no_probs(count), draw.processing),
            (numbers, by_slot(hidden), by_slot(logits)),
        )
        return tokens.T, None if confidence is None else confidence.T, probs

    def _begin_head(self, params, anchor, hidden):
        """Returns what corrects a slot's logits (`block_heads.correct`), and the state
        before the first slot that predicts."""
        head = self._head
        correct = functools.partial(
            block_heads.correct,
            params,
            head,
            product=block_heads.row_product(self.drafter.model.impl),
        )
        state = block_heads.first_state(head, (self.num_slots,))
        if head.first_slot:  # Slot 0 predicts nothing, but updates a recurrent state.
            state, _, _ = correct(state, anchor, hidden[:, 0])
        return correct, state

    def _grow(self, params, anchor, hidden, logits, draw, *, wanted):
        """Returns the proposal of trees, level after level.

        A slot's logits are the same whatever is drafted before it, but for what the
        sequential head adds by the token before. So the children of a node at depth `d`
        are the best tokens of slot `d` as the head corrects it after that node, and a
        level costs its rows of the head alone, none of the backbone:

            state, bias = correct(state of the parent, token of the node, hidden of d)
            children    the best of logits of d + bias, by the weights of `draw`

        Without a head all nodes of a level have the same children.
        """
        head, slots = self._head, self.num_slots
        tree = cast(tree_shapes.AnyTree, self.drafter.tree)
        correct, state = self._begin_head(params, anchor, hidden)

        def after(states, before, slot):
            """Returns the states after rows `[B, K]` of a slot, and their logits."""
            count = before.shape[1]
            of_rows = lambda x: jnp.repeat(x[:, slot], count, axis=0)
            flat = states.reshape(slots * count, -1), before.reshape(-1)
            states, bias, _ = correct(*flat, of_rows(hidden))
            rows = of_rows(logits)
            if bias is not None:
                rows += bias
            by_slot = lambda x: x.reshape(slots, count, -1)
            return by_slot(states), by_slot(rows)

        def run(states, tokens, parents, first, num_rows):
            """Runs the rows of a level; see `draw.Run`."""
            level = tree_search.level_of(tree, first)
            above = jax.lax.dynamic_slice_in_dim(parents, first, tree.width, axis=1)
            before = states[jnp.arange(slots, dtype=jnp.int32)[:, None], above]
            new, rows = after(before, tokens, head.first_slot + level)
            states = jax.lax.dynamic_update_slice_in_dim(states, new, first, axis=1)
            return states, rows, num_rows > 0

        new, root = after(state[:, None], anchor[:, None], head.first_slot)
        states = jnp.zeros((slots, tree.num_columns, state.shape[1]), state.dtype)
        _, proposal = draw_lib.grow(
            draw,
            run,
            root[:, 0],
            states.at[:, :1].set(new),
            tree=tree,
            wanted=wanted,
        )
        return proposal


def _until(survival: Float[Array, "B W"], threshold: float) -> Int[Array, " B"]:
    """Counts the leading drafts each of which is kept with a chance of at least
    `threshold`, given that all before it are."""
    before = jnp.pad(survival[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)
    goes_on: Bool[Array, "B W"] = survival >= threshold * before
    kept = jnp.cumprod(goes_on.astype(jnp.int32), axis=1)
    return jnp.sum(kept, axis=1, dtype=jnp.int32)
