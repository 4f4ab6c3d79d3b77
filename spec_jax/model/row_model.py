"""One sequence of a model on pages: the `Target` that rounds and drafters use.

Static and hashable; parameters and cache are handed in. Holds what must not change
between plain and speculative decoding for their bits to be equal: config,
implementation and slab height.
"""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import compilation
from spec_jax.model import (
    config as config_lib,
    decoder,
    families,
    load_shards,
    params as params_lib,
    sequence,
)
from spec_jax.ops import argmax, dispatch, weights
from spec_jax.paging import allocator, cache as paged, index
from spec_jax.parallel import shard
from spec_jax.typing import check_impl, check_whole


CacheKind = Literal["paged", "static"]
"""Layouts of pages: a pool that all slots share, or a fixed range for each slot."""

CACHE_KINDS: tuple[str, ...] = get_args(CacheKind)

SLOT = 0
# Rows of a tile of a native prefill, whose bits depend on no slab: a multiple of the
# kernels' groups of rows, and enough of them for one read of the weights.
NATIVE_PREFILL_SLAB = 64


def slab_for(impl: str, rows: int) -> int:
    """Returns the height of slabs for windows of `rows`: `rows`, or fixed by `impl`.

    Raises:
      ValueError: no such implementation, or more rows than it runs at once.
    """
    impl = _resolved(impl)
    height, most = dispatch.slab_rows(impl), dispatch.most_rows(impl)
    if height is None or most is None:
        return rows
    if rows > most:
        raise ValueError(
            f"{rows} rows do not fit impl={impl!r}, which runs {most} at once: at most "
            f"gamma {most - 1}"
        )
    return height


