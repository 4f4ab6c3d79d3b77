"""How native drafts are drawn, as the kernels take it."""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import calls


class Draws(typing.NamedTuple):
    """Draws as `rules.sampling` has them, in slots whose temperature is not 0."""

    settings: typing.Any  # `sampling.SamplingSettings` with leaves [S]
    positions: jax.Array  # [S] int32, of each slot's first draft
    vocab_size: int  # of the target: noise is by its tokens
    independent: bool  # noise of `Stream.DRAFT`, and what was drawn from is given


def arguments(
    draws: Draws | None, shape: tuple[int, int, int]
) -> tuple[tuple[jax.Array, jax.Array], jax.ShapeDtypeStruct, dict[str, typing.Any]]:
    """Returns the arrays, the result and the attributes of a kernel that draws.

    Args:
      draws: None: the highest logits are drafted.
      shape: slots, drafts of each at most, and tokens to choose from.
    """
    numbers = jnp.zeros((0, 0), jnp.float32)
    integers = jnp.zeros((0, 0), jnp.int32)
    vocab_size, independent = 0, False
    if draws is not None:
        settings, positions, vocab_size, independent = draws
        calls.check_shapes(
            temperature=(settings.temperature, shape[:1]),
            positions=(positions, shape[:1]),
        )
        numbers = jnp.stack([settings.temperature, settings.top_p, settings.min_p])
        seed = jax.lax.bitcast_convert_type(settings.seed, jnp.int32)
        integers = jnp.stack([settings.top_k, seed, positions])
    result = shape if independent else (0, 0, 0)
    return (
        (numbers, integers),
        jax.ShapeDtypeStruct(result, jnp.float32),
        {"vocabulary": np.int64(vocab_size), "is_independent": independent},
    )


def draw(
    logits: jax.Array,  # [R, N] float32
    draws: Draws,
    *,
    asked: jax.Array,  # [R] bool
    isa: str | None = None,
) -> jax.Array:
    """Draws a token from each row; see `ops.draw.draw`. A row is a slot of `draws`."""
    R, N = logits.shape
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits of {logits.dtype}: draws take float32")
    calls.check_shapes(asked=(asked, (R,)))
    how, _, attributes = arguments(draws, (R, 1, N))
    tokens, _ = calls.call(
        "spec_jax_draw",
        [
            jax.ShapeDtypeStruct((R,), jnp.int32),
            jax.ShapeDtypeStruct((0, 0, 0), jnp.float32),
        ],
        *(logits, asked, *how),
        isa=isa,
        **attributes,
    )
    return tokens


def given(draws: Draws | None, log_weights: jax.Array) -> jax.Array | None:
    """Returns the log weights that a kernel gave; None if draws are not independent."""
    return log_weights if draws is not None and draws.independent else None
