"""The rows of many slots in one forward: the target, or the draft model, of a batch.

    slot 0    (token, n-1) (token, n) ..      \\
    slot 1    nothing: finished, or empty      >   packed, live rows first, in tiles
    slot 2    (token, m-1)                    /

By the row contract a row's bits depend on neither its neighbours nor its place, so that
each slot gets the tokens and the K/V that it would get alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import rules, sampling
from spec_jax.model import (
    config as config_lib,
    params as params_lib,
    prompt as prompt_lib,
    qwen3,
    row_model,
)
from spec_jax.paging import allocator, cache as paged, index


# With kernels whose bits do not depend on the height: so many rows share one read of
# the weights, and still lie in the second cache.
NATIVE_TILE = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowBatch:
    """A `RowModel` for `num_slots` sequences, which share one cache.

    Rows go through the model in tiles of `model.slab` rows, or of up to `NATIVE_TILE`
    where their bits do not depend on that; as many tiles as live rows need.

    Raises:
      ValueError: fewer than one slot.
    """

    model: row_model.RowModel
    num_slots: int

    def __post_init__(self):
        if self.num_slots < 1:
            raise ValueError(f"num_slots={self.num_slots} must be at least 1")

    @property
    def config(self) -> config_lib.Qwen3Config:
        """That of the model."""
        return self.model.config

    def new_cache(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> paged.PagedKV:
        """An empty cache, every slot open.

        Args:
          capacity: positions of each slot, or a little more.
          num_pages: of all slots together; None is enough for all of them in full. A
            static cache has no other choice.

        Raises:
          ValueError: a size below one, or fewer pages than slots.
        """
        if self.model.cache == "static" and num_pages is not None:
            raise ValueError(
                "a static cache has its pages by slot: leave num_pages out, or use "
                "cache='paged'"
            )
        return self.model.new_slots(
            self.num_slots,
            capacity=capacity,
            page_size=page_size,
            num_pages=num_pages,
        )

    def prefill(
        self,
        params: params_lib.Params,
        kv: paged.PagedKV,
        prompt: list[int],
        *,
        slot: int,
        by_rows: bool | None = None,
    ) -> paged.PagedKV:
        """The K/V of all of the prompt but its last token. Donates `kv`."""
        return prompt_lib.prefill(
            self.model, params, kv, prompt[:-1], by_rows=by_rows, slot=slot
        )

    def next_tokens(
        self,
        params: params_lib.Params,
        kv: paged.PagedKV,
        *,
        tokens: Int[Array, "B W"],
        starts: Int[Array, " B"],
        num_live: Int[Array, " B"],
        settings: sampling.SamplingSettings | None,
        chooses: bool = True,
    ) -> tuple[paged.PagedKV, Int[Array, "B W"], Bool[Array, "B W"]]:
        """Runs each slot's first `num_live` tokens, at positions from its `starts`.

        A slot without live rows is not touched. Where a slot finds no page nothing of
        it is run, and `is_starved` says so; the others go on.

        Args:
          settings: with leaves `[B]`, each slot's own; None is greedy, for all.
          chooses: False runs the rows for their K/V alone: no logits are computed, and
            the tokens mean nothing.

        Returns:
          The cache, whose slots have grown by their live rows; the model's own token
          after each live row, drawn or of highest logit; and whether the row's logits
          are finite, see `rules.finite_rows`.
        """
        asked = num_live > 0
        follows = (starts == kv.length) | ~asked
        kv = kv.replace(refused=kv.refused | ~follows)
        kv = allocator.reserve_each(kv, starts + num_live, asked=asked)
        num_live = jnp.where(self.is_starved(kv), 0, num_live)
        tile = self._tile(tokens.size)
        rows, at = _pack(
            tokens, starts, num_live, height=-(-tokens.size // tile) * tile
        )

        def step(number, carry):
            """Runs one tile, and chooses the tokens that follow its rows."""
            kv, own, is_finite = carry
            part = _tile_of(rows, number * tile, tile)
            kv, outputs = qwen3.forward_rows(
                params, self.config, part, kv, impl=self.model.impl
            )
            if not chooses:
                return kv, own, is_finite
            chosen, are_finite = self._choose(outputs.logits, part, settings)
            first = (number * tile,)
            own = jax.lax.dynamic_update_slice(own, chosen, first)
            return kv, own, jax.lax.dynamic_update_slice(is_finite, are_finite, first)

        num_tiles = -(-rows.num_live // tile)
        nothing = jnp.zeros_like(rows.tokens), jnp.ones(rows.tokens.shape, bool)
        kv, own, is_finite = jax.lax.fori_loop(0, num_tiles, step, (kv, *nothing))
        kv = allocator.extend_each(kv, starts + num_live, asked=num_live > 0)
        own = own.at[at].get(mode="fill", fill_value=0)
        return kv, own, is_finite.at[at].get(mode="fill", fill_value=True)

    def _tile(self, num_rows: int) -> int:
        if self.model.impl == "native":
            return min(num_rows, NATIVE_TILE)
        return self.model.slab

    def _choose(self, logits, rows, settings) -> tuple[jax.Array, jax.Array]:
        """The token after each live row, by the settings of its slot.

        And whether the row's logits are finite.
        """
        greedy = self.model.choose(logits, rows.num_live)
        is_finite = rules.finite_rows(logits, greedy)
        if settings is None:
            return greedy, is_finite
        each = jax.tree.map(lambda leaf: leaf[rows.slots], settings)
        is_live = jnp.arange(logits.shape[0], dtype=jnp.int32) < rows.num_live
        draws = is_live & (each.temperature != 0)
        drawn = sampling.sample_each(
            logits, each, positions=rows.positions + 1, draws=draws
        )
        return jnp.where(draws, drawn, greedy), is_finite

    def truncate(
        self, kv: paged.PagedKV, new_len: Int[Array, " B"], *, asked: Bool[Array, " B"]
    ) -> paged.PagedKV:
        """Forgets the positions from `new_len` on, of the slots that are asked."""
        return allocator.truncate_each(kv, new_len, asked=asked)

    def is_starved(self, kv: paged.PagedKV) -> Bool[Array, " B"]:
        """Of each slot: whether its last reservation found no page."""
        return kv.out_of_pages

    def pages_needed(self, num_positions: int, page_size: int) -> int:
        """Pages that a sequence of so many positions takes: a slot keeps its first."""
        return max(1, index.pages_for(num_positions, page_size))


def _pack(
    tokens: Int[Array, "B W"],
    starts: Int[Array, " B"],
    num_live: Int[Array, " B"],
    *,
    height: int,
) -> tuple[qwen3.Rows, Int[Array, "B W"]]:
    """All live rows, one slot after the other, and where each of them went.

    A dead one goes to `height`, past the end.
    """
    B, W = tokens.shape
    ends = jnp.cumsum(num_live, dtype=jnp.int32)
    offsets = jnp.arange(W, dtype=jnp.int32)[None, :]
    at = (ends - num_live)[:, None] + offsets
    at = jnp.where(offsets < num_live[:, None], at, height)

    def pack(values):
        values = jnp.broadcast_to(values, (B, W))
        return jnp.zeros((height,), jnp.int32).at[at].set(values, mode="drop")

    rows = qwen3.Rows(
        tokens=pack(tokens),
        slots=pack(jnp.arange(B, dtype=jnp.int32)[:, None]),
        positions=pack(starts[:, None] + offsets),
        num_live=ends[-1],
    )
    return rows, at


def _tile_of(rows: qwen3.Rows, start: jax.Array, height: int) -> qwen3.Rows:
    def cut(values):
        return jax.lax.dynamic_slice_in_dim(values, start, height)

    return qwen3.Rows(
        tokens=cut(rows.tokens),
        slots=cut(rows.slots),
        positions=cut(rows.positions),
        num_live=jnp.clip(rows.num_live - start, 0, height),
    )
