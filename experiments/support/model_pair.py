"""The target and the draft of an experiment: loaded, checked against each other."""

import dataclasses
import pathlib

import spec_jax
from spec_jax import rounds, session
from spec_jax.drafters import draft_model
from spec_jax.model import (
    load,
    params as params_lib,
    row_model,
    tokenizer,
    verify_paths,
)
from spec_jax.ops import dispatch


ASSETS = pathlib.Path(spec_jax.__file__).parent / "assets"
EMBEDDED_TARGET = ASSETS / "target"
EMBEDDED_DRAFT = ASSETS / "draft"

# Two rows are the least that XLA multiplies fast, and all that catching up needs.
DRAFT_SLAB = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Everything that a round needs beside its state.

    A preset (`subjects.from_preset`) brings a target and its weights alone; whatever
    `load_pair` returns is complete.

    Attributes:
      verifier: what verifies windows on the target's caches; the target itself
        where that is by rows (`verify_paths.make`). None for a preset.
      drafter: None for a preset, which decodes plainly.
      params: of target and draft; the draft's are None where there is no drafter.
      tokenizer: None for a preset, whose random weights know no text.
    """

    target: row_model.RowModel
    verifier: rounds.Target | None
    drafter: rounds.Drafter | None
    params: tuple[params_lib.Params, params_lib.Params | None]
    tokenizer: tokenizer.Tokenizer | None


def load_pair(
    target: pathlib.Path,
    draft: pathlib.Path,
    *,
    gamma_max: int,
    slab: int,
    dtype: str | None,
    impl: str,
    verify_path: str = "paged-decode",
    cache: str = "paged",
    draft_cache: str = "persistent",
) -> ModelPair:
    """Loads two Hugging Face folders that share a vocabulary.

    Args:
      gamma_max: the most tokens that are drafted in a round.
      slab: rows of every call of the target, or more where `impl` wants them.
      dtype: of both models; that of their own `config.json` if None.
      verify_path: a name of `verify_paths.PATHS`.
      cache: "paged" or "static", of both models.
      draft_cache: "persistent", or built again in each "round".

    Raises:
      ValueError: a folder or a name that cannot be used, or models that do not fit
        together.
      NotImplementedError: an implementation that cannot run here.
    """
    impl = dispatch.resolve(impl)
    target_tokenizer = tokenizer.load(target)
    tokenizer.check_same_vocabulary(target_tokenizer, tokenizer.load(draft))
    draft_slab = DRAFT_SLAB
    if draft_cache == "round" and impl == "native":
        draft_slab = row_model.NATIVE_PREFILL_SLAB  # Rows of catch-up, at one read.
    slabs = [row_model.slab_for(impl, rows) for rows in (slab, draft_slab)]
    target_config, target_params = load.load(target, dtype=dtype)
    draft_config, draft_params = load.load(draft, dtype=dtype)
    shared = {"impl": impl, "cache": cache}
    target_model = row_model.RowModel(config=target_config, slab=slabs[0], **shared)
    pair = ModelPair(
        target=target_model,
        verifier=verify_paths.make(verify_path, target_model),
        drafter=draft_model.DraftModel(
            model=row_model.RowModel(config=draft_config, slab=slabs[1], **shared),
            gamma_max=gamma_max,
            draft_cache=draft_cache,
        ),
        params=(target_params, draft_params),
        tokenizer=target_tokenizer,
    )
    session.check_pair(pair.target, pair.drafter)
    return pair
