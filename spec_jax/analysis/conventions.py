"""Conventions: our counters -> the numbers of other tools, and back.

Functions here know whole numbers. Nearly every tool prints an "acceptance length" and
an "acceptance rate", and hardly two count the same. Three questions tell them apart:

    is the target's own token counted?   `mean_accepted_length` counts it
    conditional or marginal?             `conditional_acceptance[i]` divides by rounds
                                         that reached position `i`; vLLM by all drafts
    before or after the stop token cut?  `Counters.accepted` is before the cut

Each class and function names the file that it follows. Numbers that a convention does
not hold are lost on the way there: the way back asks for them by keyword, or raises
`ValueError`, as it does for numbers that contradict each other. Counters of ours that
do are a fault, and raise `metrics.IdentityError` on the way there.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from spec_jax.analysis import metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vllm:
    """Counters of vLLM: `SpecDecodingStats` in `vllm/v1/spec_decode/metrics.py`.

    Attributes:
      num_spec_tokens: the largest window, in drafted tokens.
      num_drafts: rounds that drafted at least one token (`update_from_output` in
        `vllm/v1/core/sched/scheduler.py` observes no others).
      num_draft_tokens: drafted tokens, those behind a rejection included.
      num_accepted_tokens: drafts kept, before a stop token cuts; no bonus token.
      num_accepted_tokens_per_pos: entry `i` counts the rounds that kept more than `i`.
    """

    num_spec_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float | None:
        """`1 + num_accepted_tokens / num_drafts`: the bonus token counted."""
        ratio = _ratio(self.num_accepted_tokens, self.num_drafts)
        return None if ratio is None else 1 + ratio

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Kept over drafted tokens; vLLM's log prints it in per cent."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_position(self) -> list[float | None]:
        """Marginal: kept at a position over all drafts, however long they were."""
        return [_ratio(n, self.num_drafts) for n in self.num_accepted_tokens_per_pos]


def to_vllm(counters: metrics.Counters) -> Vllm:
    """Returns vLLM's counts; rounds that drafted nothing are left out."""
    metrics.identities(counters)
    return Vllm(
        num_spec_tokens=len(counters.accepted_at),
        num_drafts=counters.proposed_at[0] if counters.proposed_at else 0,
        num_draft_tokens=counters.proposed,
        num_accepted_tokens=counters.accepted,
        num_accepted_tokens_per_pos=counters.accepted_at,
    )


