"""Loads a `LanguageModel` from folders, from GGUF files or from the package."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from spec_jax.drafters import draft_model, registry, tree_shapes
from spec_jax.engine import checks, protocols, rows
from spec_jax.language_model import LanguageModel
from spec_jax.model import (
    config as config_lib,
    families,
    hub,
    load as load_lib,
    params as params_lib,
    row_model,
    tokenizer,
    translated,
)
from spec_jax.ops import dispatch
from spec_jax.parallel import shard
from spec_jax.typing import Impl


ASSETS = pathlib.Path(__file__).parent / "assets"
EMBEDDED_TARGET = ASSETS / "target"
EMBEDDED_DRAFT = ASSETS / "draft"
"""The embedded pair. Heads for its target are beside it, in folders named by drafter;
those for a model of `hub.FETCHED` are in a folder of its name."""

# XLA is slow for one row, and a round of drafts leaves at most two to catch up with.
DRAFT_SLAB = 2
TARGET_SLAB = 8
"""The fewest rows of a call of the target: XLA multiplies up to 8 at one speed."""


def load(
    target: str | pathlib.Path | None = None,
    *,
    draft: str | pathlib.Path | None = None,
    drafter: str | protocols.Drafter = "auto",
    gamma_max: int = 7,
    tree: tree_shapes.AnyTree | str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    draft_weights: str | None = None,
    impl: Impl = "auto",
    cache: row_model.CacheKind = "paged",
    slab: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    segments: int = shard.SEGMENTS,
    cut_draft: bool = False,
) -> LanguageModel:
    """Loads a target, and a drafter for it.

    Examples:
      >>> import spec_jax as sj
      >>> lm = sj.load()  # the embedded pair, in the package
      >>> lm.target.config.num_layers, lm.gamma_max
      (8, 7)

    Args:
      target: a Hugging Face folder of a model of `model.families`; a GGUF file of Llama
        or Qwen3; a name such as "Qwen/Qwen3-0.6B" in Hugging Face's local cache, or
        "smollm2" after `experiments/fetch_model.py`; None: the embedded one.
      draft: a draft model, named as `target` is, which drafts tokens that both
        tokenizers have; or a folder of a head that reads the target; None: the embedded
        draft model if the target is the embedded one.
      drafter: a name (`drafters.registry.names`), `package.module:Name`, the folder of
        a head that was trained for the target, or a `protocols.Drafter` without
        parameters; "auto": the drafter that `draft` is for; or else a head that is
        shipped for the target, in a hybrid with suffix lookup; or else prompt lookup.
      gamma_max: the most tokens that are drafted in a round.
      tree: the shape of trees to draft in place of chains, such as "4x12:15": 4
        children of a node, 12 drafts on a path and 15 in all.
      dtype: of all weights, "float32" or "bfloat16"; None: that of each `config.json`.
      weights: of the target: "q8_0" rounds its matrices to eight bits, in blocks of 32
        with a scale each, which makes another model, read in half the time; those of a
        GGUF file of Q8_0 are taken as they are. "q4_1" rounds those of its layers to
        four bits with a scale and a minimum, or takes those of a file of Q4_1 or Q4_0.
        None: as its folder has them.
      draft_weights: of the drafter, likewise; its drafts change, and take less time.
      impl: the kernels, see `ops.dispatch`; "auto": the fastest that run here.
      cache: "paged" or "static", of both models.
      slab: rows of every call of the target, on which bits depend; None: 8, or
        `gamma_max + 1` if that is more. Some implementations fix the number.
      mesh: devices that share the target, as `parallel.shard.mesh` makes it; None: one.
      segments: parts of every sum over these devices, on which bits depend: with 8 they
        are equal on 1, 2, 4 and 8 devices; one per device is fastest.
      cut_draft: whether these devices share one draft model, not one on each.

    Raises:
      ValueError: an argument that cannot be used, or models that do not fit together.
      NotImplementedError: an implementation, or a mesh, that cannot run the models.
    """
    config_lib.check_form("draft_weights", draft_weights or "dense")
    if drafter == "auto":
        drafter = default_drafter(target, draft)
    folder = hub.locate(EMBEDDED_TARGET if target is None else target)
    words, forms = tokenizer.load(folder), (weights, draft_weights)
    named = _draft_folder(target, draft)
    if isinstance(drafter, str) and registry.reads_target(drafter, named):
        named = None  # A head is checked when it is loaded.
    impls, entries = _agreed(folder, named, words, dtype=dtype, forms=forms, impl=impl)
    model, params = _load_rows(
        folder,
        dtype=dtype,
        weights=weights,
        impl=impls[0],
        slab=max(TARGET_SLAB, gamma_max + 1) if slab is None else slab,
        cache=cache,
        vocab_size=entries,
        layout=None if mesh is None else shard.Layout(mesh=mesh, segments=segments),
    )
    parts = drafter_parts(
        model,
        params,
        words,
        folder=target,
        draft=draft,
        gamma_max=gamma_max,
        dtype=dtype,
        weights=draft_weights,
        impl=impls[-1],
        cut_draft=cut_draft,
    )
    chosen, drafter_params = registry.build(drafter, parts)
    checks.check_pair(rows.SlotRows(model=model, num_slots=1), chosen)
    lm = LanguageModel(
        target=model,
        params=params,
        drafter=chosen,
        drafter_params=drafter_params,
        tokenizer=words,
    )
    return lm if tree is None else lm.with_tree(tree)


def drafter_parts(
    target: row_model.RowModel,
    params: params_lib.Params,
    words: tokenizer.Tokenizer,
    *,
    folder: str | pathlib.Path | None,
    draft: str | pathlib.Path | None,
    gamma_max: int,
    dtype: str | None,
    weights: str | None = None,
    impl: str | None = None,
    cut_draft: bool = False,
) -> registry.Parts:
    """Returns the parts that drafters of a target are built of; reads no draft model.

    Args:
      words: the target's tokenizer, in whose vocabulary a draft model drafts.
      folder: the target's; None: the embedded one.
      draft, gamma_max, dtype, cut_draft: as in `load`.
      weights: as `draft_weights` in `load`.
      impl: the draft model's, resolved; None: the target's.
    """
    return registry.Parts(
        gamma_max=gamma_max,
        vocab_size=target.config.vocab_size,
        load_draft=functools.partial(
            load_draft,
            _draft_folder(folder, draft),
            words,
            gamma_max=gamma_max,
            dtype=dtype,
            weights=weights,
            impl=impl or target.impl,
            cache=target.cache,
            vocab_size=target.config.vocab_size,
            layout=target.layout,
            is_cut=cut_draft,
        ),
        target=target,
        target_params=params,
        draft=None if draft is None else pathlib.Path(draft),
        has_draft=_draft_folder(folder, draft) is not None,
        heads=heads_for(folder),
        dtype=dtype,
        weights=weights,
    )


def _draft_folder(
    target: str | pathlib.Path | None, draft: str | pathlib.Path | None
) -> str | pathlib.Path | None:
    """Returns the folder of a target's draft model, named or embedded, if any."""
    return EMBEDDED_DRAFT if target is None and draft is None else draft


