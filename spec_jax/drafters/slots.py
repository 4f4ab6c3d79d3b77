"""The base class of drafters for slots, and the loop that takes in rows.

A slot's K/V covers a beginning of its text. `take_in` runs what is missing, the rows of
all slots in each forward.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax import compilation
from spec_jax.engine import held as held_lib, protocols, rows as rows_lib
from spec_jax.paging import cache as paged


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSlots:
    """The base of drafters for slots: it has the properties of `drafter`.

    A subclass has the functions of a `protocols.SlotDrafter`.
    """

    drafter: Any
    num_slots: int

    gamma_max = protocols.passed_on("gamma_max", of="drafter")
    depth_max = protocols.passed_on("depth_max", of="drafter")
    vocab_size = protocols.passed_on("vocab_size", of="drafter")
    taps = protocols.passed_on("taps", of="drafter")
    feature_size = protocols.passed_on("feature_size", of="drafter")

    @property
    def _rows(self) -> rows_lib.SlotRows:
        """The rows of a drafter that has a `model`."""
        return rows_lib.SlotRows(model=self.drafter.model, num_slots=self.num_slots)


def new_cache(
    slots: rows_lib.SlotRows,
    *,
    num_pages: int | None = None,
    kept: int | None = None,
    **how: Any,
) -> paged.PagedKV:
    """Returns a drafter's own empty cache; takes and raises as `RowModel.new_cache`.

    Its pages are as large as the target's, which may have more positions.

    Args:
      kept: positions of a slot that are needed at a time, its last ones; None: all.
    """
    model = slots.model
    if kept is not None and kept >= how["capacity"]:
        kept = None
    if kept is not None or model.cache == "static":
        num_pages = None  # It counts the target's pages; there is no pool here.
    return model.new_cache(slots.num_slots, num_pages=num_pages, kept=kept, **how)


def begin(
    slots: rows_lib.SlotRows,
    kv: paged.PagedKV,
    begun: held_lib.Begun,
    *,
    slot: int,
    length: int,
) -> paged.PagedKV:
    """Begins a slot with `length` positions of the prompt that `begun.source` holds.

    The slot is empty; or it is the source, and is cut to `length`. Donates `kv`.
    """
    if begun.source == slot:
        return _cut(slots, kv, np.int32(slot), np.int32(length))
    return slots.share(kv, begun.source, slot, length) if length else kv


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=1)
def _cut(slots, kv, slot, length):
    is_slot = jnp.arange(slots.num_slots, dtype=jnp.int32) == slot
    return slots.truncate(kv, jnp.zeros_like(kv.length) + length, asked=is_slot)


def windows(
    text: Int[Array, "B max_len"], starts: Int[Array, " B"], size: int
) -> Int[Array, "B size"]:
    """Returns `size` tokens of each text, from its start on; past its end, zeros."""
    rows = jnp.arange(text.shape[0], dtype=jnp.int32)[:, None]
    columns = starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    # `mode="fill"` checks each index, which is a launch of its own on a GPU.
    found = text.at[rows, columns].get(mode="clip")
    return jnp.where(columns < text.shape[1], found, 0)


Run = Callable[[paged.PagedKV, protocols.Window], tuple[paged.PagedKV, Any, Any]]
"""Runs a window. Returns the cache, each column's row (`[B, R]`; past the end where it
was not run), and outputs by row."""


def take_in(
    run: Run,
    kv: paged.PagedKV,
    text: Int[Array, "B max_len"] | None,
    outputs: Any = (),
    *,
    goal: Int[Array, " B"],
    num_rows: int,
    until: Int[Array, " B"] | None = None,
    asked: Bool[Array, " B"] | None = None,
    ahead: int = 0,
) -> tuple[paged.PagedKV, Any]:
    """Takes in rows of each slot up to `goal`, as far as there is room for them.

    Args:
      text: the tokens; None: `run` reads none.
      outputs: leaves `[B, N]`, which slots that take in nothing keep.
      num_rows: rows that a slot takes in with a forward, at most.
      until: a slot whose K/V is that long is done; `goal` if None.
      asked: the slots that take in anything; all if None.
      ahead: how far a row's token is after the row's place.

    Returns:
      The cache, and the outputs of each slot's last row.
    """
    until = goal if until is None else until

    def step(carry):
        """Takes in up to `num_rows` rows of each slot."""
        kv, outputs, wanted = carry
        start = kv.length
        num_active = jnp.where(wanted, jnp.minimum(goal - start, num_rows), 0)
        if text is None:
            tokens = jnp.zeros((*goal.shape, num_rows), jnp.int32)
        else:
            tokens = windows(text, start + ahead, num_rows)
        window = protocols.Window(tokens=tokens, start=start, num_active=num_active)
        kv, at, found = run(kv, window)
        wanted &= kv.length > start  # Else there is no room.
        if jax.tree.leaves(outputs):
            is_each = jnp.arange(goal.shape[0], dtype=jnp.int32)
            last = at[is_each, jnp.maximum(num_active - 1, 0)]

        def keep(new, old):
            new = new.at[last].get(mode="fill", fill_value=0)
            return jnp.where((num_active > 0)[:, None], new, old)

        outputs = jax.tree.map(keep, found, outputs)
        return kv, outputs, wanted & (kv.length < until)

    wanted = kv.length < until
    if asked is not None:
        wanted &= asked
    kv, outputs, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]), step, (kv, outputs, wanted)
    )
    return kv, outputs
