"""Targets with a planted fault: what the checks of exactness must catch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib import runs
from spec_jax import pytree
from spec_jax.engine import protocols


@dataclasses.dataclass(frozen=True, kw_only=True)
class Around:
    """A target that does as another one does."""

    target: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.target, name)


class OneUlpOff(Around):
    """Every column after the first has one logit, of token 17, that is one ULP off."""

    def verify(self, params, cache, window):
        cache, verified = self.target.verify(params, cache, window)
        column = verified.positions - window.start[verified.slots]
        more = (column > 0).astype(jnp.int32)
        number = jax.lax.bitcast_convert_type(verified.logits, jnp.int32)
        number = number.at[:, 17].add(more)
        logits = jax.lax.bitcast_convert_type(number, jnp.float32)
        return cache, verified.replace(logits=logits)


class StaleValues(Around):
    """The last layer's values of windows of three columns are those of before."""

    def verify(self, params, cache, window):
        before = cache.v[-1]
        cache, verified = self.target.verify(params, cache, window)
        stale = jnp.where(jnp.any(window.num_active == 3), before, cache.v[-1])
        return cache.replace(v=(*cache.v[:-1], stale)), verified


class ForgetsPaths(Around):
    """The K/V of a tree's path stay at the places of its nodes."""

    def keep_path(self, cache, path, num_kept, *, start):
        return cache


class Spoilt(pytree.Node):
    """The parameters of `SpoiltLogits`: the target's, and what is wrong where."""

    params: protocols.Params
    positions: jax.Array  # [n] int32, of the rows that are spoilt
    value: jax.Array  # [] float32, in place of logits
    only: jax.Array  # [] int32, the token whose logit it is; -1: of all


class SpoiltLogits(Around):
    """Rows at some positions have other logits, as their parameters say."""

    def prefill(self, params, *arguments, **settings):
        return self.target.prefill(params.params, *arguments, **settings)

    def verify(self, params, cache, window):
        cache, verified = self.target.verify(params.params, cache, window)
        logits = _spoil(params, verified.logits, verified.positions)
        return cache, verified.replace(logits=logits)


def _spoil(params: Spoilt, logits: jax.Array, positions: jax.Array) -> jax.Array:
    is_row = jnp.any(positions[:, None] == params.positions[None, :], axis=-1)
    token = jnp.arange(logits.shape[1], dtype=jnp.int32)
    is_token = (token == params.only) | (params.only < 0)
    return jnp.where(is_row[:, None] & is_token[None, :], params.value, logits)


def plant(monkeypatch, wrong) -> None:
    """Plants a fault in what verifies."""
    real = runs.make_scheduler

    def planted(lm, settings):
        made = real(lm, settings)
        target = wrong(target=made.speculator.target)
        speculator = made.speculator.replace(target=target)
        return dataclasses.replace(made, speculator=speculator)

    monkeypatch.setattr(runs, "make_scheduler", planted)
