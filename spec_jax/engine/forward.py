"""A target made of a forward function over rows and a function that makes its cache.

`ForwardTarget` implements what rounds and decoding need of a target: windows are
packed into slabs of one height, prompts go through the same rows, and nothing has to be
rolled back, since a row sees the keys up to its own position alone. Exactness rests on
what `testing.check_target` tests: that a row's bits depend on that row alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spec_jax import compilation, pytree
from spec_jax.engine import protocols, target as target_lib, windows
from spec_jax.model import decoder
from spec_jax.paging import index
from spec_jax.typing import check_whole


class ForwardCache(pytree.Node):
    """The cache of a forward function."""

    own: Any  # as `init_cache` made it
    slot_capacity: int = pytree.static()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardTarget(target_lib.Target):
    """Makes a target of a forward function. It verifies chains, and no trees.

    Attributes:
      forward_rows: `forward_rows(params, config, rows, cache) -> (cache, logits)`, with
        a slab of rows, a `decoder.Rows`: tokens, slots and positions `[slab]`, of which
        the first `num_active` are real. It writes a row's keys and values at its slot
        and position, sees those up to there, and gives float32 logits `[slab, V]`. The
        slot of a row that is not real is `num_slots`: `at[..].set(mode="drop")` writes
        nothing of it.
      init_cache: `init_cache(config, num_slots, capacity) -> cache`, of `capacity`
        positions a slot: any pytree of arrays.
      config: hashable, with `vocab_size` and `max_position_embeddings`.
      slab: rows of every call; at least `gamma_max + 1`.
      num_slots: sequences at once; `speculative` makes as many as there are prompts.

    Raises:
      ValueError: fewer than one row or slot.
    """

    forward_rows: Callable[..., tuple[Any, jax.Array]]
    init_cache: Callable[[Any, int, int], Any]
    config: Hashable
    slab: int = 8
    num_slots: int = 1

    taps: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        check_whole(slab=self.slab, num_slots=self.num_slots)

    @property
    def max_rows(self) -> int:
        """The most columns of a window."""
        return self.slab

    def new_cache(
        self, *, capacity: int, page_size: int = 1, num_pages: int | None = None
    ) -> ForwardCache:
        """Allocates the cache of `capacity` positions a slot, in whole pages.

        Raises:
          ValueError: a number of pages, which are not shared.
        """
        if num_pages is not None:
            raise ValueError(f"{num_pages=}, and slots share no pages: leave it out")
        capacity = index.pages_for(capacity, page_size) * page_size
        own = self.init_cache(self.config, self.num_slots, capacity)
        return ForwardCache(own=own, slot_capacity=capacity)

    def prefill(
        self,
        params: protocols.Params,
        cache: ForwardCache,
        prompt: list[int],
        *,
        slot: int,
        by_rows: bool | None = None,
    ) -> ForwardCache:
        """Runs all of the prompt but its last token, by rows. Donates `cache`."""
        del by_rows
        for start in range(0, len(prompt) - 1, self.slab):
            part = prompt[start : min(start + self.slab, len(prompt) - 1)]
            tokens = jnp.asarray(part + [0] * (self.slab - len(part)), jnp.int32)
            numbers = jnp.int32(slot), jnp.int32(start), jnp.int32(len(part))
            cache = _advance(self, params, cache, tokens, *numbers)
        return cache

    def verify(
        self,
        params: protocols.Params,
        cache: ForwardCache,
        window: protocols.Window,
        *,
        taps: tuple[int, ...] = (),
    ) -> tuple[ForwardCache, protocols.Verified]:
        """Runs each slot's active columns; see `target.Target`.

        Raises:
          NotImplementedError: trees.
        """
        del taps  # `checks.check_pair` refuses drafters that ask for any.
        if window.parents is not None:
            raise NotImplementedError(
                "a forward function over rows sees each slot's keys by position, and "
                "the drafter drafts trees: draft chains, or write an "
                "engine.target.Target"
            )
        height = -(-window.tokens.size // self.slab) * self.slab
        num_active, at = windows.places(window, height)
        pack = functools.partial(windows.packed, window, height)
        own_slots = jnp.arange(self.num_slots, dtype=jnp.int32)[:, None]
        columns = jnp.arange(window.tokens.shape[1], dtype=jnp.int32)
        is_active = jnp.arange(height, dtype=jnp.int32) < num_active
        rows = decoder.Rows(
            tokens=pack(window.tokens),
            slots=jnp.where(is_active, pack(own_slots), self.num_slots),
            positions=pack(window.start[:, None] + columns[None]),
            num_active=num_active,
        )
        # A loop even where one slab holds all rows: its body is compiled by itself.
        own, logits = windows.over_tiles(
            lambda own, rows, _: self.forward_rows(params, self.config, rows, own),
            cache.own,
            rows,
            None,
            jnp.zeros((height, self.config.vocab_size), jnp.float32),  # type: ignore[attr-defined]
            tile=self.slab,
        )
        return cache.replace(own=own), protocols.Verified(
            logits=logits,
            slots=jnp.minimum(rows.slots, self.num_slots - 1),
            positions=rows.positions,
            num_active=num_active,
            at=at,
        )


@functools.partial(
    compilation.jit, static_argnames=("target",), donate_argnames=("cache",)
)
def _advance(target, params, cache, tokens, slot, start, count):
    """Runs the first `count` tokens of one slot."""
    is_own = jnp.arange(target.num_slots, dtype=jnp.int32) == slot
    tokens = jnp.where(is_own[:, None], tokens[None], 0)
    window = protocols.Window(
        tokens=tokens,
        start=jnp.where(is_own, start, 0),
        num_active=jnp.where(is_own, count, 0),
    )
    return target.verify(params, cache, window)[0]
