"""Rounds whose tokens come from decoding: verification is paid for, and not trusted.

The way around a verify path that does not keep the row contract: what it computes is
compared with decoding, and thrown away. Three caches:

    commit cache   written by decoding alone; its argmax decides every token
    mirror cache   the verify path writes a window, which is rolled back; then the
                   committed rows are decoded into it too
    draft memory   as in `rounds`

    1 draft     d_1 .. d_g
    2 verify    the window on the mirror cache: v_0 .. v_g;  roll it back
    3 commit    decode x[n-1], d_1, .. on the commit cache, as long as the token that
                comes out is the next draft: a + 1 forwards
    4 mirror    decode the same rows on the mirror cache: a + 1 forwards
    5 truncate  both to n'-1

Three forwards a row, where `rounds` has one a window: this is a historical design,
measured beside its successor.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import pytree, rounds, rules
from spec_jax.engine import loop, protocols
from spec_jax.rules import acceptance


class DecodeRoundState(pytree.Node):
    """A `RoundState`, whose cache is the mirror, and what this design adds to it."""

    inner: rounds.RoundState
    commit_cache: protocols.Cache
    num_commit_steps: jax.Array  # [] int32, forwards on the commit cache
    num_mirror_steps: jax.Array  # [] int32, decoding forwards on the mirror cache
    num_correction_steps: jax.Array  # [] int32, commit steps that fed a correction
    num_mismatches: jax.Array  # [] int32, committed rows with another verify argmax


def init_state(
    inner: rounds.RoundState, *, commit_cache: protocols.Cache
) -> DecodeRoundState:
    """The state before the first round; both caches hold the prompt's K/V."""
    return DecodeRoundState(
        inner=inner,
        commit_cache=commit_cache,
        num_commit_steps=jnp.int32(0),
        num_mirror_steps=jnp.int32(0),
        num_correction_steps=jnp.int32(0),
        num_mismatches=jnp.int32(0),
    )


def run_round(
    target: protocols.Target,
    verify: protocols.Target,
    drafter: protocols.Drafter,
    params: tuple[protocols.Params, protocols.Params],
    state: DecodeRoundState,
    *,
    gamma: Int[Array, ""],
    stop_ids: Int[Array, " num_stop"],
) -> DecodeRoundState:
    """Runs one round. A round that a cache has no room for commits nothing."""
    target_params, draft_params = params
    inner = state.inner
    n = inner.length
    gamma = jnp.clip(jnp.minimum(gamma, inner.limit - n - 1), 0, drafter.gamma_max)
    memory, proposal = drafter.propose(
        draft_params, inner.memory, tokens=inner.tokens, length=n, gamma=gamma
    )
    proposal = rounds.limit_proposal(proposal, gamma)
    window = jnp.concatenate([inner.tokens[n - 1][None], proposal.tokens])

    num_rows = proposal.num_drafted + 1
    mirror, logits = verify.forward(
        target_params, inner.cache, tokens=window, start=n - 1, num_live=num_rows
    )
    starved = verify.is_starved(mirror)
    seen, _ = rules.own_tokens(
        verify, logits, inner.settings, first_position=n, num_live=num_rows
    )
    seen = seen[: window.shape[0]]
    mirror = verify.truncate(mirror, n - 1)

    decode = functools.partial(
        _decode_rows,
        target,
        target_params,
        inner.settings,
        window=window,
        start=n - 1,
    )
    commit, own, is_finite, fed = decode(
        state.commit_cache, num_rows=num_rows, given=False
    )
    mirror, _, _, mirrored = decode(mirror, num_rows=fed, given=True)
    starved = starved | target.is_starved(commit) | target.is_starved(mirror)

    verdict = acceptance.accept_exact(proposal.tokens, own, proposal.num_drafted)
    fed_correction = inner.origins[n - 1] == int(rounds.Origin.CORRECTION)
    inner = rounds.commit_verdict(
        inner.replace(cache=mirror, memory=memory),
        verdict,
        proposal,
        is_finite=is_finite,
        starved=starved,
        stop_ids=stop_ids,
    )
    counted = (~starved).astype(jnp.int32)
    differs = (seen != own) & (
        jnp.arange(window.shape[0], dtype=jnp.int32) < inner.length - n
    )
    return state.replace(
        inner=inner.replace(
            cache=target.truncate(mirror, inner.length - 1),
            memory=drafter.commit(draft_params, memory, inner.length),
        ),
        commit_cache=target.truncate(commit, inner.length - 1),
        num_commit_steps=state.num_commit_steps + counted * fed,
        num_mirror_steps=state.num_mirror_steps + counted * mirrored,
        num_correction_steps=state.num_correction_steps
        + counted * fed_correction.astype(jnp.int32),
        num_mismatches=state.num_mismatches + jnp.sum(differs, dtype=jnp.int32),
    )


def _decode_rows(target, params, settings, cache, *, window, start, num_rows, given):
    """Decodes rows of the window one at a time.

    Args:
      num_rows: the most that are decoded.
      given: decode all of them; otherwise stop after the first whose token is not
        the next of the window.

    Returns:
      The cache, the token that each row chose (-1 where none was decoded), whether
      its logits were finite, and how many rows were decoded.
    """

    def keep_going(carry):
        row, _, _, _, goes_on = carry
        return goes_on & (row < num_rows)

    def step(carry):
        """Decodes one row, and says whether its token leads to the next."""
        row, cache, own, is_finite, _ = carry
        cache, logits = target.forward(
            params,
            cache,
            tokens=window[row][None],
            start=start + row,
            num_live=jnp.int32(1),
        )
        chosen, has_finite = rules.own_tokens(
            target,
            logits,
            settings,
            first_position=start + row + 1,
            num_live=jnp.int32(1),
        )
        token = chosen[0]
        agrees = given | (token == window.at[row + 1].get(mode="fill", fill_value=-1))
        goes_on = agrees & ~target.is_starved(cache)
        own = own.at[row].set(token)
        return row + 1, cache, own, is_finite.at[row].set(has_finite[0]), goes_on

    # What is not decoded must not look like a draft that was right.
    own = jnp.full(window.shape, -1, jnp.int32)
    is_finite = jnp.ones(window.shape, bool)
    row, cache, own, is_finite, _ = jax.lax.while_loop(
        keep_going, step, (jnp.int32(0), cache, own, is_finite, jnp.bool_(True))
    )
    return cache, own, is_finite, row


@loop.donates(static_argnames=("target", "verify", "drafter"))
def generate(
    target: protocols.Target,
    verify: protocols.Target,
    drafter: protocols.Drafter,
    params: tuple[protocols.Params, protocols.Params],
    state: DecodeRoundState,
    *,
    gamma: Int[Array, ""],
    stop_ids: Int[Array, " num_stop"],
    max_rounds: Int[Array, ""],
) -> DecodeRoundState:
    """As `rounds.generate`, with tokens of `target` whatever `verify` computes.

    Args:
      target: decodes, one row at a time.
      verify: the verify path, on caches of the same kind.
    """

    def keep_going(carry):
        step, state = carry
        return ~state.inner.done & (step < max_rounds)

    def body(carry):
        step, state = carry
        state = run_round(
            target, verify, drafter, params, state, gamma=gamma, stop_ids=stop_ids
        )
        return step + 1, state

    _, state = jax.lax.while_loop(keep_going, body, (jnp.int32(0), state))
    return state