def _agreed(
    target: pathlib.Path,
    draft: str | pathlib.Path | None,
    words: tokenizer.Tokenizer,
    *,
    dtype: str | None,
    forms: tuple[str | None, str | None],
    impl: Impl,
) -> tuple[list[str], int | None]:
    """Returns the implementation of each model, and how many entries of their
    vocabularies are loaded: see `entries`.

    Args:
      draft: the draft model, if any.
      forms: the forms of the target's and the drafter's weights.
    """
    resolved = dispatch.resolve(impl)
    impls: list[str] = []
    shared: list[config_lib.ModelConfig] = []
    folders = [target] if draft is None else [target, hub.locate(draft)]
    for folder, form in zip(folders, forms, strict=False):
        config = config_lib.read(folder / "config.json", dtype=dtype, weights=form)
        impls.append(families.runnable(config, resolved, is_named=impl != "auto"))
        own = words if folder is target else tokenizer.load(folder)
        if own.fingerprint == words.fingerprint:
            shared.append(config)
    return impls, entries(words, shared)


def heads_for(target: str | pathlib.Path | None) -> pathlib.Path | None:
    """Returns the folder of the heads shipped for a target; None: there are none.

    Args:
      target: as in `load`.
    """
    homes = {hub.cache() / file: ASSETS / name for name, file in hub.FETCHED.items()}
    path = hub.locate(EMBEDDED_TARGET if target is None else target).resolve()
    for model, heads in {EMBEDDED_TARGET: ASSETS, **homes}.items():
        if path == model.resolve() and heads.is_dir():
            return heads
    return None


