"""The baseline: Hugging Face's greedy and assisted generation, on torch.

The only file of the experiments that imports torch and transformers, and it does so
when `load` is called: they are an extra, and importing them starts thread pools.
"""

import dataclasses
import importlib.util
import os
import pathlib
import sys
from typing import Any


INSTALL = "pip install -e '.[oracle]'"
_MODULES = ("torch", "transformers")


def missing() -> list[str]:
    """The modules that are needed and not installed."""
    return [name for name in _MODULES if importlib.util.find_spec(name) is None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """Models of Hugging Face, ready to generate.

    Attributes:
      target: a causal language model.
      draft: the assistant, where there is one.
      description: versions and threads, for the rows of the results.
    """

    target: Any
    draft: Any
    description: dict[str, Any]

    def generate(
        self, prompt: list[int], num_tokens: int, *, assisted: bool = False
    ) -> list[int]:
        """Exactly `num_tokens` greedy tokens after the prompt; no token stops it."""
        import torch

        ids = torch.tensor([prompt])
        options = {"assistant_model": self.draft} if assisted else {}
        with torch.inference_mode():
            output = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                **options,
            )
        return output[0, len(prompt) :].tolist()


def load(
    target: pathlib.Path, draft: pathlib.Path | None, *, dtype: str, gamma: int
) -> Baseline:
    """Loads the folders in `dtype`; torch computes on all cores of this process.

    Args:
      gamma: tokens that the draft proposes a round, always.

    Raises:
      ValueError: a folder that transformers does not take.
    """
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
    torch.set_num_threads(_num_cores())

    def load_model(folder: pathlib.Path) -> transformers.PreTrainedModel:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True
            )
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{folder}: transformers cannot load it: {error}"
            ) from None
        # In the place of the folder's own, which may sample or stop.
        model.generation_config = transformers.GenerationConfig(do_sample=False)
        return model.eval()

    draft_model = None
    if draft is not None:
        draft_model = load_model(draft)
        # The assistant's own settings decide how much is drafted. Its confidence
        # would end a draft early.
        settings = draft_model.generation_config
        settings.num_assistant_tokens = gamma
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
    return Baseline(
        target=load_model(target),
        draft=draft_model,
        description={
            "torch_version": torch.__version__,
            "transformers_version": transformers.__version__,
            "torch_num_threads": torch.get_num_threads(),
            # None: torch had been loaded by the caller, and the policy is unknown.
            "omp_wait_policy": wait_policy,
        },
    )


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
