"""Settings of sampling: checked on the host, and arrays of them for the device.

Functions here know numbers alone; what the settings mean is in `sampling`.
"""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp

from spec_jax import pytree


ALL_TOKENS = 2**31 - 1
"""The `top_k` that filters nothing."""

SMALLEST_TEMPERATURE = float(jnp.finfo(jnp.float32).tiny)
"""A smaller one above 0 may count as zero when float32 numbers are divided by it."""

MOST_REQUESTS, MOST_SAMPLES = 2**20, 2**12
"""How many requests one seed has noise for, and how many samples of each."""


class SamplingSettings(pytree.Node):
    """How tokens are drawn. Data: changing it never compiles again.

    Built, and checked, by `Sampling.settings` or `make_settings`.
    """

    temperature: jax.Array  # [] float32; 0 is greedy
    top_k: jax.Array  # [] int32; `ALL_TOKENS` filters nothing
    top_p: jax.Array  # [] float32; 1 filters nothing
    min_p: jax.Array  # [] float32; 0 filters nothing
    seed: jax.Array  # [] uint32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; `sampling` says the order of the filters.

    Attributes:
      temperature: divides the logits; 0 is greedy, and takes no filter.
      top_k: how many tokens stay, and with them all that equal the last; None, or more
        than the vocabulary has, keeps all.
      top_p: the mass that stays, in `(0, 1]`.
      min_p: the least probability that stays, as a share of the highest, in `[0, 1]`.
      seed: of all noise, in `[0, 2**32)`: the same seed gives the same bits.

    Raises:
      ValueError: a value outside its range, or not a number; a filter at temperature
        0, which it would not change.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_k, top_p, min_p, seed = dataclasses.astuple(self)
        _check_number("temperature", temperature)
        if temperature < 0:
            raise ValueError(
                f"{temperature=} is negative: use 0 for greedy decoding, 1 for the "
                "model's own distribution"
            )
        if 0 < temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"{temperature=} is too small to divide by in float32: use 0 for greedy"
            )
        if temperature > float(jnp.finfo(jnp.float32).max):
            raise ValueError(f"{temperature=} is more than float32 can hold")
        if top_k is not None:
            _check_whole("top_k", top_k)
            if top_k < 1:
                raise ValueError(
                    f"{top_k=} keeps no token: use at least 1, or None for all"
                )
        _check_number("top_p", top_p)
        # A value that float32 rounds to 0 is refused too: it would select nothing.
        if not 0 < top_p <= 1 or top_p < SMALLEST_TEMPERATURE:
            raise ValueError(f"{top_p=} is outside (0, 1]: use 1 to keep all tokens")
        _check_number("min_p", min_p)
        if not 0 <= min_p <= 1:
            raise ValueError(f"{min_p=} is outside [0, 1]: use 0 to keep all tokens")
        filters = {"top_k": (top_k, None), "top_p": (top_p, 1), "min_p": (min_p, 0)}
        given = [f"{name}={x}" for name, (x, off) in filters.items() if x != off]
        if temperature == 0 and given:
            raise ValueError(
                f"{temperature=} is greedy decoding, which {' and '.join(given)} would "
                "not change: give a temperature above 0, or no filter"
            )
        _check_whole("seed", seed)
        if not 0 <= seed < 2**32:
            raise ValueError(f"{seed=} is outside [0, 2**32)")

    def settings(self) -> SamplingSettings:
        """Returns the settings as arrays."""
        return SamplingSettings(
            temperature=jnp.float32(self.temperature),
            top_k=jnp.int32(min(self.top_k or ALL_TOKENS, ALL_TOKENS)),
            top_p=jnp.float32(self.top_p),
            min_p=jnp.float32(self.min_p),
            seed=jnp.uint32(self.seed),
        )


def make_settings(
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SamplingSettings:
    """Returns the settings as arrays; takes and raises what `Sampling` does."""
    return Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    ).settings()


def _check_number(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r} is not a number")
    # `Real` has no types for its comparisons.
    if not -math.inf < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name}={value} is not finite")


def _check_whole(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} is not a whole number")


def greedy(num_slots: int) -> SamplingSettings:
    """Returns settings, `[num_slots]`, by which slots take the highest logit."""
    one = make_settings(temperature=0.0)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_slots,)), one)


def folded_seed(seed: int, request: int, sample: int) -> int:
    """Returns the seed of one sample of one request, made from the seed that all share.

    Request 0, sample 0 has the seed itself. No two samples have the same seed: their
    number is hashed by a bijection of 32 bits (MurmurHash3's finaliser), which keeps 0.

    Args:
      request: in `[0, MOST_REQUESTS)`.
      sample: of the request, in `[0, MOST_SAMPLES)`.

    Raises:
      ValueError: a request or a sample outside its range.
    """
    if not (0 <= request < MOST_REQUESTS and 0 <= sample < MOST_SAMPLES):
        raise ValueError(
            f"{request=} and {sample=} of one seed: it has noise for {MOST_REQUESTS} "
            f"requests of {MOST_SAMPLES} samples, so give the others another seed"
        )
    mixed = request * MOST_SAMPLES + sample
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return seed ^ mixed ^ (mixed >> 16)
