"""An EAGLE-3 head's config and weights: shapes, checks, random initialisation.

A parallel head (P-EAGLE) also has a mask, and may have ordinary decoder layers after
the first. `eagle3` computes with the weights, and `eagle3_files` reads the files.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

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

    @property
    def has_own_embed(self) -> bool:
        """Whether it must have an embedding: its width is not the target's."""
        return self.hidden_size != self.target_hidden_size

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


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Returns the taps of heads whose config names none."""
    return 2, num_layers // 2, num_layers - 3


class Eagle3Params(pytree.Node):
    """A head, and the target's embedding that it reads."""

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


def shapes(config: Eagle3Config) -> Eagle3Params:
    """Returns the `Eagle3Params` of `config` as `jax.ShapeDtypeStruct`s."""
    layer = config.layer
    dtype = jnp.dtype(layer.dtype)
    D, Dt = config.hidden_size, config.target_hidden_size
    V, Vd = layer.vocab_size, config.draft_vocab_size

    def leaf(*shape: int, dtype=dtype) -> Any:  # in the place of an array
        return jax.ShapeDtypeStruct(shape, dtype)

    own = head_params.layer_shapes(layer)
    if not config.has_head_norms:
        own |= {"q_norm": None, "k_norm": None}
    later = params_lib.LayerParams(qkv=leaf(layer.qkv_size, D), **own)
    return Eagle3Params(
        fc=leaf(D, config.features_size),
        features_norm=leaf(config.features_size) if config.norm_before_fc else None,
        fc_norms=(leaf(Dt),) * len(config.taps) if config.fc_norm else None,
        hidden_norm=leaf(D),
        qkv=leaf(layer.qkv_size, 2 * D),
        **own,
        final_norm=leaf(D),
        lm_head=leaf(Vd, D),
        hot=leaf(Vd, dtype=jnp.dtype(jnp.int32)) if Vd < V else None,
        embed=leaf(V, D),
        mask_hidden=leaf(1, 1, config.features_size) if config.is_parallel else None,
        more=(later,) * (layer.num_layers - 1),
    )


def init(
    key: jax.Array,
    config: Eagle3Config,
    *,
    embed: weights.Weight,
    hot: jax.Array | None = None,
    stddev: float = 0.02,
) -> Eagle3Params:
    """Returns random weights, normal with `stddev`; norm weights are one.

    Args:
      key: consumed.
      embed: the target's embedding.
      hot: the target's token of each draft token, ascending; None: the first ones.
    """
    made, hot = shapes(config.validate()), config.hot_tokens(hot)
    return head_params.draw(key, made, stddev=stddev, embed=embed, hot=hot)


def prepare(
    params: Eagle3Params, impl: str, *, form: str | None = None
) -> Eagle3Params:
    """Returns the weights as the kernels of a resolved `impl` read them.

    Call it once, where they are loaded: inside a step it runs at every step.

    Args:
      form: of matrices, as `params.prepare_matrices` takes it.
    """
    prepared = params_lib.prepare_matrices(params.replace(embed=None), impl, form=form)
    embed, dtype = params.embed, params.final_norm.dtype
    if impl == "native" and embed.dtype != dtype:
        # One call takes one dtype; rounding here or after the look-up is the same.
        embed = weights.matrix(embed).astype(dtype)
    return prepared.replace(embed=embed)
