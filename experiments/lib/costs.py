"""What rounds of any drafter cost: a plain step, windows, and whole rounds.

Rounds are timed whole, along a text that decoding wrote, and the target's forward over
as many rows apart; what is left is drafting, acceptance and commit. Timed alone, a
proposal is faster than in a round: there a forward of the target comes between two, and
takes the draft's weights out of the caches. Every thunk runs many steps in one compiled
call, and returns the seconds of one.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import bench, runs, works
from spec_jax import loading
from spec_jax.engine import baseline, protocols, round as round_lib


Free = Literal["drafting", "verification", "both"]
"""The part that costs nothing in a ceiling."""

PLAIN = "plain step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Seconds of a round by the drafts that are asked for, of one drafter.

    The drafts of a tree are its nodes.
    """

    plain_s: float  # a step of autoregressive decoding
    drafts: tuple[int, ...]  # from 0 on; what follows is of these
    verify_s: tuple[float, ...]  # the target's forward over one row more
    # All else that a round takes: drafting, acceptance, truncation
    beyond_s: tuple[float, ...]

    @property
    def gamma_max(self) -> int:
        """The most drafts that were timed."""
        return self.drafts[-1]

    @property
    def draft_s(self) -> float:
        """What a draft adds beside its row; noise below 0 counts 0."""
        first = min(1, len(self.drafts) - 2)  # A first proposal costs more than others.
        added_s = self.beyond_s[-1] - self.beyond_s[first]
        return max(0.0, added_s) / (self.drafts[-1] - self.drafts[first])

    def seconds(self, asked: int, *, drafted: float) -> float:
        """Seconds of a round that asks for `asked` drafts, and verifies `drafted`.

        Between numbers that were timed, along a line.
        """
        beyond_s = float(np.interp(asked, self.drafts, self.beyond_s))
        return beyond_s + float(np.interp(drafted, self.drafts, self.verify_s))

    def without(self, free: Free) -> "RoundCosts":
        """Returns the costs if drafting, or all rows but the first, cost nothing.

        The latter is about so on a GPU, whose rows share one read of the weights.
        """
        verify_s, beyond_s = self.verify_s, self.beyond_s
        if free in ("verification", "both"):
            verify_s = verify_s[:1] * len(verify_s)
        if free in ("drafting", "both"):
            beyond_s = beyond_s[:1] * len(beyond_s)
        return dataclasses.replace(self, verify_s=verify_s, beyond_s=beyond_s)


def check_gen_tokens(gen_tokens: int, gamma_max: int) -> None:
    """Raises `ValueError` where a text is too short for one window of `gamma_max`."""
    if gen_tokens <= gamma_max:
        raise ValueError(
            f"--gen-tokens {gen_tokens}: rounds of {gamma_max} drafts are timed along "
            "the text; generate more tokens than that"
        )


