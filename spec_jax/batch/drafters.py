"""The form for several slots of each drafter that has one."""

from spec_jax import protocols
from spec_jax.batch import draft_models, drafter as drafter_lib, lookups
from spec_jax.drafters import draft_model, hybrid, ngram, oracle, suffix


def of(drafter: protocols.Drafter, num_slots: int) -> drafter_lib.BatchDrafter:
    """The drafter for so many slots.

    Raises:
      NotImplementedError: a drafter, or a field of it, that has no form for batches.
    """
    if isinstance(drafter, draft_model.DraftModel):
        return draft_models.DraftModelBatch(drafter=drafter, num_slots=num_slots)
    if isinstance(drafter, hybrid.Hybrid):
        return draft_models.HybridBatch(
            suffix=drafter.suffix,
            draft=draft_models.DraftModelBatch(
                drafter=drafter.draft, num_slots=num_slots
            ),
            threshold=drafter.threshold,
        )
    if isinstance(drafter, oracle.Oracle):
        return lookups.OracleBatch(drafter=drafter, num_slots=num_slots)
    if isinstance(drafter, ngram.PromptLookup | suffix.SuffixDecoding):
        return lookups.EachSlot(drafter=drafter, num_slots=num_slots)
    raise NotImplementedError(
        f"{type(drafter).__name__} has no form for batches: write a BatchDrafter, or, "
        "if it keeps no memory, wrap it in EachSlot"
    )
