"""Drafters by the name that a command line gives them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from spec_jax.drafters import draft_model, hybrid, ngram, oracle, suffix
from spec_jax.engine import protocols


Drafting = tuple[protocols.Drafter, Any]
"""A drafter, and its parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What drafters are made of.

    Attributes:
      vocab_size: of the target.
      load_draft: the draft model and its weights, read when asked for.
    """

    gamma_max: int
    vocab_size: int
    load_draft: Callable[[], tuple[draft_model.DraftModel, draft_model.DraftParams]]


def _draft_model(parts: Parts) -> Drafting:
    return parts.load_draft()


def _ngram(parts: Parts) -> Drafting:
    return ngram.PromptLookup(gamma_max=parts.gamma_max), None


def _suffix(parts: Parts) -> Drafting:
    """Of the sequence itself: a prompt that is repeated must not find its answer."""
    return suffix.SuffixDecoding(gamma_max=parts.gamma_max), suffix.empty_corpus(1)


def _hybrid(parts: Parts) -> Drafting:
    draft, draft_params = parts.load_draft()
    statistics, corpus = _suffix(parts)
    drafter = hybrid.Hybrid(suffix=statistics, draft=draft)
    return drafter, hybrid.HybridParams(draft=draft_params, corpus=corpus)


def _oracle(parts: Parts) -> Drafting:
    """Without a trace: each prompt has its own, see `paired_runs`."""
    drafter = oracle.Oracle(gamma_max=parts.gamma_max, vocab_size=parts.vocab_size)
    return drafter, None


DRAFTERS: Mapping[str, Callable[[Parts], Drafting]] = {
    "draft-model": _draft_model,  # a small model of the same family, and its weights
    "ngram": _ngram,  # prompt lookup; no parameters
    "suffix": _suffix,  # suffix statistics, and an empty corpus
    "hybrid": _hybrid,  # suffix where it is sure, otherwise the draft model; both
    "oracle": _oracle,  # what plain decoding writes, as a ceiling; a trace per prompt
}
"""How each drafter is built, with its parameters."""


def build(name: str, parts: Parts) -> Drafting:
    """The drafter of that name, and its parameters; raises as `parts.load_draft`.

    Raises:
      ValueError: a name that is not in `DRAFTERS`.
    """
    if name not in DRAFTERS:
        raise ValueError(f"drafter {name!r} is not one of {', '.join(DRAFTERS)}")
    return DRAFTERS[name](parts)
