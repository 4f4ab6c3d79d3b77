"""Metrics: counters of speculative runs -> the one dictionary of numbers.

Functions here know whole numbers and seconds. They know nothing of models, of how
tokens were drafted, or of where the numbers are shown.

Every token comes from a round: the prompt's prefill commits nothing, and a round
commits its accepted draft tokens and one token of the target's own. So the counters
satisfy identities, and `summarise` refuses to report numbers that break them.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from spec_jax.analysis import speeds


_GRAM, _THIRDS = 4, 3  # tokens of a run in `repetition`; groups of prompts by it


Metrics = speeds.Metrics
Timing = speeds.Timing


class IdentityError(AssertionError):
    """Counters that contradict each other: a fault of the program, not of its input.

    Attributes:
      identity: the identity that fails, as `identities` spells it.
    """

    def __init__(self, identity: str, numbers: str):
        super().__init__(f"identity `{identity}` fails: {numbers}")
        self.identity = identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """Counts of one speculative run, or of several.

    Attributes:
      tokens: tokens generated after the prompt, cut after the first stop token, after
        the token that completes a stop text, and at the token limit.
      rounds: windows drafted, verified and committed; one target forward each.
      proposed: drafted tokens sent to verification.
      accepted: drafted tokens kept, before the cut.
      cut: tokens that a round committed and that a stop token, a stop text or the
        token limit then cut off.
      accepted_hist: entry `a` counts the rounds that kept `a` drafted tokens,
        before the cut; `gamma_max + 1` entries.
      proposed_at: entry `i` counts the rounds that drafted a token at position `i`
        and kept all before it; `gamma_max` entries.
      accepted_at: entry `i` counts those of `proposed_at[i]` that kept it too. The
        positions of trees are depths, in all three.
      kept_by_rank: entry `i` counts the rounds that kept the `i`-th of their drafts, of
        a tree in the order of its nodes; empty where that was not counted.
      nonfinite: those of `tokens` that were chosen from logits that are not finite.
    """

    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    cut: int = 0
    accepted_hist: tuple[int, ...] = (0,)
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    kept_by_rank: tuple[int, ...] = ()
    nonfinite: int = 0

    @property
    def target_steps(self) -> int:
        """All forwards of the target, prefill not counted."""
        return self.rounds

    def __add__(self, other: "Counters") -> "Counters":
        """Adds both; positions that one of them lacks count as zero."""
        return Counters(
            tokens=self.tokens + other.tokens,
            rounds=self.rounds + other.rounds,
            proposed=self.proposed + other.proposed,
            accepted=self.accepted + other.accepted,
            cut=self.cut + other.cut,
            accepted_hist=_add_padded(self.accepted_hist, other.accepted_hist),
            proposed_at=_add_padded(self.proposed_at, other.proposed_at),
            accepted_at=_add_padded(self.accepted_at, other.accepted_at),
            kept_by_rank=_add_padded(self.kept_by_rank, other.kept_by_rank),
            nonfinite=self.nonfinite + other.nonfinite,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextCounts:
    """Counts of one prompt's generated text.

    Attributes:
      tokens: of the text, cut as `Counters.tokens` are.
      repetition: of these tokens, see `repetition`.
      proposed: as in `Counters`.
      accepted: as in `Counters`.
    """

    tokens: int
    repetition: float
    proposed: int
    accepted: int


def of_slot(slot: Any, *, num_tokens: int) -> Counters:
    """Returns the counters of ONE slot's state (`engine.state.Slots`).

    Args:
      num_tokens: generated, as `Counters.tokens`.
    """

    def counts(name: str) -> tuple[int, ...]:
        return tuple(int(count) for count in getattr(slot, name))

    return Counters(
        tokens=num_tokens,
        rounds=int(slot.num_rounds),
        proposed=int(slot.num_proposed),
        accepted=int(slot.num_accepted),
        cut=int(slot.num_cut),
        accepted_hist=counts("accepted_hist"),
        proposed_at=counts("proposed_at"),
        accepted_at=counts("accepted_at"),
        kept_by_rank=counts("kept_by_rank"),
        nonfinite=int(slot.num_nonfinite),
    )


def repetition(tokens: Sequence[int]) -> float:
    """Measures how far a text repeats itself: the share of repeated 4-grams.

    A text has `len(tokens) - 3` runs of four consecutive tokens, overlapping ones
    included; the share is that of runs that equal an earlier one: one minus distinct
    runs over runs. Texts of fewer than 5 tokens, which have no second run, give 0.0.

    Args:
      tokens: generated tokens of one text, without its prompt.
    """
    runs = list(zip(*(tokens[i:] for i in range(_GRAM)), strict=False))
    return (len(runs) - len(set(runs))) / len(runs) if runs else 0.0


def text_counts(tokens: Sequence[int], counters: Counters) -> TextCounts:
    """Combines one prompt's generated tokens and its counters."""
    return TextCounts(
        tokens=len(tokens),
        repetition=repetition(tokens),
        proposed=counters.proposed,
        accepted=counters.accepted,
    )


