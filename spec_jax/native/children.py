"""The best children of a tree's rows as a JAX function, one foreign call.

Its meaning is `drafters.draw.Draw.children`, which finds them by XLA too:

    scores  log_softmax(what the target's draw takes the highest of, / tau)
    tokens  the best of these, equal ones by their numbers

What is drawn from has the noise of `rules.sampling.noise`. Ranks are those of what is
drawn from, so that two children whose scores round to the same need not be in the order
of their numbers.
"""

import jax
import jax.numpy as jnp

from spec_jax.native import calls, draws as draws_lib


def children(
    logits: jax.Array,  # [S, K, N] float32
    counts: jax.Array,  # [S] int32
    numbers: jax.Array,  # [K] int32
    *,
    most: int,
    tau: float,
    names: jax.Array | None,  # [N] int32
    draws: draws_lib.Draws | None,
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
      ValueError: more children than tokens, or shapes that do not fit each other.
      NotImplementedError: logits that are not float32.
    """
    S, K, N = logits.shape
    if not 1 <= most <= N:
        raise ValueError(f"{most} children of {N} tokens: take from 1 to as many")
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"logits of {logits.dtype}: children take float32")
    how, attributes = draws_lib.arguments(draws, S)
    given = {
        "logits": logits,
        "counts": (counts, (S,)),
        "numbers": (numbers, (K,)),
        "names": (names, (N,), jnp.int32),
    }
    outputs = [((S, K, most), jnp.float32), ((S, K, most), jnp.int32)]
    scores, tokens = calls.call(
        "children", outputs, given | how, tau=float(tau), **attributes
    )
    return scores, tokens
