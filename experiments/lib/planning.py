"""Planning: how often drafts are kept, and what a gamma is then expected to bring.

Shares come from rounds that are run one at a time; predictions from them and from what
rounds cost, by `gamma.theory`. Speed-ups are of decoding, prefill excluded, over long
texts: no round is cut at its end.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.lib import costs as costs_lib, runs
from spec_jax import compilation, loading
from spec_jax.analysis import metrics
from spec_jax.engine import checks, round as round_lib, scheduler as scheduler_lib
from spec_jax.gamma import theory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """One round."""

    asked: int  # tokens that the drafter was asked for: gamma, or less near the end
    drafted: int  # tokens that it proposed; lookups often find fewer, or none
    accepted: int  # those that were kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What windows show of a drafter, by the position in the draft."""

    # Chance that a draft is there and kept, given that those before it were: a window
    # that ended before it counts as if it had been rejected. None where no window
    # reached the position.
    kept: tuple[float | None, ...]
    drafted: tuple[float, ...]  # share of the windows that had a draft at the position
    windows: int  # rounds that were looked at
    # Of the texts that they wrote, see `metrics.repetition`
    repetition: float | None = None

    @property
    def known(self) -> tuple[float, ...]:
        """`kept` up to the first position that no window reached."""
        end = self.kept.index(None) if None in self.kept else len(self.kept)
        return self.kept[:end]


def record(
    lm: loading.LanguageModel, settings: runs.Settings, prompt: list[int]
) -> tuple[list[Window], metrics.TextCounts]:
    """Runs one prompt with `settings.gamma`: its rounds, and the text's counts."""
    scheduler = runs.make_scheduler(lm, settings)
    state = scheduler.begin(runs.make_request(lm, settings, prompt))
    windows = []
    while bool(state.slots.running[0]):
        state, info = _run_round(scheduler.speculator, state)
        numbers = info.gamma, info.proposal.num_drafted, info.outcome.num_accepted
        asked, drafted, accepted = (int(number[0]) for number in numbers)
        windows.append(Window(asked=asked, drafted=drafted, accepted=accepted))
    checks.check_refused([state.cache, state.memory])
    checks.check_pages(state.slots.status, state.slots.length, state.cache)
    text = scheduler_lib.generated(
        scheduler_lib.slot_of(jax.device_get(state.slots), 0)
    )
    counts = metrics.TextCounts(
        tokens=len(text),
        repetition=metrics.repetition(text),
        proposed=sum(window.drafted for window in windows),
        accepted=sum(window.accepted for window in windows),
    )
    return windows, counts


def measure_drafter(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompts: Sequence[list[int]],
    *,
    after_prompt: Callable[[], None] = lambda: None,
) -> Acceptance:
    """How often a drafter's tokens are kept, over all prompts."""
    windows, texts = [], []
    for prompt in prompts:
        rounds, text = record(lm, settings, prompt)
        windows += rounds
        texts.append(text)
        after_prompt()
    repetition = metrics.mean_repetition(texts)
    return measure(windows, gamma_max=settings.gamma, repetition=repetition)


@functools.partial(compilation.jit, donate_argnums=1)
def _run_round(speculator, state):
    return round_lib.run_round(speculator, state)