def from_vllm(vllm: Vllm, *, rounds: int, tokens: int) -> metrics.Counters:
    """Reads our counters from vLLM's.

    Args:
      rounds: all rounds; vLLM leaves out rounds without drafts.
      tokens: tokens generated in those rounds, after the cut, which vLLM does not
        count here. Its prefill samples each request's first token: leave that out.

    Raises:
      ValueError: windows shorter than `num_spec_tokens`: which positions they reached
        is lost.
    """
    _require_full(vllm.num_draft_tokens, vllm.num_drafts, vllm.num_spec_tokens)
    at = vllm.num_accepted_tokens_per_pos
    return _checked(
        tokens=tokens,
        rounds=rounds,
        proposed=vllm.num_draft_tokens,
        accepted=vllm.num_accepted_tokens,
        accepted_hist=_histogram(rounds, at),
        proposed_at=(vllm.num_drafts, *at)[: len(at)],
        accepted_at=at,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sglang:
    """Counters of SGLang's `meta_info`.

    Of `fill_spec_decoding_meta`, called by `sglang/srt/managers/tokenizer_manager.py`;
    its names have changed between releases.

    Attributes:
      spec_verify_ct: rounds.
      completion_tokens: tokens generated, after the cut. In SGLang the one that prefill
        samples is among them, though no round committed it; here all are of rounds.
      spec_num_correct_drafts: drafts kept, before the cut; no bonus token.
      spec_num_proposed_drafts: rounds times the full window, whatever was drafted.
      spec_correct_drafts_histogram: entry `a` counts the rounds that kept `a` drafts.
    """

    spec_verify_ct: int
    completion_tokens: int
    spec_num_correct_drafts: int
    spec_num_proposed_drafts: int
    spec_correct_drafts_histogram: tuple[int, ...]

    @property
    def spec_accept_length(self) -> float | None:
        """`completion_tokens / spec_verify_ct`: the bonus token counted, after the cut.

        So SGLang's own number is larger than ours by one token per request, and smaller
        by what the cut took: `tokens_per_target_step`, not `mean_accepted_length`.
        """
        return _ratio(self.completion_tokens, self.spec_verify_ct)

    @property
    def spec_accept_rate(self) -> float | None:
        """Kept drafts over full windows; no bonus token."""
        return _ratio(self.spec_num_correct_drafts, self.spec_num_proposed_drafts)

    @property
    def scheduler_accept_rate(self) -> float | None:
        """`accept rate` of the scheduler's log: bonus tokens counted above and below.

        With nothing kept it is `1 / (gamma + 1)`, and not 0. `report_decode_stats` in
        `sglang/srt/observability/scheduler_metrics_mixin.py`, which logs intervals; its
        `accept len`, the bonus token counted, is our `mean_accepted_length`.
        """
        committed = self.spec_num_correct_drafts + self.spec_verify_ct
        return _ratio(committed, self.spec_num_proposed_drafts + self.spec_verify_ct)


def to_sglang(counters: metrics.Counters, *, window: int | None = None) -> Sglang:
    """Returns SGLang's counts, where every round has a full window.

    Args:
      window: drafts of a full window; of a tree, its nodes. None: one for each entry of
        `accepted_at`, which is right for chains: of a tree that is the depth.
    """
    metrics.identities(counters)
    if window is None:
        window = len(counters.accepted_at)
    return Sglang(
        spec_verify_ct=counters.rounds,
        completion_tokens=counters.tokens,
        spec_num_correct_drafts=counters.accepted,
        spec_num_proposed_drafts=counters.rounds * window,
        spec_correct_drafts_histogram=counters.accepted_hist,
    )


def from_sglang(
    sglang: Sglang, *, gamma_max: int, proposed: int, prefill_tokens: int
) -> metrics.Counters:
    """Reads our counters from SGLang's.

    Args:
      gamma_max: the full window: SGLang's `speculative_num_draft_tokens` less one.
      proposed: tokens that were really drafted, which SGLang does not count.
      prefill_tokens: completion tokens that prefill sampled: in SGLang one a request.

    Raises:
      ValueError: windows that were not full: which positions they reached is lost.
    """
    _require_full(proposed, sglang.spec_verify_ct, gamma_max)
    # SGLang's histogram ends at the most drafts that a round kept.
    hist = sglang.spec_correct_drafts_histogram
    hist += (0,) * (gamma_max + 1 - len(hist))
    counters = _from_histogram(hist, tokens=sglang.completion_tokens - prefill_tokens)
    total = sglang.spec_verify_ct, sglang.spec_num_correct_drafts, proposed
    held = counters.rounds, counters.accepted, counters.proposed
    if held != total:
        raise ValueError(
            f"the totals (rounds, kept, proposed) are {total}, and by the histogram "
            f"{hist} with {gamma_max=} they are {held}"
        )
    return counters


def to_spec_bench(counters: metrics.Counters) -> tuple[int, ...]:
    """Returns Spec-Bench's `accept_lengths`: tokens of each round, before the cut.

    `evaluation/inference_eagle.py` appends the growth of the text: kept drafts and one
    token of the target's own. The order of the rounds is lost; these rise.
    """
    metrics.identities(counters)
    hist = enumerate(counters.accepted_hist, start=1)
    return tuple(itertools.chain.from_iterable([length] * n for length, n in hist))


def mean_accepted_tokens(accept_lengths: Sequence[int]) -> float | None:
    """Returns Spec-Bench's `#Mean accepted tokens` (MAT), bonus tokens counted.

    The mean over the rounds of all questions together (`evaluation/speed.py`), so that
    a long answer weighs more; our `mean_accepted_length`.
    """
    return _ratio(sum(accept_lengths), len(accept_lengths))


def from_spec_bench(
    accept_lengths: Sequence[int], *, gamma_max: int, proposed: int, tokens: int
) -> metrics.Counters:
    """Reads our counters from `accept_lengths`.

    Args:
      gamma_max: the largest window, which Spec-Bench does not record.
      proposed: tokens that were drafted, which it does not record either.
      tokens: tokens generated, after the cut.

    Raises:
      ValueError: lengths outside `1 .. gamma_max + 1`. Or windows that were not full:
        which positions they reached is lost.
    """
    wrong = [n for n in accept_lengths if not 1 <= n <= gamma_max + 1]
    if wrong:
        raise ValueError(
            f"accept_lengths holds {wrong[0]}: with {gamma_max=} a round commits 1 to "
            f"{gamma_max + 1} tokens"
        )
    _require_full(proposed, len(accept_lengths), gamma_max)
    counted = collections.Counter(accept_lengths)
    hist = tuple(counted[length] for length in range(1, gamma_max + 2))
    return _from_histogram(hist, tokens=tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle:
    """Counters of the EAGLE repository: `evaluate_posterior` in `eagle/model`.

    Of `utils_alpha.py` there, run by `eagle/evaluation/gen_ea_alpha_vicuna.py`.

    Attributes:
      alpha: entry `n` counts the rounds that kept the draft at position `n`.
      alpha_num: entry `n` counts the rounds that kept all `n` before it. A window that
        ended there, and was kept whole, is among them, as if it had been rejected.
    """

    alpha: tuple[int, ...]
    alpha_num: tuple[int, ...]

    @property
    def n_alpha(self) -> list[float | None]:
        """The paper's n-alpha: conditional acceptance after `n` drafted tokens.

        It is our `conditional_acceptance` of full windows, and less of others. The
        paper (https://arxiv.org/abs/2401.15077) measures it on chains, not on trees.
        """
        return [_ratio(k, n) for k, n in zip(self.alpha, self.alpha_num, strict=True)]

    @property
    def tau(self) -> float | None:
        """The paper's average acceptance length: tokens per round, before the cut.

        The bonus token is counted: its scripts record `new_tokens`, to which each round
        adds what it kept and one, and `idxs`, the index of the last round.
        """
        rounds = self.alpha_num[0] if self.alpha_num else 0
        return _ratio(sum(self.alpha) + rounds, rounds)


def to_eagle(counters: metrics.Counters) -> Eagle:
    """Returns the counts of EAGLE's scripts.

    Raises:
      ValueError: no position: EAGLE counts its rounds at the first one.
    """
    metrics.identities(counters)
    if not counters.accepted_at:
        raise ValueError(
            "the counters have no drafted position, and EAGLE counts rounds at the "
            "first: gamma_max must be 1 or more"
        )
    alpha_num = (counters.rounds, *counters.accepted_at[:-1])
    return Eagle(alpha=counters.accepted_at, alpha_num=alpha_num)


def from_eagle(eagle: Eagle, *, proposed: int, tokens: int) -> metrics.Counters:
    """Reads our counters from EAGLE's.

    Args:
      proposed: tokens that were drafted, which EAGLE does not count.
      tokens: tokens generated, after the cut.

    Raises:
      ValueError: no position, or rounds of a position that were not kept at the one
        before it. Or windows that were not full: which positions they reached is lost.
    """
    alpha, alpha_num = eagle.alpha, eagle.alpha_num
    if not alpha or len(alpha) != len(alpha_num) or alpha_num[1:] != alpha[:-1]:
        raise ValueError(
            f"{alpha_num=} must count at each position but the first the rounds that "
            f"{alpha=} counts as kept at the one before it"
        )
    _require_full(proposed, alpha_num[0], len(alpha))
    return _from_histogram(_histogram(alpha_num[0], alpha), tokens=tokens)


def hugging_face_matches(counters: metrics.Counters) -> int:
    """Sums `num_matches` of assisted generation: no bonus token, after the cut.

    `_assisted_decoding` in `transformers/generation/utils.py` of release 5.23 hands
    `num_matches` to the candidate generator: the committed tokens of a round less one.
    Where the cut left a draft as the last, that draft counts as the target's own.
    """
    metrics.identities(counters)
    return counters.tokens - counters.rounds


def from_hugging_face(
    rounds: Sequence[tuple[int, int]], *, gamma_max: int, tokens: int | None = None
) -> metrics.Counters:
    """Reads our counters from rounds of assisted generation; totals do not suffice.

    Args:
      rounds: of each round, the tokens drafted and `num_matches`.
      gamma_max: the most that a round may draft.
      tokens: generated in all rounds, where `num_matches` are those before the cut.
        None: what the cut took is lost, `cut` comes back as 0, and `accepted` smaller
        by it.

    Raises:
      ValueError: rounds that do not satisfy `0 <= matches <= drafted <= gamma_max`, or
        cannot have generated so many tokens.
    """
    for drafted, matches in rounds:
        if not 0 <= matches <= drafted <= gamma_max:
            raise ValueError(
                f"a round drafted {drafted} tokens and matched {matches}, with "
                f"{gamma_max=}: 0 <= matches <= drafted <= gamma_max must hold"
            )
    kept = [matches for _, matches in rounds]
    at = tuple(sum(n > i for n in kept) for i in range(gamma_max))
    return _checked(
        tokens=sum(kept) + len(rounds) if tokens is None else tokens,
        rounds=len(rounds),
        proposed=sum(drafted for drafted, _ in rounds),
        accepted=sum(kept),
        accepted_hist=_histogram(len(rounds), at),
        proposed_at=tuple(
            sum(drafted > i and matches >= i for drafted, matches in rounds)
            for i in range(gamma_max)
        ),
        accepted_at=at,
    )


def _from_histogram(hist: tuple[int, ...], *, tokens: int) -> metrics.Counters:
    """Computes the counters of full windows from the histogram."""
    rounds, gamma_max = sum(hist), len(hist) - 1
    at = tuple(sum(hist[i + 1 :]) for i in range(gamma_max))
    return _checked(
        tokens=tokens,
        rounds=rounds,
        proposed=rounds * gamma_max,
        accepted=sum(at),
        accepted_hist=hist,
        proposed_at=(rounds, *at)[:gamma_max],
        accepted_at=at,
    )


def _checked(
    *, tokens: int, rounds: int, accepted: int, **rest: Any
) -> metrics.Counters:
    """Returns the counters, the rest as cut; raises if foreign numbers disagree."""
    cut = accepted + rounds - tokens
    counters = metrics.Counters(
        tokens=tokens, rounds=rounds, accepted=accepted, cut=cut, **rest
    )
    try:
        metrics.identities(counters)
    except metrics.IdentityError as error:
        raise ValueError(f"the numbers contradict each other: {error}") from error
    return counters


def _histogram(rounds: int, accepted_at: Sequence[int]) -> tuple[int, ...]:
    """Counts rounds by drafts kept, from the rounds that kept more than `i`."""
    return tuple(a - b for a, b in itertools.pairwise((rounds, *accepted_at, 0)))


def _require_full(proposed: int, rounds: int, gamma_max: int) -> None:
    if proposed != rounds * gamma_max:
        raise ValueError(
            f"{proposed} drafted tokens are not {rounds} full windows of {gamma_max}: "
            "which positions the shorter ones reached is lost"
        )


def _ratio(numerator: int, denominator: int) -> float | None:
    """Divides; returns `None` where nothing was counted, as `metrics` does."""
    return numerator / denominator if denominator else None
