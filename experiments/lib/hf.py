"""Hugging Face's ways to generate, on torch, with drafts counted as ours are.

The only file of the experiments that imports torch and transformers, and it does so
when they are needed: they are an extra, and importing them starts thread pools.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.lib import processes
from spec_jax.analysis import metrics


INSTALL = "pip install -e '.[oracle]'"

PLAIN, DRAFT_MODEL, PROMPT_LOOKUP = "plain", "draft model", "prompt lookup"

METHODS = (DRAFT_MODEL, PROMPT_LOOKUP)
"""Where Hugging Face's drafts can come from."""

MATCHED_NGRAM = 2
"""Tokens that prompt lookup matches at most: the library's own default, said aloud."""

_MODULES = ("torch", "transformers")
_HOOK = "_get_candidate_generator"
_DEVICES = {"cpu": "cpu", "gpu": "cuda"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """Models of Hugging Face, ready to generate."""

    target: Any  # a causal language model
    draft: Any  # the assistant, where there is one
    description: dict[str, Any]  # versions and threads, for the rows of the results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What one generation produced, on either side."""

    # Generated, without the prompt; the stop token, if any, is the last
    tokens: list[int]
    counters: metrics.Counters | None  # of the drafts; None for autoregressive decoding
    nonfinite: int = 0  # tokens chosen from logits that are not finite, on our side


def check_installed() -> None:
    """Raises `ValueError` if a library that is needed is missing."""
    lacking = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError(
            f"{' and '.join(lacking)} not installed; {INSTALL} brings them"
        )


def load(
    target: pathlib.Path,
    draft: pathlib.Path | None,
    *,
    dtype: str,
    backend: str = "cpu",
) -> Baseline:
    """Loads the folders in `dtype`; torch computes on all cores of this process.

    Args:
      backend: JAX's, "cpu" or "gpu": torch takes the same.
    """
    wait_policy = _import()
    _check_device(backend)

    def load_model(folder: pathlib.Path) -> Any:
        import torch
        import transformers

        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True
            )
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{folder}: transformers cannot load it: {error}"
            ) from None
        return model.to(_DEVICES[backend])

    draft_model = None if draft is None else load_model(draft)
    return _baseline(load_model(target), draft_model, wait_policy)


def _import() -> str | None:
    """Imports torch and transformers; returns the policy of OpenMP's threads."""
    # Threads of OpenMP spin for a while when their work is done, unless told to
    # sleep: they would take the cores from JAX, and from each other where there are
    # more threads than free cores. It is read once, when torch is loaded.
    wait_policy = None
    if "torch" not in sys.modules:
        wait_policy = os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(processes.usable_cores())
    # None: torch had been loaded by the caller, and the policy is unknown.
    return wait_policy


def _check_device(backend: str) -> None:
    """Raises `ValueError` where torch lacks the device on which JAX computes."""
    import torch

    if backend == "cpu" or (backend == "gpu" and torch.cuda.is_available()):
        return
    raise ValueError(
        f"JAX computes on {backend!r} and torch {torch.__version__} finds no such "
        "device; set JAX_PLATFORMS=cpu, or install a torch that has it"
    )


def _baseline(target: Any, draft: Any, wait_policy: str | None) -> Baseline:
    """The models, decoding greedily and drafting as much as they are told."""
    import torch
    import transformers

    for model in (target, draft):
        if model is not None:
            # In the place of the folder's own, which may sample or stop.
            model.generation_config = transformers.GenerationConfig(do_sample=False)
            model.eval().requires_grad_(False)
    if draft is not None:
        # The assistant's own settings decide how much is drafted. Its confidence
        # would end a draft early.
        settings = draft.generation_config
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
    if not hasattr(target, _HOOK):
        raise ValueError(
            f"transformers {transformers.__version__} has no {_HOOK}, at which drafts "
            f"are counted; {INSTALL} brings a version that has it"
        )
    return Baseline(
        target=target,
        draft=draft,
        description={
            "torch_version": torch.__version__,
            "transformers_version": transformers.__version__,
            "torch_num_threads": torch.get_num_threads(),
            "omp_wait_policy": wait_policy,
        },
    )


def generate(
    baseline: Baseline,
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
    counters = counters_of(drafts, gamma_max=gamma, tokens=len(tokens))
    return Generated(tokens=tokens, counters=counters)


def counters_of(
    rounds: Sequence[tuple[int, int]], *, gamma_max: int, tokens: int
) -> metrics.Counters:
    """Returns our counters of rounds of assisted generation.

    Args:
      rounds: of each round, the tokens drafted and those kept, before a stop token
        cuts.
      gamma_max: the most that a round may draft.
      tokens: generated in all rounds, after the cut.

    Raises:
      metrics.IdentityError: numbers that contradict each other.
    """
    kept = [matches for _, matches in rounds]
    at = tuple(sum(n > i for n in kept) for i in range(gamma_max))
    counters = metrics.Counters(
        tokens=tokens,
        rounds=len(rounds),
        proposed=sum(drafted for drafted, _ in rounds),
        accepted=sum(kept),
        cut=sum(kept) + len(rounds) - tokens,
        accepted_hist=tuple(kept.count(n) for n in range(gamma_max + 1)),
        proposed_at=tuple(
            sum(drafted > i and matches >= i for drafted, matches in rounds)
            for i in range(gamma_max)
        ),
        accepted_at=at,
        kept_by_rank=at,  # A chain's drafts are kept in their order.
    )
    metrics.identities(counters)
    return counters


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
