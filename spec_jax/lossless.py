"""Checks that generation is lossless: compares its bits with those of decoding."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from spec_jax import algorithms, generation, inputs, keywords, run as run_lib
from spec_jax.debug import evidence, recorder
from spec_jax.engine import round as round_lib, state as states
from spec_jax.language_model import LanguageModel
from spec_jax.rules import rule as rule_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One prompt, generated speculatively and decoded.

    Attributes:
      prompt_tokens: the number of tokens of the prompt.
      tokens: the number of tokens that decoding generated.
      rounds: the number of rounds of the speculative run.
      differences: where the runs differ, at most one for each of `evidence.WHATS`.
      nonfinite: tokens chosen from logits not finite, in the run with more of them.
    """

    prompt_tokens: int
    tokens: int
    rounds: int
    differences: tuple[evidence.Difference, ...]
    nonfinite: int

    @property
    def equal(self) -> bool:
        """Whether all is equal, and all tokens were chosen from finite logits."""
        return not self.differences and not self.nonfinite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `check_lossless`: true if all is equal; `str` makes a table."""

    comparisons: tuple[Comparison, ...]

    @property
    def equal(self) -> bool:
        """Whether every prompt's results are equal."""
        return all(one.equal for one in self.comparisons)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        lines = [
            f"{'prompt':>6} {'tokens':>6} {'rounds':>6}  "
            + "  ".join(f"{what:9}" for what in evidence.WHATS)
        ]
        for number, one in enumerate(self.comparisons):
            differ = {difference.what for difference in one.differences}
            cells = ["differ" if w in differ else "equal" for w in evidence.WHATS]
            lines.append(
                f"{number:>6} {one.tokens:>6} {one.rounds:>6}  "
                + "  ".join(f"{cell:9}" for cell in cells)
            )
            lines += [
                f"       {evidence.describe(difference.to_row())}"
                for difference in one.differences
            ]
            if one.nonfinite:
                lines.append(f"       {one.nonfinite} tokens of logits not finite")
        return "\n".join(line.rstrip() for line in lines)


def check_lossless(
    lm: LanguageModel,
    prompt: inputs.Prompt | Sequence[inputs.Prompt],
    **settings: Any,
) -> Report:
    """Generates each prompt speculatively and by decoding, and compares the bits.

    It compares tokens, log-probabilities, a hash of all logits, and the committed keys
    and values of all layers. The prompts run together in `num_slots` slots.

    Examples:
      >>> import spec_jax as sj
      >>> bool(sj.check_lossless(sj.load(), "import os", max_tokens=8))
      True

    Args:
      **settings: as for `generate`, but `gamma=None` is a fixed gamma; texts in `stop`
        end nothing; and the rule is "coupled", the only one with decoding's stream.

    Raises:
      ValueError, TypeError: as `generate`, and for another rule.
    """
    if not rule_lib.of(settings.get("rule", "coupled")).is_exact:
        raise ValueError(
            f"rule={settings['rule']!r} keeps the distribution, not the stream: only "
            "'coupled' can be compared with decoding"
        )
    known = list(inspect.signature(generation.generate).parameters)
    keywords.check_names("check_lossless", known, settings)
    run = run_lib.Run.make(lm, prompt, **settings)
    slots = run.scheduler.target.num_slots
    comparisons = []
    for first in range(0, len(run.requests), slots):
        numbers = range(first, min(first + slots, len(run.requests)))
        state = _generate(run, numbers)
        each = enumerate(numbers)
        comparisons += [_compare(run, state, slot, number) for slot, number in each]
    return Report(comparisons=tuple(comparisons))


def _generate(run: run_lib.Run, numbers: range) -> states.State:
    """Generates requests, one in each slot, and records all rows."""
    watched = recorder.Recorder(target=run.scheduler.target)
    state = run.scheduler.begin(*(run.requests[number] for number in numbers))
    speculator = run.scheduler.speculator.replace(target=watched)
    return round_lib.run(speculator, watched.attach(state))


def _compare(
    run: run_lib.Run, state: states.State, slot: int, number: int
) -> Comparison:
    """Compares one slot with decoding of its request alone, on other pages."""
    lm, num_prompt = run.lm, len(run.requests[number].prompt)
    watched = recorder.Recorder(target=lm.target)
    begun = run.begin_decoding(number)
    begun = begun.replace(sequences=tuple(map(watched.attach, begun.sequences)))
    plain = algorithms.autoregressive(watched).run(lm.params, begun)
    expected = evidence.of_decode(plain.sequences[0], num_prompt=num_prompt)
    found = evidence.of_slot(state, num_prompt=num_prompt, slot=slot)
    return Comparison(
        prompt_tokens=num_prompt,
        tokens=len(expected.tokens),
        rounds=int(state.slots.num_rounds[slot]),
        differences=tuple(evidence.compare(expected, found)),
        nonfinite=max(expected.nonfinite, found.nonfinite),
    )
