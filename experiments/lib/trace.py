"""Replay: the rounds of a text that decoding wrote, without the target.

Where a draft stays if it is the target's own token, greedy or drawn with keyed noise
(rule "coupled"), rounds commit the text of autoregressive decoding, whatever drafts. So
that text alone decides which drafts stay. `TraceTarget` reads its tokens from such a
text, a trace: `round.generate` on it is the very loop that runs live, and its counters
are those of a live run, for any drafter, gamma, policy of gamma and stop tokens,
without one weight of the target.

A trace goes on after stop tokens: it is written with them ignored. A live round decides
on its drafts before a stop token cuts, and counts drafts that the target would have
chosen after it.

The rules that draw uniforms commit texts of their own, which no trace foretells.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from spec_jax import pytree
from spec_jax.engine import protocols, target as target_lib
from spec_jax.rules import acceptance


MAX_VOCAB_SIZE = 2**24
"""Below it float32, which is what "logits" are, holds every whole number."""


class Trace(pytree.Node):
    """A text that decoding wrote: one slot's share of `TraceCache`."""

    tokens: jax.Array  # [size] int32, prompt and output, then PAD
    length: jax.Array  # [] int32, how many of them are the text


class TraceCache(pytree.Node):
    """Decisions and counts in the place of K/V caches, and the slots' traces."""

    tokens: jax.Array  # [B, size] int32
    length: jax.Array  # [B] int32
    capacity: jax.Array  # [] int32, positions that a slot holds
    out_of_pages: jax.Array  # [B] bool, the last window found no room, or no text
    num_forwards: jax.Array  # [max_rows + 1] int32, windows by their active rows


