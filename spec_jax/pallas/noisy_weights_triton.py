"""What a draw takes the highest of, for rows on a GPU (Pallas Triton): one launch.

    log weights of the tokens that the filters keep + Gumbel noise;  -inf of the others

as `rules.sampling.noisy_weights` with the noise of `Stream.SAMPLE`, of the same bits of
Threefry (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405). Program `(r, c)`
has `CHUNK` tokens of row `r`, and everything is elementwise: a token's noise depends on
seed, position and the token alone. Rows that do not draw are neither read nor written.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from spec_jax.pallas import attention_plan as plan, first_tokens_triton as first, slab


CHUNK = 1024  # tokens of a program
_TINY = float(jnp.finfo(jnp.float32).tiny)
_ONE = 0x3F800000  # the bits of 1.0


def noisy_weights(
    logits: jax.Array,  # [R, V] float32 or bfloat16
    highest: jax.Array,  # [R], the largest of each row
    kept: first.Kept,
    *,
    temperature: jax.Array,  # [R] float32
    min_p: jax.Array,  # [R] float32
    seeds: jax.Array,  # [R] uint32
    positions: jax.Array,  # [R] int32, of the tokens to be drawn
    draws: jax.Array,  # [R] bool
    interpret: bool,
) -> jax.Array:
    """Returns the noisy log weights `[R, V]` float32 of the rows that draw.

    Those of the others are uninitialised. The logits as they are where a temperature
    is 0.

    Raises:
      ValueError: settings that are not of each row.
    """
    R, V = logits.shape
    rows = {"temperature": temperature, "min_p": min_p, "seeds": seeds}
    rows |= {"positions": positions, "draws": draws}
    slab.check_shapes(**{name: (array, (R,)) for name, array in rows.items()})
    rows["draws"] = first.programs_that_draw(draws)
    inputs = logits, highest, *kept, *rows.values()
    out = jax.ShapeDtypeStruct((R, V), jnp.float32)
    return pl.pallas_call(
        _kernel,
        grid=(*rows["draws"].shape, pl.cdiv(V, CHUNK)),
        in_specs=[plan.whole(x) for x in inputs],
        out_specs=plan.whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sampling_noisy_weights",
    )(*inputs)


def _kernel(
    logits_ref,  # [R, V]
    highest_ref,  # [R]
    last_ref,  # [R]
    end_ref,  # [R]
    temperature_ref,  # [R]
    min_p_ref,  # [R]
    seeds_ref,  # [R]
    positions_ref,  # [R]
    draws_ref,  # one for each row of programs, int32
    out_ref,  # [R, V]
):
    row, chunk, V = pl.program_id(0), pl.program_id(1), logits_ref.shape[1]

    @pl.when(draws_ref[row] != 0)
    def _():
        index = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        inside = index < V
        logits = plt.load(logits_ref.at[row, index], mask=inside, other=-jnp.inf)
        logits = logits.astype(jnp.float32)
        temperature = temperature_ref[row]
        is_greedy = temperature == 0
        scores = logits - highest_ref[row].astype(jnp.float32)
        scores = scores / jnp.where(is_greedy, jnp.float32(1), temperature)
        kept = first.is_kept(first.rank(logits), index, last_ref[row], end_ref[row])
        kept &= jnp.exp(scores) >= min_p_ref[row]
        noise = _gumbel(_key(seeds_ref[row], positions_ref[row]), index, V)
        noisy = jnp.where(kept, scores + noise, -jnp.inf)
        noisy = jnp.where(is_greedy, logits, noisy)
        plt.store(out_ref.at[row, index], noisy, mask=inside)


def _key(seed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key of `rules.sampling.noise_key` for `Stream.SAMPLE`, without an offset."""
    zero = jnp.zeros_like(seed)
    key = zero, seed
    for part in (zero, position.astype(jnp.uint32), zero):
        key = threefry(key, zero, part)
    return key


def _gumbel(key, index: jax.Array, vocab_size: int) -> jax.Array:
    """As `jax.random.gumbel` of `vocab_size` numbers, mode "high": number `index`."""

    def uniform(number):
        number = number.astype(jnp.uint32)
        one, other = threefry(key, jnp.zeros_like(number), number)
        bits = (one ^ other) >> 9 | jnp.uint32(_ONE)
        return jax.lax.bitcast_convert_type(bits, jnp.float32) - 1

    high, low = uniform(index), uniform(index + vocab_size)
    x = jnp.where(high >= 0.5, high, high + (low * 2.0**-23 + _TINY))
    return -jnp.log(-jnp.log1p(-x))


def threefry(key, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of the counters `(high, low)`, all of them uint32."""
    keys = [*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)]
    x, y = high + keys[0], low + keys[1]
    for turn in range(5):
        for by in (17, 29, 16, 24) if turn % 2 else (13, 15, 26, 6):
            x = x + y
            y = (y << by | y >> (32 - by)) ^ x
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x, y
