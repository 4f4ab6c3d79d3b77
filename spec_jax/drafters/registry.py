"""Drafters by name: the built-in ones, and those of other packages.

A name stands for a builder, which takes `Parts` and returns a drafter and its
parameters. Other packages register under the entry point group `spec_jax.drafters`, or
are named as `package.module:Name`; what is found there may be a drafter, a class or
function that makes one of keywords named like fields of `Parts`, or a builder whose
only parameter is `parts`.
"""

import dataclasses
import functools
import importlib
import inspect
import pathlib
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax

from spec_jax.drafters import (
    block,
    choice,
    draft_model,
    eagle3,
    features,
    hybrid,
    ngram,
    oracle,
    suffix,
)
from spec_jax.engine import protocols
from spec_jax.model import (
    block_dialects,
    eagle3_files,
    head_dialects,
    load_shards,
    params as params_lib,
    row_model,
)
from spec_jax.ops import dispatch


ENTRY_POINTS = "spec_jax.drafters"
"""The entry point group of drafters from other packages."""

Built = tuple[Any, Any]
"""A drafter, for one sequence or with a form for slots, and its parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The inputs from which drafters are built.

    Attributes:
      gamma_max: the most tokens of a proposal.
      vocab_size: of the target.
      load_draft: reads the draft model and its weights, when it is called.
      target, target_params: for drafters that read the target's features; None where
        there is no target, as in a replay.
      draft: the folder that was named for the drafter's weights, if one was.
      has_draft: whether `load_draft` has a draft model, named or shipped.
      heads: the folder with the heads that are shipped for the target, each in a
        folder of its drafter's name; None: no heads are shipped for it.
      dtype: the one that was asked for; None: the one of each folder.
      weights: the form of the drafter's weights, likewise.
    """

    gamma_max: int
    vocab_size: int
    load_draft: Callable[[], tuple[draft_model.DraftModel, params_lib.Params]]
    target: row_model.RowModel | None = None
    target_params: params_lib.Params | None = None
    draft: pathlib.Path | None = None
    has_draft: bool = True
    heads: pathlib.Path | None = None
    dtype: str | None = None
    weights: str | None = None

    @property
    def impl(self) -> str:
        """The target's implementation, for look-ups; XLA on a mesh; else the best."""
        if self.target is None:
            return dispatch.resolve("auto")
        return self.target.cache_impl


def _suffix(parts: Parts) -> Built:
    """Starts without a corpus: a prompt that is repeated must not find its answer."""
    statistics = suffix.SuffixDecoding(gamma_max=parts.gamma_max, impl=parts.impl)
    return statistics, suffix.empty_corpus(1)


def _drafting(parts: Parts) -> Built:
    """Builds a named head, else the draft model; without one, a shipped head."""
    kind = "draft-model"
    if parts.draft is not None and is_head(parts.draft):
        kind = kind_of(parts.draft)
    elif not parts.has_draft:
        kind = next(iter(shipped(parts.heads)), kind)
    return BUILDERS[kind](parts)


def _hybrid(parts: Parts) -> Built:
    draft, draft_params = _drafting(parts)
    statistics = suffix.SuffixDecoding(
        gamma_max=draft.gamma_max, match_min=hybrid.MATCH_MIN, impl=parts.impl
    )
    drafter = hybrid.Hybrid(suffix=statistics, draft=draft)
    params = hybrid.HybridParams(draft=draft_params, corpus=suffix.empty_corpus(1))
    return drafter, params


def _choice(parts: Parts) -> Built:
    draft, draft_params = _drafting(parts)
    parts = dataclasses.replace(parts, gamma_max=draft.gamma_max)
    statistics, corpus = _suffix(parts)
    drafter = choice.Choice(members=(statistics, draft))
    return drafter, choice.params_of(drafter, (corpus, draft_params))


def _oracle(parts: Parts) -> Built:
    """Makes an oracle without a trace: each request brings its own."""
    return oracle.Oracle(gamma_max=parts.gamma_max, vocab_size=parts.vocab_size), None


HEADS: Mapping[str, type[features.FeatureDrafter]] = {
    "eagle3": eagle3.Eagle3,
    "dflash": block.BlockDrafter,
    "dspark": block.BlockDrafter,
}