def mean_repetition(texts: Sequence[TextCounts]) -> float | None:
    """Averages `repetition` over texts, weighted by their tokens."""
    weighted = sum(text.tokens * text.repetition for text in texts)
    return speeds.ratio(weighted, sum(text.tokens for text in texts))


def total(counters: Iterable[Counters]) -> Counters:
    """Sums the counters of prompts; without any, all counters are zero."""
    return sum(counters, start=Counters())


def identities(counters: Counters) -> None:
    """Checks that the counters agree with each other.

    Raises:
      IdentityError: naming the first identity that fails, with its numbers.
    """
    c = counters
    sizes = [len(c.accepted_hist) - 1, len(c.proposed_at), len(c.accepted_at)]
    _require("len(hist) - 1 == len(proposed_at) == len(accepted_at)", sizes)
    scalars = [c.tokens, c.rounds, c.proposed, c.accepted, c.cut, c.nonfinite]
    by_place = *c.accepted_hist, *c.proposed_at, *c.accepted_at, *c.kept_by_rank
    smallest = min(*scalars, *by_place)
    _require("0 <= every counter", [0, smallest], ordered=True)

    _require(
        "accepted + rounds == tokens + cut", [c.accepted + c.rounds, c.tokens + c.cut]
    )
    _require("sum(hist) == rounds", [sum(c.accepted_hist), c.rounds])
    kept = sum(i * n for i, n in enumerate(c.accepted_hist))
    _require("sum(i * hist[i]) == accepted", [kept, c.accepted])
    _require("sum(accepted_at) == accepted", [sum(c.accepted_at), c.accepted])
    if c.kept_by_rank:
        _require("sum(kept_by_rank) == accepted", [sum(c.kept_by_rank), c.accepted])
    reached = sum(c.proposed_at)
    numbers = [c.accepted, reached, c.proposed]
    _require("accepted <= sum(proposed_at) <= proposed", numbers, ordered=True)

    _require("nonfinite <= tokens", [c.nonfinite, c.tokens], ordered=True)

    # A position is reached only where the one before it was kept.
    reachable = (c.rounds, *c.accepted_at)
    for i, (reached, kept) in enumerate(zip(c.proposed_at, c.accepted_at, strict=True)):
        at = f" at i={i}"
        _require("accepted_at[i] <= proposed_at[i]", [kept, reached], at, ordered=True)
        longer = sum(c.accepted_hist[i + 1 :])
        _require("accepted_at[i] == sum(hist[i+1:])", [kept, longer], at)
        numbers = [reached, reachable[i]]
        _require("proposed_at[i] <= accepted_at[i-1]", numbers, at, ordered=True)


def summarise(
    counters: Counters,
    *,
    prompts: int,
    texts: Sequence[TextCounts] = (),
    baseline: Sequence[Sequence[Timing]] = (),
    spec: Sequence[Sequence[Timing]] = (),
    matched: bool | None,
    verify_decode_mismatches: int | None,
) -> Metrics:
    """Returns the metric dictionary, after checking every identity.

    Args:
      counters: of the speculative run, summed over the prompts; of one repeat only.
      prompts: how many prompts were run.
      texts: the speculative run's text of each prompt; empty where they are not known.
      baseline: `baseline[r][i]` times plain decoding of prompt `i` in repeat `r`.
      spec: the same of the speculative runs, each interleaved with its baseline.
      matched: whether every token of every prompt equals plain decoding, and none
        was chosen from logits that are not finite; `None` where that was not looked
        at.
      verify_decode_mismatches: verified positions whose argmax differs from plain
        decoding of the same prefix; `None` where they were not replayed.

    Returns:
      The names of the design's table of numbers, in its order. Speeds are medians
      over the repeats of totals over the prompts. A speed-up is the median over the
      repeats of the ratio of the two totals, seconds per token; its `_p10` and `_p90`
      are quantiles of that ratio over the repeats or, with a single repeat, of the
      ratio of each prompt over the prompts. `repetition` is the mean over the texts,
      weighted by tokens; `tercile_*` have an entry for each third of the prompts, in
      order of their repetition (fewer than three prompts: one each).

    Raises:
      IdentityError: counters, texts or timings that contradict each other.
      ValueError: timings that are not one per repeat and prompt in both runs, or
        texts that are not one per prompt.
    """
    identities(counters)
    _check_texts(counters, prompts, texts)
    _check_timings(counters, prompts, baseline, spec, matched)
    return {
        "prompts": prompts,
        **_counted(counters),
        **_by_repetition(texts),
        "matched": matched,
        "verify_decode_mismatches": verify_decode_mismatches,
        "nonfinite_logits": counters.nonfinite,
        **speeds.of_runs("baseline", baseline),
        **speeds.of_runs("spec", spec),
        **speeds.speedup("speedup_e2e", "e2e_s", baseline, spec),
        **speeds.speedup("speedup_decode", "decode_s", baseline, spec),
    }


