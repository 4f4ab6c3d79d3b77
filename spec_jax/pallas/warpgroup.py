"""What the kernels on Pallas Mosaic have in common: programs of one warpgroup.

A value of two axes lies in registers as a tensor-core instruction leaves its sums, 64
rows high: a warp has 16 rows, and each of its threads 2 columns of every 8. Rows that
are not there are computed with, whatever they are, and never stored: no row meets
another. Blocks of two axes come by TMA and are stored by it. A copy that is contiguous
on both sides, as that of a single row, may begin at any 16 bytes of shared memory; any
other has to begin at a multiple of 128.

XLA launches the next kernel as soon as all programs of this one let it go, long before
they have ended (programmatic dependent launch, as in `early_launch`); what to wait for
before a kernel's first access is for the kernel itself to say. All do, with all their
threads, and let the next one go only then: so that whoever has waited sees what every
kernel before it wrote, and who has not yet must keep off the last one's alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.pallas import early_launch


ROWS = 64  # of an instruction, and of a value of two axes
THREADS = 128  # of a warpgroup: a value of one axis has a multiple of it
ALIGNED = 8  # logits: a row begins where a load may
PROGRAMS = 132  # one for each multiprocessor of an H100

SWIZZLE_BYTES = 128  # of a row of a tile in shared memory
TILE = SWIZZLE_BYTES // 2  # bfloat16 elements of that row
OPERAND = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(SWIZZLE_BYTES))
"""How an operand of `wgmma` lies in shared memory."""

TABLE = plgpu.Layout.WGMMA
OF_ROW, OF_COLUMN = TABLE.reduce(1), TABLE.reduce(0)
"""How what there is once for a row of a table, or for a column, lies in registers."""


def kernel(
    body: Callable[..., None],
    *,
    outputs: Any,
    grid: Mapping[str, int],
    scratch: Sequence[Any] = (),
    prologue: Callable[..., None] | None = None,
    interpret: Any,
) -> Callable[..., Any]:
    """The function of arrays that runs `body` on a grid of single warpgroups.

    Args:
      body: takes references to inputs, outputs and scratch; its name is the kernel's.
        What it does comes after all that the kernels before this one do.
      outputs: `jax.ShapeDtypeStruct`, one or a list.
      prologue: takes what `body` takes, and may run beside the kernel before: it reads
        nothing that a kernel of the program writes, and writes to no global memory.
      interpret: False, or jax's `InterpretGPUParams()`; `True` interprets no copies.
    """

    @functools.wraps(body)
    def run(*refs: Any) -> None:
        if prologue is not None:
            prologue(*refs)
        if not interpret:  # There one kernel runs after another.
            plgpu.griddepcontrol_wait()
            if early_launch.IS_EARLY:
                plgpu.griddepcontrol_launch_dependents()
        body(*refs)

    return plgpu.kernel(
        run,
        out_type=outputs,
        scratch_types=list(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )


def sums(shape: tuple[int, int]) -> Any:
    """The accumulator of `wgmma`, float32, for `pl.run_scoped`."""
    # jax does not list it as a public name.
    return plgpu.ACC(shape, jnp.float32)  # type: ignore[attr-defined]


def transposed(ref: Any) -> Any:
    """A view of a reference to a matrix."""
    # A method from jax 0.11 on, where the function is deprecated.
    return ref.T if hasattr(type(ref), "T") else plgpu.transpose_ref(ref, (1, 0))


def load(ref: Any, layout: Any) -> jax.Array:
    """A value from a reference, as it is to lie in registers."""
    # What to load of it is deprecated from jax 0.11 on, and necessary before.
    all_of_it = () if jax.__version_info__ >= (0, 11) else (...,)
    return plgpu.load(ref, *all_of_it, layout=layout, optimized=False)


def whole(length: int) -> int:
    """The length of the shortest value of one axis that has so many elements."""
    return -(-length // THREADS) * THREADS


def line(length: int) -> Any:
    """How a value of one axis lies in registers, of whatever dtype."""
    vector = 2 if length // THREADS % 2 == 0 else 1
    return plgpu.Layout.WG_STRIDED((length,), vec_size=vector)


def line_numbers(length: int) -> jax.Array:
    """The number of each element of a value of one axis, int32."""
    return plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=line(length))


def chunk_of(width: int, most: int) -> int:
    """The logits of one program of a row of `width`: `most`, or whole warpgroups.

    Raises:
      ValueError: too few logits, or rows that do not begin where a load may.
    """
    if width < THREADS or width % ALIGNED:
        raise ValueError(
            f"rows of {width} logits: a multiple of {ALIGNED}, and {THREADS} or more"
        )
    return min(most, width // THREADS * THREADS)


def of_rows(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A table from what there is once for each of its rows."""
    return jax.lax.broadcast_in_dim(values, shape, (0,))


def of_columns(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A table from what there is once for each of its columns."""
    return jax.lax.broadcast_in_dim(values, shape, (1,))


def numbers(shape: tuple[int, int], axis: int) -> jax.Array:
    """The number of each element's row or column, int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TABLE)


def store_from_shared(*pairs: tuple[Any, Any]) -> None:
    """Copies references of shared memory to global memory, and waits."""
    plgpu.commit_smem()
    for source, target in pairs:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)
