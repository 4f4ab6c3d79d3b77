"""Who owns which page, on a GPU (Pallas Mosaic): see `allocation`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import allocation, warpgroup


def run(
    operation: Callable[..., None],
    tables: allocation.Tables,
    *inputs: jax.Array,
    shapes: Sequence[tuple[int, ...]],
    pages: allocation.Pages,
    interpret: Any,
) -> tuple[allocation.Tables, list[jax.Array]]:
    """See `allocation_triton.run`.

    Args:
      interpret: False, or jax's `InterpretGPUParams()`.
    """
    fields = len(tables)

    @functools.wraps(operation)  # The kernel's name is that of the operation.
    def body(*refs):
        # No shared memory is written: to make it visible, all threads meet.
        how = pages._replace(meet=plgpu.commit_smem)
        operation(allocation.Tables(*refs[:fields]), *refs[fields:], how)

    changed = allocation.Tables(*map(jax.new_ref, tables))
    made = warpgroup.kernel(
        body,
        outputs=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        grid={"one": 1},
        interpret=interpret,
    )(*changed, *inputs)
    return allocation.Tables(*map(jax.freeze, changed)), made
