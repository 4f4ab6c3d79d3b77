"""Rows of many slots in one forward: the engine's target, and its draft models.

    slot 0    (token, n-1) (token, n) ..      \\
    slot 1    nothing: finished, or empty      >   packed, active rows first, in tiles
    slot 2    (token, m-1)                    /

By the row contract a row's bits depend on neither its neighbours nor its place, so that
each slot gets the logits and the K/V that it would get alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax import compilation
from spec_jax.engine import protocols, target as target_lib, windows
from spec_jax.model import (
    config as config_lib,
    decoder,
    params as params_lib,
    row_model,
)
from spec_jax.ops import dispatch, draw as draw_op, page_move
from spec_jax.paging import allocator, cache as paged, index
from spec_jax.rules import sampling
from spec_jax.typing import check_whole


# Rows of a tile with native kernels, whose bits do not depend on the height: so many
# share one read of the weights, and still lie in the second-level cache.
NATIVE_TILE = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotRows(target_lib.Target):
    """Runs a `RowModel` for `num_slots` sequences, which share one cache.

    Rows go through the model in tiles of `model.slab` rows, or of up to `NATIVE_TILE`
    or `dispatch.most_rows` where their bits do not depend on that; as many tiles as
    active rows need. Where one tile takes all rows there is no loop.

    Raises:
      ValueError: fewer than one slot.
    """

    model: row_model.RowModel
    num_slots: int

    # Whether the model has `run_chains`; whether a prompt is prefilled by rows where
    # `by_rows` is None.
    runs_chains = target_lib.passed_on("runs_chains", of="model")
    prefills_by_rows = target_lib.passed_on("prefills_by_rows", of="model")
    choose = target_lib.passed_on("choose", of="model")

    def __post_init__(self) -> None:
        check_whole(num_slots=self.num_slots)

    @property
    def config(self) -> config_lib.ModelConfig:
        """The model's config."""
        return self.model.config

    @property
    def max_rows(self) -> int:
        """The most columns of a window of a chain."""
        return dispatch.most_rows(self.model.impl) or self.model.slab

    def new_cache(self, **sizes: Any) -> paged.PagedKV:
        """Allocates an empty cache; takes and raises as `RowModel.new_cache`, and
        raises `ValueError` for pages of more positions than the model has."""
        positions = self.config.max_position_embeddings
        index.check_page_size(sizes["page_size"], num_positions=positions)
        return self.model.new_cache(self.num_slots, **sizes)

    def share(
        self, kv: paged.PagedKV, source: int, slot: int, length: int
    ) -> paged.PagedKV:
        """Begins an empty slot with `length` positions of another, whose full pages
        both then hold; see `allocator.share`. Donates `kv`."""
        return _share(kv, *map(np.int32, (source, slot, length)))

    def prefill(
        self,
        params: params_lib.Params,
        kv: paged.PagedKV,
        prompt: list[int],
        **how: Any,
    ) -> paged.PagedKV:
        """Writes the K/V of all of the prompt but its last token. Donates `kv`.

        Args:
          **how: as `RowModel.prefill` takes it: slot, by_rows, begun.
        """
        return self.model.prefill(params, kv, prompt[:-1], **how)[0]

    def prefill_features(
        self,
        params: params_lib.Params,
        kv: paged.PagedKV,
        prompt: list[int],
        *,
        taps: tuple[int, ...],
        **how: Any,
    ) -> tuple[paged.PagedKV, Float[Array, "T taps D"] | None]:
        """Does as `prefill`, and returns features, too; see `RowModel.prefill`."""
        return self.model.prefill(params, kv, prompt[:-1], taps=taps, **how)

    def verify(
        self,
        params: params_lib.Params,
        kv: paged.PagedKV,
        window: protocols.Window,
        *,
        taps: tuple[int, ...] = (),
    ) -> tuple[paged.PagedKV, protocols.Verified]:
        """Runs each slot's active columns; see `target.Target`."""
        rows, at, kv, (logits, features) = self._run(params, kv, window, taps=taps)
        return kv, protocols.Verified(
            logits=logits,
            slots=rows.slots,
            positions=rows.positions,
            num_active=rows.num_active,
            at=at,
            features=features,
        )

    def advance(
        self, params: params_lib.Params, kv: paged.PagedKV, window: protocols.Window
    ) -> paged.PagedKV:
        """Runs each slot's active columns for their K/V; computes no logits."""
        return self._run(params, kv, window, with_logits=False)[2]

    def run_chains(
        self,
        params: params_lib.Params,
        kv: paged.PagedKV,
        *,
        tokens: Int[Array, "B W"],
        pending: Int[Array, " B"],
        counts: Int[Array, " B"],
        most: int,
    ) -> tuple[paged.PagedKV, Int[Array, "B most"], Int[Array, " B"]]:
        """Continues each slot's text greedily, all in one call; only if `runs_chains`.

        Args:
          tokens: the tokens after those whose K/V is stored.
          pending: how many they are; a slot with none, or with more than `W`, sits
            out.
          counts: tokens to draft, `most` at most.

        Returns:
          The cache, in which all but the last draft of a slot have K/V; drafts; and how
          many each slot has, fewer than `counts` where it finds too few pages.
        """
        starts, length = kv.length, kv.length + pending
        kv, counts = _reserve_chains(kv, tokens.shape[1], pending, counts)
        kv, drafts = decoder.run_chains(
            params,
            self.config,
            kv,
            tokens=tokens,
            starts=starts,
            pending=pending,
            counts=counts,
            most=most,
        )
        kv = allocator.extend_each(kv, length + counts - 1, asked=counts > 0)
        return kv, drafts, counts

    def _run(self, params, kv, window, *, taps=(), with_logits=True):
        """Runs the columns as `windows.run` does, whose outputs are logits and
        features, each None where it is not asked for."""

        def forward(kv, rows, inputs):
            del inputs
            kv, outputs = self.model.forward_rows(
                params, rows, kv, taps=taps, with_logits=with_logits
            )
            logits = outputs.logits if with_logits else None
            return kv, (logits, outputs.features if taps else None)

        def empty(height):
            logits = features = None
            if with_logits:
                logits = jnp.zeros((height, self.config.vocab_size), jnp.float32)
            if taps:
                shape = height, len(taps), self.config.hidden_size
                features = jnp.zeros(shape, self.config.dtype)
            return logits, features

        tile = self.tile_rows(window.tokens.size)
        return windows.run(
            forward, kv, window, tile=tile, empty=empty, impl=self.model.cache_impl
        )

    def tile_rows(self, num_rows: int) -> int:
        """Returns the rows of each forward of so many, active or not."""
        impl = self.model.impl
        if most := dispatch.most_rows(impl):
            return min(dispatch.whole_slabs(impl, num_rows), most)
        return tile_of(impl, self.model.slab, num_rows)

    @property
    def draw(self) -> Callable[..., Int[Array, " P"]]:
        """The model's own kernels for draws, or XLA's."""
        if not draw_op.can_draw(self.model.impl):
            return sampling.sample_each
        return functools.partial(draw_op.draw, impl=self.model.impl)

    @property
    def sums(self) -> target_lib.Sums:
        """The model's own kernels for distributions, or XLA's."""
        impl = self.model.impl
        if not draw_op.has_kernels(impl):
            return target_lib.Sums()
        kernels = draw_op.distribution, draw_op.row_sums
        return target_lib.Sums(*(functools.partial(f, impl=impl) for f in kernels))

    def keep_path(
        self,
        kv: paged.PagedKV,
        path: Int[Array, "B D"],
        num_kept: Int[Array, " B"],
        *,
        start: Int[Array, " B"],
    ) -> paged.PagedKV:
        """Moves the K/V of accepted columns; see `target.Target`."""
        num_slots, depth_max = path.shape
        steps = jnp.broadcast_to(jnp.arange(depth_max, dtype=jnp.int32), path.shape)
        slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
        pools = page_move.page_move(
            (*kv.k, *kv.v),
            page_table=kv.page_table,
            slots=jnp.broadcast_to(slots, path.shape).reshape(-1),
            sources=(start[:, None] + path).reshape(-1),
            targets=(start[:, None] + steps + 1).reshape(-1),
            moves=(steps < num_kept[:, None]).reshape(-1),
            impl=self.model.cache_impl,
        )
        return kv.replace(k=pools[: len(kv.k)], v=pools[len(kv.k) :])

    def truncate(
        self, kv: paged.PagedKV, new_len: Int[Array, " B"], *, asked: Bool[Array, " B"]
    ) -> paged.PagedKV:
        """Forgets the positions from `new_len` on, of the slots that are asked."""
        return allocator.truncate_each(
            kv, new_len, asked=asked, impl=self.model.cache_impl
        )

    def out_of_pages(self, kv: paged.PagedKV) -> Bool[Array, " B"]:
        """Returns for each slot whether its last reservation found no page."""
        return kv.out_of_pages


