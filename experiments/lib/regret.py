"""Regret: constant gammas and policies on one set of texts, simulated and by the clock.

A simulation takes recorded outcomes of drafts and a cost curve; live rounds run in turn
with autoregressive decoding.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.lib import (
    bench,
    costs as costs_lib,
    forced_drafter,
    outcomes,
    policies,
    runs,
)
from spec_jax import loading
from spec_jax.gamma import policy, simulation


PLAIN = "plain"

ADAPTIVE = tuple(name for name in policies.MEASURED if name != "fixed")
"""Policies that adapt; they are compared with every constant gamma."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy, and the state that its first text begins with."""

    name: str
    gamma: int  # tokens that are drafted a round, at most
    gamma_policy: policy.GammaPolicy
    state: policy.State
    # Whether it is a constant gamma, one of those that regret is against
    is_fixed: bool
    # With a drafter of its own, which ends drafts by itself; it cannot be simulated.
    # None: that of all others.
    lm: loading.LanguageModel | None = None


def candidates(
    names: Sequence[str],
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompt: list[int],
) -> list[Candidate]:
    """Every constant gamma up to `settings.gamma`, then the policies of these names.

    Args:
      names: of `ADAPTIVE`; they are what `spec_round.py` runs by these names.
      prompt: as in `policies.with_policy`, whose errors are raised.
    """
    fixed = policy.Fixed(gamma_max=settings.gamma)
    made = [
        Candidate(
            name=f"fixed {gamma}",
            gamma=gamma,
            gamma_policy=fixed,
            state=fixed.init(gamma),
            is_fixed=True,
        )
        for gamma in range(settings.gamma + 1)
    ]
    for name in names:
        asked = policies.with_policy(name, lm, settings, prompt)
        made.append(
            Candidate(
                name=name,
                gamma=asked.gamma,
                gamma_policy=asked.gamma_policy,
                state=asked.policy_state,
                is_fixed=False,
            )
        )
    return made


def confident(
    confidence: float, lm: loading.LanguageModel, settings: runs.Settings
) -> Candidate:
    """The largest gamma, with a drafter that stops where it is not confident.

    Args:
      lm: with that drafter.
    """
    fixed = policy.Fixed(gamma_max=settings.gamma)
    return Candidate(
        name=f"confidence {confidence:g}",
        gamma=settings.gamma,
        gamma_policy=fixed,
        state=fixed.init(settings.gamma),
        is_fixed=False,
        lm=lm,
    )


def seconds_of(
    candidate: Candidate,
    texts: Sequence[outcomes.Text],
    *,
    round_s: np.ndarray,
    catch_up_s: float,
    hand_on: bool,
) -> float:
    """Seconds that the policy takes for all texts.

    Args:
      hand_on: whether a text begins with what was learnt from the text before it.
    """
    total, state = 0.0, candidate.state
    for text in texts:
        run = simulation.simulate(
            candidate.gamma_policy,
            simulation.begin(candidate.gamma_policy, state),
            jnp.asarray(text.is_kept),
            max_rounds=jnp.int32(len(text.tokens)),
        )
        total += run.seconds(round_s, catch_up_s=catch_up_s)
        learnt = policy.renewed(candidate.gamma_policy, run.state)
        state = learnt if hand_on else candidate.state
    return total


def simulated_rows(
    candidates: Sequence[Candidate],
    sets: Mapping[str, Sequence[outcomes.Text]],
    costs: costs_lib.RoundCosts,
    *,
    hand_on: bool,
) -> list[dict[str, Any]]:
    """A row of each set and policy, as `row` makes it, of kind "regret"."""
    round_s = costs.round_s()
    made = []
    for name, texts in sets.items():
        seconds = {
            candidate.name: seconds_of(
                candidate,
                texts,
                round_s=round_s,
                catch_up_s=costs.catch_up_s or 0.0,
                hand_on=hand_on,
            )
            for candidate in candidates
        }
        plain_s = sum(len(text.tokens) for text in texts) * costs.plain_s
        for candidate in candidates:
            about = {"kind": "regret", "set": name, "prompts": len(texts)}
            made.append(about | row(candidate, candidates, seconds, plain_s))
    return made


