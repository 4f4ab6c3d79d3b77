"""An EAGLE-3 head's config and weights: shapes and checks.

A parallel head (P-EAGLE) also has a mask, and may have ordinary decoder layers after
the first. `eagle3` computes with the weights, and `eagle3_files` reads the files.
"""

import dataclasses
from typing import ClassVar, Self

import jax

from spec_jax import pytree
from spec_jax.model import config as config_lib, head_params, params as params_lib
from spec_jax.ops import weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(head_params.HeadConfig):
    """Sizes and constants of a head."""

    target_hidden_size: int  # Dt
    has_head_norms: bool = False  # of queries and keys
    norm_before_fc: bool = False  # of all features as one vector
    fc_norm: bool = False  # of each feature
    norm_before_residual: bool = False  # the residual is the normed g
    norm_output: bool = False  # `hidden` is the output of the final norm
    window: int = 0  # keys that a row sees, its own the last; 0: all
    shares_head: bool = False  # `lm_head` is the target's rows of the draft tokens
    mask_token_id: int | None = None  # of a parallel head, whose masks follow a pair

    @property
    def is_parallel(self) -> bool:
        """Whether one pass drafts all tokens."""
        return self.mask_token_id is not None

    @property
    def reach(self) -> int | None:
        """Upper bound of the positions before a row that it sees; None: all."""
        return self.window or None

    def validate(self) -> Self:
        """Returns the config itself; raises as `HeadConfig.validate`."""
        super().validate()
        if self.layer.num_layers != 1 and not self.is_parallel:
            raise ValueError(
                f"num_hidden_layers={self.layer.num_layers}: only EAGLE-3 heads of one "
                "layer are supported, unless they are parallel"
            )
        if self.window:
            config_lib.check_size("sliding_window", self.window)
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both true: no published code says "
                "which comes first; state one"
            )
        if self.shares_head and self.has_own_embed:
            raise ValueError(
                f"a head of width {self.hidden_size} for a target of width "
                f"{self.target_hidden_size} cannot share the target's output projection"
            )
        if self.features_size == self.hidden_size:
            raise ValueError(
                f"taps={self.taps} are {self.features_size} values, as many as the "
                "head's own hidden state: features and hidden state could not be told "
                "apart"
            )
        return self

    def shapes(self) -> "Eagle3Params":
        """Returns the weights as `jax.ShapeDtypeStruct`s."""
        leaf, layer, D = self.leaf, self.layer, self.hidden_size
        own = self._layer_shapes()
        if not self.has_head_norms:
            own |= {"q_norm": None, "k_norm": None}
        later = params_lib.LayerParams(qkv=leaf(layer.qkv_size, D), **own)
        features, taps = self.features_size, len(self.taps)
        return Eagle3Params(
            **self._outer_shapes(),
            **own,
            features_norm=leaf(features) if self.norm_before_fc else None,
            fc_norms=(leaf(self.target_hidden_size),) * taps if self.fc_norm else None,
            qkv=leaf(layer.qkv_size, 2 * D),
            mask_hidden=leaf(1, 1, features) if self.is_parallel else None,
            more=(later,) * (layer.num_layers - 1),
        )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Returns the taps of heads whose config names none."""
    return 2, num_layers // 2, num_layers - 3


class Eagle3Params(pytree.Node):
    """A head, which is also its first layer, and the target's embedding."""

    qkv_bias: ClassVar[None] = None
    fc: weights.Weight  # [D, taps * Dt]
    features_norm: jax.Array | None  # [taps * Dt], with `norm_before_fc`
    fc_norms: tuple[jax.Array, ...] | None  # taps times [Dt], with `fc_norm`
    input_norm: jax.Array  # [D], of the embedding
    hidden_norm: jax.Array  # [D], of g
    qkv: weights.Weight  # [(N + 2K) * H, 2D], the embedding's columns first
    q_norm: jax.Array | None  # [H], with `has_head_norms`
    k_norm: jax.Array | None  # [H]
    attention_out: weights.Weight  # [D, N * H]
    mlp_norm: jax.Array  # [D]
    gate_up: weights.Weight  # [2F, D], gate first
    down: weights.Weight  # [D, F]
    final_norm: jax.Array  # [D]
    lm_head: weights.Weight  # [Vd, D]; of the target's values with `shares_head`
    # [Vd] int32, the target's token of each draft token; None: the same.
    hot: jax.Array | None
    embed: weights.Weight  # [V, D]; the target's array, unless the head has its own
    # A parallel head's: the features of masks, and the layers after the first.
    mask_hidden: jax.Array | None = None  # [1, 1, taps * Dt]
    more: tuple[params_lib.LayerParams, ...] = ()

    @property
    def head(self) -> weights.Weight:
        """The output projection, `[Vd, D]`."""
        return self.lm_head
