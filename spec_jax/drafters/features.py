"""Drafters with a head that reads the target's features, and their slots.

A drafter's K/V are made of features. Until it takes them in they wait in a
`feature_ring`.
"""

import dataclasses
import functools
import pathlib
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax import pytree
from spec_jax.drafters import (
    draft_model,
    draw as draw_lib,
    feature_ring,
    slots as slots_lib,
)
from spec_jax.engine import protocols, rows as rows_lib, windows
from spec_jax.model import params as params_lib, row_model
from spec_jax.paging import cache as paged


RING_ROWS = 64
"""Features that a slot keeps while it drafts nothing, at least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureDrafter(draft_model.DraftModel):
    """A drafter with a head that reads the target's features.

    Attributes:
      head: the head's config; its `layer` is the config of `model`.
      catch_up_rows: features of a prompt that are taken in at once, at least.
      files: the module that reads such heads.

    Raises:
      ValueError: as a draft model; another `model`.
    """

    head: Any
    files: ClassVar[Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.config != self.head.layer:
            raise ValueError("the model's config is not that of the head's layer")

    @classmethod
    def load(
        cls,
        folder: str | pathlib.Path,
        target: row_model.RowModel,
        target_params: params_lib.Params,
        *,
        gamma_max: int,
        **how: Any,
    ) -> tuple[Self, Any]:
        """Reads a head, which drafts for this target with kernels as the target's.

        Args:
          gamma_max: as in `of_head`.
          **how: as `files.load` takes it: dtype, weights.

        Raises:
          ValueError: the folder is not of a head for this target.
        """
        head, params = cls.files.load(
            folder, target.config, target_params, impl=target.impl, **how
        )
        return cls.of_head(head, target, gamma_max=gamma_max), params

    @classmethod
    def of_head(
        cls,
        head: Any,
        target: row_model.RowModel,
        *,
        gamma_max: int,
        slab: int | None = None,
    ) -> Self:
        """Returns the drafter of a head, with kernels as the target's.

        Args:
          gamma_max: the most tokens of a proposal; those of a block, if it has fewer.
          slab: rows that its model runs at once, at least; None: `gamma_max + 1`.
        """
        model = row_model.RowModel(
            config=head.layer,
            impl=target.impl,
            slab=row_model.slab_for(target.impl, slab or gamma_max + 1),
            cache=target.cache,
        )
        # Native kernels read the weights once for so many rows, and skip inactive ones.
        rows = row_model.NATIVE_PREFILL_SLAB if target.impl == "native" else 0
        return cls(head=head, gamma_max=gamma_max, model=model, catch_up_rows=rows)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's features that the head reads."""
        return self.head.taps

    @property
    def feature_size(self) -> int:
        """The width of a feature."""
        return self.head.target_hidden_size

    @property
    def max_positions(self) -> int | None:  # type: ignore[override]
        """Positions that the head was trained for; None: any.

        A head whose layers all have a window sees no distances between positions but
        those of the window, wherever in a text.
        """
        reach, most = self.head.reach, self.head.layer.max_position_embeddings
        return None if reach is not None and reach <= most else most


