"""The best children of a tree's rows, by kernels of our own.

Its meaning is `drafters.draft_trees.Draw.children`, which finds them where an
implementation has no kernels for it:

    scores  log_softmax(what the target's draw takes the highest of, / tau)
    tokens  the best of these, equal ones by their numbers

What is drawn from has the noise of `rules.sampling.noise`. Ranks are those of what is
drawn from, so that two children whose scores round to the same need not be in the order
of their numbers.
"""

import jax

from spec_jax.native import children as native
from spec_jax.ops import step


def has_kernels(impl: str) -> bool:
    """Whether an implementation has kernels that find children."""
    return impl == "native"


def children(
    logits: jax.Array,  # [S, K, N] float32
    counts: jax.Array,  # [S] int32
    numbers: jax.Array,  # [K] int32
    *,
    most: int,
    tau: float,
    names: jax.Array | None,  # [N] int32
    draws: step.Draws | None,
    impl: str,
) -> tuple[jax.Array, jax.Array]:
    """Finds the best children of the rows of a level of each slot's tree.

    Args:
      counts: rows of each slot that are looked at, the first ones; the others have
        no draft, a score of -inf and token 0.
      numbers: which draft of its slot a row gives, from that of `draws.positions` on;
        of independent draws, which of the round.
      most: children of a row.
      tau: divides what is drawn from.
      names: the token that each of the drafter's own stands for; None: the same.
      draws: None: by the logits alone.

    Returns:
      Scores `[S, K, most]` float32, best first, -inf where there is no draft: where a
      token has no weight, and in rows without any weight or with a weight that is no
      number, or infinite; and tokens `[S, K, most]` int32.

    Raises:
      NotImplementedError: an implementation without such kernels.
      ValueError: more children than tokens.
    """
    if not has_kernels(impl):
        raise NotImplementedError(f"impl={impl!r} has no kernels that find children")
    return native.children(
        logits, counts, numbers, most=most, tau=tau, names=names, draws=draws
    )
