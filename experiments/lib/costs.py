"""What the parts of a round cost: a plain step, windows, proposals of any drafter.

Proposals are timed along a text that decoding wrote, one token further each, as if the
target had kept none: what a drafter looks up depends on what stands there. The other
parts, and rounds of trees, are timed on the same text. Every thunk runs many steps in
one compiled call, and returns the seconds of one.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import runs, timing, works
from spec_jax import loading
from spec_jax.analysis import trace
from spec_jax.engine import (
    baseline,
    protocols,
    round as round_lib,
    rows as rows_lib,
)
from spec_jax.gamma import theory


PLAIN = "plain step"
STRIDE = 8
"""Tokens that a drafter sits out between two proposals, where catching up is timed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Seconds of the parts of a round, of one drafter."""

    plain_s: float  # a step of autoregressive decoding
    # The target's forward over `1 .. gamma_max + 1` active rows.
    verify_s: tuple[float, ...]
    idle_s: float  # a round that asks for no draft
    # A proposal of 0, of 1 and of `gamma_max` tokens
    propose_s: tuple[float, float, float]
    # By which a token that the drafter sat out delays its next proposal, as
    # `gamma.simulation` takes it; None where it was not timed
    catch_up_s: float | None = None

    @property
    def gamma_max(self) -> int:
        """The largest gamma whose window was timed."""
        return len(self.verify_s) - 1

    def curve(self) -> theory.CostCurve:
        """The costs as a line in gamma: what a draft adds, and what a round has anyway.

        The overhead is all of a round that asks for nothing but its forward, and what
        a proposal costs beyond its drafts. Differences below 0 are noise, and count 0.
        """
        none, one, most = self.propose_s
        if self.gamma_max == 1:
            draft_s = max(0.0, one - none)
        else:
            draft_s = max(0.0, most - one) / (self.gamma_max - 1)
        beyond_drafts = max(0.0, one - none - draft_s)
        return theory.CostCurve(
            plain_s=self.plain_s,
            rows=tuple(range(1, self.gamma_max + 2)),
            verify_s=self.verify_s,
            draft_s=draft_s,
            overhead_s=max(0.0, self.idle_s - self.verify_s[0]) + beyond_drafts,
        )

    def round_s(self) -> np.ndarray:
        """Seconds of a round by gamma, `[gamma_max + 1]`; with 0 as it was timed."""
        round_s = self.curve().round_s(self.gamma_max)
        round_s[0] = min(self.idle_s, round_s[0])
        return round_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeCosts:
    """Seconds of the parts of a round of trees, by the nodes that are asked for."""

    plain_s: float  # a step of autoregressive decoding
    nodes: tuple[int, ...]  # from 0 on; what follows is of these
    verify_s: tuple[float, ...]  # the target's forward over the root and as many nodes
    # All else that a round takes: drafting, acceptance, moving what is kept
    beyond_s: tuple[float, ...]

    @property
    def gamma_max(self) -> int:
        """The most nodes that were timed."""
        return self.nodes[-1]

    def seconds(self, nodes: int, *, drafted: float) -> float:
        """Seconds of a round that asks for `nodes`, and verifies `drafted` of them.

        Between numbers that were timed, along a line.
        """
        beyond_s = float(np.interp(nodes, self.nodes, self.beyond_s))
        return beyond_s + float(np.interp(drafted, self.nodes, self.verify_s))

    def with_free_rows(self) -> "TreeCosts":
        """Returns the costs where a forward takes as long as with one row, of any
        number: as on a GPU, whose rows share one read of the weights."""
        flat = (self.verify_s[0],) * len(self.verify_s)
        return dataclasses.replace(self, verify_s=flat)

    def with_rows_of(self, curve: theory.CostCurve) -> "TreeCosts":
        """Returns the costs where rows cost the plain steps that another curve says,
        of as many rows or more; drafting, and what else a round has, cost the same."""
        num_rows = np.asarray(self.nodes) + 1
        steps = np.interp(num_rows, curve.rows, curve.verify_s) / curve.plain_s
        verify_s = tuple((steps * self.plain_s).tolist())
        return dataclasses.replace(self, verify_s=verify_s)

    def round_s(self) -> np.ndarray:
        """Seconds of a round by its nodes, `[gamma_max + 1]`."""
        return np.array([self.seconds(n, drafted=n) for n in range(self.gamma_max + 1)])


def measure_tree(
    name: str,
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompt: list[int],
    *,
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
) -> tuple[TreeCosts, list[dict[str, Any]]]:
    """Times windows and whole rounds in turn, as `measure` does, of trees.

    Rounds, and not proposals: a draft's weights are not in the caches any more where a
    forward of the target came between, and what is kept is moved.
    """
    nodes = (0, *_sizes(lm))
    made, text = _of_target(lm, settings, prompt, nodes)
    walk = _Walk(lm, settings, text, num_prompt=len(prompt))
    rounds = {n: walk.rounds(n) for n in nodes}
    made |= {_round(name, n): thunk for n, (thunk, _) in rounds.items()}
    timings = timing.interleave(made, repeats=repeats, after_turn=after_turn)
    seconds = functools.partial(_seconds, timings)
    windows = np.maximum.accumulate([seconds(_window(1 + n)) for n in nodes])
    beyond_s = [
        seconds(_round(name, n)) - np.interp(drafted, nodes, windows)
        for n, (_, drafted) in rounds.items()
    ]
    found = TreeCosts(
        plain_s=statistics.median(timings.seconds[PLAIN]),
        nodes=nodes,
        verify_s=tuple(windows.tolist()),
        beyond_s=tuple(np.maximum(beyond_s, 0.0).tolist()),
    )
    return found, rows(timings)


def _sizes(lm: loading.LanguageModel) -> list[int]:
    """Numbers of a tree's nodes that are timed: 1, 3, 7 and so on, and all of them."""
    most = lm.gamma_max
    return sorted({2**n - 1 for n in range(1, most.bit_length())} | {most})


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
    """Times all parts in turn: each drafter's costs, and their rows; see `thunks`."""
    made = thunks(lms, settings, prompt, catch_up=catch_up)
    timings = timing.interleave(made, repeats=repeats, after_turn=after_turn)
    found = {
        name: costs_of(name, timings, gamma_max=lm.gamma_max)
        for name, lm in lms.items()
    }
    return found, rows(timings)


