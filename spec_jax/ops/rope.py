"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864).

The rotate-half form that Qwen3 checkpoints use: element `i` of a head pairs with
element `i + H/2`. Angles are float32; cosines and sines are cast to the activation's
dtype before the products, as Hugging Face does.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax.ops import dispatch
from spec_jax.typing import typed


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Returns `theta ** (-2i / H)` for `i < H/2`, float32, equal on every machine.

    The exponent, the power and its reciprocal are each rounded to float32, as Hugging
    Face does. The power is computed in float64: NumPy's float32 power has other bits
    with AVX-512 than without.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = np.float64(np.float32(theta)) ** exponent.astype(np.float64)
    return np.float32(1) / power.astype(np.float32)


def yarn_inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> np.ndarray:
    """Interpolates by parts as YaRN does (https://arxiv.org/abs/2309.00071, 3.2).

    Dimensions that turn more than `beta_fast` times over the original length keep
    their frequency, pairs that turn less than `beta_slow` times are slowed down by
    `factor`, and a linear ramp joins the two.
    """

    def dimension_of(turns: float) -> float:
        wavelength = original_length / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # As Hugging Face: keeps the ramp finite.
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low)
    kept = 1.0 - np.clip(ramp, 0, 1).astype(np.float32)
    plain = inverse_frequencies(head_dim, theta)
    return (plain / factor * (1 - kept) + plain * kept).astype(np.float32)


def llama3_inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_length: int,
) -> np.ndarray:
    """Returns Llama 3.1's frequencies, float32 `[H/2]`: low ones divided by `factor`.

    Between the two wavelengths a linear ramp joins them.
    """
    table = inverse_frequencies(head_dim, theta)
    turns = original_length * table / (2 * math.pi)
    ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = np.clip(ramp, 0, 1)
    scaled = (1 - kept) * table / factor + kept * table
    return scaled.astype(np.float32)


def yarn_attention_factor(
    factor: float, mscale: float | None, mscale_all_dim: float | None
) -> float:
    """Returns the scale of cosines and sines, `0.1 ln(factor) + 1` by default."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


@typed
def angles(
    positions: Int[Array, "*rows"],
    inv_freq: Float[Array, " half"],
    *,
    scale: float,
    dtype: str | jnp.dtype,
    impl: str = "xla",
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """Returns cosines and sines of positions, times `scale`, in activations' dtype.

    Args:
      impl: computes those of a slab by its kernels, if it has any.
    """
    if impl in dispatch.PALLAS:
        kernel = dispatch.kernel("angles", impl)
        return kernel(positions, inv_freq, scale=scale, dtype=jnp.dtype(dtype))
    turns = jnp.broadcast_to(inv_freq, (*positions.shape, *inv_freq.shape))
    radians = positions[..., None].astype(jnp.float32) * turns
    return (
        (jnp.cos(radians) * scale).astype(dtype),
        (jnp.sin(radians) * scale).astype(dtype),
    )


@typed
def rotate(
    x: Float[Array, "*rows heads H"],
    cos: Float[Array, "*rows half"],
    sin: Float[Array, "*rows half"],
) -> Float[Array, "*rows heads H"]:
    """Rotates each head by its row's angles."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


@typed
def rope(
    x: Float[Array, "*rows heads H"],
    positions: Int[Array, "*rows"],
    inv_freq: Float[Array, " half"],
    *,
    scale: float,
) -> Float[Array, "*rows heads H"]:
    """Rotates each head by its row's position; `scale` multiplies cos and sin."""
    return rotate(x, *angles(positions, inv_freq, scale=scale, dtype=x.dtype))
