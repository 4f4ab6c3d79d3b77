"""Cells of the exactness suite: one configuration of rounds, and lists of these.

A cell has everything that may decide a bit, except weights and prompts. The numbers
that its names stand for are here, too. No number is measured, so that a run decides the
same on every machine.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lib import flags, policies
from spec_jax.drafters import registry, tree_shapes
from spec_jax.engine import protocols
from spec_jax.gamma import schedule
from spec_jax.model import row_model
from spec_jax.rules import sampling as sampling_lib


CONSTANTS: Mapping[str, Mapping[str, float]] = {
    "sampled": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 0},
    # A round without drafts takes 1, in any unit, and each draft adds to it: enough
    # that texts of some difficulty get fewer drafts than the most.
    "goodput": {"round": 1.0, "draft": 0.25},
    "leader": {"round": 1.0, "draft": 0.25},
    # A step takes 1, each row of any slot adds to it, and so does drafting: enough that
    # some drafts are verified, and not all.
    "schedule": {"step": 1.0, "row": 0.04, "draft": 0.2},
}
"""Numbers that cells name: settings of sampling, and costs. Certificates have them."""

SAMPLINGS = ("greedy", "sampled")
GAMMA_POLICIES = (*policies.POLICIES, "schedule")
"""Policies of command lines, and a schedule that chooses what a batch verifies, as
`--schedule` of other scripts does, by stated times instead of a profile."""
NO_TREE = flags.NO_TREE
PREFILLS = ("rows", "batched")
FORCED = {"always-right": 1.0, "always-wrong": 0.0}
"""Drafters that know the text, and their share of right drafts: all, so that all rows
of a window are kept, or none."""


DRAFTERS = (*registry.names(), *FORCED)
"""Names of drafters, without any written as package.module:Name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration of rounds; `suite_plan.AXES` says what its values mean.

    An axis that older certificates lack has a default.
    """

    dtype: str
    impl: str  # a resolved implementation
    slab: int
    page_size: int
    cache: str
    prefill: str
    drafter: str
    gamma: int  # data of an executable, and so the cheapest axis
    sampling: str = "greedy"
    gamma_policy: str = "fixed"
    batch: int = 1  # each prompt is compared with its decoding alone
    # `NO_TREE`, or the text of a tree that is drafted in place of chains; `gamma` is
    # then the number of its nodes
    tree: str = NO_TREE
    weights: str = "dense"

    @property
    def plain(self) -> dict[str, Any]:
        """The axes that decide decoding: cells that agree in them share its runs."""
        return {axis: getattr(self, axis) for axis in PLAIN_AXES}

    @property
    def bits(self) -> dict[str, Any]:
        """The axes that decide bits: cells that agree in them must have equal bits."""
        return {axis: getattr(self, axis) for axis in BIT_AXES}

    @property
    def uses_library(self) -> bool:
        """Whether products are XLA's own, whose bits may differ by processor or GPU."""
        return self.impl == "xla" or self.prefill != "rows"

    @property
    def name(self) -> str:
        """All axes on one line, without dense weights and without chains."""
        name = (
            f"{self.dtype} {self.impl} slab {self.slab} pages of {self.page_size} "
            f"{self.cache} prefill {self.prefill} {self.sampling} | "
            f"{self.drafter} gamma {self.gamma} {self.gamma_policy} batch {self.batch}"
        )
        if self.weights != "dense":
            name = f"{self.weights} {name}"
        return name if self.tree == NO_TREE else f"{name} tree {self.tree}"

    @property
    def kind_of_weights(self) -> str:
        """The name that cells with the same weights share."""
        return self.dtype if self.weights == "dense" else f"{self.dtype} {self.weights}"

    def to_row(self) -> dict[str, Any]:
        """Returns the JSON form, without the defaults of axes that were added later."""
        later = {"weights": "dense", "tree": NO_TREE}
        row = dataclasses.asdict(self)
        return {axis: x for axis, x in row.items() if later.get(axis) != x}

    @property
    def settings(self) -> sampling_lib.SamplingSettings | None:
        """Settings by which the target draws; None is greedy."""
        if self.sampling == "greedy":
            return None
        return sampling_lib.make_settings(**CONSTANTS[self.sampling])

    def policy(self, drafter: protocols.Drafter) -> policies.Chosen:
        """Returns the policy and its first state, for as much as the drafter can draft.

        A cell's gamma is data, and no part of the policy, so that cells of any gamma
        share executables. Policies that need costs, and a schedule, get stated ones
        instead of measured ones.
        """
        gamma_max = drafter.gamma_max
        if self.gamma_policy == "schedule":
            costs = CONSTANTS["schedule"]
            rows = np.arange(self.batch * (gamma_max + 1) + 1)
            made = schedule.Schedule(gamma_max=gamma_max)
            step_s = costs["step"] + costs["row"] * rows
            return made, made.init(step_s, draft_s=costs["draft"])
        costs = CONSTANTS.get(self.gamma_policy, CONSTANTS["goodput"])
        round_s = costs["round"] + costs["draft"] * np.arange(gamma_max + 1)
        name = self.gamma_policy
        return policies.make(name, drafter, gamma=gamma_max, round_s=lambda: round_s)


