"""Targets with a planted fault, which the checks of exactness must catch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib import runs
from spec_jax import pytree
from spec_jax.engine import protocols


@dataclasses.dataclass(frozen=True, kw_only=True)
class Around:
    """A target that does as `target` does, unless a subclass changes a method."""

    target: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.target, name)


class OneUlpOff(Around):
    """A target whose logit of token 17 is one ULP off in columns after the first."""

    def verify(self, params, cache, window):
        cache, verified = self.target.verify(params, cache, window)
        column = verified.positions - window.start[verified.slots]
        more = (column > 0).astype(jnp.int32)
        number = jax.lax.bitcast_convert_type(verified.logits, jnp.int32)
        number = number.at[:, 17].add(more)
        logits = jax.lax.bitcast_convert_type(number, jnp.float32)
        return cache, verified.replace(logits=logits)


class StaleValues(Around):
    """A target that keeps the last layer's old values if a window has three columns."""

    def verify(self, params, cache, window):
        before = cache.v[-1]
        cache, verified = self.target.verify(params, cache, window)
        stale = jnp.where(jnp.any(window.num_active == 3), before, cache.v[-1])
        return cache.replace(v=(*cache.v[:-1], stale)), verified


class ForgetsPaths(Around):
    """A target that leaves the K/V of a tree's kept path at the places of its nodes."""

    def keep_path(self, cache, path, num_kept, *, start):
        return cache


class Spoilt(pytree.Node):
    """The parameters of `SpoiltLogits`: the target's, and which logits are wrong."""

    params: protocols.Params
    positions: jax.Array  # [n] int32, positions of the rows that are spoilt
    value: jax.Array  # [] float32, in place of logits
    only: jax.Array  # [] int32, the token whose logit it replaces; -1: all


class SpoiltLogits(Around):
    """A target whose rows at some positions have other logits, by its parameters."""

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
    """Plants a fault in the target that verifies."""
    real = runs.make_scheduler

    def planted(settings):
        made = real(settings)
        target = wrong(target=made.speculator.target)
        speculator = made.speculator.replace(target=target)
        return dataclasses.replace(made, speculator=speculator)

    monkeypatch.setattr(runs, "make_scheduler", planted)
