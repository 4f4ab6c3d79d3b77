"""Ways to run a window by name: decoding, the engine's rows, and what came before.

The names are those of the command line. `record_path` makes what the microscope looks
at, `slot_target` what the engine runs.
"""

from experiments.ablations import verify_paths
from spec_jax.debug.microscope import record as record_lib
from spec_jax.engine import rows
from spec_jax.model import row_model


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
    tree: tuple[int, ...] | None = None,
) -> record_lib.Path:
    """Returns the path of that name, for the microscope; `tree` see `record.Path`."""
    check(name)
    is_models = name in (DECODE, ROWS)
    return record_lib.Path(
        model=model,
        page_size=page_size,
        window_rows=window_rows,
        one_by_one=name in ONE_BY_ONE,
        target=None if is_models else verify_paths.make(name, model),
        is_rows=name in OF_ROWS,
        tree=tree,
    )


def slot_target(
    name: str, model: row_model.RowModel, num_slots: int = 1
) -> rows.SlotRows:
    """Returns the engine's target that verifies by the path of that name."""
    if name == ROWS:
        return rows.SlotRows(model=model, num_slots=num_slots)
    if num_slots > 1:
        raise ValueError(
            f"verify path {name!r} runs one sequence, and {num_slots} slots are asked "
            f"for: give one, or take {ROWS!r}"
        )
    return verify_paths.OneSlot(model=model, path=verify_paths.make(name, model))
