"""The configs and weights of heads that read a target's features: the common part.

`eagle3_params` and `block_params` have the fields and shapes of each kind.
"""

import dataclasses
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp

from spec_jax import pytree
from spec_jax.model import config as config_lib, params as params_lib
from spec_jax.ops import weights


_Params = TypeVar("_Params", bound=pytree.Node)

_ROWS = ("embed", "confidence")
"""Matrices that kernels do not multiply by: tables, whose rows are looked up, and a
single row."""


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
    def has_own_embed(self) -> bool:
        """Whether it must have an embedding: its width is not the target's."""
        return self.hidden_size != self.target_hidden_size

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

    def shapes(self) -> Any:
        """Returns the weights as `jax.ShapeDtypeStruct`s."""
        raise NotImplementedError

    def leaf(self, *shape: int) -> Any:
        """Returns a shape in the place of an array of the layers' dtype."""
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.layer.dtype))

    def _outer_shapes(self) -> dict[str, Any]:
        """Returns the shapes of the weights around the layers, by their fields."""
        D, V, Vd = self.hidden_size, self.layer.vocab_size, self.draft_vocab_size
        hot = jax.ShapeDtypeStruct((Vd,), jnp.dtype(jnp.int32))
        return {
            "fc": self.leaf(D, self.features_size),
            "hidden_norm": self.leaf(D),
            "final_norm": self.leaf(D),
            "lm_head": self.leaf(Vd, D),
            "hot": hot if Vd < V else None,
            "embed": self.leaf(V, D),
        }

    def _layer_shapes(self) -> dict[str, Any]:
        """Returns the shapes of a layer's weights, but for `qkv`, by their fields."""
        plain = params_lib.shapes(self.layer).layers[0]
        names = [field.name for field in dataclasses.fields(plain)]
        return {x: getattr(plain, x) for x in names if not x.startswith("qkv")}


def init(
    key: jax.Array,
    config: HeadConfig,
    *,
    embed: weights.Weight,
    lm_head: weights.Weight | None = None,
    hot: jax.Array | None = None,
    stddev: float = 0.02,
) -> Any:
    """Returns random weights, normal with `stddev`; norms are one, biases are zero.

    Args:
      key: consumed.
      embed: the target's embedding.
      lm_head: the target's output projection, whose rows are the head's; None: random.
      hot: the target's token of each draft token, ascending; None: the first ones.
    """
    shapes = config.validate().shapes()
    if hot is None and shapes.hot is not None:
        hot = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    given: dict[str, Any] = {"embed": embed, "hot": hot}
    if lm_head is not None:
        is_whole = shapes.hot is None
        given["lm_head"] = lm_head if is_whole else weights.matrix(lm_head)[hot]
    own = shapes.replace(**dict.fromkeys(given))
    return params_lib.draw(key, own, stddev=stddev).replace(**given)


def prepare(params: _Params, impl: str, *, form: str | None = None) -> _Params:
    """Returns a head's weights as the kernels of a resolved `impl` read them.

    Call it once, where they are loaded: inside a step it runs at every step.

    Args:
      form: of matrices, as `params.prepare_matrices` takes it.
    """
    made: Any = params_lib.prepare_matrices(params, impl, form=form, but=_ROWS)
    embed, dtype = made.embed, made.final_norm.dtype
    if impl == "native" and embed is not None and embed.dtype != dtype:
        # One call takes one dtype; rounding here or after the look-up is the same.
        made = made.replace(embed=weights.matrix(embed).astype(dtype))
    return made
