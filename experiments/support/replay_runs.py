"""Drafters on traces: built without the target, and replayed prompt by prompt."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from experiments.support import (
    drafters,
    model_pair,
    paired_runs,
    policies,
    traces,
)
from spec_jax import replay, rounds, session
from spec_jax.analysis import metrics
from spec_jax.drafters import draft_model, oracle
from spec_jax.engine import protocols
from spec_jax.model import tokenizer
from spec_jax.ops import dispatch
from spec_jax.paging import index
from spec_jax.rules import acceptance, sampling


CONSTANT = policies.Chosen()
"""No policy: the same gamma in every round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """One prompt, as replay counts it.

    Attributes:
      num_forwards: verifications by their live rows, `[slab + 1]`: what the target
        would have computed.
    """

    counters: metrics.Counters
    num_forwards: np.ndarray


def sampling_of(header: traces.Header) -> sampling.SamplingSettings | None:
    """How the target drew; None is greedy.

    Raises:
      ValueError: a value outside its range.
    """
    settings = sampling.make_settings(
        **{name: getattr(header, name) for name in traces.SAMPLING}
    )
    return None if header.temperature == 0 else settings


def capacity_of(header: traces.Header, prompts: Sequence[traces.PromptTrace]) -> int:
    """Positions of a cache that fits the longest prompt: whole pages."""
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    pages = index.pages_for(longest + header.gen_tokens, header.page_size)
    return pages * header.page_size


def build(
    names: Sequence[str],
    header: traces.Header,
    draft: pathlib.Path,
    *,
    gamma_max: int,
    min_confidence: float = 0.0,
) -> dict[str, drafters.Drafting]:
    """The drafters of those names for these traces, as a live run has them.

    The draft's weights are read once, if a drafter uses them; the target's never.

    Args:
      draft: Hugging Face folder of the draft model.
      min_confidence: of the draft model, see `draft_model.DraftModel`.

    Raises:
      ValueError: an unknown name, a folder that cannot be used, a draft of another
        vocabulary, or a confidence outside `[0, 1]`.
      NotImplementedError: an implementation that cannot run here.
    """
    sizes = {"gamma_max": gamma_max, "min_confidence": min_confidence}
    parts = drafters.Parts(
        gamma_max=gamma_max,
        vocab_size=header.vocab_size,
        load_draft=functools.cache(lambda: _load_draft(header, draft, **sizes)),
    )
    return {name: drafters.build(name, parts) for name in names}


def _load_draft(
    header: traces.Header,
    folder: pathlib.Path,
    *,
    gamma_max: int,
    min_confidence: float,
) -> tuple[draft_model.DraftModel, draft_model.DraftParams]:
    """The draft model of a folder; it draws as the target does, with its noise."""
    drafter, params = model_pair.load_draft(
        folder,
        gamma_max=gamma_max,
        dtype=header.dtype,
        impl=dispatch.resolve(header.impl),
        min_confidence=min_confidence,
        settings=sampling_of(header),
    )
    vocabulary = tokenizer.load(folder).fingerprint
    ours = {"vocabulary": vocabulary, "vocab_size": drafter.vocab_size}
    changes = header.changes(ours)
    if changes:
        raise ValueError(
            f"{folder}: a draft of another vocabulary than that of the traces "
            f"({'; '.join(changes)}); give the --draft that goes with {header.target}"
        )
    return drafter, params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayer:
    """A drafter on traces.

    Attributes:
      params: the drafter's.
      capacity: positions of all caches.
      page_size: positions per page of the drafter's.
      stop_ids: at which the rounds end.
    """

    drafter: protocols.Drafter
    params: protocols.Params
    slab: int
    capacity: int
    page_size: int
    stop_ids: tuple[int, ...]

    def run(
        self,
        prompt: traces.PromptTrace,
        *,
        gamma: int,
        chosen: policies.Chosen = CONSTANT,
    ) -> Replayed:
        """Replays one prompt, with a policy that chooses gammas up to `gamma`.

        Raises:
          ValueError: as `replay.make_trace` and `replay.begin`, or a gamma that the
            drafter does not have.
        """
        session.check_gamma(gamma, self.drafter.gamma_max)
        target = replay.TraceTarget(slab=self.slab)
        trace = replay.make_trace(prompt.text, size=self.capacity + 1)
        params = trace, self._params_of(prompt)
        state = replay.begin(
            target,
            self.drafter,
            params,
            target.new_cache(capacity=self.capacity),
            self.drafter.init(capacity=self.capacity, page_size=self.page_size),
            prompt.prompt_ids,
            max_tokens=len(prompt.generated_ids),
            policy=chosen.state,
        )
        state = rounds.generate(
            target,
            self.drafter,
            params,
            state,
            gamma=jnp.int32(gamma),
            stop_ids=session.stop_array(self.stop_ids),
            max_rounds=jnp.int32(len(prompt.generated_ids)),
            gamma_policy=chosen.gamma_policy,
        )
        num_tokens = int(state.length) - len(prompt.prompt_ids)
        return Replayed(
            counters=paired_runs.count(state, num_tokens),
            num_forwards=np.asarray(state.cache.num_forwards),
        )

    def _params_of(self, prompt: traces.PromptTrace) -> protocols.Params:
        """The drafter's parameters; an oracle's are those of the prompt."""
        if not isinstance(self.drafter, oracle.Oracle):
            return self.params
        # What a live oracle is told: the text of plain decoding, to its stop token.
        known = [*prompt.prompt_ids, *prompt.until_stop(self.stop_ids)]
        room = self.capacity + 1 - len(known)
        return oracle.make_trace(known + [acceptance.PAD] * room)