def of(target: Any, num_slots: int) -> Any:
    """Returns a target of so many slots.

    Args:
      target: a `RowModel`; a `target.Target` of that many slots; or one that is a
        dataclass with the field `num_slots`, which is changed.

    Raises:
      ValueError: a target that has another number of slots, and no such field.
    """
    if isinstance(target, row_model.RowModel):
        return SlotRows(model=target, num_slots=num_slots)
    if target.num_slots == num_slots:
        return target
    fields = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    if "num_slots" not in {field.name for field in fields}:
        raise ValueError(
            f"{type(target).__name__} has {target.num_slots} slots, and {num_slots} "
            "are asked for: make it with as many"
        )
    return dataclasses.replace(target, num_slots=num_slots)


def tile_of(impl: str, slab: int, num_rows: int) -> int:
    """Returns the rows of a tile of a model of such slabs, for `num_rows` rows."""
    return min(num_rows, NATIVE_TILE) if impl == "native" else slab


@functools.partial(compilation.jit, donate_argnames=("kv",))
def _share(kv, source, slot, length):
    return allocator.share(kv, source, slot, length)


def _reserve_chains(
    kv: paged.PagedKV,
    most_pending: int,
    pending: Int[Array, " B"],
    counts: Int[Array, " B"],
) -> tuple[paged.PagedKV, Int[Array, " B"]]:
    """Reserves the pages of chains; returns how many drafts each can have."""
    wanted = (counts > 0) & (pending > 0) & (pending <= most_pending)
    length = kv.length + pending
    kv = allocator.reserve_each(kv, length + counts - 1, asked=wanted)
    # A slot that finds too few pages drafts as far as its own pages reach.
    room = kv.num_owned * kv.page_size + 1 - length
    return kv, jnp.where(wanted, jnp.clip(counts, 0, room), 0)
