"""Ways to run a window by name: decoding, the engine's rows, and what came before.

The names are those of the command line. `record_path` makes what the microscope looks
at, `slot_target` what the engine runs.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.ablations import verify_paths
from spec_jax.debug.microscope import record as record_lib
from spec_jax.engine import protocols, rows
from spec_jax.model import params as params_lib, row_model
from spec_jax.paging import cache as paged


DECODE = "decode"
"""Autoregressive decoding of the window, one active row at a time: the oracle."""

ROWS = "paged-decode"
"""What the engine runs: the window's rows in one slab."""

VERIFY = tuple(verify_paths.PATHS)
"""What can verify a window; `ROWS` is one of them."""

NAMES = (DECODE, *VERIFY)

# Paths of `qwen3.forward_rows`; the kernels of the others fuse nothing.
OF_ROWS = (DECODE, "row-loop", ROWS)
ONE_BY_ONE = (DECODE, "row-loop")


def check(name: str) -> None:
    """Raises `ValueError` unless there is a path of that name."""
    if name not in NAMES:
        raise ValueError(f"path={name!r} is not one of {', '.join(NAMES)}")


def record_path(
    name: str,
    model: row_model.RowModel,
    *,
    page_size: int,
    window_rows: int | None = None,
) -> record_lib.Path:
    """Returns the path of that name, for the microscope.

    Raises:
      ValueError: no path of that name.
    """
    check(name)
    is_models = name in (DECODE, ROWS)
    return record_lib.Path(
        model=model,
        page_size=page_size,
        window_rows=window_rows,
        one_by_one=name in ONE_BY_ONE,
        target=None if is_models else verify_paths.make(name, model),
        is_rows=name in OF_ROWS,
    )


def slot_target(
    name: str, model: row_model.RowModel, num_slots: int = 1
) -> rows.SlotRows:
    """Returns the engine's target that verifies by the path of that name.

    Raises:
      ValueError: no verify path of that name, or one that runs one sequence alone.
    """
    if name == ROWS:
        return rows.SlotRows(model=model, num_slots=num_slots)
    if num_slots > 1:
        raise ValueError(
            f"verify path {name!r} runs one sequence, and {num_slots} slots are asked "
            f"for: give one, or take {ROWS!r}"
        )
    return _OneSlot(model=model, num_slots=1, path=verify_paths.make(name, model))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OneSlot(rows.SlotRows):
    """Verifies the windows of one slot by a `baseline.RowTarget`, `path`."""

    path: Any

    def verify(
        self, params: params_lib.Params, kv: paged.PagedKV, window: protocols.Window
    ) -> tuple[paged.PagedKV, protocols.Verified]:
        """Runs the slot's active columns."""
        start, num_active = window.start[0], window.num_active[0]
        kv, logits = self.path.forward(
            params, kv, tokens=window.tokens[0], start=start, num_active=num_active
        )
        num_active = jnp.where(self.path.is_out_of_pages(kv), 0, num_active)
        height = logits.shape[0]
        places = jnp.arange(height, dtype=jnp.int32)
        columns = jnp.arange(window.tokens.shape[1], dtype=jnp.int32)
        return kv, protocols.Verified(
            logits=logits,
            slots=jnp.zeros((height,), jnp.int32),
            positions=start + places,
            num_active=num_active,
            at=jnp.where(columns < num_active, columns, height)[None],
        )

    def choose(
        self, logits: Float[Array, "P V"], num_active: Int[Array, ""]
    ) -> Int[Array, " P"]:
        """Chooses as the path does."""
        return self.path.choose(logits, num_active)
