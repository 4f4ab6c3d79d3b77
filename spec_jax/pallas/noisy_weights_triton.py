"""What a draw takes the highest of, for rows on a GPU (Pallas Triton): one launch.

    log weights of the tokens that the filters keep + Gumbel noise;  -inf of the others

as `rules.sampling.noisy_weights` with the noise of `Stream.SAMPLE`, or without any as
`log_weights`; what is computed is `gumbel_noise`'s. Program `(r, c)` has `CHUNK` tokens
of row `r`. Rows that do not draw are neither read nor written.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan, early_launch, gumbel_noise


CHUNK = 1024  # tokens of a program


def noisy_weights(
    *rows, interpret: bool, with_noise: bool = True, **settings
) -> jax.Array:
    """Returns the noisy log weights `[R, V]` float32 of the rows that draw.

    Those of the others are uninitialised. The logits as they are where a temperature
    is 0. Takes what `gumbel_noise.rows_of` takes.
    """
    inputs = gumbel_noise.rows_of(*rows, **settings)
    out = jax.ShapeDtypeStruct(inputs.logits.shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(
            _kernel, log1p=jnp.log1p if with_noise else None, interpret=interpret
        ),
        grid=(*inputs.draws.shape, pl.cdiv(out.shape[1], CHUNK)),
        in_specs=[plan.whole(x) for x in inputs],
        out_specs=plan.whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sampling_noisy_weights" if with_noise else "sampling_log_weights",
    )(*inputs)


def _kernel(*refs, log1p, interpret):
    *rows, out_ref = refs
    refs = gumbel_noise.Rows(*rows)
    row, chunk = pl.program_id(0), pl.program_id(1)

    @pl.when(refs.draws[early_launch.program(0, interpret=interpret)] != 0)
    def _():
        index = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        inside = index < refs.logits.shape[1]
        logits = plt.load(refs.logits.at[row, index], mask=inside, other=-jnp.inf)
        logits = logits.astype(jnp.float32)
        noisy = gumbel_noise.noisy(logits, index, row, refs, log1p=log1p)
        plt.store(out_ref.at[row, index], noisy, mask=inside)