def _counted(c: Counters) -> Metrics:
    """Returns the numbers that need no clock."""
    return {
        "tokens": c.tokens,
        "rounds": c.rounds,
        "target_steps": c.target_steps,
        "verify_steps": c.rounds,
        "proposed": c.proposed,
        "accepted": c.accepted,
        "acceptance_rate": speeds.ratio(c.accepted, c.proposed),
        "conditional_acceptance": [
            speeds.ratio(kept, reached)
            for kept, reached in zip(c.accepted_at, c.proposed_at, strict=True)
        ],
        "mean_accepted_length": speeds.ratio(c.accepted + c.rounds, c.rounds),
        "cut": c.cut,
        "tokens_per_target_step": speeds.ratio(c.tokens, c.target_steps),
        "accepted_hist": list(c.accepted_hist),
        "rows_per_round": speeds.ratio(c.proposed + c.rounds, c.rounds),
        "kept_by_rank": list(c.kept_by_rank),
    }


def _by_repetition(texts: Sequence[TextCounts]) -> Metrics:
    """Measures how far texts repeat themselves, and how acceptance follows."""
    ordered = sorted(texts, key=lambda text: text.repetition)
    ends = [third * len(ordered) // _THIRDS for third in range(_THIRDS + 1)]
    thirds = [ordered[start:end] for start, end in itertools.pairwise(ends)]
    thirds = [third for third in thirds if third]
    return {
        "repetition": mean_repetition(texts),
        "tercile_prompts": [len(third) for third in thirds],
        "tercile_repetition": [mean_repetition(third) for third in thirds],
        "tercile_acceptance_rate": [
            speeds.ratio(sum(t.accepted for t in third), sum(t.proposed for t in third))
            for third in thirds
        ],
    }


def _check_texts(counters: Counters, prompts: int, texts: Sequence[TextCounts]) -> None:
    """Checks that the texts are those of the run that was counted."""
    if not texts:
        return
    if len(texts) != prompts:
        raise ValueError(f"{len(texts)} texts of {prompts} prompts")
    for name in ("tokens", "proposed", "accepted"):
        numbers = [sum(getattr(text, name) for text in texts), getattr(counters, name)]
        _require(f"sum of the texts' {name} == {name}", numbers)


def _check_timings(
    counters: Counters,
    prompts: int,
    baseline: Sequence[Sequence[Timing]],
    spec: Sequence[Sequence[Timing]],
    matched: bool | None,
) -> None:
    """Checks that the timings time the runs that were counted."""
    if len(baseline) != len(spec):
        raise ValueError(
            f"{len(baseline)} baseline repeats and {len(spec)} speculative ones: "
            "a speed-up needs them in pairs"
        )
    for name, runs in (("baseline", baseline), ("spec", spec)):
        for repeat, timings in enumerate(runs):
            if len(timings) != prompts:
                raise ValueError(
                    f"{name}[{repeat}] times {len(timings)} prompts of {prompts}"
                )
    for repeat, (plain, fast) in enumerate(zip(baseline, spec, strict=True)):
        at = f" in repeat {repeat}"
        timed = sum(timing.tokens for timing in fast)
        _require("timed spec tokens == tokens", [timed, counters.tokens], at)
        if matched:
            for i, (a, b) in enumerate(zip(plain, fast, strict=True)):
                where = f"{at}, prompt {i}"
                _require("matched: equal token counts", [a.tokens, b.tokens], where)


def _require(
    identity: str, numbers: Sequence[int], where: str = "", *, ordered: bool = False
) -> None:
    """Requires that the numbers are equal or, if `ordered`, that they do not fall."""
    holds = all(a <= b if ordered else a == b for a, b in itertools.pairwise(numbers))
    if not holds:
        raise IdentityError(identity, " against ".join(map(str, numbers)) + where)


def _add_padded(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """Adds by position; the shorter one is continued with zeros."""
    return tuple(x + y for x, y in itertools.zip_longest(a, b, fillvalue=0))
