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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import bench, runs, works
from spec_jax import loading
from spec_jax.analysis import trace
from spec_jax.engine import baseline, protocols, round as round_lib, rows as rows_lib
from spec_jax.gamma import theory


PLAIN = "plain step"
STRIDE = 8
"""Tokens that a drafter sits out between two proposals, where catching up is timed."""


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
    # By which a token that the drafter sat out delays its next proposal, as
    # `gamma.simulation` takes it; None where it was not timed
    catch_up_s: float | None = None

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

    def round_s(self) -> np.ndarray:
        """Seconds of a round that drafts all it is asked for, `[gamma_max + 1]`."""
        return np.array([self.seconds(n, drafted=n) for n in range(self.gamma_max + 1)])

    def without(self, free: theory.Free) -> "RoundCosts":
        """Returns the costs if drafting, or all rows but the first, cost nothing.

        The latter is about so on a GPU, whose rows share one read of the weights.
        """
        verify_s, beyond_s = self.verify_s, self.beyond_s
        if free in ("verification", "both"):
            verify_s = verify_s[:1] * len(verify_s)
        if free in ("drafting", "both"):
            beyond_s = beyond_s[:1] * len(beyond_s)
        return dataclasses.replace(self, verify_s=verify_s, beyond_s=beyond_s)

    def with_rows_of(self, curve: theory.CostCurve) -> "RoundCosts":
        """Returns the costs where rows cost the plain steps that another curve says,
        of as many rows or more; drafting, and what else a round has, cost the same."""
        num_rows = np.asarray(self.drafts) + 1
        steps = np.interp(num_rows, curve.rows, curve.verify_s) / curve.plain_s
        verify_s = tuple((steps * self.plain_s).tolist())
        return dataclasses.replace(self, verify_s=verify_s)


def check_gen_tokens(gen_tokens: int, gamma_max: int) -> None:
    """Raises `ValueError` where a text is too short for one window of `gamma_max`."""
    if gen_tokens <= gamma_max:
        raise ValueError(
            f"--gen-tokens {gen_tokens}: a round of gamma {gamma_max} commits up to "
            f"{gamma_max + 1} tokens; generate at least as many"
        )


def measure(
    lms: Mapping[str, loading.LanguageModel],
    settings: runs.Settings,
    prompt: list[int],
    *,
    repeats: int,
    catch_up: bool = False,
    after_turn: Callable[[], None] = lambda: None,
) -> tuple[dict[str, RoundCosts], list[dict[str, Any]]]:
    """Times everything in turn: each drafter's costs, and a row of each part.

    Args:
      lms: one target with several drafters of chains, by their names, all of one
        `gamma_max`; or with one drafter of trees.
      settings: of one slot; `settings.gen_tokens` are walked, more than `gamma_max`.
      prompt: a prompt of typical length.
      catch_up: whether to time what tokens cost that a drafter sat out.
    """
    first = next(iter(lms.values()))
    sizes = _sizes(first.gamma_max)
    cases, text = _of_target(first, settings, prompt, sizes)
    drafted: dict[str, dict[int, float]] = {name: {} for name in lms}
    for name, lm in lms.items():
        walk = _Walk(lm, settings, text, num_prompt=len(prompt))
        for asked in sizes:
            cases[_round(name, asked)], drafted[name][asked] = walk.rounds(asked)
        if catch_up:
            cases |= walk.late(name)
    timings = bench.run(cases, repeats=repeats, after_turn=after_turn)
    found = {name: costs_of(name, timings, drafted[name]) for name in lms}
    return found, rows(timings)


def _sizes(gamma_max: int) -> list[int]:
    """Numbers of drafts that are timed: 0, 1, 3, 7 and so on, and the most."""
    return sorted({2**n - 1 for n in range(gamma_max.bit_length())} | {gamma_max})


