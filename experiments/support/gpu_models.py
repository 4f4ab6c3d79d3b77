"""The pair of models of the GPU report: random weights, full caches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from experiments.support import gpu_arrays, gpu_task
from spec_jax import rounds
from spec_jax.drafters import draft_model
from spec_jax.model import config as config_lib, row_model
from spec_jax.ops import dispatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """A target and a draft, without weights.

    Attributes:
      drafter: drafts as many tokens as the largest gamma.
    """

    target: row_model.RowModel
    drafter: draft_model.DraftModel


def models(task: gpu_task.Task) -> Models:
    """Both models of a report, with slabs of the same height."""
    impl, sizes = dispatch.resolve(task.impl), task.sizes

    def model(config: config_lib.Qwen3Config) -> row_model.RowModel:
        return row_model.RowModel(config=config, impl=impl, slab=sizes.height)

    drafter = draft_model.DraftModel(
        model=model(sizes.draft), gamma_max=max(sizes.gammas)
    )
    return Models(target=model(sizes.target), drafter=drafter)


def text(capacity: int, vocab_size: int) -> jax.Array:
    """Random tokens for all positions of a cache, and one more."""
    return gpu_arrays.tokens(capacity + 1, vocab_size, seed=3)


def round_state(
    tokens: jax.Array,
    *,
    length: int,
    limit: int,
    cache: Any,
    memory: Any,
    gamma_max: int,
) -> rounds.RoundState:
    """`rounds.init_state` from buffers of its own, so that it can be donated."""
    return rounds.init_state(
        jnp.copy(tokens),
        length=jnp.int32(length),
        limit=jnp.int32(limit),
        cache=cache,
        memory=memory,
        gamma_max=gamma_max,
    )
