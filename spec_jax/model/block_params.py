"""A block drafter's config and weights: shapes and checks.

DFlash, DSpark and DFlash2 share a backbone that runs a block of rows. DFlash has no
sequential head, DSpark one of three, and DFlash2 a selector, and convolutions in its
backbone. `block_draft` and `block_heads` compute with the weights; `block_files` reads
the files.
"""

import dataclasses
from typing import Any, Literal, Self, get_args

import jax
import numpy as np

from spec_jax import pytree
from spec_jax.model import head_params
from spec_jax.ops import weights


Slots = Literal["fill-in", "anchor-first"]
"""The token that a slot of a block predicts. "fill-in": that of its own position, so
slot 0, the anchor's, predicts nothing; "anchor-first": that of the next position."""

SLOTS: tuple[str, ...] = get_args(Slots)

Head = Literal["none", "vanilla", "gated", "rnn", "selector"]
"""How the token before corrects a slot's logits: not at all, by a product of low rank,
by the same behind a gate, by a recurrent state, or by such a product for the slot's
best tokens only."""

HEADS: tuple[str, ...] = get_args(Head)
DSPARK_HEADS: tuple[str, ...] = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Says what the rows of a block see in a layer.

    Attributes:
      window: keys that a row sees, its own the last; 0: all.
      is_causal: whether a row sees its block only up to itself; otherwise all of it.
      from_anchor: whether the window is counted back from the anchor, the same for all
        rows of a block, which see their block besides.
    """

    window: int = 0
    is_causal: bool = False
    from_anchor: bool = False

    def first(self, positions: jax.Array, anchors: jax.Array) -> jax.Array | None:
        """Returns the first position that rows see, possibly below 0; None: all.

        Args:
          positions: of the rows.
          anchors: of their blocks' first rows.
        """
        if not self.window:
            return None
        if self.from_anchor:
            return anchors - self.window
        return positions - (self.window - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(head_params.HeadConfig):
    """Sizes and constants of a block drafter, whose width is its target's."""

    block_size: int  # rows of a block, the anchor's included
    slots: Slots
    mask_token_id: int  # fed to all rows but the anchor's
    head: Head = "none"
    markov_rank: int = 0  # r, of a head
    top_k: int = 0  # best tokens of a slot, from which a selector chooses
    # Channels that share a row's kernel of a convolution; 0: no convolutions.
    conv_group: int = 0
    has_confidence: bool = False
    confidence_with_markov: bool = False  # it reads the token before, too
    # For each draft, what divides the logit of its confidence, and what is then added;
    # empty: 1 and 0.
    confidence_temperatures: tuple[float, ...] = ()
    confidence_shifts: tuple[float, ...] = ()
    # By layer; empty: all rows of a block see the block and its context.
    attention: tuple[LayerAttention, ...] = ()

    def attention_of(self, layer: int) -> LayerAttention:
        """Returns what rows see in a layer."""
        return self.attention[layer] if self.attention else LayerAttention()

    @property
    def shares_head(self) -> bool:
        """Whether its output projection is the target's, for all tokens."""
        return self.draft_vocab_size == self.layer.vocab_size

    @property
    def is_one_call(self) -> bool:
        """Whether native kernels run a block in one call: its layers are plain."""
        return not self.attention and not self.conv_group

    @property
    def has_dspark_heads(self) -> bool:
        """Whether it has a sequential head of DSpark, or a confidence head."""
        return self.has_confidence or self.head in DSPARK_HEADS

    @property
    def reach(self) -> int | None:
        """Upper bound of the positions before a block that a row sees; None: all."""
        windows = [each.window for each in self.attention]
        return max(windows) if windows and all(windows) else None

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token to be drafted."""
        return int(self.slots == "fill-in")

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.first_slot

    def validate(self) -> Self:
        """Returns the config itself; raises as `HeadConfig.validate`."""
        super().validate()
        for name, value, known in (
            ("slots", self.slots, SLOTS),
            ("head", self.head, HEADS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        if self.num_drafts < 1:
            raise ValueError(
                f"block_size={self.block_size} with slots={self.slots!r} drafts no "
                "token: give at least one row, and with 'fill-in' two"
            )
        if (self.markov_rank > 0) != (self.head != "none"):
            raise ValueError(
                f"head={self.head!r} with markov_rank={self.markov_rank}: a head has a "
                "rank of at least 1, and 'none' has rank 0"
            )
        is_selector = self.head == "selector"
        if (self.top_k > 0) != is_selector or self.top_k > self.draft_vocab_size:
            raise ValueError(
                f"selector_top_k={self.top_k} with head={self.head!r} of "
                f"{self.draft_vocab_size} draft tokens: a selector has from 1 to all"
            )
        if self.conv_group and self.hidden_size % self.conv_group:
            raise ValueError(
                f"conv_group_size={self.conv_group} must divide the width of "
                f"{self.hidden_size}"
            )
        self._check_attention()
        if self.confidence_with_markov and self.head == "none":
            raise ValueError(
                "confidence_with_markov, but the drafter has no head that embeds the "
                "token before"
            )
        if self.confidence_with_markov and not self.has_confidence:
            raise ValueError("confidence_with_markov, but there is no confidence head")
        for name, least, said in (
            ("confidence_temperatures", 0.0, " above 0"),
            ("confidence_shifts", -np.inf, ""),
        ):
            numbers, count = getattr(self, name), self.num_drafts
            is_good = all(least < number < np.inf for number in numbers)
            if len(numbers) not in (0, count) or not is_good:
                raise ValueError(
                    f"{name}={numbers} must be {count} finite numbers{said}, one for "
                    "each draft of a block"
                )
        return self

    def shapes(self) -> "BlockParams":
        """Returns the weights as `jax.ShapeDtypeStruct`s."""
        leaf, layer = self.leaf, self.layer
        D, r, group = self.hidden_size, self.markov_rank, self.conv_group
        conv = None
        if group:
            conv = Convolution(base=leaf(2, 2, D), kernels=leaf(4 * D // group, D))
        block_layer = BlockLayer(
            q=leaf(layer.attention_size, D),
            kv=leaf(layer.qkv_size - layer.attention_size, D),
            attention_conv=conv,
            mlp_conv=conv,
            **self._layer_shapes(),
        )
        mixes = {"gated": (r, D + r), "rnn": (3 * r, 2 * r + D), "selector": (r, D)}
        mix = mixes.get(self.head)
        markov = Markov(
            embed=leaf(layer.vocab_size, r),
            out=leaf(self.draft_vocab_size, r),
            mix=leaf(*mix) if mix else None,
            mix_bias=leaf(mix[0]) if mix and self.head != "selector" else None,
        )
        width = D + r * self.confidence_with_markov
        return BlockParams(
            **self._outer_shapes(),
            layers=(block_layer,) * layer.num_layers,
            markov=markov if self.head != "none" else None,
            confidence=leaf(1, width) if self.has_confidence else None,
            confidence_bias=leaf(1) if self.has_confidence else None,
        )

    def _check_attention(self) -> None:
        num_layers, count = self.layer.num_layers, len(self.attention)
        if count not in (0, num_layers):
            raise ValueError(f"attention of {count} layers, and there are {num_layers}")
        for window in {each.window for each in self.attention} - {0}:
            if window < self.block_size:
                raise ValueError(
                    f"sliding_window={window} is below the {self.block_size} rows of a "
                    "block, which see each other: give as many at least"
                )


class Convolution(pytree.Node):
    """Two convolutions of a row and the one before it in its block: one for a
    sublayer's input, and one for its output."""

    base: jax.Array  # [2, 2, D], by side and tap
    kernels: weights.Weight  # [4 D / conv_group, D], to multiply a normed row