def _resolved(impl: str) -> str:
    """Resolves "auto"; returns another implementation as it is, runnable or not."""
    check_impl(impl)
    return dispatch.resolve("auto") if impl == "auto" else impl


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowModel:
    """A model that runs slabs of `slab` rows of one sequence.

    Attributes:
      impl: an implementation, see `ops.dispatch`; "auto" is resolved at once, and the
        attribute then names what was chosen.
      slab: rows of every call, active or padding: at least the longest window, or the
        height that `impl` fixes. `slab_for` returns it.
      cache: what `new_cache` allocates. No bit of a row depends on it, and every
        method takes either.
      layout: how a model lies on a mesh; `load.load` must get the same one. None: on
        one device.

    Raises:
      ValueError: no such implementation, a slab that it does not take, an unknown kind
        of cache, or a mesh that does not divide the heads.
    """

    config: config_lib.ModelConfig
    impl: str
    slab: int
    cache: CacheKind = "paged"
    layout: shard.Layout | None = None

    def __post_init__(self):
        if self.cache not in CACHE_KINDS:
            raise ValueError(
                f"cache={self.cache!r} is not one of {', '.join(CACHE_KINDS)}"
            )
        is_named = self.impl != "auto"
        impl = families.runnable(self.config, _resolved(self.impl), is_named=is_named)
        object.__setattr__(self, "impl", impl)
        height = dispatch.slab_rows(self.impl)
        if height not in (None, self.slab):
            raise ValueError(
                f"slab={self.slab}, but impl={self.impl!r} has slabs of {height} rows"
            )
        if self.layout is not None:
            load_shards.check(self.config, self.layout)

    def new_cache(
        self,
        num_slots: int = 1,
        *,
        capacity: int,
        page_size: int,
        num_pages: int | None = None,
        shares: bool = False,
        kept: int | None = None,
    ) -> paged.PagedKV:
        """Makes an empty cache for one sequence or several.

        Args:
          capacity: positions of each slot, or a little more.
          num_pages: of all slots together, of a paged cache; None is enough for all of
            them in full.
          shares: whether slots may share pages; see `allocator.share`.
          kept: positions of each slot that are kept, its last ones, in a ring;
            None: all.

        Raises:
          ValueError: a size below one, fewer pages than slots, or a static cache with
            `num_pages` or `shares`.
        """
        check_whole(capacity=capacity)
        index.check_page_size(page_size, num_positions=None)
        pages_per_slot = index.pages_for(capacity, page_size)
        is_static = self.cache == "static"
        if is_static and (shares or num_pages is not None):
            raise ValueError(
                "a static cache has its pages by slot, and shares none: leave shares "
                "and num_pages out, or use cache='paged'"
            )
        if num_pages is None:
            num_pages = num_slots * pages_per_slot
        sizes: dict[str, Any] = {
            "num_layers": self.config.num_layers,
            "num_slots": num_slots,
            "page_size": page_size,
            "pages_per_slot": min(pages_per_slot, num_pages),
            "num_kv_heads": self.config.num_kv_heads,
            "head_dim": self.config.head_dim,
            "dtype": self.config.dtype,
        }
        if kept is not None:
            sizes["kept"] = index.pages_for(kept, page_size)
        elif not is_static:
            sizes |= {"num_pages": num_pages, "shares": shares}
        return _new_cache(self.layout, tuple(sizes.items()))

    def forward_rows(
        self,
        params: params_lib.Params,
        rows: decoder.Rows,
        kv: paged.PagedKV,
        **how: Any,
    ) -> tuple[paged.PagedKV, decoder.RowOutputs]:
        """Runs a slab of rows: `decoder.forward_rows`, on each device its part.

        Logits and features are the same on all of them.
        """

        def forward(params, rows, kv):
            return decoder.forward_rows(
                params, self.config, rows, kv, impl=self.impl, **how
            )

        if self.layout is None:
            return forward(params, rows, kv)
        is_split = lambda leaf: isinstance(leaf, weights.Split)

        def on_device(params, rows, kv):
            local = lambda leaf: leaf.local() if is_split(leaf) else leaf
            return forward(jax.tree.map(local, params, is_leaf=is_split), rows, kv)

        spec_of = lambda leaf: shard.CUT if is_split(leaf) else shard.REPLICATED
        specs = jax.tree.map(spec_of, params, is_leaf=is_split)
        kv_specs = _cache_specs(kv)
        return self.layout.run(
            on_device,
            in_specs=(specs, shard.REPLICATED, kv_specs),
            out_specs=(kv_specs, shard.REPLICATED),
        )(params, rows, kv)

    def prefill(
        self,
        params: params_lib.Params,
        kv: paged.PagedKV,
        tokens: list[int],
        *,
        taps: tuple[int, ...] = (),
        by_rows: bool | None = None,
        slot: int = SLOT,
        begun: int = 0,
        before: Float[Array, "T0 taps D"] | None = None,
    ) -> tuple[paged.PagedKV, Float[Array, "T taps D"] | None]:
        """Writes the K/V of all `tokens`, possibly none. Donates `kv`.

        Args:
          taps: of features that are returned too, see `sequence.forward`.
          by_rows: whether the prompt goes through `forward_rows`, so that its K/V is
            that of decoding; otherwise through the library's batched products. None is
            `prefills_by_rows`.
          begun: how many of the tokens the slot has already, of a prefill by rows.
          before: the features of these, or of more, if any are asked for.

        Returns:
          The cache, and with `taps` the features, undefined past the tokens: `T` is a
          `decoder.bucket`, for no tokens that of one.
        """
        padded = np.zeros((decoder.bucket(max(1, len(tokens))),), np.int32)
        if not tokens:
            shape = padded.size, len(taps), self.config.hidden_size
            return kv, jnp.zeros(shape, self.config.dtype) if taps else None
        padded[: len(tokens)] = tokens
        # Arrays of the host, since a call hands over all that it gets at once.
        return _prefill(
            self,
            params,
            kv,
            padded,
            np.int32(len(tokens)),
            np.int32(slot),
            np.int32(begun) if begun else None,
            before,
            by_rows=self.prefills_by_rows if by_rows is None else by_rows,
            taps=taps,
        )

    @property
    def prefills_by_rows(self) -> bool:
        """Whether rows are the faster prefill: they are with kernels of our own.

        A mesh has no other prefill, and XLA's products with blocks are slow.
        """
        of_bytes = self.config.is_bytes and self.impl in dispatch.PALLAS
        return self.impl == "native" or self.layout is not None or of_bytes

    @property
    def runs_chains(self) -> bool:
        """Whether its family continues texts greedily in one call: `run_chains`."""
        return self.layout is None and self.impl in families.of(self.config).fused

    def choose(
        self, logits: Float[Array, "slab V"], num_active: Int[Array, ""]
    ) -> Int[Array, " slab"]:
        """Returns the token of highest logit of each active row."""
        return argmax.argmax(logits, num_active=num_active, impl=self.impl)

    @property
    def cache_impl(self) -> str:
        """The implementation of what is done with a cache, and not with its rows.

        A kernel's call would ask for all pages on each device of a mesh.
        """
        return self.impl if self.layout is None else "xla"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _new_cache(layout, sizes):
    """Makes a cache by one program: calls for each array cost more than a prompt."""
    kv = paged.init(**dict(sizes))
    if layout is None:
        return kv
    return jax.lax.with_sharding_constraint(
        kv, jax.tree.map(layout.sharding, _cache_specs(kv))
    )


