"""P-EAGLE: an EAGLE-3 head drafts all tokens in one pass
(https://arxiv.org/abs/2602.01469, `model.eagle3`).

Pairs are those of `eagle3`. For a slot with committed tokens `x[0, n)`:

    propose   runs the pairs of the ring, up to n - 2, and masks after them, in one
              forward; what the masks stored is forgotten. The last pair's row and the
              masks' are slots of a block, from which tokens are drawn, or a tree, as by
              `block` where it has no sequential head
    commit    puts the features of what was committed into the ring

A row sees itself and the rows before it alone, so fewer masks change no draft.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spec_jax.drafters import block, features as features_lib, slots as slots_lib
from spec_jax.engine import protocols
from spec_jax.model import block_params, eagle3


class PairReader(features_lib.SlotReader):
    """An EAGLE-3 head, parallel or not, for `num_slots` sequences: runs pairs."""

    reads_tokens = True

    def _forward(self, params, kv, rows, features):
        """Runs pairs and masks; the outputs are hidden states and logits."""
        head, impl = self.drafter.head, self.drafter.model.impl
        kv, *outputs = eagle3.forward_rows(params, head, rows, features, kv, impl=impl)
        return kv, tuple(outputs)

    def _empty(self, height: int) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states and logits of rows that were not run."""
        return self._no_rows(height)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotParallel(PairReader, block.SlotBlock):
    """A parallel head for `num_slots` sequences, whose round is one forward for all."""

    @functools.cached_property
    def _head(self) -> block_params.BlockConfig:
        """The block whose slots are the rows of the last pair and of the masks."""
        head = self.drafter.head
        return block_params.BlockConfig(
            layer=head.layer,
            draft_vocab_size=head.draft_vocab_size,
            taps=head.taps,
            block_size=protocols.depth_max(self),
            slots="anchor-first",
            mask_token_id=head.mask_token_id,
        )

    def _draft(self, params, memory, tokens, draw, *, gamma, asked, is_full):
        """Drafts from one forward, or nothing where there is no room for masks."""
        ring, size = memory.ring, self._rows_most
        # The last pending row drafts; more than a round's rows go before.
        is_long = is_full | (ring.end - ring.first > size)
        first = jnp.where(is_long, jnp.maximum(ring.end - 1, ring.first), ring.first)
        goal = jnp.where(asked | is_full, first, ring.first)
        memory, _ = self._take_in_ring(params, memory, tokens, goal=goal)
        asked &= memory.ring.first == first
        anchor = jnp.take_along_axis(tokens, draw.length[:, None] - 1, axis=1)[:, 0]
        ring, slots = memory.ring, block_params.bare(params.hot)
        kv, proposal = self._one_turn(
            lambda kv: self._run_round(params, kv, ring, tokens, asked),
            functools.partial(self._draw, slots, anchor, draw),
            memory.kv,
            ring.end,
            asked=asked,
            gamma=gamma,
        )
        return memory.replace(kv=kv, ring=ring.replace(first=kv.length)), proposal

    def _run_round(self, params, kv, ring, tokens, asked):
        """Runs what waits in the rings of the slots that are asked, and masks.

        Returns:
          The cache with the rows that were run; and hidden states `[B, W, D]` and
          logits `[B, W, Vd]` of the rows that draft.
        """
        head, size, count = self.drafter.head, self._rows_most, self._head.block_size
        waiting = ring.end - ring.first
        columns = jnp.arange(size + count - 1, dtype=jnp.int32)[None]
        is_pair = columns < waiting[:, None]
        widen = lambda x: jnp.pad(x, [(0, 0), (0, count - 1)] + [(0, 0)] * (x.ndim - 2))
        pairs = widen(slots_lib.windows(tokens, ring.first + 1, size))
        window = protocols.Window(
            tokens=jnp.where(is_pair, pairs, head.mask_token_id),
            start=ring.first,
            num_active=jnp.where(asked, waiting + count - 1, 0),
        )
        known = widen(ring.read(ring.first, count=size))
        features = jnp.where(is_pair[..., None], known, params.mask_hidden)
        kv, at, outputs = self._run(params, kv, window, features)
        drafting = jnp.maximum(waiting - 1, 0)[:, None] + columns[:, :count]
        at = jnp.take_along_axis(at, drafting, axis=1)
        by_slot = lambda rows: rows.at[at].get(mode="fill", fill_value=0)
        return kv, *map(by_slot, outputs)
