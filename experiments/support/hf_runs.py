"""Hugging Face's ways to generate, with drafts counted as ours are.

Knows models of transformers and counters. Imports torch when it is called, and JAX
never: a process that measures the memory of one side must not hold the other.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.support import hf_baseline
from spec_jax import metrics


PLAIN, DRAFT_MODEL, PROMPT_LOOKUP = "plain", "draft model", "prompt lookup"

METHODS = (DRAFT_MODEL, PROMPT_LOOKUP)
"""Where Hugging Face's drafts can come from."""

MATCHED_NGRAM = 2
"""Tokens that prompt lookup matches at most: the library's own default, said aloud."""

_HOOK = "_get_candidate_generator"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What one call of `generate` produced.

    Attributes:
      tokens: generated, without the prompt; the stop token, if any, is the last.
      counters: of the drafts; None for plain decoding.
    """

    tokens: list[int]
    counters: metrics.Counters | None


def check_supported(baseline: hf_baseline.Baseline) -> None:
    """Raises `ValueError` if the drafts of this transformers cannot be counted."""
    if not hasattr(baseline.target, _HOOK):
        version = baseline.description["transformers_version"]
        raise ValueError(
            f"transformers {version} has no {_HOOK}, at which drafts are counted; "
            f"{hf_baseline.INSTALL} brings a version that has it"
        )


def move(baseline: hf_baseline.Baseline, backend: str) -> None:
    """Moves the models to the kind of device on which JAX computes.

    Args:
      backend: JAX's, "cpu" or "gpu".

    Raises:
      ValueError: torch has no such device.
    """
    import torch

    if backend == "cpu":
        return
    if backend != "gpu" or not torch.cuda.is_available():
        raise ValueError(
            f"JAX computes on {backend!r} and torch {torch.__version__} finds no such "
            "device; set JAX_PLATFORMS=cpu, or install a torch that has it"
        )
    for model in (baseline.target, baseline.draft):
        model.to("cuda")


def generate(
    baseline: hf_baseline.Baseline,
    prompt: Sequence[int],
    *,
    method: str,
    gamma: int | None,
    max_tokens: int,
    stop_ids: Sequence[int],
) -> Generated:
    """Greedy tokens after the prompt, at most `max_tokens`, with the drafts counted.

    Args:
      method: `PLAIN`, or where drafts come from.
      gamma: tokens drafted a round, unless `method` is `PLAIN`. The draft model ends
        a draft at a stop token, and prompt lookup proposes what it finds: both may
        draft fewer. What prompt lookup drafts past `max_tokens`, and then cuts, is not
        counted: our rounds do not ask for it.
      stop_ids: tokens that end the text.
    """
    import torch

    options: dict[str, Any] = {}
    if method == DRAFT_MODEL:
        # The assistant's own settings decide how much is drafted.
        baseline.draft.generation_config.num_assistant_tokens = gamma
        options["assistant_model"] = baseline.draft
    elif method == PROMPT_LOOKUP:
        options["prompt_lookup_num_tokens"] = gamma
        options["max_matching_ngram_size"] = MATCHED_NGRAM
    elif method != PLAIN:
        raise ValueError(f"{method=} is not one of {PLAIN}, {', '.join(METHODS)}")
    ids = torch.tensor([list(prompt)], device=baseline.target.device)
    with (
        torch.inference_mode(),
        _counted(baseline.target, limit=len(prompt) + max_tokens) as drafts,
    ):
        output = baseline.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_ids) or None,
            **options,
        )
    tokens = output[0, len(prompt) :].tolist()
    if method == PLAIN:
        return Generated(tokens=tokens, counters=None)
    return Generated(tokens=tokens, counters=count(drafts, len(tokens), gamma))


def count(
    drafts: Sequence[tuple[int, int]], num_tokens: int, gamma: int
) -> metrics.Counters:
    """The counters of rounds that drafted and kept so many tokens.

    As in our rounds, what is kept is counted before a stop token cuts it.

    Args:
      drafts: `(proposed, accepted)` of each round.
      num_tokens: generated in all of them, after the cut.
      gamma: the most that a round drafted.

    Raises:
      IdentityError: rounds that cannot have generated these tokens.
    """
    accepted = sum(kept for _, kept in drafts)
    counters = metrics.Counters(
        tokens=num_tokens,
        rounds=len(drafts),
        proposed=sum(proposed for proposed, _ in drafts),
        accepted=accepted,
        cut=accepted + len(drafts) - num_tokens,
        accepted_hist=tuple(
            sum(kept == length for _, kept in drafts) for length in range(gamma + 1)
        ),
        proposed_at=tuple(
            sum(i < proposed and i <= kept for proposed, kept in drafts)
            for i in range(gamma)
        ),
        accepted_at=tuple(sum(i < kept for _, kept in drafts) for i in range(gamma)),
    )
    metrics.identities(counters)
    return counters


def next_logits(baseline: hf_baseline.Baseline, tokens: Sequence[int]) -> list[float]:
    """The target's logits after `tokens`, from one forward of all of them."""
    import torch

    ids = torch.tensor([list(tokens)], device=baseline.target.device)
    with torch.inference_mode():
        return baseline.target(ids).logits[0, -1].float().tolist()


@contextlib.contextmanager
def _counted(model: Any, *, limit: int) -> Iterator[list[tuple[int, int]]]:
    """Notes each round that `model` drafts: tokens proposed, and accepted.

    Args:
      limit: tokens of the longest text. The last one of a round is the target's own.
    """
    drafts: list[tuple[int, int]] = []
    make = getattr(model, _HOOK)

    def make_counting(*arguments: Any, **keywords: Any) -> _CountingGenerator:
        return _CountingGenerator(make(*arguments, **keywords), drafts, limit)

    setattr(model, _HOOK, make_counting)
    try:
        yield drafts
    finally:
        # The class's own method shows again.
        delattr(model, _HOOK)


class _CountingGenerator:
    """A candidate generator that counts; all else is that of the one it wraps."""

    def __init__(self, wrapped: Any, drafts: list[tuple[int, int]], limit: int):
        self._wrapped = wrapped
        self._drafts = drafts
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def get_candidates(self, input_ids: Any, **keywords: Any) -> tuple[Any, Any]:
        """The wrapped generator's candidates: the text with the draft after it."""
        candidates, logits = self._wrapped.get_candidates(input_ids, **keywords)
        self._draft = candidates[0, input_ids.shape[1] : self._limit - 1]
        return candidates, logits

    def update_candidate_strategy(
        self, input_ids: Any, scores: Any, num_matches: int
    ) -> None:
        """Called once a round, with the target's scores after each candidate."""
        proposed = len(self._draft)
        # `num_matches` is what is left after a stop token or the limit cut it.
        is_kept = scores[0, :proposed].argmax(-1) == self._draft
        self._drafts.append((proposed, int(is_kept.long().cumprod(0).sum())))
        self._wrapped.update_candidate_strategy(input_ids, scores, num_matches)