def measure(
    windows: Iterable[Window], *, gamma_max: int, repetition: float | None = None
) -> Acceptance:
    """The shares. Windows near the end of a text count where they asked for a draft.

    After a position at which nothing was ever kept, the chance is 0: what it is
    multiplied with is.

    Raises:
      ValueError: no window that asked for `gamma_max` drafts.
    """
    table = np.array([(w.asked, w.drafted, w.accepted) for w in windows]).reshape(-1, 3)
    asked, drafted, accepted = table.T
    if not (asked == gamma_max).any():
        raise ValueError(
            f"none of {len(table)} rounds had room for {gamma_max} drafts: generate "
            "more tokens"
        )
    kept: list[float | None] = []
    for i in range(gamma_max):
        reached = (accepted >= i) & (asked > i)
        if kept and kept[-1] == 0:
            kept.append(0.0)
        elif reached.any():
            kept.append(float((accepted[reached] > i).mean()))
        else:
            kept.append(None)
    shares = [float((drafted[asked > i] > i).mean()) for i in range(gamma_max)]
    return Acceptance(
        kept=tuple(kept),
        drafted=tuple(shares),
        windows=len(table),
        repetition=repetition,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one gamma is expected to bring."""

    gamma: int
    tokens_per_round: float  # the target's own token counted
    round_s: float  # seconds of a round, on average
    speedup: float  # over autoregressive decoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreePrediction:
    """What some of a tree's nodes, the best, are expected to bring."""

    nodes: int
    rows_per_round: float  # of the target's forward, the root's counted
    tokens_per_round: float
    # Of a round: the tokens that it must commit to be as fast as decoding
    plain_steps: float
    speedup: float  # over autoregressive decoding
    # And where rows cost nothing (`RoundCosts.without`); drafting costs the same
    free_rows_speedup: float
    # And where they cost what a curve says, by `RoundCosts.with_rows_of`, or None
    other_rows_speedup: float | None = None


def predict_tree(
    counters: metrics.Counters,
    costs: costs_lib.RoundCosts,
    *,
    rows_of: theory.CostCurve | None = None,
) -> list[TreePrediction]:
    """Returns a prediction for each number of nodes that was timed, from 1 on.

    A path that leaves the best `n` nodes does not come back to them, so that rounds of
    `n` keep what rounds of all nodes keep among these.

    Args:
      counters: of rounds that asked for all nodes.
      rows_of: what rows cost elsewhere, to predict that too.
    """
    drafted = counters.proposed / counters.rounds
    made, all_costs = [], [costs, costs.without("verification")]
    if rows_of is not None:
        all_costs.append(costs.with_rows_of(rows_of))
    for nodes in costs.drafts[1:]:
        tokens = 1 + sum(counters.kept_by_rank[:nodes]) / counters.rounds
        num_rows = min(drafted, nodes)
        steps, *elsewhere = (
            each.seconds(nodes, drafted=num_rows) / costs.plain_s for each in all_costs
        )
        speedups = [tokens / each for each in elsewhere]
        made.append(
            TreePrediction(
                nodes=nodes,
                rows_per_round=1 + num_rows,
                tokens_per_round=tokens,
                plain_steps=steps,
                speedup=tokens / steps,
                free_rows_speedup=speedups[0],
                other_rows_speedup=speedups[1] if rows_of is not None else None,
            )
        )
    return made


def words_of_tree(name: str, predictions: Sequence[TreePrediction]) -> str:
    """Returns where a tree pays, in words: here, and where rows cost nothing."""
    best = max(predictions, key=lambda prediction: prediction.speedup)
    free = [(one.nodes, one.free_rows_speedup) for one in predictions]
    words = (
        f"{name}: {_pays([(one.nodes, one.speedup) for one in predictions])}; "
        f"{best.speedup:.2f}x with {best.nodes} nodes expected to be "
        f"the best, {best.tokens_per_round:.2f} tokens in rounds of "
        f"{best.plain_steps:.2f} plain steps. If rows cost nothing, as on a GPU, it "
        f"{_pays(free)}; {_highest(free)}"
    )
    other = [(one.nodes, one.other_rows_speedup or 0.0) for one in predictions]
    if best.other_rows_speedup is None:
        return words
    return f"{words}. With rows as --row-costs has them it {_pays(other)}; " + (
        _highest(other)
    )


def _pays(speedups: Sequence[tuple[int, float]]) -> str:
    faster = [str(nodes) for nodes, speedup in speedups if speedup > 1]
    return f"pays with {', '.join(faster)} nodes" if faster else "does not pay"


def _highest(speedups: Sequence[tuple[int, float]]) -> str:
    nodes, speedup = max(speedups, key=lambda one: one[1])
    return f"{speedup:.2f}x with {nodes}"


ERROR_BAR = 0.15
"""Share by which a measured speed-up may miss the predicted one."""


def words_of_errors(errors: Sequence[float | None]) -> str | None:
    """Returns how far predictions were off, in words; None of none.

    Args:
      errors: predicted over measured less 1; None where nothing was measured.
    """
    known = [abs(error) for error in errors if error is not None]
    if not known:
        return None
    within = sum(error <= ERROR_BAR for error in known)
    return (
        f"{within} of {len(known)} predictions are within {ERROR_BAR:.0%} of what was "
        f"measured; they are off by {max(known):.0%} at most"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Whether a drafter can win, and what stands in its way."""

    best: Prediction  # the prediction of the best gamma
    # The best speed-up if something cost nothing, by `theory.Free`; what a round has
    # besides drafts and rows stays
    ceilings: dict[theory.Free, float]
    acceptance: float  # the chance that a first draft is kept
    cost: float  # seconds that a draft adds, over those of a plain step: the paper's c
    # Seconds that the whole of a round with gamma 1 takes longer than a plain step,
    # over those of a plain step: what acceptance must exceed there
    break_even: float

    @property
    def can_win(self) -> bool:
        """Whether any gamma is expected to be faster than autoregressive decoding."""
        return self.best.speedup > 1

    def row(self, drafter: str) -> dict[str, Any]:
        """The JSON row."""
        return {
            "kind": "plan_recommendation",
            "drafter": drafter,
            "can_win": self.can_win,
            "words": self.words(drafter),
            **dataclasses.asdict(self),
        }

    def words(self, drafter: str) -> str:
        """The recommendation in words."""
        best = f"{self.best.speedup:.2f}x with gamma {self.best.gamma}"
        if self.can_win:
            return f"{drafter}: can win, {best} expected to be the best"
        free = self.ceilings
        a, c = f"a = {self.acceptance:.3f}", f"c = {self.cost:.3f}"
        if not theory.improves(self.acceptance, self.cost):
            why = (
                f"A first draft is kept with {a}, which is not above the cost of a "
                f"draft, {c} plain steps: no gamma pays, even if verification were "
                "free (Leviathan et al., Corollary 3.9)"
            )
        else:
            why = (
                f"A first draft is kept with {a}, which is above the cost of a draft, "
                f"{c} plain steps, as Corollary 3.9 of Leviathan et al. asks. But that "
                "takes verification to be free: here a whole round with one draft is "
                f"{self.break_even:.3f} plain steps longer than a plain step, and a "
                "would have to exceed that"
            )
        return (
            f"{drafter}: cannot win, {best} expected at best. Even with free "
            f"verification at most {free['verification']:.2f}x, with free drafting "
            f"{free['drafting']:.2f}x, with both {free['both']:.2f}x. {why}."
        )


def predict(acceptance: Acceptance, costs: costs_lib.RoundCosts) -> list[Prediction]:
    """A prediction for each gamma from 1 that acceptance is known for."""
    chances = np.array(acceptance.known, np.float64)
    tokens = theory.tokens_by_gamma(chances)
    round_s = _round_s(acceptance, costs)
    speedup = theory.goodput(chances, round_s) * costs.plain_s
    return [
        Prediction(
            gamma=gamma,
            tokens_per_round=float(tokens[gamma]),
            round_s=float(round_s[gamma]),
            speedup=float(speedup[gamma]),
        )
        for gamma in range(1, len(chances) + 1)
    ]


def recommend(acceptance: Acceptance, costs: costs_lib.RoundCosts) -> Recommendation:
    """The recommendation, over the gammas that acceptance is known for."""
    best = _best(predict(acceptance, costs))
    names: tuple[theory.Free, ...] = ("drafting", "verification", "both")
    free = {
        name: _best(predict(acceptance, costs.without(name))).speedup for name in names
    }
    one = costs.round_s()[1]
    return Recommendation(
        best=best,
        ceilings=free,
        acceptance=acceptance.known[0],
        cost=costs.draft_s / costs.plain_s,
        break_even=float(one / costs.plain_s - 1),
    )


def _best(predictions: list[Prediction]) -> Prediction:
    return max(predictions, key=lambda prediction: prediction.speedup)


def _round_s(acceptance: Acceptance, costs: costs_lib.RoundCosts) -> np.ndarray:
    """Seconds of a round by gamma, on average; windows that end early cost less."""
    drafted = np.cumsum([0.0, *acceptance.drafted[: len(acceptance.known)]])
    return np.array([costs.seconds(n, drafted=d) for n, d in enumerate(drafted)])