def row(
    candidate: Candidate,
    candidates: Sequence[Candidate],
    seconds: Mapping[str, float],
    plain_s: float,
) -> dict[str, Any]:
    """One policy on one set, and the constant gammas and autoregressive decoding.

    Args:
      seconds: of every candidate.
      plain_s: seconds of autoregressive decoding of the same texts.
    """
    fixed_s = [seconds[other.name] for other in candidates if other.is_fixed]
    regret = simulation.Regret(seconds=seconds[candidate.name], fixed_s=tuple(fixed_s))
    return {
        "policy": candidate.name,
        "is_fixed": candidate.is_fixed,
        "seconds": regret.seconds,
        "plain_s": plain_s,
        "fixed_s": regret.fixed_s,
        "best_gamma": regret.best_gamma,
        "regret": regret.regret,
        "speedup": plain_s / regret.seconds,
        "slowdown_to_gamma_0": regret.overhead,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveSet:
    """Seconds of decoding a set of texts, without prefill, by candidate and repeat."""

    seconds: Mapping[str, Sequence[float]]  # by the candidate's name, or `PLAIN`
    # Whether all tokens of the candidate are those of autoregressive decoding, and none
    # is chosen from logits that are not finite
    matched: Mapping[str, bool]


def run_set(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    texts: Sequence[outcomes.Text],
    candidates: Sequence[Candidate],
    *,
    repeats: int,
    hand_on: bool,
    after_text: Callable[[], None] = lambda: None,
) -> LiveSet:
    """Every text plain and with each policy in turn, `repeats` times.

    Args:
      settings: with the largest gamma, which bounds what policies ask for.
      hand_on: as in `seconds_of`; a repeat begins anew.
    """
    names = [candidate.name for candidate in candidates]
    seconds = {name: [0.0] * repeats for name in (PLAIN, *names)}
    matched = dict.fromkeys(names, True)
    for repeat in range(repeats):
        states = {candidate.name: candidate.state for candidate in candidates}
        for text in texts:
            plain = runs.run_plain(lm, settings, text.prompt_ids)
            seconds[PLAIN][repeat] += plain.timing.decode_s
            for candidate in candidates:
                asked = _asked(settings, candidate, states[candidate.name])
                used, known = candidate.lm or lm, None
                if text.is_adversarial:
                    written = [*text.prompt_ids, *text.tokens]
                    known = forced_drafter.never_kept(used.drafter_params, written)
                    used = forced_drafter.adversarial(used)
                done = runs.run_speculative(
                    used, asked, text.prompt_ids, draft_params=known
                )
                seconds[candidate.name][repeat] += done.timing.decode_s
                matched[candidate.name] &= runs.matches(done, plain)
                if hand_on:
                    learnt = policy.renewed(candidate.gamma_policy, done.policy_state)
                    states[candidate.name] = learnt
            after_text()
    return LiveSet(seconds=seconds, matched=matched)


def live_rows(
    name: str,
    live: LiveSet,
    candidates: Sequence[Candidate],
    *,
    num_texts: int,
) -> list[dict[str, Any]]:
    """A row of each policy on the set, of kind "regret_live".

    Regret and speed-up are medians over the repeats of ratios within one.
    """
    plain = live.seconds[PLAIN]
    by_repeat = []
    for repeat, plain_s in enumerate(plain):
        seconds = {c.name: live.seconds[c.name][repeat] for c in candidates}
        by_repeat.append(
            {c.name: row(c, candidates, seconds, plain_s) for c in candidates}
        )
    made = []
    for candidate in candidates:
        found = [of_repeat[candidate.name] for of_repeat in by_repeat]
        about = {
            "kind": "regret_live",
            "set": name,
            "prompts": num_texts,
            "policy": candidate.name,
            "is_fixed": candidate.is_fixed,
            "matched": live.matched[candidate.name],
            "best_gamma": [row["best_gamma"] for row in found],
        }
        for key in ("seconds", "plain_s", "regret", "speedup"):
            about |= bench.spread_fields(key, [row[key] for row in found])
        made.append(about)
    return made


def _asked(
    settings: runs.Settings,
    candidate: Candidate,
    state: policy.State,
) -> runs.Settings:
    """The candidate's settings; a constant gamma runs without any policy."""
    if isinstance(candidate.gamma_policy, policy.Fixed):
        return dataclasses.replace(settings, gamma=candidate.gamma)
    return dataclasses.replace(
        settings,
        gamma=candidate.gamma,
        gamma_policy=candidate.gamma_policy,
        policy_state=state,
    )
