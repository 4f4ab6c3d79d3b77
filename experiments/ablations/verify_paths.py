"""Ways to verify a window of drafted tokens, besides the rows of `RowModel`.

    paged-decode    rows in a slab: equal to decoding by the row contract; `RowModel`
    row-loop        one row after the other: equal to decoding, one forward a row
    flash           the whole window through the batched products and the one-shot
                    attention of prefill, which have numerics of their own
    library-rows    rows as tall as the window, through the library's products: what
                    one gets without a row contract

Each is a `baseline.RowTarget`, and `OneSlot` makes a target of the engine of it. The
last two break the contract on purpose: they are here to be measured, and to be told
apart from what keeps it. All of them keep their K/V on the pages of the same cache.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.ablations import library_window
from spec_jax.engine import baseline, protocols, rows
from spec_jax.model import (
    config as config_lib,
    observe as observe_lib,
    params as params_lib,
    row_model,
)
from spec_jax.paging import allocator, cache


def make(name: str, model: row_model.RowModel):
    """The `RowTarget` of a verify path, on the model's caches.

    Raises:
      ValueError: no such path, or one that does not run models of this family.
    """
    if name not in PATHS:
        raise ValueError(f"verify path {name!r} is not one of {', '.join(PATHS)}")
    if name in OF_QWEN3 and not isinstance(model.config, config_lib.Qwen3Config):
        raise ValueError(
            f"verify path {name!r} runs models of qwen3, and this is one of "
            f"{model.config.model_type}: take 'paged-decode' or 'row-loop'"
        )
    return PATHS[name](model=model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnModel:
    """A `RowTarget` that shares everything but `forward` with a `RowModel`."""

    model: row_model.RowModel

    def __getattr__(self, name: str) -> Any:
        """What the model has."""
        if name.startswith("_") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLoop(_OnModel):
    """Verifies by decoding: each active row is a forward of its own."""

    def forward(
        self,
        params: params_lib.Params,
        kv: cache.PagedKV,
        *,
        tokens: Int[Array, " window"],
        start: Int[Array, ""],
        num_active: Int[Array, ""],
    ) -> tuple[cache.PagedKV, Float[Array, "slab V"]]:
        """As `RowModel.forward`, in `num_active` forwards of one row."""

        def keep_going(carry):
            row, kv, _ = carry
            return (row < num_active) & ~self.is_out_of_pages(kv)

        def step(carry):
            row, kv, logits = carry
            kv, one = self.model.forward(
                params,
                kv,
                tokens=tokens[row][None],
                start=start + row,
                num_active=jnp.int32(1),
            )
            return row + 1, kv, logits.at[row].set(one[0])

        logits = jnp.zeros((self.slab, self.config.vocab_size), jnp.float32)
        # An earlier failure is not this call's.
        kv = allocator.reserve(kv, row_model.SLOT, start)
        _, kv, logits = jax.lax.while_loop(keep_going, step, (jnp.int32(0), kv, logits))
        return kv, logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LibraryWindow(_OnModel):
    """Verifies a window as tall as it is: a row's bits depend on the height."""

    attention: ClassVar[library_window.Attention]

    def forward(
        self,
        params: params_lib.Params,
        kv: cache.PagedKV,
        *,
        tokens: Int[Array, " window"],
        start: Int[Array, ""],
        num_active: Int[Array, ""],
        observe: observe_lib.Observe = observe_lib.pass_on,
    ) -> tuple[cache.PagedKV, Float[Array, "window V"]]:
        """As `RowModel.forward`, with the numerics of `library_window`."""
        slot = row_model.SLOT
        follows = start == kv.length[slot]
        kv = kv.replace(refused=kv.refused.at[slot].set(kv.refused[slot] | ~follows))
        kv = allocator.reserve(kv, slot, start + num_active)
        num_active = jnp.where(self.is_out_of_pages(kv), 0, num_active)
        kv, logits = library_window.forward(
            params,
            self.config,
            kv,
            tokens=tokens,
            start=start,
            num_active=num_active,
            slot=slot,
            attention=self.attention,
            observe=observe,
        )
        return allocator.extend(kv, slot, start + num_active), logits

    def choose(
        self, logits: Float[Array, "window V"], num_active: Int[Array, ""]
    ) -> Int[Array, " window"]:
        """The first token of highest logit."""
        del num_active
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


class Flash(_LibraryWindow):
    """The batched path of prefill: one-shot attention."""

    attention = "one-shot"


class LibraryRows(_LibraryWindow):
    """Rows without the contract: the library's products, the rows' attention.

    A window of one row is autoregressive decoding as this path would do it.
    """

    attention = "rows"

    @property
    def impl(self) -> str:
        """The name that results report."""
        return "library"


PATHS = {
    "paged-decode": lambda *, model: model,
    "row-loop": RowLoop,
    "flash": Flash,
    "library-rows": LibraryRows,
}
"""Verify paths by name: what makes each from a `RowModel`."""

OF_QWEN3 = ("flash", "library-rows")
"""Those written for one family: `library_window` norms queries and keys per head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSlot(rows.SlotRows):
    """A target of one slot whose windows a verify path verifies.

    Attributes:
      model: allocates and prefills.
    """

    num_slots: int = 1
    path: baseline.RowTarget  # runs the rows of a window, on the caches of `model`

    def verify(
        self, params: params_lib.Params, kv: cache.PagedKV, window: protocols.Window
    ) -> tuple[cache.PagedKV, protocols.Verified]:
        """Runs the active columns by the path; see `protocols.Target`."""
        kv, logits = self.path.forward(
            params,
            kv,
            tokens=window.tokens[0],
            start=window.start[0],
            num_active=window.num_active[0],
        )
        failed = self.path.is_out_of_pages(kv)
        num_active = jnp.where(failed, 0, window.num_active)
        return kv, in_one_slot(logits, window.replace(num_active=num_active))

    def choose(
        self, logits: Float[Array, "P V"], num_active: Int[Array, ""]
    ) -> Int[Array, " P"]:
        """As the path does."""
        return self.path.choose(logits, num_active)

    def recount(self, run: Any, kv: cache.PagedKV) -> Any:
        """Returns the run with a forward for each row, where it goes by rows."""
        del kv
        if not isinstance(self.path, RowLoop):
            return run
        counters = dataclasses.replace(run.counters, row_steps=run.counters.proposed)
        return dataclasses.replace(run, counters=counters)


def in_one_slot(
    logits: Float[Array, "P V"], window: protocols.Window
) -> protocols.Verified:
    """Returns the rows of a window of one slot, row `i` of column `i`."""
    height, (_, width) = logits.shape[0], window.tokens.shape
    columns = jnp.arange(width, dtype=jnp.int32)[None]
    return protocols.Verified(
        logits=logits,
        slots=jnp.zeros((height,), jnp.int32),
        positions=window.start[0] + jnp.arange(height, dtype=jnp.int32),
        num_active=window.num_active[0],
        at=jnp.where(columns < window.num_active[:, None], columns, height),
    )
