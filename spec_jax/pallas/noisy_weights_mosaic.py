"""What a draw takes the highest of, for rows on a GPU (Pallas Mosaic): one launch.

As `noisy_weights_triton`. The last chunk of a row ends where the row does: what lies in
the one before it too is written twice, the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spec_jax.pallas import gumbel_noise, warpgroup


CHUNK = 1024  # tokens of a program


def noisy_weights(
    *rows, interpret: Any, with_noise: bool = True, **settings
) -> jax.Array:
    """See `noisy_weights_triton.noisy_weights`.

    Raises:
      ValueError: besides, rows that `warpgroup.chunk_of` refuses.
    """
    inputs = gumbel_noise.rows_of(*rows, **settings)
    R, V = inputs.logits.shape
    size = warpgroup.chunk_of(V, CHUNK)

    def sampling_noisy_weights(*refs: Any) -> None:
        """One chunk of a row."""
        *of_rows, out_ref = refs
        refs = gumbel_noise.Rows(*of_rows)
        row, chunk = (jax.lax.axis_index(name) for name in ("r", "chunk"))

        @pl.when(refs.draws[row] != 0)
        def _():
            first = jnp.minimum(chunk * size, V - size)
            index = first + warpgroup.line_numbers(size)
            place = pl.ds(first, size)
            logits = warpgroup.load(refs.logits.at[row, place], warpgroup.line(size))
            logits = logits.astype(jnp.float32)
            out_ref[row, place] = gumbel_noise.noisy(
                logits, index, row, refs, log1p=log1p if with_noise else None
            )

    if not with_noise:
        sampling_noisy_weights.__name__ = "sampling_log_weights"
    return warpgroup.kernel(
        sampling_noisy_weights,
        outputs=jax.ShapeDtypeStruct((R, V), jnp.float32),
        grid={"r": inputs.draws.size, "chunk": pl.cdiv(V, size)},
        interpret=interpret,
    )(*inputs)


def log1p(x: jax.Array) -> jax.Array:
    """log(1 + x), which is no operation on Mosaic, for x > -1.

    The rounding of 1 + x is made up for: Higham 2002, Accuracy and Stability of
    Numerical Algorithms, section 1.14.1.
    """
    # Else XLA, which interprets this, takes (1 + x) - 1 for x.
    above = jax.lax.optimization_barrier(1 + x)
    return jnp.where(above == 1, x, jnp.log(above) * (x / (above - 1)))