def measure(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompt: list[int],
    *,
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
) -> tuple[RoundCosts, list[dict[str, Any]]]:
    """Times everything in turns: the costs, and a row of each part.

    Args:
      settings: of one slot; `settings.gen_tokens` are walked, more than `gamma_max`.
      prompt: a prompt of typical length.
    """
    # Numbers of drafts that are timed: 0, 1, 3, 7 and so on, and the most.
    sizes = {2**n - 1 for n in range(lm.gamma_max.bit_length())} | {lm.gamma_max}
    # As far as the last proposal has room for all of its drafts.
    steps = settings.gen_tokens - lm.gamma_max
    text = [*prompt, *runs.run_plain(lm, settings, prompt).tokens]
    # As the settings choose tokens.
    endless = dataclasses.replace(settings, stop_ids=())
    run = functools.partial(
        baseline.generate, lm.target, lm.params, max_steps=jnp.int32(steps)
    )
    begun = runs.begin_plain(lm, endless, prompt)
    cases = {PLAIN: _case(run, begun, calls=steps)}
    middle = text[: len(prompt) + steps // 2]
    kv = runs.begin_plain(lm, settings, middle).cache
    is_tree = protocols.is_tree(lm.drafter)
    how = {"num_columns": lm.gamma_max + 1 if is_tree else None, "is_tree": is_tree}
    for asked in sorted(sizes):
        cases[_window(asked)] = windows(lm, kv, 1 + asked, steps=steps, **how)
    rounds, drafted = _rounds_of(lm, settings, prompt), {}
    for asked in sorted(sizes):
        cases[_round(asked)], drafted[asked] = rounds(asked)
    timings = bench.run(cases, repeats=repeats, after_turn=after_turn)
    return costs_of(timings, drafted), [
        {"kind": "plan_cost", "cost": name} | timings.row(name, ratio_to=PLAIN)
        for name in timings.seconds
    ]


def _case(run: Callable, state: Any, *, calls: int) -> bench.Case:
    """The case of a run on copies of what it donates."""
    return functools.partial(bench.on_copies, run, state, calls=calls)


def windows(
    lm: loading.LanguageModel, kv: Any, num_active: Any, **how: Any
) -> bench.Case:
    """Times the target's forward over a window after a text, and what undoes it.

    Args:
      how: `steps` of a call, and the other arguments of `works.repeat_forward`.
    """
    live = jnp.asarray(num_active, jnp.int32)
    run = functools.partial(
        works.repeat_forward, lm.target, lm.params, num_active=live, **how
    )
    return _case(lambda kv: run(kv=kv), kv, calls=how["steps"])


def costs_of(timings: bench.Timings, drafted: Mapping[int, float]) -> RoundCosts:
    """Returns the costs: medians of ratios to a plain step.

    A part is compared with the plain step of its own turn, so that what slowed both
    down is in neither. A taller window that seems to take less is noise, and takes
    what the one before it does.

    Args:
      drafted: what rounds that ask for so many drafts verify on average.
    """
    plain = timings.seconds[PLAIN]
    plain_s, asked = statistics.median(plain), tuple(drafted)

    def seconds(part: str) -> float:
        ratios = bench.ratios(timings.seconds[part], plain)
        return plain_s * statistics.median(ratios)

    verify_s = np.maximum.accumulate([seconds(_window(n)) for n in asked])
    beyond_s = [
        seconds(_round(n)) - np.interp(verified, asked, verify_s)
        for n, verified in drafted.items()
    ]
    return RoundCosts(
        plain_s=plain_s,
        drafts=asked,
        verify_s=tuple(verify_s.tolist()),
        beyond_s=tuple(np.maximum(beyond_s, 0.0).tolist()),
    )


def _window(drafts: int) -> str:
    return f"{1 + drafts} active row{'s' * (drafts > 0)}"


_round = "round, gamma {}".format


def _rounds_of(
    lm: loading.LanguageModel, settings: runs.Settings, prompt: list[int]
) -> Callable[[int], tuple[bench.Case, float]]:
    """Returns what times rounds that ask for so many drafts, to the text's end, and
    tells how many they verify on average."""
    fixed = dataclasses.replace(settings, gamma=0, gamma_policy=None, policy_state=None)
    scheduler = runs.make_scheduler(lm, fixed)
    state = scheduler.begin(runs.make_request(lm, fixed, prompt))
    most = jnp.int32(settings.gen_tokens)
    run = lambda s: round_lib.generate(scheduler.speculator, s, max_rounds=most)

    def rounds(gamma: int) -> tuple[bench.Case, float]:
        slots = state.slots.replace(gamma=jnp.full_like(state.slots.gamma, gamma))
        begun = state.replace(slots=slots)
        done = run(jax.tree.map(jnp.copy, begun)).slots
        count = int(done.num_rounds[0])
        return _case(run, begun, calls=count), int(done.num_proposed[0]) / count

    return rounds