def _head(name: str, parts: Parts) -> Built:
    """Loads a head from a folder, with the target whose features it reads."""
    if parts.target is None or parts.target_params is None:
        raise ValueError(
            f"drafter {name!r} reads the features of a target, and none runs here: "
            "take a drafter that reads tokens alone, such as 'draft-model'"
        )
    layout, target_params = parts.target.layout, parts.target_params
    if layout is not None:
        target_params = load_shards.with_whole_head(
            target_params, parts.target.config, layout
        )
    drafter, params = HEADS[name].load(
        shipped_head(name, parts.heads) if parts.draft is None else parts.draft,
        parts.target,
        target_params,
        gamma_max=parts.gamma_max,
        dtype=parts.dtype,
        weights=parts.weights,
    )
    kind = getattr(drafter, "kind", name)
    if kind != name:
        raise ValueError(
            f"drafter {name!r}, but {parts.draft or 'the shipped head'} is of "
            f"{kind!r}: name that one"
        )
    if layout is not None:  # The features that it reads are on every device.
        params = jax.tree.map(layout.replicated, params)
    return drafter, params


BUILDERS: Mapping[str, Callable[[Parts], Built]] = {
    "draft-model": lambda parts: parts.load_draft(),  # a small model of the same family
    # Prompt lookup; no parameters.
    "ngram": lambda parts: (ngram.PromptLookup(gamma_max=parts.gamma_max), None),
    "suffix": _suffix,  # suffix statistics, and an empty corpus
    "hybrid": _hybrid,  # suffix where its match is long, otherwise a model or a head
    "choice": _choice,  # either of the two, by what this text keeps of each
    # Heads that read the target's features.
    **{name: functools.partial(_head, name) for name in HEADS},
    "oracle": _oracle,  # what decoding writes, as a ceiling; a trace a request
}
"""The builder of each built-in drafter."""


NEED_TARGET = tuple(HEADS)
"""Drafters that read a target while it runs, and cannot be replayed without it."""

NEED_DRAFT = ("draft-model", "hybrid", "choice")
"""Drafters that load a draft model, which is shipped for the embedded target alone;
one of `TAKE_HEAD` takes a head in its place, named or shipped."""

TAKE_HEAD = ("hybrid", "choice")
"""Drafters that look up, and ask a head or a draft model besides."""

NEED_NOTHING = ("ngram", "suffix", "oracle")
"""Drafters without weights."""

ARCHITECTURES = (*eagle3_files.ARCHITECTURES, *block_dialects.ARCHITECTURES)
"""Values of `architectures` in the `config.json` of drafters."""


def is_folder(name: str) -> bool:
    """Returns whether a drafter is named by a folder of its weights."""
    return (pathlib.Path(name) / "config.json").is_file()


def is_head(folder: str | pathlib.Path) -> bool:
    """Returns whether a folder has a head that reads the target."""
    try:
        return kind_of(folder) in NEED_TARGET
    except ValueError:
        return False


def shipped_head(drafter: str, heads: pathlib.Path | None) -> pathlib.Path:
    """Returns the folder of the head that is shipped for a target.

    Args:
      drafter: one of `NEED_TARGET`.
      heads: as in `Parts`.

    Raises:
      ValueError: no such head is shipped for this target.
    """
    if heads is not None and drafter in shipped(heads):
        return heads / drafter
    raise ValueError(
        f"drafter {drafter!r} needs a head, and none is given nor shipped for this "
        "target: name a folder as `draft`, or in place of the drafter"
    )


def shipped(heads: pathlib.Path | None) -> tuple[str, ...]:
    """Returns the drafters whose heads are shipped for a target.

    Args:
      heads: as in `Parts`.
    """
    return tuple(n for n in NEED_TARGET if heads and is_folder(str(heads / n)))


def default_name(draft: str | pathlib.Path | None, heads: pathlib.Path | None) -> str:
    """Returns the drafter that "auto" stands for.

    It is the one of `draft`; else a head that is shipped for the target, in a hybrid
    with suffix lookup, which keeps more at no cost; else prompt lookup.

    Args:
      draft: the folder that was named for the drafter's weights, if one was.
      heads: as in `Parts`.
    """
    if draft is not None:
        return kind_of(draft) if is_head(draft) else "draft-model"
    return "hybrid" if shipped(heads) else "ngram"


