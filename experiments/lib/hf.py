"""Hugging Face's ways to generate, on torch.

The only file of the experiments that imports torch and transformers, and it does so
when they are needed: they are an extra, and importing them starts thread pools.
"""

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.lib import processes


PLAIN, DRAFT_MODEL, PROMPT_LOOKUP = "plain", "draft model", "prompt lookup"

MATCHED_NGRAM = 2
"""Most tokens that prompt lookup matches: the library's own default, made explicit."""

_DEVICES = {"cpu": "cpu", "gpu": "cuda"}


class Baseline(NamedTuple):
    """Models of Hugging Face, ready to generate."""

    target: Any  # a causal language model
    draft: Any  # the assistant, where there is one
    description: dict[str, Any]  # versions and threads, for the rows of the results


def load(
    target: pathlib.Path,
    draft: pathlib.Path | None,
    *,
    dtype: str,
    backend: str = "cpu",
) -> Baseline:
    """Loads the folders in `dtype`; torch computes on all cores of this process.

    The models decode greedily, and draft as many tokens as they are told.

    Args:
      backend: JAX's, "cpu" or "gpu": torch takes the same.

    Raises:
      ValueError: a folder that transformers cannot load, or a device that torch lacks.
    """
    # Threads of OpenMP spin for a while when their work is done, unless told to
    # sleep: they would take the cores from JAX, and from each other where there are
    # more threads than free cores. torch reads the variable once, when it is loaded.
    wait_policy = None
    if "torch" not in sys.modules:
        wait_policy = os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(processes.usable_cores())
    if backend == "gpu" and not torch.cuda.is_available():
        raise ValueError(
            f"JAX computes on {backend!r} and torch {torch.__version__} finds no such "
            "device; set JAX_PLATFORMS=cpu, or install a torch that has it"
        )

    how = {"dtype": getattr(torch, dtype), "device": _DEVICES[backend]}
    assistant = draft and _model(draft, **how)
    if assistant is not None:
        # The assistant's own settings decide how much is drafted. Its confidence
        # would end a draft early.
        settings = assistant.generation_config
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
    return Baseline(
        target=_model(target, **how),
        draft=assistant,
        description={
            "torch_version": torch.__version__,
            "transformers_version": transformers.__version__,
            "torch_num_threads": torch.get_num_threads(),
            "omp_wait_policy": wait_policy,
        },
    )


def _model(folder: pathlib.Path, *, dtype: Any, device: str) -> Any:
    """Loads a model that decodes greedily."""
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        )
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder}: transformers cannot load it: {error}") from None
    # Replaces the folder's own settings, which may sample or stop.
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    return model.to(device).eval().requires_grad_(False)


def generate(
    baseline: Baseline,
    prompt: Sequence[int],
    *,
    method: str,
    gamma: int | None,
    max_tokens: int,
    stop_ids: Sequence[int],
) -> list[int]:
    """Returns at most `max_tokens` greedy tokens; a stop token, if any, is the last.

    Args:
      method: `PLAIN`, or the source of drafts.
      gamma: tokens drafted a round, unless `method` is `PLAIN`. The draft model ends
        a draft at a stop token, and prompt lookup proposes what it finds: both may
        draft fewer.
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
    ids = torch.tensor([list(prompt)], device=baseline.target.device)
    with torch.inference_mode():
        output = baseline.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_ids) or None,
            **options,
        )
    return output[0, len(prompt) :].tolist()
