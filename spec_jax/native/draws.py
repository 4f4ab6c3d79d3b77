"""How native drafts are drawn, as the kernels take it."""

import typing

import jax
import jax.numpy as jnp

from spec_jax.native import calls


class Draws(typing.NamedTuple):
    """Draws as `rules.sampling` has them, in slots whose temperature is not 0."""

    settings: typing.Any  # `sampling.SamplingSettings` with leaves [S]
    positions: jax.Array  # [S] int32, of each slot's first draft
    vocab_size: int  # of the target: noise is by its tokens
    independent: bool  # noise of `Stream.DRAFT`, and what was drawn from is given


def arguments(
    draws: Draws | None, num_slots: int
) -> tuple[dict[str, typing.Any], dict[str, typing.Any]]:
    """Returns the arrays and the attributes of a kernel that draws.

    Args:
      draws: None: the highest logits are drafted.
    """
    numbers = integers = None
    vocab_size, independent = 0, False
    if draws is not None:
        settings, positions, vocab_size, independent = draws
        calls.check_shapes(
            temperature=(settings.temperature, (num_slots,)),
            positions=(positions, (num_slots,)),
        )
        numbers = jnp.stack([settings.temperature, settings.top_p, settings.min_p])
        seed = jax.lax.bitcast_convert_type(settings.seed, jnp.int32)
        integers = jnp.stack([settings.top_k, seed, positions])
    given = {
        "draw_numbers": (numbers, (None, None)),
        "draw_integers": (integers, (None, None), jnp.int32),
    }
    return given, {"vocabulary": vocab_size, "is_independent": independent}


def draw(
    logits: jax.Array,  # [R, N] float32
    draws: Draws,
    *,
    asked: jax.Array,  # [R] bool
    isa: str | None = None,
) -> jax.Array:
    """Draws a token from each row; see `ops.draw.draw`. A row is a slot of `draws`."""
    (R, _) = logits.shape
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits of {logits.dtype}: draws take float32")
    how, attributes = arguments(draws, R)
    given = {"logits": logits, "asked": (asked, (R,))} | how
    (tokens,) = calls.call("draw", [((R,), jnp.int32)], given, isa=isa, **attributes)
    return tokens


def chain_results(draws: Draws | None, shape: tuple[int, int, int]) -> list:
    """Returns the results of a kernel of chains: tokens `[S, most]`, and of independent
    draws log weights `[S, most, N]` that they were drawn from, otherwise empty.

    Args:
      shape: slots, drafts of each at most, and tokens to choose from.
    """
    weighed = shape if draws is not None and draws.independent else (0, 0, 0)
    return [(shape[:2], jnp.int32), (weighed, jnp.float32)]


def given(log_weights: jax.Array) -> jax.Array | None:
    """Returns the log weights that a kernel gave; None if it gave none."""
    return log_weights if log_weights.size else None