def reads_target(drafter: str, draft: str | pathlib.Path | None) -> bool:
    """Returns whether a drafter of this name, with this draft, reads a target; shipped
    heads, which drafters of `TAKE_HEAD` may take, do not count."""
    if drafter in TAKE_HEAD:
        return draft is not None and is_head(draft)
    return drafter in NEED_TARGET or is_folder(drafter)


def names() -> tuple[str, ...]:
    """Returns all names that `build` knows, the built-in ones first."""
    others = {point.name for point in metadata.entry_points(group=ENTRY_POINTS)}
    return (*BUILDERS, *sorted(others - set(BUILDERS)))


def build(drafter: str | protocols.Drafter, parts: Parts) -> Built:
    """Returns a drafter and its parameters.

    Args:
      drafter: one of `names()`, `package.module:Name`, a folder with the weights of a
        head, or a drafter without parameters.

    Raises:
      ValueError: an unknown name, or what it names is not a drafter.
    """
    if not isinstance(drafter, str):
        return _check(drafter, type(drafter).__name__), None
    if drafter in BUILDERS:
        return BUILDERS[drafter](parts)
    if is_folder(drafter):
        parts = dataclasses.replace(parts, draft=pathlib.Path(drafter))
        return BUILDERS[kind_of(drafter)](parts)
    return _from_outside(drafter, _find(drafter), parts)


def kind_of(folder: str | pathlib.Path) -> str:
    """Returns the drafter whose weights a folder has; raises `ValueError`."""
    path = pathlib.Path(folder) / "config.json"
    raw = head_dialects.read_object(path)
    match raw.get("architectures"):
        case [str(name)] if name in eagle3_files.ARCHITECTURES:
            return "eagle3"
        case [str(name)] if name in block_dialects.ARCHITECTURES:
            return block_dialects.kind_of(raw)
        case found:
            raise ValueError(
                f"{path}: architectures={found!r} is no head that drafts, of which "
                f"these are known: {', '.join(ARCHITECTURES)}; a draft model is named "
                "as `draft`"
            )


def _find(name: str) -> Any:
    """Returns what an entry point or `package.module:Name` names."""
    try:
        for point in metadata.entry_points(group=ENTRY_POINTS):
            if point.name == name:
                return point.load()
        module, colon, attribute = name.partition(":")
        if colon and module and attribute:
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"drafter {name!r}: {error}") from None
    raise ValueError(
        f"drafter {name!r} is not one of {', '.join(names())}, nor written as "
        "package.module:Name, nor a folder with a config.json"
    )


def _from_outside(name: str, found: Any, parts: Parts) -> Built:
    """Makes a drafter of what a name stands for."""
    if not (isinstance(found, type) or inspect.isroutine(found)):
        return _check(found, name), None
    signature = inspect.signature(found)
    parameters = signature.parameters
    if [*parameters] == ["parts"]:
        made = found(parts)
    else:
        known = sorted(field.name for field in dataclasses.fields(parts))
        given = {key: getattr(parts, key) for key in known if key in parameters}
        try:
            signature.bind(**given)
        except TypeError as error:
            raise ValueError(
                f"drafter {name!r}: {error}, which is not one of {', '.join(known)}: "
                "give it a default, or name a function of `parts` that returns "
                "(drafter, params)"
            ) from None
        made = found(**given)
    drafter, params = made if isinstance(made, tuple) else (made, None)
    return _check(drafter, name), params


def _check(drafter: Any, name: str) -> protocols.Drafter:
    """Returns the drafter, or says what it lacks."""
    needed: tuple[str, ...] = ("gamma_max", "init", "prefill", "propose", "commit")
    if isinstance(drafter, protocols.Drafter):
        needed = ("gamma_max", "propose")
    if protocols.has_own(drafter, "for_slots"):
        needed = ("gamma_max",)
    missing = [name for name in needed if not protocols.has_own(drafter, name)]
    if missing:
        raise ValueError(
            f"drafter {name!r} is no drafter: it has no {', '.join(missing)} "
            "(engine.protocols.Drafter)"
        )
    return drafter
