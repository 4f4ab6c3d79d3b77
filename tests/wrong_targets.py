"""Targets with a planted fault: what the checks of exactness must catch."""

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.engine import protocols


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Around:
    """A target that does as another one does."""

    target: protocols.Target

    def forward(self, params, cache, *, tokens, start, num_live):
        return self.target.forward(
            params, cache, tokens=tokens, start=start, num_live=num_live
        )

    def choose(self, logits, num_live):
        return self.target.choose(logits, num_live)

    def truncate(self, cache, new_len):
        return self.target.truncate(cache, new_len)

    def is_starved(self, cache):
        return self.target.is_starved(cache)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneUlpOff(_Around):
    """Every row after the first has one logit, of token 17, that is one ULP off."""

    def forward(self, params, cache, *, tokens, start, num_live):
        cache, logits = super().forward(
            params, cache, tokens=tokens, start=start, num_live=num_live
        )
        number = jax.lax.bitcast_convert_type(logits, jnp.int32).at[1:, 17].add(1)
        return cache, jax.lax.bitcast_convert_type(number, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaleValues(_Around):
    """The last layer's values of windows of three rows are those of before."""

    def forward(self, params, cache, *, tokens, start, num_live):
        before = cache.v[-1]
        cache, logits = super().forward(
            params, cache, tokens=tokens, start=start, num_live=num_live
        )
        stale = jnp.where(num_live == 3, before, cache.v[-1])
        return cache.replace(v=(*cache.v[:-1], stale)), logits


class Spoilt(pytree.Node):
    """The parameters of `SpoiltLogits`: the target's, and what is wrong where."""

    params: protocols.Params
    positions: jax.Array  # [n] int32, of the rows that are spoilt
    value: jax.Array  # [] float32, in place of logits
    only: jax.Array  # [] int32, the token whose logit it is; -1: of all


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpoiltLogits(_Around):
    """Rows at some positions have other logits, as their parameters say."""

    def forward(self, params, cache, *, tokens, start, num_live):
        cache, logits = super().forward(
            params.params, cache, tokens=tokens, start=start, num_live=num_live
        )
        rows = start + jnp.arange(logits.shape[0], dtype=jnp.int32)
        is_row = jnp.any(rows[:, None] == params.positions[None, :], axis=-1)
        token = jnp.arange(logits.shape[1], dtype=jnp.int32)
        is_token = (token == params.only) | (params.only < 0)
        is_spoilt = is_row[:, None] & is_token[None, :]
        return cache, jnp.where(is_spoilt, params.value, logits)
