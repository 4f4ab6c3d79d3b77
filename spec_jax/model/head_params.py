"""The configs and weights of heads that read a target's features: the common part."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.model import config as config_lib, params as params_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes that all heads have.

    `layer` is the config of a Qwen3 model with the head's layers: caches are made by
    it, as those of a draft model are.
    """

    layer: config_lib.Qwen3Config  # vocab_size is the target's
    draft_vocab_size: int  # Vd
    # `hidden_states` indices of the features that `fc` reads, in its order.
    taps: tuple[int, ...]
    mask_token_id: int | None  # fed to rows of masks; None: it has no masks

    @property
    def hidden_size(self) -> int:
        """Width of the head, D."""
        return self.layer.hidden_size

    @pytree.optional
    def target_hidden_size(self) -> int:
        """Width of the target, Dt."""
        return self.hidden_size

    @property
    def features_size(self) -> int:
        """Width of the features of a position, of all taps."""
        return len(self.taps) * self.target_hidden_size

    def validate(self) -> Self:
        """Returns the config itself.

        Raises:
          ValueError: a value with which no head can be run.
        """
        self.layer.validate()
        V, mask, taps = self.layer.vocab_size, self.mask_token_id, self.taps
        if not 1 <= self.draft_vocab_size <= V:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} must be from 1 to "
                f"vocab_size={V}"
            )
        if mask is not None and not 0 <= mask < V:
            raise ValueError(
                f"mask_token_id={mask} is outside the target's embedding of {V} rows"
            )
        if len(set(taps)) != len(taps) or min(taps, default=-1) < 0:
            raise ValueError(f"{taps=} must be different hidden_states indices")
        return self

    def check_target(self, target: config_lib.ModelConfig) -> None:
        """Passes if the head can read this target's features.

        Raises:
          ValueError: another width or vocabulary, or taps that the target lacks.
        """
        ours = self.target_hidden_size, self.layer.vocab_size
        theirs, taps = (target.hidden_size, target.vocab_size), self.taps
        if ours != theirs:
            raise ValueError(
                f"the head reads features of width {ours[0]} and a vocabulary of "
                f"{ours[1]}, the target has {theirs[0]} and {theirs[1]}: it is a head "
                "for another target"
            )
        # hidden_states[L] is normed in Hugging Face, and not in our features.
        if not all(tap < target.num_layers for tap in taps):
            raise ValueError(
                f"{taps=} of a target with {target.num_layers} layers: each must be "
                f"below {target.num_layers}; it is a head for another target"
            )

    def hot_tokens(self, hot: jax.Array | None) -> jax.Array | None:
        """Returns `hot`; if it is None and the draft vocabulary is not the whole one,
        the first tokens."""
        if hot is None and self.draft_vocab_size < self.layer.vocab_size:
            return jnp.arange(self.draft_vocab_size, dtype=jnp.int32)
        return hot


def layer_shapes(layer: config_lib.Qwen3Config) -> dict[str, Any]:
    """Returns the shapes of a Qwen3 layer's weights, but for `qkv`, by their fields."""
    plain = params_lib.shapes(layer).layers[0]
    names = [field.name for field in dataclasses.fields(plain)]
    return {x: getattr(plain, x) for x in names if not x.startswith("qkv")}


def draw(key: jax.Array, shapes: Any, *, stddev: float, **given: Any) -> Any:
    """Returns random weights of these shapes, as `params.draw`, but the `given` ones.

    Consumes `key`.
    """
    own = shapes.replace(**dict.fromkeys(given))
    return params_lib.draw(key, own, stddev=stddev).replace(**given)
