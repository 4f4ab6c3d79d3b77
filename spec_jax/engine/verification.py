"""Verification: the target's token after each row, and what a rule accepts.

Functions here know a target by its logits and a rule by what it accepts; they know
neither rounds nor caches.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.engine import protocols, state as state_lib, target as target_lib
from spec_jax.rules import acceptance, rule as rule_lib, sampling


Rule = rule_lib.Rule | rule_lib.Name
"""A rule of acceptance, or its name."""


def finite_rows(
    logits: Float[Array, "R V"], highest: Int[Array, " R"]
) -> Bool[Array, " R"]:
    """Returns whether each row holds no NaN and no +inf, and is not all -inf.

    Reads one logit a row.

    Args:
      highest: the argmax of each row, as `ops.argmax` gives it: where there is a NaN,
        the first one.
    """
    # "clip": an index past the end cannot turn the logit that is read into NaN.
    top = jnp.take_along_axis(logits, highest[:, None], axis=-1, mode="clip")
    return jnp.isfinite(top[:, 0])


def target_tokens(
    target: target_lib.Target,
    verified: protocols.Verified,
    sampling_settings: protocols.Sampling,
) -> tuple[Int[Array, " P"], Bool[Array, " P"]]:
    """Returns the target's token after each active row, and whether its logits are
    finite (`finite_rows`).

    The token is drawn by the settings of the row's slot with the noise of the position
    that it will have; at temperature 0, and without settings, it has the highest
    logit.
    """
    highest = target.choose(verified.logits, verified.num_active)
    is_finite = finite_rows(verified.logits, highest)
    if sampling_settings is None:
        return highest, is_finite
    each = jax.tree.map(lambda leaf: leaf[verified.slots], sampling_settings)
    is_active = jnp.arange(highest.shape[0], dtype=jnp.int32) < verified.num_active
    draws = is_active & (each.temperature != 0)
    drawn = target.draw(
        verified.logits, each, positions=verified.positions + 1, draws=draws
    )
    return jnp.where(draws, drawn, highest), is_finite


def decide(
    target: target_lib.Target,
    verified: protocols.Verified,
    proposal: protocols.Proposal,
    sampling_settings: protocols.Sampling,
    *,
    first_position: Int[Array, " B"],
    rule: rule_lib.Rule,
    depth_max: int,
    wanted: Int[Array, " B"],
) -> tuple[acceptance.Outcome, Bool[Array, "B R"]]:
    """Returns each slot's outcome, and which columns' logits are finite.

    Args:
      first_position: of each slot's first draft; keys the noise of the round.
      depth_max: drafts on a path of a tree, at most.
      wanted: drafts that each slot may commit, at most. A chain has no more.
    """
    if rule.is_exact and proposal.parents is None:
        own, is_finite = target_tokens(target, verified, sampling_settings)
        outcome = state_lib.map_slots(
            rule.accept_chain,
            proposal.tokens,
            verified.by_column(own, fill=0),
            proposal.num_drafted,
        )
        return outcome, verified.by_column(is_finite, fill=True)
    highest = target.choose(verified.logits, verified.num_active)
    is_finite = finite_rows(verified.logits, highest)
    accept = rule.accept_chain
    if proposal.parents is not None:
        accept = functools.partial(rule.accept_tree, depth_max=depth_max)
    given = accept, target, verified, proposal, sampling_settings, wanted
    if rule.is_exact:
        outcome = _along_own_tokens(*given, highest)
    else:
        outcome = _by_uniforms(*given, first_position)
    return outcome, verified.by_column(is_finite, fill=True)


def _along_own_tokens(
    accept, target, verified, proposal, sampling_settings, wanted, highest
):
    """Follows trees by the target's own tokens, drawn along the path alone."""
    highest = verified.by_column(highest, fill=0)
    is_greedy = sampling_settings is None

    def one(slot):
        """Follows one slot's tree."""
        proposal, highest, wanted, at, settings = slot

        def draw(column):
            """Draws as `target_tokens` does, of one row."""
            row, each = at[column][None], jax.tree.map(lambda x: x[None], settings)
            logits = verified.logits.at[row].get(mode="clip")
            positions = verified.positions.at[row].get(mode="clip") + 1
            draws = each.temperature != 0
            drawn = target.draw(logits, each, positions=positions, draws=draws)
            return jnp.where(draws, drawn, highest[column])[0]

        return accept(
            proposal.tokens,
            (lambda column: highest[column]) if is_greedy else draw,
            proposal.parents,
            proposal.num_drafted,
            wanted,
        )

    slots = (proposal, highest, wanted, verified.at)
    if is_greedy:
        return state_lib.map_slots(lambda *slot: one((*slot, None)), *slots)
    # A loop: with `vmap` over slots, all rows would be drawn.
    return jax.lax.map(one, (*slots, sampling_settings))


def _by_uniforms(
    accept, target, verified, proposal, sampling_settings, wanted, first_position
):
    """Decides slot by slot, in a loop: only one slot's logits are copied at a time."""
    num_slots, gamma_max = proposal.tokens.shape
    vocab_size, sums = verified.logits.shape[-1], target.sums
    if sampling_settings is None:
        sampling_settings = sampling.greedy(num_slots)

    def one(slot):
        """Decides one slot's proposal."""
        proposal, settings, position, at, wanted = slot
        logits = verified.logits.at[at].get(mode="fill", fill_value=0)
        tokens, count = proposal.tokens, proposal.num_drafted
        draft_probs = proposal.probs
        target_probs = sums.distribution(logits, settings)
        seed, own = settings.seed, sampling.Stream.OWN
        random = {
            "uniforms": sampling.uniforms(seed, position, gamma=gamma_max),
            "noise": sampling.noise(seed, position, vocab_size=vocab_size, stream=own),
            "row_sums": sums.row_sums,
        }
        if proposal.parents is not None:
            drafts = tokens, proposal.parents, draft_probs
            return accept(*drafts, target_probs, count, wanted, **random)
        if draft_probs is None:
            draft_probs = jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32)
        # A chain has no more drafts than are wanted.
        return accept(tokens, draft_probs, target_probs, count, **random)

    return jax.lax.map(
        one, (proposal, sampling_settings, first_position, verified.at, wanted)
    )
