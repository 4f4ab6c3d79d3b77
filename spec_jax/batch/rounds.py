"""Speculative rounds of several sequences at once: one target forward for all.

The rounds of `spec_jax.rounds`, slot by slot: each with its own length, gamma, limit,
stop, seed and sampling settings. What a slot commits is what it would commit alone, bit
for bit: its rows keep the row contract, and everything else of it is its own. Drafts
are judged by the target's own tokens (the rule "sample-path"). Slots that are done take
no rows, and wait to be refilled.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import acceptance, loop, protocols, rounds
from spec_jax.batch import drafter as drafter_lib, rows
from spec_jax.gamma import policy as policy_lib


@flax.struct.dataclass(kw_only=True)
class BatchState:
    """Everything that `generate` carries, for `B` slots."""

    # Each slot's state, leaves `[B, ...]`: without cache and memory, which are shared.
    slots: rounds.RoundState
    gamma: jax.Array  # [B] int32, the most that each slot drafts
    cache: protocols.Cache  # of all slots
    memory: protocols.Memory  # of all slots


def run_round(
    target: rows.RowBatch,
    drafter: drafter_lib.BatchDrafter,
    params: tuple[protocols.Params, protocols.Params],
    state: BatchState,
    *,
    stop_ids: Int[Array, " num_stop"],
    gamma_policy: policy_lib.GammaPolicy | None = None,
) -> BatchState:
    """One round of every slot that is not done.

    A slot that finds no page commits nothing, and is done and starved.
    """
    target_params, draft_params = params
    slots = state.slots
    n, active = slots.length, ~slots.done
    gamma = _gammas(state, drafter.gamma_max, gamma_policy)
    memory, proposal = drafter.propose(
        draft_params,
        state.memory,
        tokens=slots.tokens,
        length=n,
        gamma=gamma,
        settings=slots.settings,
    )
    proposal = rounds.limit_proposal(proposal, gamma)
    pending = jnp.take_along_axis(slots.tokens, n[:, None] - 1, axis=1)
    cache, own, is_finite = target.next_tokens(
        target_params,
        state.cache,
        tokens=jnp.concatenate([pending, proposal.tokens], axis=1),
        starts=n - 1,
        num_live=jnp.where(active, proposal.num_drafted + 1, 0),
        settings=slots.settings,
    )
    starved = active & target.is_starved(cache)
    commit = functools.partial(
        _commit_slot, gamma_policy=gamma_policy, stop_ids=stop_ids
    )
    committed = jax.vmap(commit)(slots, proposal, own, is_finite, gamma, starved)
    slots = jax.tree.map(
        lambda new, old: jnp.where(_against(active, new), new, old), committed, slots
    )
    return state.replace(
        slots=slots,
        cache=target.truncate(cache, slots.length - 1, asked=active),
        memory=drafter.commit(draft_params, memory, slots.length, asked=active),
    )


def _gammas(state, gamma_max, gamma_policy) -> Int[Array, " B"]:
    """What each slot asks for: nothing where it is done."""
    slots = state.slots
    # At most `g + 1` tokens are committed, so the limit is met exactly.
    gamma = jnp.minimum(state.gamma, slots.limit - slots.length - 1)
    if gamma_policy is not None:
        gamma = jnp.minimum(gamma, jax.vmap(gamma_policy.choose)(slots.policy))
    return jnp.where(slots.done, 0, jnp.clip(gamma, 0, gamma_max))


def _commit_slot(
    slot, proposal, own, is_finite, gamma, starved, *, gamma_policy, stop_ids
):
    """One slot's verdict and commit, as in `rounds.run_round`."""
    verdict = acceptance.accept_exact(proposal.tokens, own, proposal.num_drafted)
    if gamma_policy is not None:
        slot = rounds.teach_policy(
            gamma_policy, slot, verdict, proposal, gamma=gamma, starved=starved
        )
    return rounds.commit_verdict(
        slot,
        verdict,
        proposal,
        is_finite=is_finite,
        starved=starved,
        stop_ids=stop_ids,
    )


def _against(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    """The mask `[B]`, in the rank of a leaf `[B, ...]`."""
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - 1))


@loop.donates(static_argnames=("target", "drafter", "gamma_policy"))
def generate(
    target: rows.RowBatch,
    drafter: drafter_lib.BatchDrafter,
    params: tuple[protocols.Params, protocols.Params],
    state: BatchState,
    *,
    stop_ids: Int[Array, " num_stop"],
    max_rounds: Int[Array, ""],
    until_one_ends: Bool[Array, ""],
    gamma_policy: policy_lib.GammaPolicy | None = None,
) -> BatchState:
    """Runs rounds on the device until all slots are done, or `max_rounds` passed.

    Args:
      params: of the target and of the drafter.
      state: donated.
      stop_ids: tokens that end a sequence, see `rounds.generate`.
      until_one_ends: return as soon as a slot that was not done is, so that it can be
        refilled. Data: the same executable.
      gamma_policy: chooses each slot's gamma, at most `state.gamma`, by what the
        slot's own rounds taught.
    """
    done_before = state.slots.done

    def keep_going(carry):
        step, state = carry
        done = state.slots.done
        has_ended = jnp.any(done & ~done_before)
        return ~jnp.all(done) & (step < max_rounds) & ~(until_one_ends & has_ended)

    def body(carry):
        """One round more, of every slot that goes on."""
        step, state = carry
        state = run_round(
            target, drafter, params, state, stop_ids=stop_ids, gamma_policy=gamma_policy
        )
        return step + 1, state

    _, state = jax.lax.while_loop(keep_going, body, (jnp.int32(0), state))
    return state
