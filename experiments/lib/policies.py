"""Policies of gamma by the name that a command line gives them."""

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.lib import models, profiles, runs
from spec_jax import default_gamma, loading
from spec_jax.drafters import choice, draft_model, hybrid
from spec_jax.engine import protocols
from spec_jax.gamma import (
    costs as costs_lib,
    goodput,
    leader,
    policy,
    schedule,
    threshold,
)


POLICIES = ("fixed", "threshold", "goodput", "leader")
"""Always the same gamma; by the share of kept drafts; by expected tokens per second,
from times that are measured first; by these of this text and of those before it."""

BUDGET = "budget"
"""The front door's default: goodput, and as much as its budget pays for."""

MEASURED = (*POLICIES, BUDGET)
"""All names, of scripts that measure what a policy needs where it runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A policy and its first state; None twice is a constant gamma.

    With the drafter's parameters, where those know what rounds cost, too.
    """

    gamma_policy: policy.GammaPolicy | None = None
    state: policy.State = None
    draft_params: Any = None


def make(
    name: str,
    drafter: protocols.Drafter,
    *,
    gamma: int,
    round_s: Callable[[], np.ndarray],
) -> Chosen:
    """The policy of that name, for gammas up to `gamma`.

    Args:
      round_s: seconds of a round by gamma, `0 .. gamma` at least; asked for where the
        policy needs them.
    """
    # A lookup that finds nothing cost nothing, and is no evidence.
    real = getattr(drafter, "inner", drafter)  # Of one that is forced.
    asks_a_model = isinstance(real, draft_model.DraftModel | hybrid.Hybrid)
    probing = policy.Probing(empty_is_free=not asks_a_model)
    if name == "fixed":
        return Chosen()
    if name == "threshold":
        levels = [level for level in (0, 1, 2, 4, 8, 16) if level < gamma]
        chosen = threshold.Threshold(ladder=(*levels, gamma), probing=probing)
        return Chosen(gamma_policy=chosen, state=chosen.init())
    if name in ("goodput", "leader"):
        is_tree = protocols.is_tree(drafter)
        if name == "leader":
            kind = leader.RankLeader if is_tree else leader.Leader
            free = probing.empty_is_free
            probing = dataclasses.replace(kind.probing, empty_is_free=free)
        else:
            kind = goodput.RankGoodput if is_tree else goodput.Goodput
        chosen = kind(gamma_max=gamma, probing=probing)
        state = chosen.init(round_s()[: gamma + 1])
        return Chosen(gamma_policy=chosen, state=state)
    raise ValueError(f"gamma policy {name!r} is not one of {', '.join(POLICIES)}")


def of_run(
    args: argparse.Namespace,
    subject: models.Subject,
    settings: runs.Settings,
    *,
    name: str,
    drafter: str | None = None,
) -> runs.Settings:
    """Returns the settings with the policy of that name, and with `--schedule`: then it
    says how many tokens are drafted by the profile's costs, where it needs any.

    Args:
      drafter: its name; None: `--drafter`.

    Raises:
      ValueError: as `profiles.read`; and a schedule of trees.
    """
    lm, gamma, slots = subject.lm, settings.gamma, settings.num_slots
    if not args.schedule:
        return with_policy(name, lm, settings, models.typical(subject.ids))
    if protocols.is_tree(lm.drafter):
        raise ValueError("--schedule is of chains: leave it out, or the tree")
    about = models.describe(args, lm, drafter) | {"drafter": drafter or args.drafter}
    about |= {"drafter_sha256": models.drafter_sha256(lm)}
    lengths, drawn = statistics.median(map(len, subject.ids)), settings.sampling
    profile = profiles.read(
        args.schedule,
        about,
        num_slots=slots,
        gamma=gamma,
        context=int(lengths) + settings.gen_tokens // 2,  # In the middle of a text.
        temperature=0.0 if drawn is None else float(drawn.temperature),
    )
    round_s = lambda: profile.round_s(slots, gamma)
    asks = make(name, lm.drafter, gamma=gamma, round_s=round_s)
    made = schedule.Schedule(
        gamma_max=gamma, stops_early=settings.rule != "coupled", asks=asks.gamma_policy
    )
    state = made.init(**vars(profile), asks=asks.state)
    return dataclasses.replace(settings, gamma_policy=made, policy_state=state)


def costs_of(
    lm: loading.LanguageModel, settings: runs.Settings, prompt: list[int]
) -> costs_lib.RoundCosts:
    """Returns what rounds of a model cost, as the front door measures it.

    Args:
      prompt: a prompt of typical length.
    """
    return _adapted(lm, settings, prompt)[1]


def _adapted(
    lm: loading.LanguageModel, settings: runs.Settings, prompt: list[int]
) -> tuple[Chosen, costs_lib.RoundCosts]:
    """Returns the front door's policy, and the costs that it has measured."""
    change = {"gamma_policy": None, "policy_state": None, "rule": "coupled"}
    fixed = dataclasses.replace(settings, **change)
    scheduler = runs.make_scheduler(lm, fixed)
    request = runs.make_request(lm, fixed, prompt)
    scheduler, _, costs = default_gamma.adapted(lm, scheduler, [request])
    if costs is None:
        raise ValueError("costs of rounds are measured in one process, of drafts")
    made, (_, params) = scheduler.speculator.gamma_policy, scheduler.speculator.params
    chosen = Chosen(
        gamma_policy=made,
        state=scheduler.policy_state,
        draft_params=params if isinstance(params, choice.ChoiceParams) else None,
    )
    return chosen, costs


def with_policy(
    name: str,
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompt: list[int],
) -> runs.Settings:
    """The settings with a policy of that name, for gammas up to `settings.gamma`.

    Args:
      prompt: a prompt of typical length, with which costs are measured where the policy
        needs them, as the front door measures them.

    Raises:
      ValueError: a budget under a rule whose tokens would depend on measured times.
    """
    if name == BUDGET and settings.rule != "coupled":
        raise ValueError(
            f"policy {BUDGET!r} chooses gamma by measured times, on which tokens would "
            f"depend under rule {settings.rule!r}: take the rule 'coupled', or a fixed "
            "gamma"
        )

    adapted = lambda: _adapted(lm, settings, prompt)
    if name == BUDGET:
        chosen, _ = adapted()
    else:
        how = {"gamma": settings.gamma, "round_s": lambda: adapted()[1].rising_s()}
        chosen = make(name, lm.drafter, **how)
    return dataclasses.replace(
        settings,
        gamma_policy=chosen.gamma_policy,
        policy_state=chosen.state,
        draft_params=chosen.draft_params,
    )
