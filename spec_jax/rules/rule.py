"""The rules of acceptance, as objects. A new one is an entry of `RULES`."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from spec_jax.rules import acceptance, multi_path, traversal, tree_acceptance


Name = Literal["coupled", "rejection", "block", "multipath"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Rule:
    """How drafts are accepted.

    Attributes:
      name: by which calls and flags know it.
      is_exact: whether a draft stays if the target draws it with the noise of seed and
        position (its argmax at temperature 0): the stream is that of autoregressive
        decoding, bit for bit. Otherwise the output has the target's distribution, and
        the rule reads `Proposal.probs`.
      accept_chain: decides on ONE chain; takes what `acceptance.accept_exact` does if
        `is_exact`, else what `acceptance.accept_block` does.
      accept_tree: the same for ONE tree: `tree_acceptance.follow`, or `accept_tree`.
      replaces: whether siblings of a tree must be drawn with replacement.
    """

    name: str
    is_exact: bool
    accept_chain: Callable[..., acceptance.Outcome]
    accept_tree: Callable[..., acceptance.Outcome]
    replaces: bool = False

    def __repr__(self) -> str:
        return repr(self.name)


def _accept_rejection(*drafts, row_sums, **random) -> acceptance.Outcome:
    """Decides as `acceptance.accept_rejection`, which sums no rows."""
    del row_sums
    return acceptance.accept_rejection(*drafts, **random)


# The lambdas look functions up when called, so that tests can plant faults there.
coupled = Rule(
    name="coupled",
    is_exact=True,
    accept_chain=lambda *drafts: acceptance.accept_exact(*drafts),
    accept_tree=lambda *drafts, **more: tree_acceptance.follow(*drafts, **more),
)
rejection = Rule(
    name="rejection",
    is_exact=False,
    accept_chain=_accept_rejection,
    accept_tree=lambda *drafts, **more: tree_acceptance.accept_tree(*drafts, **more),
)
block = Rule(
    name="block",
    is_exact=False,
    accept_chain=lambda *drafts, **more: acceptance.accept_block(*drafts, **more),
    accept_tree=lambda *drafts, **more: traversal.accept_traversal(*drafts, **more),
)
multipath = Rule(
    name="multipath",
    is_exact=False,
    accept_chain=lambda *drafts, **more: acceptance.accept_block(*drafts, **more),
    accept_tree=lambda *drafts, **more: multi_path.accept_multi_path(*drafts, **more),
    replaces=True,
)

RULES = {rule.name: rule for rule in (coupled, rejection, block, multipath)}
"""All rules, by name."""


def of(rule: Rule | str) -> Rule:
    """Returns the rule of that name, or the rule itself.

    Raises:
      ValueError: no rule of that name.
    """
    found = rule if isinstance(rule, Rule) else RULES.get(rule)
    if found is None:
        raise ValueError(f"{rule=} is not one of {', '.join(RULES)}")
    return found