def _cache_specs(kv: paged.PagedKV) -> paged.PagedKV:
    """Lays a cache out on a mesh: pages by heads, all else on every device."""
    specs = jax.tree.map(lambda _: shard.REPLICATED, kv)
    pages = (shard.PAGES,) * len(kv.k)
    return specs.replace(k=pages, v=pages)


@functools.partial(
    compilation.jit,
    static_argnames=("model", "by_rows", "taps"),
    donate_argnames=("kv",),
)
def _prefill(
    model,
    params,
    kv,
    tokens,
    length,
    slot,
    begun=None,
    before=None,
    *,
    by_rows,
    taps=(),
):
    # NumPy's where `jax.disable_jit` makes this a plain call.
    tokens, length, slot = map(jnp.asarray, (tokens, length, slot))
    kv = allocator.reserve(kv, slot, length)
    if by_rows:
        begun = 0 if begun is None else begun
        return _prefill_rows(
            model, params, kv, tokens, length, slot, begun, before, taps
        )
    if model.layout is not None:
        raise ValueError("batched prefill of a model on a mesh: prefill by rows")
    if begun is not None:
        raise ValueError("batched prefill of a slot that is begun: prefill by rows")
    # Bits differ from those of rows; plain and speculative decoding share them.
    outputs = sequence.forward(params, model.config, tokens[None], taps=taps)
    for number in range(model.config.num_layers):
        kv = paged.write(
            kv,
            number,
            slots=jnp.full(tokens.shape, slot, jnp.int32),
            positions=jnp.arange(tokens.size, dtype=jnp.int32),
            num_active=length,  # Padding writes nowhere.
            k=outputs.k[number][0],
            v=outputs.v[number][0],
        )
    kv = allocator.extend(kv, slot, length)
    return kv, outputs.features[0] if taps else None


def _prefill_rows(model, params, kv, tokens, length, slot, begun, before, taps):
    """Writes the K/V of `tokens[begun:length]` by slabs of rows, as in decoding."""
    slab = NATIVE_PREFILL_SLAB if model.impl == "native" else model.slab
    padded, features = jnp.pad(tokens, (0, slab)), None
    if taps:
        shape = padded.shape[0], len(taps), model.config.hidden_size
        features = jnp.zeros(shape, model.config.dtype)
        if before is not None:
            most = min(before.shape[0], tokens.shape[0])
            features = features.at[:most].set(before[:most])

    def tile(number, carry):
        """Runs slab `number` of the prompt."""
        kv, features = carry
        start = begun + number * slab
        rows = decoder.Rows(
            tokens=jax.lax.dynamic_slice_in_dim(padded, start, slab),
            slots=jnp.full((slab,), slot, jnp.int32),
            positions=start + jnp.arange(slab, dtype=jnp.int32),
            num_active=jnp.minimum(length - start, slab),
        )
        kv, outputs = model.forward_rows(params, rows, kv, taps=taps, with_logits=False)
        if features is not None:
            features = jax.lax.dynamic_update_slice_in_dim(
                features, outputs.features, start, axis=0
            )
        return kv, features

    num_tiles = (length - begun + slab - 1) // slab
    kv, features = jax.lax.fori_loop(0, num_tiles, tile, (kv, features))
    kv = allocator.extend(kv, slot, length)
    return kv, None if features is None else features[: tokens.shape[0]]
