"""Ways to run a window by name: decoding, the engine's rows, and what came before.

The names are those of the command line of `parity.py`.
"""

from experiments.lib import superseded
from spec_jax.debug.microscope import record as record_lib
from spec_jax.model import row_model


DECODE = "decode"
"""Autoregressive decoding of the window, one active row at a time: the oracle."""

ROWS = "paged-decode"
"""What the engine runs: the window's rows in one slab."""

VERIFY = tuple(superseded.PATHS)
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
        target=None if is_models else superseded.make_path(name, model),
        is_rows=name in OF_ROWS,
        tree=tree,
    )
