"""Regret by the clock: every policy in real rounds, in turn with plain decoding."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import timing
from experiments.support import (
    forced_drafter,
    model_pair,
    paired_runs,
    regret_fates,
    regret_policies,
    regret_simulation,
)
from spec_jax import session
from spec_jax.gamma import policy


PLAIN = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveSet:
    """Seconds of decoding a set of texts, without prefill, by candidate and repeat.

    Attributes:
      seconds: by the candidate's name, or `PLAIN`.
      matched: whether all tokens of the candidate are those of plain decoding.
    """

    seconds: Mapping[str, Sequence[float]]
    matched: Mapping[str, bool]


def run_set(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    texts: Sequence[regret_fates.Text],
    candidates: Sequence[regret_policies.Candidate],
    *,
    repeats: int,
    hand_on: bool,
    after_text: Callable[[], None] = lambda: None,
) -> LiveSet:
    """Every text plain and with each policy in turn, `repeats` times.

    Args:
      settings: with the largest gamma, which bounds what policies ask for.
      hand_on: as in `regret_simulation.seconds_of`; a repeat begins anew.
    """
    names = [candidate.name for candidate in candidates]
    seconds = {name: [0.0] * repeats for name in (PLAIN, *names)}
    matched = dict.fromkeys(names, True)
    for repeat in range(repeats):
        states = {candidate.name: candidate.state for candidate in candidates}
        for text in texts:
            plain = paired_runs.run_plain(pair, settings, text.prompt_ids)
            seconds[PLAIN][repeat] += plain.timing.decode_s
            for candidate in candidates:
                used = candidate.pair or pair
                if text.is_hostile:
                    used = _hostile(used, settings, text)
                asked = _asked(settings, candidate, states[candidate.name])
                done = _run(used, asked, text.prompt_ids)
                seconds[candidate.name][repeat] += done.decode_s
                matched[candidate.name] &= done.tokens == plain.tokens
                if hand_on:
                    states[candidate.name] = done.state
            after_text()
    return LiveSet(seconds=seconds, matched=matched)


def rows(
    name: str,
    live: LiveSet,
    candidates: Sequence[regret_policies.Candidate],
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
            {
                c.name: regret_simulation.row(c, candidates, seconds, plain_s)
                for c in candidates
            }
        )
    made = []
    for candidate in candidates:
        found = [of_repeat[candidate.name] for of_repeat in by_repeat]
        spreads = {
            key: timing.spread([row[key] for row in found])
            for key in ("seconds", "plain_s", "regret", "speedup")
        }
        made.append(
            {
                "kind": "regret_live",
                "set": name,
                "prompts": num_texts,
                "policy": candidate.name,
                "is_fixed": candidate.is_fixed,
                "matched": live.matched[candidate.name],
                "best_gamma": [row["best_gamma"] for row in found],
                **{key: spread.median for key, spread in spreads.items()},
                **{f"{key}_p10": spread.p10 for key, spread in spreads.items()},
                **{f"{key}_p90": spread.p90 for key, spread in spreads.items()},
            }
        )
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Done:
    """One run, and what its policy has learnt."""

    tokens: list[int]
    decode_s: float
    state: policy.State


def _asked(
    settings: paired_runs.Settings,
    candidate: regret_policies.Candidate,
    state: policy.State,
) -> paired_runs.Settings:
    """The candidate's settings; a constant gamma runs without any policy."""
    if isinstance(candidate.gamma_policy, policy.Fixed):
        return dataclasses.replace(settings, gamma=candidate.gamma)
    return dataclasses.replace(
        settings,
        gamma=candidate.gamma,
        gamma_policy=candidate.gamma_policy,
        policy_state=state,
    )


def _run(
    pair: model_pair.ModelPair, settings: paired_runs.Settings, prompt: list[int]
) -> _Done:
    """One prompt; the clock runs over everything after the prefill."""
    runs = paired_runs.Rounds(pair, settings, prompt)
    jax.block_until_ready(runs.arrays)
    state = jax.block_until_ready(runs.begin())
    started = time.perf_counter()
    state = jax.block_until_ready(runs.generate(state))
    decode_s = time.perf_counter() - started
    session.check_state(state)
    tokens = np.asarray(state.tokens)[len(prompt) : int(state.length)].tolist()
    return _Done(tokens=tokens, decode_s=decode_s, state=state.policy)


def _hostile(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    text: regret_fates.Text,
) -> model_pair.ModelPair:
    """The pair whose drafter works as always, and is always wrong."""
    trace = np.zeros((settings.capacity + 1,), np.int32)
    written = [*text.prompt_ids, *text.tokens]
    trace[: len(written)] = written
    drafter = forced_drafter.ForcedDrafter(
        inner=pair.drafter, vocab_size=pair.target.config.vocab_size
    )
    params = forced_drafter.ForcedParams(
        draft=pair.params[1],
        trace=jnp.asarray(trace),
        kept=jnp.zeros(trace.shape, bool),
    )
    return dataclasses.replace(pair, drafter=drafter, params=(pair.params[0], params))