AXES = tuple(field.name for field in dataclasses.fields(Cell))
BIT_AXES = ("dtype", "weights", "impl", "slab", "prefill", "sampling")
PLAIN_AXES = (*BIT_AXES, "page_size", "cache")


def of_axes(axes: Mapping[str, Sequence], *, is_product: bool = False) -> list[Cell]:
    """Returns the cell of all first values, and one for each other value of an axis, or
    a cell for every combination; cells that share decoding are neighbours."""
    base = {axis: values[0] for axis, values in axes.items()}
    choices = [base]
    choices += [base | {axis: x} for axis, values in axes.items() for x in values[1:]]
    if is_product:
        combinations = itertools.product(*axes.values())
        choices = [dict(zip(axes, values, strict=True)) for values in combinations]
    cells = list(dict.fromkeys(map(_cell, choices)))
    plains = [cell.plain for cell in cells]
    return sorted(cells, key=lambda cell: plains.index(cell.plain))


def _cell(choice: Mapping[str, Any]) -> Cell:
    """Returns the cell of a choice of values; a tree is drafted with all its nodes.

    Raises:
      ValueError: a window that its slab cannot hold; a tree with a policy of chains.
    """
    gamma, slab, tree = choice["gamma"], choice["slab"], choice["tree"]
    if tree != NO_TREE:
        if choice["gamma_policy"] != "fixed":
            raise ValueError(
                f"{tree=!s} and gamma_policy={choice['gamma_policy']} do not go "
                "together, for that is of chains, and both are among those to run; "
                "leave one of them out, or run them apart"
            )
        gamma = tree_shapes.parse(tree).nodes
    elif gamma + 1 > slab:
        raise ValueError(
            f"{gamma=} needs a slab of {gamma + 1} rows, and one of {slab} is among "
            "those to run; leave one of them out"
        )
    slab = row_model.slab_for(choice["impl"], slab)
    return Cell(**{**choice, "gamma": gamma, "slab": slab})


def label(cell: Cell, base: Cell) -> str:
    """Returns the axes in which a cell differs from the base, with their values."""
    ours, theirs = dataclasses.asdict(cell), dataclasses.asdict(base)
    changed = [
        f"{axis.replace('_', '-')} {value}"
        for axis, value in ours.items()
        if value != theirs[axis]
    ]
    return ", ".join(changed) or "base"


def constants_of(cells: Sequence[Cell]) -> dict[str, Mapping[str, float]]:
    """Returns the entries of `CONSTANTS` that cells name."""
    named = {name for cell in cells for name in (cell.sampling, cell.gamma_policy)}
    return {name: dict(CONSTANTS[name]) for name in CONSTANTS if name in named}
