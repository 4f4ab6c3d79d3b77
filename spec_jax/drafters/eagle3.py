"""EAGLE-3: one layer drafts from the target's features (Li et al. 2025,
https://arxiv.org/abs/2503.01840). `eagle3_slots` runs it.
"""

import dataclasses
import pathlib

from spec_jax.drafters import eagle3_slots, features
from spec_jax.model import eagle3_files, eagle3_params, params as params_lib, row_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(features.FeatureDrafter):
    """An EAGLE-3 head; its parameters are an `Eagle3Params`. `for_slots` drafts.

    Attributes:
      catch_up_rows: pairs of a prompt that are taken in at once, at least.

    Raises:
      ValueError: as a draft model; another `model`, or a confidence.
    """

    head: eagle3_params.Eagle3Config

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_confidence:
            raise ValueError(
                f"min_confidence={self.min_confidence}: an EAGLE-3 head has no rule "
                "that ends a draft early, leave it out"
            )

    @property
    def feature_size(self) -> int:
        """The width of a feature."""
        return self.head.target_hidden_size

    def for_slots(self, num_slots: int) -> eagle3_slots.SlotEagle3:  # type: ignore[override]
        """Returns the head for `num_slots` sequences."""
        return eagle3_slots.SlotEagle3(drafter=self, num_slots=num_slots)


def load(
    folder: str | pathlib.Path,
    target: row_model.RowModel,
    target_params: params_lib.Params,
    *,
    gamma_max: int,
    dtype: str | None = None,
) -> tuple[Eagle3, eagle3_params.Eagle3Params]:
    """Reads a head, which drafts for this target with kernels as the target's.

    Raises:
      ValueError: the folder is not of a head for this target.
    """
    head, params = eagle3_files.load(
        folder, target.config, target_params, dtype=dtype, impl=target.impl
    )
    drafter = Eagle3(
        head=head,
        gamma_max=gamma_max,
        **features.parts_of(head, target, slab=gamma_max + 1),  # type: ignore[arg-type]
    )
    return drafter, params