class ReaderMemory(pytree.Node):
    """A drafter's K/V `[0, m)` of each slot, and the features from `m` on."""

    kv: paged.PagedKV
    ring: feature_ring.FeatureRing


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotReader(slots_lib.OfSlots):
    """A drafter of features for `num_slots` sequences: all but what it proposes.

    Its drafter's `head` is a `model.head_params.HeadConfig`. A subclass has `_forward`
    and `_draft`, and `_empty` if `_forward` has outputs.

    Attributes:
      reads_tokens: whether features go with the tokens after their positions: the last
        feature of a prompt then waits for the first proposal, which takes it in.
    """

    reads_tokens: ClassVar[bool] = True
    reads_processing: ClassVar[bool] = True

    @property
    def _rows_most(self) -> int:
        """Features that a round brings, at most."""
        return 1 + protocols.depth_max(self)

    @property
    def _kept(self) -> int | None:
        """Positions of a slot's K/V that are needed at a time; None: all.

        Rows see `reach` of them; the others are what a forward writes before its
        first row sees any, what is drafted, and what a caller takes back.
        """
        drafter, reach = self.drafter, self.drafter.head.reach
        if reach is None:
            return None
        tile = max(rows_lib.NATIVE_TILE, drafter.model.slab, drafter.catch_up_rows)
        return (
            reach + RING_ROWS + tile + max(drafter.gamma_max, protocols.MAX_TREE_ROWS)
        )

    @property
    def shares_prompts(self) -> bool:
        """Whether the cache has pages that slots can share: a ring has not."""
        return self.drafter.model.cache == "paged" and self._kept is None

    def init(self, **sizes: Any) -> ReaderMemory:
        """Allocates an empty cache, as `SlotRows.new_cache`, and empty rings."""
        head = self.drafter.head
        ring = feature_ring.empty(
            self.num_slots,
            size=RING_ROWS + self._rows_most,
            width=head.features_size,
            dtype=head.layer.dtype,
        )
        kv = slots_lib.new_cache(self._rows, kept=self._kept, **sizes)
        return ReaderMemory(kv=kv, ring=ring)

    def commit(self, params, memory, length, *, asked, features=None):
        """Keeps the features of what was committed, or forgets what was not."""
        del params
        ring = memory.ring
        if features is not None:
            flat = features.reshape(*features.shape[:2], -1)
            ring = ring.append(flat, length - 1, asked=asked)
        ring = ring.truncate(length - 1, asked=asked)
        return self._without_drafts(memory.replace(ring=ring), asked)

    def _without_drafts(self, memory: ReaderMemory, asked: jax.Array) -> ReaderMemory:
        """Forgets the rows after those of features, in the slots that are asked."""
        kv = self._rows.truncate(memory.kv, memory.ring.first, asked=asked)
        return memory.replace(kv=kv)

    def _forward(self, params: Any, kv: paged.PagedKV, rows: Any, features: Any) -> Any:
        """Runs features, and the tokens after their positions; see `windows.run`."""
        raise NotImplementedError

    def _empty(self, height: int) -> Any:
        """Returns the outputs of `_forward` for `height` rows that were not run."""
        del height
        return ()

    def _no_rows(self, *sizes: int) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states and logits of rows `[*sizes]` that were not run."""
        head = self.drafter.head
        return (
            jnp.zeros((*sizes, head.hidden_size), head.layer.dtype),
            jnp.zeros((*sizes, head.draft_vocab_size), jnp.float32),
        )

    def _run(self, params, kv, window, features):
        """Runs a window with features `[B, R, width]`, as `slots.Run` does."""
        model = self.drafter.model
        _, at, kv, outputs = windows.run(
            functools.partial(self._forward, params),
            kv,
            window,
            tile=rows_lib.tile_of(model.impl, model.slab, window.tokens.size),
            empty=self._empty,
            impl=model.cache_impl,
            inputs=features,
        )
        return kv, at, outputs

    def _take_in(self, params, memory, tokens, read, *, goal, num_rows):
        """Takes in features up to `goal`, as far as there is room; see `slots.take_in`.

        Args:
          read: returns features `[B, num_rows, width]` from a position `[B]` on.
        """
        kv, outputs = slots_lib.take_in(
            lambda kv, window: self._run(params, kv, window, read(window.start)),
            memory.kv,
            tokens if self.reads_tokens else None,
            self._empty(self.num_slots),
            goal=goal,
            num_rows=num_rows,
            ahead=1,
        )
        ring = memory.ring.replace(first=kv.length)
        return memory.replace(kv=kv, ring=ring), outputs

    def _take_in_ring(self, params, memory, tokens, *, goal):
        """Takes in the ring's features up to `goal`, a round's at a time."""
        size = self._rows_most
        read_ring = functools.partial(memory.ring.read, count=size)
        return self._take_in(
            params, memory, tokens, read_ring, goal=goal, num_rows=size
        )

    def prefill(self, params, memory, prompt, *, slot, features, begun=None):
        """Takes in the features of the prompt, except for the waiting ones."""
        if begun is not None:
            # The last shared feature goes with the token after it, which may differ.
            length = begun.length - self.reads_tokens
            how = {"slot": slot, "length": length}
            kv = slots_lib.begin(self._rows, memory.kv, begun, **how)
            memory = memory.replace(kv=kv)
        tokens = np.zeros((features.shape[0] + 1,), np.int32)
        tokens[: len(prompt)] = prompt
        end, slot_ = np.int32(len(prompt) - 1), np.int32(slot)
        return self._prefill(params, memory, tokens, features, end, slot_)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def _prefill(self, params, memory, tokens, features, end, slot):
        """Takes the features `[0, end)` of a prompt into a slot, the last ones into its
        ring."""
        num_rows = max(self.drafter.catch_up_rows, self._rows_most)
        flat = features.reshape(features.shape[0], -1)
        padded = jnp.pad(flat, ((0, num_rows), (0, 0)))

        def read(start):
            """Broadcasts the slot's features; other slots ignore them."""
            rows = jax.lax.dynamic_slice_in_dim(padded, start[slot], num_rows)
            return jnp.broadcast_to(rows, (self.num_slots, *rows.shape))

        is_slot = jnp.arange(self.num_slots, dtype=jnp.int32) == slot
        first = jnp.maximum(end - int(self.reads_tokens), 0)
        memory, _ = self._take_in(
            params,
            memory,
            jnp.broadcast_to(tokens, (self.num_slots, *tokens.shape)),
            read,
            goal=jnp.where(is_slot, first, memory.ring.first),
            num_rows=num_rows,
        )
        ring = memory.ring
        if self.reads_tokens:
            last = features[first].reshape(-1).astype(ring.features.dtype)
            kept = ring.features.at[slot, first % ring.size].set(last)
            ring = ring.replace(features=kept)
        return memory.replace(ring=ring.replace(end=ring.end.at[slot].set(end)))

    def propose(
        self, params, memory, *, tokens, length, gamma, sampling, processing=None
    ):
        """Drafts `gamma[b]` tokens; fewer, or none, where the cache has no room."""
        kv, ring = memory.kv, memory.ring
        kv = kv.replace(out_of_pages=jnp.zeros((self.num_slots,), bool))
        # A ring that overflowed, because no page was free, has lost rows: no drafts.
        waiting = ring.end - ring.first
        is_whole = waiting <= ring.size
        asked = is_whole & (gamma > 0) & (ring.end == length - 1)
        if self.reads_tokens:  # The last pair drafts: there must be one.
            asked &= ring.end > ring.first
        return self._draft(
            params,
            memory.replace(kv=kv),
            tokens,
            draw_lib.Draw.of(
                self.drafter, sampling, length, processing, hot=params.hot
            ),
            gamma=gamma,
            asked=asked,
            is_full=is_whole & (waiting + self._rows_most > ring.size),
        )

    def _draft(
        self,
        params: Any,
        memory: ReaderMemory,
        tokens: Int[Array, "B max_len"],
        draw: draw_lib.Draw,
        *,
        gamma: Int[Array, " B"],
        asked: Bool[Array, " B"],
        is_full: Bool[Array, " B"],
    ) -> tuple[ReaderMemory, protocols.Proposal]:
        """Implements `propose` for a memory without flags of earlier rounds.

        Args:
          asked: slots that draft in this round.
          is_full: slots that must take in what waits, so that the next round's features
            find room.
        """
        raise NotImplementedError