def _of_target(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompt: list[int],
    drafts: Sequence[int],
) -> tuple[dict[str, bench.Case], list[int]]:
    """Returns cases of plain steps, and of windows of so many drafts; and the text."""
    # As far as the last proposal has room for all of its drafts.
    steps = settings.gen_tokens - lm.gamma_max
    text = [*prompt, *runs.run_plain(lm, settings, prompt).tokens]
    # As the settings choose tokens.
    endless = dataclasses.replace(settings, stop_ids=())
    run = functools.partial(
        baseline.generate, lm.target, lm.params, max_steps=jnp.int32(steps)
    )
    begun = runs.begin_plain(lm, endless, prompt)
    made = {PLAIN: _case(run, begun, calls=steps)}
    middle = text[: len(prompt) + steps // 2]
    kv = runs.begin_plain(lm, settings, middle).cache
    is_tree = protocols.is_tree(lm.drafter)
    how = {"num_columns": lm.gamma_max + 1 if is_tree else None, "is_tree": is_tree}
    for count in drafts:
        made[_window(1 + count)] = windows(lm, kv, 1 + count, steps=steps, **how)
    return made, text


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


def costs_of(
    name: str, timings: bench.Timings, drafted: Mapping[int, float]
) -> RoundCosts:
    """The costs of the drafter `name`: medians of ratios to a plain step.

    A part is compared with the plain step of its own turn, so that what slowed both
    down is in neither. A taller window that seems to take less is noise, and takes
    what the one before it does.

    Args:
      drafted: what rounds that ask for so many drafts verify on average.
    """
    plain, catch_up_s = timings.seconds[PLAIN], None
    plain_s = statistics.median(plain)

    def seconds(part: str) -> float:
        ratios = bench.ratios(timings.seconds[part], plain)
        return plain_s * statistics.median(ratios)

    if _late(name) in timings.seconds:
        delay_s = seconds(_late(name)) - seconds(_prompt(name))
        catch_up_s = max(0.0, delay_s) / (STRIDE - 1)
    asked = tuple(drafted)
    windows = np.maximum.accumulate([seconds(_window(1 + n)) for n in asked])
    beyond_s = [
        seconds(_round(name, n)) - np.interp(verified, asked, windows)
        for n, verified in drafted.items()
    ]
    return RoundCosts(
        plain_s=plain_s,
        drafts=asked,
        verify_s=tuple(windows.tolist()),
        beyond_s=tuple(np.maximum(beyond_s, 0.0).tolist()),
        catch_up_s=catch_up_s,
    )


def rows(timings: bench.Timings) -> list[dict[str, Any]]:
    """A JSON row of each part; ratios to a plain step are medians over the turns."""
    return [
        {"kind": "plan_cost", "cost": name} | timings.row(name, ratio_to=PLAIN)
        for name in timings.seconds
    ]


def _window(num_active: int) -> str:
    return f"{num_active} active row{'s' * (num_active > 1)}"


_round = "{}: round, gamma {}".format
_prompt = "{}: proposal, nothing to catch up".format
_late = f"{{}}: proposal, {STRIDE - 1} tokens to catch up".format


class _Walk:
    """A drafter, and a text along which it proposes.

    Args:
      text: the prompt, and what autoregressive decoding wrote behind it.
    """

    def __init__(
        self,
        lm: loading.LanguageModel,
        settings: runs.Settings,
        text: list[int],
        *,
        num_prompt: int,
    ):
        self._gen_tokens, self._num_prompt = settings.gen_tokens, num_prompt
        idle = dataclasses.replace(settings, gamma=0, gamma_policy=None)
        idle = dataclasses.replace(idle, policy_state=None)
        scheduler = runs.make_scheduler(lm, idle)
        self._speculator = scheduler.speculator
        request = runs.make_request(lm, idle, text[:num_prompt])
        self._state = scheduler.begin(request)
        tokens = np.zeros(self._state.slots.tokens.shape, np.int32)
        tokens[0, : len(text)] = text
        self._tokens = jnp.asarray(tokens)
        taps, self._features = protocols.taps_of(lm.drafter), None
        if taps:
            self._features = trace.record_features(
                rows_lib.SlotRows(model=lm.target, num_slots=1),
                lm.params,
                text,
                num_prompt=num_prompt,
                taps=taps,
            )

    def rounds(self, gamma: int) -> tuple[bench.Case, float]:
        """Returns rounds that ask for so many drafts, to the text's end; and how many
        they verify on average."""
        slots, most = self._state.slots, jnp.int32(self._gen_tokens)
        asks = slots.replace(gamma=jnp.full_like(slots.gamma, gamma))
        begun = self._state.replace(slots=asks)
        run = lambda s: round_lib.generate(self._speculator, s, max_rounds=most)
        done = run(jax.tree.map(jnp.copy, begun)).slots
        count = int(done.num_rounds[0])
        drafted = int(done.num_proposed[0]) / count
        return _case(run, begun, calls=count), drafted

    def late(self, name: str) -> dict[str, bench.Case]:
        """Returns proposals with nothing to catch up, and with tokens sat out."""
        # Equally many proposals a call, so that the call itself costs the same.
        longest = self._gen_tokens - self._speculator.drafter.gamma_max
        few, cases = max(1, longest // STRIDE), {}
        for part, stride in ((_prompt(name), 1), (_late(name), STRIDE)):
            run = functools.partial(
                works.propose_along,
                self._speculator.drafter,
                self._speculator.params[1],
                tokens=self._tokens,
                features=self._features,
                sampling=self._state.slots.sampling,
                start=jnp.int32(self._num_prompt),
                gamma=jnp.int32(1),
                steps=jnp.int32(few),
                stride=jnp.int32(stride),
            )
            cases[part] = _case(run, self._state.memory, calls=few)
        return cases
