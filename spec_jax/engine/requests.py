"""Requests: sequences to generate, how each is drawn, and what became of them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.engine import checks, protocols, state as states
from spec_jax.processors import processor as processor_lib
from spec_jax.rules import settings as settings_lib
from spec_jax.typing import check_whole


Sampling = settings_lib.Sampling

Draws = (
    Sampling
    | settings_lib.SamplingSettings
    | Sequence[Sampling | settings_lib.SamplingSettings]
    | None
)
"""One for all prompts or one for each, made by hand or by `make_settings`; None:
greedy."""

Processors = processor_lib.Processor | Sequence[processor_lib.Processor] | None
"""One for all prompts or one for each; None: logits as they are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence to generate.

    Attributes:
      prompt: token ids.
      max_tokens: tokens to generate, at most.
      gamma: tokens to draft a round, at most; None is the drafter's `gamma_max`.
      sampling: settings by `sampling.make_settings`; None is greedy.
      processor: of the target's logits; None in all requests of a run, or in none.
      stop_ids: tokens that end the sequence; None: those of the scheduler.
      draft_params: in place of the speculator's, at prefill, where a drafter takes
        something from each request, as an oracle takes a trace.
    """

    prompt: checks.Tokens
    max_tokens: int
    gamma: int | None = None
    sampling: settings_lib.SamplingSettings | None = None
    processor: processor_lib.Processor | None = None
    stop_ids: checks.Tokens | None = None
    draft_params: protocols.Params = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A request that came to its end.

    Attributes:
      number: of the request, in the order of the queue.
      slot: the slot's last state on the host, leaves without the axis of slots.
      vocab_size: of the target; None where that is no model.
      kept: the result of the `keep` of `Scheduler.run`.
      shared: tokens of the prompt whose K/V a slot, this or another, already held.
    """

    number: int
    slot: states.Slots
    vocab_size: int | None = None
    kept: Any = None
    shared: int = 0

    @property
    def status(self) -> states.Status:
        """The reason why it ended."""
        return states.Status(int(self.slot.status))

    @property
    def tokens(self) -> list[int]:
        """The generated tokens, without the prompt.

        Raises:
          FloatingPointError, RuntimeError: as `checks.check_slot`; `slot` has the
            tokens all the same.
        """
        checks.check_slot(self.slot, vocab_size=self.vocab_size)
        return generated(self.slot)


def generated(slot: states.Slots) -> list[int]:
    """Returns the tokens of ONE slot that a round committed, unchecked."""
    is_new = np.asarray(slot.origins) != int(states.Origin.PROMPT)
    return np.asarray(slot.tokens)[is_new].tolist()


def slot_of(slots: states.Slots, slot: int) -> states.Slots:
    """Returns ONE slot of all, leaves without the axis of slots."""
    return jax.tree.map(lambda leaf: leaf[slot], slots)


def make(
    prompts: Sequence[checks.Tokens],
    *,
    max_tokens: int,
    gamma: int | None = None,
    sampling: Draws = None,
    samples: int = 1,
    processors: Processors = None,
) -> list[Request]:
    """Returns a request for each sample of each prompt, prompt after prompt.

    Raises:
      ValueError: no prompt, or settings of sampling or processors that cannot be used.
    """
    if not len(prompts):
        raise ValueError("the list of prompts is empty: give at least one")
    tokens = [checks.token_list(prompt) for prompt in prompts for _ in range(samples)]
    each = settings_of(sampling, len(prompts), samples)
    given = processors_of(processors, len(prompts))
    parts = [one for one in given for _ in range(samples)]
    return [
        Request(
            prompt=prompt,
            max_tokens=max_tokens,
            gamma=gamma,
            sampling=settings,
            processor=processor,
        )
        for prompt, settings, processor in zip(tokens, each, parts, strict=True)
    ]