def make_trace(text: list[int], *, size: int | None = None) -> Trace:
    """Returns the trace of a text: traces of one size share their executables.

    Args:
      text: prompt and output.
      size: of the array; that of the text if None.

    Raises:
      ValueError: a token that float32 does not hold.
    """
    size = len(text) if size is None else size
    if max(text) >= MAX_VOCAB_SIZE:
        raise ValueError(f"the text has token {max(text)}, not below {MAX_VOCAB_SIZE}")
    tokens = np.full((size,), acceptance.PAD, np.int32)
    tokens[: len(text)] = text
    return Trace(tokens=jnp.asarray(tokens), length=jnp.int32(len(text)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceTarget(target_lib.Target):
    """A `target.Target` that reads its own tokens from a `Trace` a slot.

    Its parameters are the trace that the next `prefill` puts into a slot. It draws
    nothing: the tokens of a trace that was sampled are drawn already. A request's
    settings of sampling are the drafter's alone, which draws as it does live.

    Attributes:
      max_rows: of the widest window.
      size: of the traces.
    """

    max_rows: int
    size: int
    num_slots: int = 1

    taps: ClassVar[tuple[int, ...]] = ()

    def new_cache(
        self, *, capacity: int, page_size: int = 1, num_pages: int | None = None
    ) -> TraceCache:
        """Allocates the cache of `capacity` positions a slot, in whole pages."""
        del num_pages
        capacity = -(-capacity // page_size) * page_size
        return TraceCache(
            tokens=jnp.zeros((self.num_slots, self.size), jnp.int32),
            length=jnp.zeros((self.num_slots,), jnp.int32),
            capacity=jnp.int32(capacity),
            out_of_pages=jnp.zeros((self.num_slots,), bool),
            num_forwards=jnp.zeros((self.max_rows + 1,), jnp.int32),
        )

    def prefill(
        self,
        params: Trace,
        cache: TraceCache,
        prompt: list[int],
        *,
        slot: int,
        by_rows: bool | None = None,
    ) -> TraceCache:
        """Puts the trace of a request into its slot.

        Raises:
          ValueError: no trace, one of another size, or of another prompt.
        """
        del by_rows
        if not isinstance(params, Trace) or params.tokens.shape != (self.size,):
            raise ValueError(
                f"a trace target of size={self.size} takes such a trace as the "
                "parameters of each request: give it as `target_params`"
            )
        if np.asarray(params.tokens)[: len(prompt)].tolist() != list(prompt):
            raise ValueError(
                "the trace does not begin with the prompt: it is another's"
            )
        return cache.replace(
            tokens=cache.tokens.at[slot].set(params.tokens),
            length=cache.length.at[slot].set(params.length),
        )

    def verify(
        self,
        params: protocols.Params,
        cache: TraceCache,
        window: protocols.Window,
        *,
        taps: tuple[int, ...] = (),
    ) -> tuple[TraceCache, protocols.Verified]:
        """Returns the trace's token after each position, as the only entry of "logits".

        It is the same whatever the window holds. As long as that is the trace, a row
        says what the target chooses. A row after a draft that differs says what the
        target chooses after the text, and not after that draft: no rule reads it,
        for the first draft that differs is the last that is decided on.

        Where a slot has no room for its active rows, or its trace no token for one of
        them, `out_of_pages` is true afterwards, and its rows mean nothing.
        """
        del params, taps  # `checks.check_pair`: it has no features.
        num_slots, width = window.tokens.shape
        asked = window.num_active > 0
        # The row of the last active position gives the token of the next.
        end = window.start + window.num_active
        # Nodes of a tree may go past the text, where none is kept.
        needed = end if window.parents is None else window.start + 1
        failed = asked & ((end > cache.capacity) | (needed >= cache.length))
        columns = jnp.arange(width, dtype=jnp.int32)[None]
        positions = protocols.positions(window)
        slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
        own = cache.tokens.at[slots, positions + 1].get(
            mode="fill", fill_value=acceptance.PAD
        )
        num_active = jnp.where(failed, 0, window.num_active)
        total = jnp.sum(num_active, dtype=jnp.int32)
        # A batch's windows may have more rows together: the last entry counts those.
        forwards = cache.num_forwards.at[jnp.minimum(total, self.max_rows)].add(
            jnp.any(asked & ~failed).astype(jnp.int32)
        )
        at = slots * width + columns
        return cache.replace(
            out_of_pages=failed, num_forwards=forwards
        ), protocols.Verified(
            logits=own.reshape(-1, 1).astype(jnp.float32),
            slots=jnp.broadcast_to(slots, own.shape).reshape(-1),
            positions=positions.reshape(-1),
            num_active=jnp.int32(num_slots * width),
            at=jnp.where(columns < num_active[:, None], at, num_slots * width),
        )

    def choose(
        self, logits: Float32[Array, "P 1"], num_active: Int[Array, ""]
    ) -> Int[Array, " P"]:
        """Returns the token of each row, int32."""
        del num_active
        return logits[:, 0].astype(jnp.int32)

    def draw(
        self,
        logits: Float32[Array, "P 1"],
        settings: protocols.Sampling,
        *,
        positions: Int[Array, " P"],
        draws: Bool[Array, " P"],
    ) -> Int[Array, " P"]:
        """Returns the token of each row, which is drawn already."""
        del settings, positions, draws
        return self.choose(logits, jnp.int32(logits.shape[0]))

    def keep_path(
        self,
        cache: TraceCache,
        path: Int[Array, "B D"],
        num_kept: Int[Array, " B"],
        *,
        start: Int[Array, " B"],
    ) -> TraceCache:
        """Does nothing: no position is kept."""
        del path, num_kept, start
        return cache

    def truncate(
        self, cache: TraceCache, new_len: Int[Array, " B"], *, asked: Bool[Array, " B"]
    ) -> TraceCache:
        """Does nothing: positions are told to `verify`, and none is kept."""
        del new_len, asked
        return cache

    def out_of_pages(self, cache: TraceCache) -> Bool[Array, " B"]:
        """Returns where the last window found no room, or no text."""
        return cache.out_of_pages

    def pages_needed(self, num_positions: int, page_size: int) -> int:
        """Returns the pages that a cache of K/V would take."""
        return max(1, -(-num_positions // page_size))
