"""Policies of gamma by the name that a command line gives them."""

import argparse
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from experiments.lib import models, profiles, prompt_files, runs
from spec_jax import default_gamma
from spec_jax.drafters import draft_model, hybrid
from spec_jax.engine import protocols
from spec_jax.gamma import (
    costs as costs_lib,
    goodput,
    leader,
    policy,
    schedule as schedule_lib,
    threshold,
)


POLICIES = ("fixed", "threshold", "goodput", "leader")
"""Names: a constant gamma; gamma by the share of kept drafts; by expected tokens per
second, from times that are measured first; by these and by the texts before."""

BUDGET = "budget"
"""The default of `spec_jax.generate`: goodput, as far as its budget pays for it."""

MEASURED = (*POLICIES, BUDGET)
"""All names, for scripts that measure the times that a policy needs."""


Chosen = tuple[policy.GammaPolicy | None, policy.State]
"""A policy and its first state; both are None for a constant gamma."""


def make(
    name: str,
    drafter: protocols.Drafter,
    *,
    gamma: int,
    round_s: Callable[[], np.ndarray],
) -> Chosen:
    """Returns the policy of that name, for gammas up to `gamma`.

    Args:
      round_s: returns seconds of a round by gamma, `0 .. gamma` at least; called only
        where the policy needs them.
    """
    if name == "fixed":
        return None, None
    # A lookup that finds nothing costs nothing, and is no evidence.
    is_free = not isinstance(drafter, draft_model.DraftModel | hybrid.Hybrid)
    if name == "threshold":
        levels = [level for level in (0, 1, 2, 4, 8, 16) if level < gamma]
        probing = policy.Probing(empty_is_free=is_free)
        made = threshold.Threshold(ladder=(*levels, gamma), probing=probing)
        return made, made.init()
    if name not in POLICIES:
        raise ValueError(f"gamma policy {name!r} is not one of {', '.join(POLICIES)}")
    of_chains, of_trees = {
        "goodput": (goodput.Goodput, goodput.RankGoodput),
        "leader": (leader.Leader, leader.RankLeader),
    }[name]
    kind = of_trees if protocols.is_tree(drafter) else of_chains
    probing = dataclasses.replace(kind.probing, empty_is_free=is_free)
    made = kind(gamma_max=gamma, probing=probing)
    return made, made.init(round_s()[: gamma + 1])


def of_run(
    args: argparse.Namespace,
    settings: runs.Settings,
    prompts: Sequence[prompt_files.Prompt],
    *,
    name: str,
    schedule: pathlib.Path | None = None,
    drafter: str | None = None,
) -> runs.Settings:
    """Returns the settings with a policy of that name, for gammas up to
    `settings.gamma`; or with a schedule of a profile's times, which asks the policy how
    many tokens to draft.

    Args:
      schedule: the file of the profile; None: costs are measured where the policy needs
        them, as `spec_jax.generate` measures them.
      drafter: the drafter's name; None: `--drafter`.

    Raises:
      ValueError: as `profiles.read`; a schedule of trees; and a budget under a rule
        whose tokens would depend on measured times.
    """
    lm, gamma, slots = settings.lm, settings.gamma, settings.num_slots
    stops_early = settings.rule != "coupled"
    if schedule is None:
        if name == BUDGET and stops_early:
            raise ValueError(
                f"policy {BUDGET!r} chooses gamma by measured times, on which tokens "
                f"would depend under rule {settings.rule!r}: take the rule 'coupled', "
                "or a fixed gamma"
            )
        if name == BUDGET:
            return adapted(settings, prompts)[0]
        round_s = lambda: adapted(settings, prompts)[1].rising_s()
        made, state = make(name, lm.drafter, gamma=gamma, round_s=round_s)
        return dataclasses.replace(settings, gamma_policy=made, policy_state=state)
    if protocols.is_tree(lm.drafter):
        raise ValueError("--schedule is of chains: leave it out, or the tree")
    about = models.describe(args, lm, drafter) | {"drafter": drafter or args.drafter}
    about |= {"drafter_sha256": models.drafter_sha256(lm)}
    length = statistics.median(len(one.ids) for one in prompts)
    drawn = settings.sampling
    profile = profiles.read(
        schedule,
        about,
        num_slots=slots,
        gamma=gamma,
        context=int(length) + settings.gen_tokens // 2,  # At the middle of a text.
        temperature=0.0 if drawn is None else float(drawn.temperature),
    )
    round_s = lambda: profile.round_s(slots, gamma)
    asks, first = make(name, lm.drafter, gamma=gamma, round_s=round_s)
    made = schedule_lib.Schedule(gamma_max=gamma, stops_early=stops_early, asks=asks)
    state = made.init(**vars(profile), asks=first)
    return dataclasses.replace(settings, gamma_policy=made, policy_state=state)


def adapted(
    settings: runs.Settings, prompts: Sequence[prompt_files.Prompt]
) -> tuple[runs.Settings, costs_lib.RoundCosts]:
    """Returns the settings with the default policy of `spec_jax.generate`, and the
    costs of rounds as it measures them, with the prompt of median length."""
    change = {"gamma_policy": None, "policy_state": None, "rule": "coupled"}
    fixed = dataclasses.replace(settings, **change)
    typical = sorted((one.ids for one in prompts), key=len)[len(prompts) // 2]
    scheduler, _, costs = default_gamma.adapted(
        settings.lm, runs.make_scheduler(fixed), [runs.make_request(fixed, typical)]
    )
    _, params = scheduler.speculator.params  # With the costs, for a choice.
    found = dataclasses.replace(
        settings,
        lm=dataclasses.replace(settings.lm, drafter_params=params),
        gamma_policy=scheduler.speculator.gamma_policy,
        policy_state=scheduler.policy_state,
    )
    return found, costs