def processors_of(
    processors: Processors, num_prompts: int
) -> list[processor_lib.Processor | None]:
    """Returns the processor of each prompt.

    Raises:
      ValueError: processors that are not one for each.
    """
    if not isinstance(processors, Sequence) or isinstance(processors, str):
        if processors is not None:
            processor_lib.check_kind(processors, "processors")
        return [processors] * num_prompts
    if len(processors) != num_prompts:
        raise ValueError(
            f"{len(processors)} processors for {num_prompts} prompts: give one for "
            "each, or one for all; processors.chain(a, b) applies several"
        )
    for number, one in enumerate(processors):
        processor_lib.check_kind(one, f"processors[{number}]")
    return list(processor_lib.join(processors)) if num_prompts else []


def settings_of(
    sampling: Draws, num_prompts: int, samples: int = 1
) -> list[settings_lib.SamplingSettings | None]:
    """Returns the settings of each sample of each prompt, as arrays.

    The seeds of samples are folded, and so are those of prompts where one is given for
    all: see `settings.folded_seed`.

    Raises:
      ValueError: settings that are not one for each, or several samples without noise.
    """
    if sampling is None:
        _check_noise(samples, is_greedy=True)
        return [None for _ in range(num_prompts * samples)]
    kinds = Sampling | settings_lib.SamplingSettings
    is_one = isinstance(sampling, kinds)
    each = [sampling] * num_prompts if is_one else sampling
    if not isinstance(each, Sequence):
        raise ValueError(f"{sampling=}: give a Sampling, or a list with one a prompt")
    if len(each) != num_prompts:
        raise ValueError(
            f"{len(each)} settings of sampling for {num_prompts} prompts: give one "
            "for all, or one for each"
        )
    made: list[settings_lib.SamplingSettings | None] = []
    for number, one in enumerate(each):
        if not isinstance(one, kinds):
            raise ValueError(
                f"sampling[{number}]={one!r}: give a Sampling for each prompt; "
                "Sampling(temperature=0) is greedy"
            )
        settings = one.settings() if isinstance(one, Sampling) else one
        if samples > 1:
            _check_noise(samples, is_greedy=not float(settings.temperature))
        for sample in range(samples):
            made.append(_folded(settings, number if is_one else 0, sample))
    return made


def _check_noise(samples: int, *, is_greedy: bool) -> None:
    """Raises `ValueError` for samples that would all be one text."""
    if samples > 1 and is_greedy:
        raise ValueError(
            f"n={samples} samples drawn greedily are one text: give a temperature, as "
            "in sampling=sj.Sampling()"
        )


def _folded(
    settings: settings_lib.SamplingSettings, request: int, sample: int
) -> settings_lib.SamplingSettings:
    """Returns the settings with the seed of one sample."""
    if not request and not sample:
        return settings
    seed = settings_lib.folded_seed(int(settings.seed), request, sample)
    return settings.replace(seed=jnp.uint32(seed))


def capacity_for(
    target: Any,
    prompts: Sequence[checks.Tokens],
    max_tokens: int,
    drafter: Any = None,
) -> int:
    """Returns the positions of a slot: enough for the longest prompt, its answer, and
    for a whole tree of the drafter behind them, as far as the model has positions.

    The number is rounded up by less than a quarter or 64, so that prompts of similar
    length share their programs.

    Raises:
      ValueError: more positions than the target's model has.
    """
    check_whole(max_tokens=max_tokens)
    longest = max(map(len, prompts))
    needed = longest + max_tokens
    config = getattr(target, "config", None)
    most = needed * 2 if config is None else config.max_position_embeddings
    if needed > most:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_tokens=} make {needed} positions, "
            f"and the model has {most} (max_position_embeddings): shorten one of them"
        )
    if drafter is not None and protocols.is_tree(drafter):
        needed += drafter.gamma_max  # Nodes are cut to the room that there is.
    step = max(64, 1 << max(int(math.log2(needed)) - 2, 0))
    return min(-(-needed // step) * step, most)
