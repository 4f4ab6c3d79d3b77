"""Plain decoding, one token a step: the baseline and the oracle.

It uses the same `Target` as the rounds and nothing else of theirs, so that the two
check each other.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import loop, protocols, rounds, rules, sampling


@flax.struct.dataclass(kw_only=True)
class DecodeState:
    """Everything that `generate` carries, for one sequence.

    Fields mean what they do in `rounds.RoundState`: `tokens[length - 1]` is pending, it
    has no K/V yet.
    """

    tokens: jax.Array  # [max_len] int32
    length: jax.Array  # [] int32
    limit: jax.Array  # [] int32
    done: jax.Array  # [] bool
    stopped: jax.Array  # [] bool
    starved: jax.Array  # [] bool
    capped: jax.Array  # [] bool
    vocab_size: jax.Array  # [] int32
    cache: protocols.Cache
    settings: sampling.SamplingSettings | None  # None: greedy
    num_steps: jax.Array  # [] int32
    num_nonfinite: jax.Array  # [] int32


@jax.jit
def init_state(
    tokens: Int[Array, " max_len"],
    *,
    length: Int[Array, ""],
    limit: Int[Array, ""],
    cache: protocols.Cache,
    settings: sampling.SamplingSettings | None = None,
    capped: Bool[Array, ""] | bool = False,
    vocab_size: Int[Array, ""] | int = rounds.UNKNOWN_SIZE,
) -> DecodeState:
    """The state before the first step: `tokens[:length]` is the prompt.

    Greedy without `settings`, which are copied: the loop donates its state. `capped`
    and `vocab_size` as in `rounds.init_state`.
    """
    return DecodeState(
        tokens=tokens,
        length=length,
        limit=limit,
        done=length >= limit,
        stopped=jnp.zeros((), bool),
        starved=jnp.zeros((), bool),
        capped=jnp.asarray(capped, bool),
        vocab_size=jnp.asarray(vocab_size, jnp.int32),
        cache=cache,
        settings=sampling.copied(settings),
        num_steps=jnp.int32(0),
        num_nonfinite=jnp.int32(0),
    )


def run_step(
    target: protocols.Target,
    params: protocols.Params,
    state: DecodeState,
    *,
    stop_ids: Int[Array, " num_stop"],
) -> DecodeState:
    """Decodes one token. A step that the cache has no room for commits nothing."""
    n = state.length
    cache, logits = target.forward(
        params,
        state.cache,
        tokens=state.tokens[n - 1][None],
        start=n - 1,
        num_live=jnp.int32(1),
    )
    own, is_finite = rules.own_tokens(
        target, logits, state.settings, first_position=n, num_live=jnp.int32(1)
    )
    token = own[0]
    is_stop = rules.is_stop(token, stop_ids)
    starved = target.is_starved(cache)
    at = jnp.where(starved, state.tokens.shape[0], n)
    length = jnp.where(starved, n, n + 1)
    return state.replace(
        tokens=state.tokens.at[at].set(token, mode="drop"),
        length=length,
        done=starved | is_stop | (length >= state.limit),
        stopped=~starved & is_stop,
        starved=starved,
        cache=cache,
        num_steps=state.num_steps + (~starved).astype(jnp.int32),
        num_nonfinite=state.num_nonfinite
        + (~starved & ~is_finite[0]).astype(jnp.int32),
    )


@loop.donates(static_argnames=("target",))
def generate(
    target: protocols.Target,
    params: protocols.Params,
    state: DecodeState,
    *,
    stop_ids: Int[Array, " num_stop"],
    max_steps: Int[Array, ""],
) -> DecodeState:
    """Decodes on the device until the sequence is done, or `max_steps` passed.

    Args:
      state: donated.
      stop_ids: tokens that end the sequence, as an array or a tuple, of which each
        length is compiled anew; -1 matches nothing.
    """

    def keep_going(carry):
        step, state = carry
        return ~state.done & (step < max_steps)

    def body(carry):
        step, state = carry
        return step + 1, run_step(target, params, state, stop_ids=stop_ids)

    _, state = jax.lax.while_loop(keep_going, body, (jnp.int32(0), state))
    return state


@functools.partial(jax.jit, static_argnames=("target",), donate_argnames=("cache",))
def replay(
    target: protocols.Target,
    params: protocols.Params,
    cache: protocols.Cache,
    *,
    tokens: Int[Array, " max_len"],
    start: Int[Array, ""],
    stop: Int[Array, ""],
    settings: sampling.SamplingSettings | None = None,
) -> tuple[protocols.Cache, Int[Array, " max_len"]]:
    """What plain decoding would choose after each prefix of a *given* text.

    Greedily, or as it would draw with `settings`.

    Feeds `tokens[start - 1 .. stop - 2]` one at a time, whatever it would have chosen
    itself. `cache` holds the K/V of `[0, start - 1)` and is donated.

    Returns:
      The cache and, at each position `start .. stop - 1`, the token that plain
      decoding chooses there; elsewhere the given tokens.
    """

    def body(position, carry):
        """Feeds the token before `position`, and keeps what is chosen after it."""
        cache, chosen = carry
        cache, logits = target.forward(
            params,
            cache,
            tokens=tokens[position - 1][None],
            start=position - 1,
            num_live=jnp.int32(1),
        )
        own, _ = rules.own_tokens(
            target, logits, settings, first_position=position, num_live=jnp.int32(1)
        )
        return cache, chosen.at[position].set(own[0])

    return jax.lax.fori_loop(start, stop, body, (cache, tokens))
