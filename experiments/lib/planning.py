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


def predict(acceptance: Acceptance, costs: costs_lib.RoundCosts) -> list[Prediction]:
    """Returns a prediction for each gamma from 1 that acceptance is known for."""
    chances = np.array(acceptance.known, np.float64)
    tokens = theory.tokens_by_gamma(chances)
    # Windows that end early cost less.
    drafted = np.cumsum([0.0, *acceptance.drafted[: len(chances)]])
    round_s = np.array([costs.seconds(n, drafted=d) for n, d in enumerate(drafted)])
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


def recommend(
    drafter: str, acceptance: Acceptance, costs: costs_lib.RoundCosts
) -> dict[str, Any]:
    """Returns the row that says whether a drafter can win, and what is in its way.

    Of the gammas that acceptance is known for: `best` is the prediction of the best,
    `ceilings` its speed-up if something cost nothing, `acceptance` the chance that a
    first draft is kept, `cost` what a draft adds and `break_even` what a whole round
    with one draft adds, in plain steps.
    """

    def best_of(costs: costs_lib.RoundCosts) -> Prediction:
        return max(predict(acceptance, costs), key=lambda one: one.speedup)

    best = best_of(costs)
    names: tuple[theory.Free, ...] = ("verification", "drafting", "both")
    free = {name: best_of(costs.without(name)).speedup for name in names}
    kept, cost = acceptance.known[0], costs.draft_s / costs.plain_s
    break_even = float(costs.round_s()[1] / costs.plain_s - 1)
    words = f"{drafter}: can win, {best.speedup:.2f}x with gamma {best.gamma} expected"
    if best.speedup <= 1:
        ceilings = ", ".join(f"{free[n]:.2f}x with free {n}" for n in names)
        words = (
            f"{drafter}: cannot win, {best.speedup:.2f}x with gamma {best.gamma} "
            f"expected at best; {ceilings}. A first draft is kept with a = {kept:.3f} "
            f"and costs c = {cost:.3f} plain steps: were verification free, it would "
            "pay where a > c (Leviathan et al., Corollary 3.9); here a must exceed "
            f"{break_even:.3f}, by which a round with one draft is longer than a step"
        )
    return {
        "kind": "plan_recommendation",
        "drafter": drafter,
        "can_win": best.speedup > 1,
        "words": words,
        "best": dataclasses.asdict(best),
        "ceilings": free,
        "acceptance": kept,
        "cost": cost,
        "break_even": break_even,
    }


def predict_tree(
    counters: metrics.Counters,
    costs: costs_lib.RoundCosts,
    *,
    rows_of: theory.CostCurve | None = None,
) -> list[dict[str, Any]]:
    """Returns what the best nodes of a tree bring, for each number that was timed.

    A path that leaves the best `n` nodes does not come back to them, so that rounds of
    `n` keep what rounds of all nodes keep among these.

    Args:
      counters: of rounds that asked for all nodes.
      rows_of: what rows cost elsewhere, to predict that too.

    Returns:
      Fields of rows: the nodes, rows and tokens of a round; `plain_steps`, the tokens
      that it must commit to be as fast as decoding; and speed-ups, also where rows cost
      nothing (`RoundCosts.without`), and where they cost what `rows_of` says.
    """
    drafted, made = counters.proposed / counters.rounds, []
    free = costs.without("verification")
    other = None if rows_of is None else costs.with_rows_of(rows_of)
    for nodes in costs.drafts[1:]:
        tokens = 1 + sum(counters.kept_by_rank[:nodes]) / counters.rounds
        num_rows = min(drafted, nodes)
        steps_of = lambda own, n=nodes, rows=num_rows: (
            own.seconds(n, drafted=rows) / costs.plain_s
        )
        made.append(
            {
                "nodes": nodes,
                "rows_per_round": 1 + num_rows,
                "tokens_per_round": tokens,
                "plain_steps": steps_of(costs),
                "speedup": tokens / steps_of(costs),
                "free_rows_speedup": tokens / steps_of(free),
                "other_rows_speedup": other and tokens / steps_of(other),
            }
        )
    return made


def words_of_tree(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Returns where a tree pays, in words: here, and where rows cost nothing."""
    words = []
    for field, where in {
        "speedup": "here it",
        "free_rows_speedup": "if rows cost nothing, as on a GPU, it",
        "other_rows_speedup": "with rows as --row-costs has them it",
    }.items():
        if rows[0][field] is None:
            continue
        faster = [str(row["nodes"]) for row in rows if row[field] > 1]
        pays = f"pays with {', '.join(faster)} nodes" if faster else "does not pay"
        best = max(rows, key=lambda row, field=field: row[field])
        words.append(f"{where} {pays}; {best[field]:.2f}x with {best['nodes']}")
    return f"{name}: {'; '.join(words)}"


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