def thunks(
    lms: Mapping[str, loading.LanguageModel],
    settings: runs.Settings,
    prompt: list[int],
    *,
    catch_up: bool = False,
) -> dict[str, timing.Thunk]:
    """Returns everything that `costs_of` needs, by name.

    Args:
      lms: one target with several drafters of chains, by their names; all of one
        `gamma_max`.
      settings: of one slot; `settings.gen_tokens` are walked, more than `gamma_max`.
      prompt: a prompt of typical length.
      catch_up: whether to time what tokens cost that a drafter sat out.
    """
    first = next(iter(lms.values()))
    made, text = _of_target(first, settings, prompt, range(first.gamma_max + 1))
    for name, lm in lms.items():
        walk = _Walk(lm, settings, text, num_prompt=len(prompt))
        made |= walk.thunks(name, catch_up=catch_up)
    return made


def _of_target(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompt: list[int],
    drafts: Sequence[int],
) -> tuple[dict[str, timing.Thunk], list[int]]:
    """Returns thunks of plain steps and of windows of so many drafts, and the text."""
    # As far as the last proposal has room for all of its drafts.
    steps = settings.gen_tokens - lm.gamma_max
    text = [*prompt, *runs.run_plain(lm, settings, prompt).tokens]
    made = {PLAIN: _plain_steps(lm, settings, prompt, steps)}
    middle = text[: len(prompt) + steps // 2]
    kv = runs.begin_plain(lm, settings, middle).cache
    for count in drafts:
        made[_window(1 + count)] = _windows(lm, kv, 1 + count, steps)
    return made, text


def _plain_steps(lm, settings, prompt, steps) -> timing.Thunk:
    """Times decoding after the prompt, as the settings choose tokens."""
    endless = dataclasses.replace(settings, stop_ids=())
    begun, most = runs.begin_plain(lm, endless, prompt), jnp.int32(steps)
    return timing.on_copies(
        lambda state: baseline.generate(lm.target, lm.params, state, max_steps=most),
        begun,
        calls=steps,
    )


def _windows(lm, kv, num_active, steps) -> timing.Thunk:
    """Times the target's forward over a window after a text, and what undoes it."""
    is_tree = protocols.is_tree(lm.drafter)
    run = functools.partial(
        works.repeat_forward,
        lm.target,
        lm.params,
        num_active=jnp.int32(num_active),
        steps=steps,
        num_columns=lm.gamma_max + 1 if is_tree else None,
        is_tree=is_tree,
    )
    return timing.on_copies(lambda kv: run(kv=kv), kv, calls=steps)


def costs_of(name: str, timings: timing.Timings, *, gamma_max: int) -> RoundCosts:
    """The costs of the drafter `name`: medians of ratios to a plain step.

    A part is compared with the plain step of its own turn, so that what slowed both
    down is in neither. A taller window that seems to take less is noise, and takes
    what the one before it does.
    """
    seconds = functools.partial(_seconds, timings)
    catch_up_s = None
    if _late(name) in timings.seconds:
        delay_s = seconds(_late(name)) - seconds(_prompt(name))
        catch_up_s = max(0.0, delay_s) / (STRIDE - 1)
    windows = [seconds(_window(n)) for n in range(1, gamma_max + 2)]
    return RoundCosts(
        plain_s=statistics.median(timings.seconds[PLAIN]),
        verify_s=tuple(np.maximum.accumulate(windows).tolist()),
        idle_s=seconds(_round(name, 0)),
        propose_s=tuple(seconds(_proposal(name, g)) for g in (0, 1, gamma_max)),
        catch_up_s=catch_up_s,
    )


def _seconds(timings: timing.Timings, thunk: str) -> float:
    plain = timings.seconds[PLAIN]
    ratios = timing.ratios(timings.seconds[thunk], plain)
    return statistics.median(plain) * statistics.median(ratios)


def rows(timings: timing.Timings) -> list[dict[str, Any]]:
    """A JSON row of each part; ratios to a plain step are medians over the turns."""
    plain = timings.seconds[PLAIN]
    return [
        {
            **{"kind": "plan_cost", "cost": name, "n": len(seconds)},
            **timing.spread_fields("ms", [1e3 * s for s in seconds]),
            **timing.spread_fields("ratio", timing.ratios(seconds, plain)),
        }
        for name, seconds in timings.seconds.items()
    ]


def _window(num_active: int) -> str:
    return f"{num_active} active row{'s' * (num_active > 1)}"


def _round(drafter: str, gamma: int) -> str:
    return f"{drafter}: round, gamma {gamma}"


def _proposal(drafter: str, gamma: int) -> str:
    return f"{drafter}: proposal, gamma {gamma}"


def _prompt(drafter: str) -> str:
    return f"{drafter}: proposal, nothing to catch up"


def _late(drafter: str) -> str:
    return f"{drafter}: proposal, {STRIDE - 1} tokens to catch up"


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

    def thunks(self, name: str, *, catch_up: bool) -> dict[str, timing.Thunk]:
        """Returns a round without drafts, and proposals along the text."""
        gamma_max = self._speculator.drafter.gamma_max
        steps, most = self._gen_tokens - gamma_max, jnp.int32(self._gen_tokens)
        made = {
            _round(name, 0): timing.on_copies(
                lambda s: round_lib.generate(self._speculator, s, max_rounds=most),
                self._state,
                calls=self._gen_tokens,
            )
        }
        for gamma in sorted({0, 1, gamma_max}):
            made[_proposal(name, gamma)] = self._proposals(gamma, steps=steps)
        if catch_up:
            # Equally many proposals a call, so that the call itself costs the same.
            few = max(1, steps // STRIDE)
            made[_prompt(name)] = self._proposals(1, steps=few)
            made[_late(name)] = self._proposals(1, steps=few, stride=STRIDE)
        return made

    def rounds(self, nodes: int) -> tuple[timing.Thunk, float]:
        """Returns rounds that ask for so many nodes, to the text's end; and how many
        they verify on average."""
        slots, most = self._state.slots, jnp.int32(self._gen_tokens)
        asks = slots.replace(gamma=jnp.full_like(slots.gamma, nodes))
        begun = self._state.replace(slots=asks)
        run = lambda s: round_lib.generate(self._speculator, s, max_rounds=most)
        done = run(jax.tree.map(jnp.copy, begun)).slots
        count = int(done.num_rounds[0])
        drafted = int(done.num_proposed[0]) / count
        return timing.on_copies(run, begun, calls=count), drafted

    def _proposals(self, gamma: int, *, steps: int, stride: int = 1) -> timing.Thunk:
        run = functools.partial(
            works.propose_along,
            self._speculator.drafter,
            self._speculator.params[1],
            tokens=self._tokens,
            features=self._features,
            sampling=self._state.slots.sampling,
            start=jnp.int32(self._num_prompt),
            gamma=jnp.int32(gamma),
            steps=jnp.int32(steps),
            stride=jnp.int32(stride),
        )
        return timing.on_copies(run, self._state.memory, calls=steps)