def default_drafter(
    target: str | pathlib.Path | None, draft: str | pathlib.Path | None
) -> str:
    """Returns the drafter that "auto" stands for in `load`."""
    return registry.default_name(_draft_folder(target, draft), heads_for(target))


def lacks_draft(
    drafter: str, target: str | pathlib.Path | None, draft: str | pathlib.Path | None
) -> bool:
    """Returns whether a drafter needs a draft model or a head, and neither exists."""
    if drafter not in registry.NEED_DRAFT or _draft_folder(target, draft) is not None:
        return False
    return drafter not in registry.TAKE_HEAD or not registry.shipped(heads_for(target))


def entries(
    words: tokenizer.Tokenizer, configs: Sequence[config_lib.ModelConfig]
) -> int | None:
    """Returns how many entries of a pair's vocabularies are loaded; None: all of both.

    Padding is left out if the models' differ, or if a family does not keep it.
    """
    is_kept = all(families.of(config).keeps_padding for config in configs)
    if is_kept and len({config.vocab_size for config in configs}) == 1:
        return None
    return words.num_ids


def load_draft(
    folder: str | pathlib.Path | None,
    target_tokenizer: tokenizer.Tokenizer,
    *,
    gamma_max: int,
    impl: str,
    vocab_size: int | None = None,
    layout: shard.Layout | None = None,
    is_cut: bool = False,
    **how: Any,
) -> tuple[draft_model.DraftModel, params_lib.Params]:
    """Reads a draft model, which drafts as its target samples; raises as `load`.

    Args:
      target_tokenizer: in whose vocabulary it drafts; if its own is another one, it
        drafts the tokens that both have.
      impl: a resolved implementation.
      vocab_size: entries that are loaded, see `model.load.load`.
      layout: of the target; each of its devices has the whole draft model, unless
        `is_cut` shares it out as the target is.
      **how: dtype, weights and cache, as `load` takes them of a target.
    """
    if folder is None:
        raise ValueError(
            "the drafter needs a draft model, and none is given: name its folder as "
            "`draft`, or take a drafter without one, such as 'ngram'"
        )
    folder = hub.locate(folder)
    words = tokenizer.load(folder)
    is_same = words.fingerprint == target_tokenizer.fingerprint
    params: Any
    model, params = _load_rows(
        folder,
        impl=impl,
        slab=DRAFT_SLAB,
        vocab_size=vocab_size if is_same else words.num_ids,
        layout=layout if is_cut else None,
        **how,
    )
    if not is_same:
        model, params = translated.translate(
            model,
            params,
            words,
            target_tokenizer,
            vocab_size=vocab_size or target_tokenizer.num_ids,
        )
    if layout is not None and not is_cut:
        params = jax.tree.map(layout.replicated, params)
    drafter = draft_model.DraftModel(
        model=model,
        gamma_max=gamma_max,
        # More rows for one read of the weights, where more of them cost nothing.
        catch_up_rows=row_model.NATIVE_PREFILL_SLAB if impl == "native" else 0,
    )
    return drafter, params


def _load_rows(
    folder: pathlib.Path,
    *,
    impl: str,
    slab: int,
    layout: shard.Layout | None,
    cache: row_model.CacheKind = "paged",
    **how: Any,
) -> tuple[row_model.RowModel, params_lib.Params]:
    """Reads a model that runs slabs of `slab` rows, or of as many as `impl` takes.

    Args:
      **how: the other arguments of `model.load.load`.
    """
    config, params = load_lib.load(folder, impl=impl, layout=layout, **how)
    height = row_model.slab_for(impl, slab)
    model = row_model.RowModel(
        config=config, impl=impl, slab=height, cache=cache, layout=layout
    )
    return model, params
