"""DFlash and DSpark: a block of tokens is drafted from one pass over the target's
features (https://arxiv.org/abs/2602.06036, https://arxiv.org/abs/2607.05147).

They differ in their heads: DFlash has none, and takes each token of a block for itself;
DSpark has a sequential head, a confidence head, or both. `block_slots` runs them, and
`block_trees` their trees.
"""

import dataclasses
import pathlib
from typing import Literal

from spec_jax.drafters import block_slots, block_trees, features
from spec_jax.model import block_files, block_params, params as params_lib, row_model


Kind = Literal["dflash", "dspark"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafter(features.FeatureDrafter):
    """A block drafter; its parameters are a `BlockParams`. `for_slots` drafts.

    All rows of a block are always run: fewer are another input, and predict worse.

    Attributes:
      gamma_max: the most tokens of a proposal; of a chain up to those of a block.
      min_confidence: a draft ends before the first token of which the confidence head
        expects less than this, given that all before it are kept; 0 never ends one.

    Raises:
      ValueError: as a draft model; another `model`, a chain or a tree of more drafts
        than a block has, or a `min_confidence` without a confidence head.
    """

    head: block_params.BlockConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        name, depth = "gamma_max", self.gamma_max
        if self.tree is not None:
            name, depth = f"depth of tree {self.tree}", self.tree.depth
        if not 1 <= depth <= self.head.num_drafts:
            raise ValueError(
                f"{name}={depth} of a drafter whose block of {self.head.block_size} "
                f"rows drafts {self.head.num_drafts} tokens: give one that is not "
                "larger"
            )
        if self.min_confidence and not self.head.has_confidence:
            raise ValueError(
                f"min_confidence={self.min_confidence} of a drafter without a "
                "confidence head: leave it out"
            )

    @property
    def kind(self) -> Kind:
        """The published name of such a drafter."""
        has_heads = self.head.head != "none" or self.head.has_confidence
        return "dspark" if has_heads else "dflash"

    @property
    def feature_size(self) -> int:
        """The width of a feature."""
        return self.head.hidden_size

    def for_slots(self, num_slots: int) -> block_slots.SlotBlock:  # type: ignore[override]
        """Returns the drafter for `num_slots` sequences; raises as `SlotBlock`."""
        chains, trees = block_slots.SlotBlock, block_trees.SlotBlockTree
        kind = chains if self.tree is None else trees
        return kind(drafter=self, num_slots=num_slots)


def load(
    folder: str | pathlib.Path,
    target: row_model.RowModel,
    target_params: params_lib.Params,
    *,
    gamma_max: int,
    dtype: str | None = None,
) -> tuple[BlockDrafter, block_params.BlockParams]:
    """Reads a drafter, which drafts for this target with kernels as the target's.

    Args:
      gamma_max: the most tokens of a proposal; those of a block, if that has fewer.

    Raises:
      ValueError: the folder is not of a block drafter for this target.
    """
    head, params = block_files.load(
        folder, target.config, target_params, dtype=dtype, impl=target.impl
    )
    drafter = BlockDrafter(
        head=head,
        gamma_max=min(gamma_max, head.num_drafts),
        **features.parts_of(head, target, slab=head.block_size),  # type: ignore[arg-type]
    )
    return drafter, params