class BlockLayer(pytree.Node):
    """A layer. Context needs keys and values alone: queries have their own weight."""

    input_norm: jax.Array  # [D], of the block's rows; the context is not normed by it
    q: weights.Weight  # [N * H, D]
    kv: weights.Weight  # [2K * H, D], keys first
    q_norm: jax.Array  # [H]
    k_norm: jax.Array  # [H]
    attention_out: weights.Weight  # [D, N * H]
    mlp_norm: jax.Array  # [D]
    gate_up: weights.Weight  # [2F, D], gate first
    down: weights.Weight  # [D, F]
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None


class Markov(pytree.Node):
    """A sequential head or a selector: W1, W2 and, of all but "vanilla", a mix."""

    embed: jax.Array  # [V, r], of the token before
    out: weights.Weight  # [Vd, r]
    # Gated [r, D + r], of hidden state and embedding; rnn [3r, 2r + D], of state,
    # embedding and hidden state; selector [r, D], of the hidden state, without a bias.
    mix: weights.Weight | None
    mix_bias: jax.Array | None  # [r] or [3r]


class BlockParams(pytree.Node):
    """A block drafter, and the target's embedding and output projection."""

    fc: weights.Weight  # [D, taps * D]
    hidden_norm: jax.Array  # [D], of fused features
    layers: tuple[BlockLayer, ...]
    final_norm: jax.Array  # [D]
    markov: Markov | None
    confidence: jax.Array | None  # [1, D] or [1, D + r], the hidden state's first
    confidence_bias: jax.Array | None  # [1]
    # [Vd] int32, the target's token of each draft token; None: the same.
    hot: jax.Array | None
    lm_head: weights.Weight  # [Vd, D]; the target's array if `Vd` is `V`
    embed: weights.Weight  # [V, D]; the target's array


def bare(hot: jax.Array | None) -> BlockParams:
    """Returns params with nothing but `hot`: enough for slots without heads."""
    nothing: Any = dict.fromkeys(each.name for each in dataclasses.fields(BlockParams))
    return BlockParams(**nothing | {"hot": hot})
