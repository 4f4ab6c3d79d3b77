"""Requests of prompts: how each is drawn, and positions that are enough for all."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

from spec_jax.engine import checks, scheduler
from spec_jax.processors import processor as processor_lib
from spec_jax.rules import sampling as sampling_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; see `sampling.make_settings` for the order of filters.

    Attributes:
      temperature: divides the logits; 0 is greedy, and takes no filter.
      top_k: how many tokens stay; None keeps all.
      top_p: the mass that stays, in `(0, 1]`.
      min_p: the least probability that stays, as a share of the highest, in `[0, 1]`.
      seed: of all noise, in `[0, 2**32)`: with it a stream is drawn again, bit for bit.

    Raises:
      ValueError: a value outside its range, or a filter at temperature 0.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> sampling_lib.SamplingSettings:
        """Returns the settings as arrays."""
        return sampling_lib.make_settings(**dataclasses.asdict(self))


Draws = (
    Sampling
    | sampling_lib.SamplingSettings
    | Sequence[Sampling | sampling_lib.SamplingSettings]
    | None
)
"""One for all prompts or one for each, made by hand or by `make_settings`; None:
greedily."""

Processors = processor_lib.Processor | Sequence[processor_lib.Processor] | None
"""One for all prompts or one for each; None: logits as they are."""


def make(
    prompts: Sequence[checks.Tokens],
    *,
    max_tokens: int,
    gamma: int | None = None,
    sampling: Draws = None,
    processors: Processors = None,
) -> list[scheduler.Request]:
    """Returns a request for each prompt.

    Warns where two would be equal samples.

    Raises:
      ValueError: no prompt, or settings of sampling or processors that are not one for
        each.
    """
    if not len(prompts):
        raise ValueError("the list of prompts is empty: give at least one")
    tokens = [checks.token_list(prompt) for prompt in prompts]
    each = settings_of(sampling, len(tokens))
    _warn_of_equal(tokens, sampling)
    return [
        scheduler.Request(
            prompt=prompt,
            max_tokens=max_tokens,
            gamma=gamma,
            sampling=settings,
            processor=processor,
        )
        for prompt, settings, processor in zip(
            tokens, each, processors_of(processors, len(tokens)), strict=True
        )
    ]


def settings_of(
    sampling: Draws, num_prompts: int
) -> list[sampling_lib.SamplingSettings | None]:
    """Returns the settings of each prompt, as arrays.

    Raises:
      ValueError: settings that are not one for each.
    """
    if sampling is None:
        return [None] * num_prompts
    kinds = Sampling | sampling_lib.SamplingSettings
    each = [sampling] * num_prompts if isinstance(sampling, kinds) else sampling
    if not isinstance(each, Sequence):
        raise ValueError(f"{sampling=}: give a Sampling, or a list with one a prompt")
    if len(each) != num_prompts:
        raise ValueError(
            f"{len(each)} settings of sampling for {num_prompts} prompts: give one "
            "for all, or one for each"
        )
    for number, one in enumerate(each):
        if not isinstance(one, kinds):
            raise ValueError(
                f"sampling[{number}]={one!r}: give a Sampling for each prompt; "
                "Sampling(temperature=0) is greedy"
            )
    return [one.settings() if isinstance(one, Sampling) else one for one in each]


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
    return list(processors)


def _warn_of_equal(prompts: list[list[int]], sampling: Draws) -> None:
    """Warns where two prompts draw the same noise."""
    each = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
    drawn = [
        (tuple(prompt), one)
        for prompt, one in zip(prompts, each, strict=True)
        if isinstance(one, Sampling) and one.temperature > 0
    ]
    if len(set(drawn)) < len(drawn):
        warnings.warn(
            "equal prompts with one seed give equal samples: give each its own, as in "
            "sampling=[sj.Sampling(seed=n) for n in range(8)]",
            stacklevel=2,
        )


def capacity_for(target: Any, prompts: Sequence[checks.Tokens], max_tokens: int) -> int:
    """Returns positions of a slot: enough for the longest prompt and its answer.

    Rounded up, to within a quarter, so that prompts of about one length share their
    programs.

    Raises:
      ValueError: more positions than the target's model has.
    """
    checks.check_max_tokens(max_tokens)
    longest = max(map(len, prompts))
    needed = longest + max_tokens
    config = getattr(target, "config", None)
    most = needed * 2 if config is None else config.max_position_embeddings
    if needed > most:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_tokens=} make {needed} positions, "
            f"and the model has {most} (max_position_embeddings): shorten one of them"
        )
    step = max(64, 1 << max(int(math.log2(needed)) - 2, 0))
    return min(-(-needed // step) * step, most)
