"""Counts of several drafters in a text: how much was kept of each.

Functions here know drafts and the text that was committed, and no drafter.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.drafters import slots as slots_lib
from spec_jax.gamma import goodput, theory


class Knowledge(pytree.Node):
    """How the members did in the text of each slot."""

    # [B, M, gamma_max] float32, faded counts: rounds that decided on draft i; kept it
    reached: jax.Array
    kept: jax.Array
    # The last round, from which the next one tells what was kept of it:
    length: jax.Array  # [B] int32, of its text; 0: there was no round
    tokens: jax.Array  # [B, M, gamma_max] int32
    num_drafted: jax.Array  # [B, M] int32, 0: the member was not asked
    rounds: jax.Array  # [B, M, gamma_max + 1] int32, by member and number of drafts


def nothing(num_slots: int, num_members: int, gamma_max: int) -> Knowledge:
    """Returns the knowledge before the first round of each slot."""
    axes = num_slots, num_members
    return Knowledge(
        reached=jnp.zeros((*axes, gamma_max), jnp.float32),
        kept=jnp.zeros((*axes, gamma_max), jnp.float32),
        length=jnp.zeros((num_slots,), jnp.int32),
        tokens=jnp.zeros((*axes, gamma_max), jnp.int32),
        num_drafted=jnp.zeros(axes, jnp.int32),
        rounds=jnp.zeros((*axes, gamma_max + 1), jnp.int32),
    )


@functools.partial(jax.jit, donate_argnums=(0,))
def renewed(
    known: Knowledge, slot: Int[Array, ""], worth: Float[Array, ""]
) -> Knowledge:
    """Returns the knowledge when a slot begins another text. Donates `known`.

    The slot's counts of earlier texts are kept, scaled down to `worth` rounds at most.
    """
    rounds = known.reached[slot, :, :1]
    share = jnp.minimum(rounds, worth) / jnp.maximum(rounds, 1e-6)
    empty = jax.tree.map(lambda leaf: leaf.at[slot].set(0), known)
    return empty.replace(
        reached=known.reached.at[slot].multiply(share),
        kept=known.kept.at[slot].multiply(share),
    )


def learn(
    known: Knowledge,
    tokens: Int[Array, "B max_len"],
    length: Int[Array, " B"],
    *,
    decay: float,
) -> Knowledge:
    """Returns the counts with the last round in them, by what was committed since."""
    size = known.tokens.shape[-1]
    places = jnp.arange(size, dtype=jnp.int32)
    since = jnp.where(known.length > 0, length - known.length, 0)
    text = slots_lib.windows(tokens, known.length, size)

    def count(reached, kept, drafts, num_drafted, text, since):
        """Returns the counts of one member in one slot."""
        # The committed text says of these drafts whether they are right.
        is_decided = (places < num_drafted) & (places < since)
        is_kept = jnp.cumprod((is_decided & (drafts == text)).astype(jnp.float32))
        before = jnp.pad(is_kept, (1, 0), constant_values=1.0)[:-1]
        fade = jnp.where(since > 0, decay, 1.0)
        is_reached = jnp.where(is_decided, before, 0.0)
        return fade * reached + is_reached, fade * kept + is_kept

    of_members = jax.vmap(count, in_axes=(0, 0, 0, 0, None, None))
    reached, kept = jax.vmap(of_members)(
        known.reached, known.kept, known.tokens, known.num_drafted, text, since
    )
    return known.replace(
        reached=reached, kept=kept, length=jnp.zeros_like(known.length)
    )


def best(
    known: Knowledge,
    round_s: Float[Array, "M gamma_max+1"],
    most: Int[Array, "B M"],
    *,
    prior: float,
    weight: float,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Returns which member drafts in each slot, and how many tokens; 0: none drafts.

    Args:
      round_s: the cost of a round of each member, by its number of drafts.
      most: how many tokens each member would draft at most.
      prior, weight: of first drafts, see `goodput.chances`.
    """

    def value(reached, kept, round_s, most):
        """Returns a member's expected tokens per cost, by its number of drafts."""
        chances = goodput.chances(reached, kept, prior=prior, weight=weight)
        expected = theory.goodput(chances, round_s)
        drafts = jnp.arange(expected.shape[0], dtype=jnp.int32)
        return jnp.where(drafts <= most, expected, 0.0)

    def one(known, most):
        """Chooses for one slot: among equals the first member, then fewest drafts."""
        values = jax.vmap(value)(known.reached, known.kept, round_s, most)
        return jnp.argmax(values).astype(jnp.int32)

    found, size = jax.vmap(one)(known, most), round_s.shape[1]
    return found // size, found % size
