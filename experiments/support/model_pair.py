"""The target and the draft of an experiment: loaded, checked against each other."""

import dataclasses
import functools
import pathlib

import spec_jax
from experiments.support import drafters
from spec_jax import protocols, sampling, session
from spec_jax.drafters import draft_model, hybrid
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
      params: of target and drafter; the latter's are None where there is no drafter,
        or one without parameters.
      tokenizer: None for a preset, whose random weights know no text.
    """

    target: row_model.RowModel
    verifier: protocols.Target | None
    drafter: protocols.Drafter | None
    params: tuple[params_lib.Params, protocols.Params | None]
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
    drafter: str = "draft-model",
    min_confidence: float = 0.0,
    sampling_settings: sampling.SamplingSettings | None = None,
) -> ModelPair:
    """Loads two Hugging Face folders that share a vocabulary.

    The draft's weights are read if the drafter uses them.

    Args:
      gamma_max: the most tokens that are drafted in a round.
      slab: rows of every call of the target, or more where `impl` wants them.
      dtype: of both models; that of their own `config.json` if None.
      verify_path: a name of `verify_paths.PATHS`.
      cache: "paged" or "static", of both models.
      draft_cache: "persistent", or built again in each "round".
      drafter: a name of `drafters.DRAFTERS`.
      min_confidence: of a draft model, see `draft_model.DraftModel`.
      sampling_settings: of a target that samples; a draft model then draws with its
        noise.

    Raises:
      ValueError: a folder or a name that cannot be used, or models that do not fit
        together.
      NotImplementedError: an implementation that cannot run here.
    """
    impl = dispatch.resolve(impl)
    target_tokenizer = tokenizer.load(target)
    tokenizer.check_same_vocabulary(target_tokenizer, tokenizer.load(draft))
    target_config, target_params = load.load(target, dtype=dtype, impl=impl)
    target_model = row_model.RowModel(
        config=target_config,
        impl=impl,
        slab=row_model.slab_for(impl, slab),
        cache=cache,
    )
    parts = drafters.Parts(
        gamma_max=gamma_max,
        vocab_size=target_config.vocab_size,
        load_draft=functools.partial(
            load_draft,
            draft,
            gamma_max=gamma_max,
            dtype=dtype,
            impl=impl,
            cache=cache,
            draft_cache=draft_cache,
            min_confidence=min_confidence,
            settings=sampling_settings,
        ),
    )
    chosen, drafter_params = drafters.build(drafter, parts)
    pair = ModelPair(
        target=target_model,
        verifier=verify_paths.make(verify_path, target_model),
        drafter=chosen,
        params=(target_params, drafter_params),
        tokenizer=target_tokenizer,
    )
    session.check_pair(pair.target, pair.drafter)
    return pair


def load_draft(
    folder: pathlib.Path,
    *,
    gamma_max: int,
    dtype: str | None,
    impl: str,
    cache: str = "paged",
    draft_cache: str = "persistent",
    min_confidence: float = 0.0,
    settings: sampling.SamplingSettings | None = None,
) -> tuple[draft_model.DraftModel, draft_model.DraftParams]:
    """The draft model of a folder, and its weights; raises as `load_pair`.

    Args:
      impl: a resolved implementation.
      settings: of a target that samples: it draws as that does, with its noise.
    """
    config, params = load.load(folder, dtype=dtype, impl=impl)
    drafter = draft_model.DraftModel(
        model=row_model.RowModel(
            config=config,
            impl=impl,
            slab=row_model.slab_for(impl, DRAFT_SLAB),
            cache=cache,
        ),
        gamma_max=gamma_max,
        draft_cache=draft_cache,
        # Rows of catch-up at one read of the weights, where their number costs nothing.
        catch_up_rows=row_model.NATIVE_PREFILL_SLAB if impl == "native" else 0,
        min_confidence=min_confidence,
    )
    if settings is None:
        return drafter, params
    return _drawing(drafter, params, settings)


def _drawing(
    drafter: draft_model.DraftModel,
    weights: params_lib.Params,
    settings: sampling.SamplingSettings,
) -> tuple[draft_model.DraftModel, draft_model.SampledParams]:
    """The draft model, drawing as a target of these settings does, with its noise."""
    return (
        dataclasses.replace(drafter, draws="sample-path"),
        draft_model.SampledParams(weights=weights, settings=settings),
    )


def with_sampling(pair: ModelPair, settings: sampling.SamplingSettings) -> ModelPair:
    """Makes a greedy pair's draft model, if it has one, draw as the target does.

    Args:
      settings: of the target that samples.
    """
    target_params, params = pair.params
    drafter = pair.drafter
    if isinstance(drafter, draft_model.DraftModel):
        drafter, params = _drawing(drafter, params, settings)
    elif isinstance(drafter, hybrid.Hybrid):
        draft, weights = _drawing(drafter.draft, params.draft, settings)
        drafter = dataclasses.replace(drafter, draft=draft)
        params = dataclasses.replace(params, draft=weights)
    return dataclasses.replace(pair, drafter=drafter, params=(target_params, params))
