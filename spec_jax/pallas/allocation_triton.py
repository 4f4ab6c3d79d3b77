"""Who owns which page, on a GPU (Pallas Triton): see `allocation`."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import allocation, attention_plan as plan, early_launch


def run(
    operation: Callable[..., None],
    tables: allocation.Tables,
    *inputs: jax.Array,
    shapes: Sequence[tuple[int, ...]],
    pages: allocation.Pages,
    interpret: bool,
) -> tuple[allocation.Tables, list[jax.Array]]:
    """Returns the tables, in place, and the int32 arrays of an operation."""
    fields = len(tables)
    outputs = [
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tables),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
    ]

    def kernel(*refs):
        # What is changed has a reference as an output too, to the same.
        given, made = refs[fields : -len(outputs)], refs[-len(outputs) :]
        how = pages._replace(
            meet=(lambda: None) if interpret else plt.debug_barrier,
            first=early_launch.program(0, interpret=interpret),
        )
        operation(allocation.Tables(*made[:fields]), *given, *made[fields:], how)

    inputs = *tables, *inputs
    made = pl.pallas_call(
        kernel,
        grid=(1,),
        in_specs=[plan.whole(x) for x in inputs],
        out_specs=[plan.whole(x) for x in outputs],
        out_shape=outputs,
        input_output_aliases={i: i for i in range(fields)},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name=operation.__name__,
    )(*inputs)
    return allocation.Tables(*made[:fields]), made[fields:]
