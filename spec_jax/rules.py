"""What a target chooses after each row, and which drafts stay because of it.

Functions here know a target by its logits, and acceptance by its three rules; they know
neither rounds nor caches.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import acceptance, protocols, sampling


Rule = Literal["sample-path", "rejection", "block"]
"""How drafts are accepted, see `acceptance`: where they are what the target draws
itself; or with the target's distribution as the law of what is committed, draft by
draft or as a block. The first writes the stream of plain decoding, bit for bit."""

RULES: tuple[str, ...] = get_args(Rule)


def own_tokens(
    target: protocols.Target,
    logits: Float[Array, "R V"],
    settings: sampling.SamplingSettings | None,
    *,
    first_position: Int[Array, ""],
    num_live: Int[Array, ""],
) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
    """The target's own token after each live row, drawn or of highest logit.

    Row `i` gives the token of position `first_position + i`. Nothing is drawn, and
    nothing paid for it, at temperature 0; without settings it is not compiled either.

    Returns:
      The tokens, int32, and of each live row whether its logits are finite, see
      `finite_rows`.
    """
    highest = target.choose(logits, num_live)
    is_finite = finite_rows(logits, highest)
    if settings is None:
        return highest, is_finite
    own = jax.lax.cond(
        settings.temperature == 0,
        lambda logits: highest,
        lambda logits: sampling.sample_rows(
            logits, settings, first_position=first_position, num_live=num_live
        ),
        logits,
    )
    return own, is_finite


def finite_rows(
    logits: Float[Array, "R V"], highest: Int[Array, " R"]
) -> Bool[Array, " R"]:
    """Whether each row holds no NaN and no +inf, and is not all -inf.

    Reads one logit a row.

    Args:
      highest: the argmax of each row, as `ops.argmax` gives it: where there is a NaN,
        the first one.
    """
    # "clip": the "logits" of `replay.TraceTarget` are tokens, and one wide.
    top = jnp.take_along_axis(logits, highest[:, None], axis=-1, mode="clip")
    return jnp.isfinite(top[:, 0])


def is_stop(
    tokens: Int[Array, "*rows"], stop_ids: Int[Array, " num_stop"] | tuple[int, ...]
) -> Bool[Array, "*rows"]:
    """Whether each token is one of `stop_ids`."""
    stop_ids = jnp.asarray(stop_ids, jnp.int32).reshape(*(1,) * tokens.ndim, -1)
    return jnp.any(tokens[..., None] == stop_ids, axis=-1)


def decide(
    target: protocols.Target,
    settings: sampling.SamplingSettings | None,
    proposal: protocols.Proposal,
    logits: Float[Array, "R V"],
    *,
    first_position: Int[Array, ""],
    rule: Rule,
) -> tuple[acceptance.Verdict, Bool[Array, " gamma+1"]]:
    """What a rule commits of a proposal, and which rows' logits are finite.

    Args:
      settings: of the target's own draws; None is greedy.
      logits: after the pending token and after each draft, then rows that are not read.
      first_position: of the first draft.

    Raises:
      ValueError: no rule of that name.
    """
    if rule not in RULES:
        raise ValueError(f"{rule=} is not one of {', '.join(RULES)}")
    by_rule = _by_tokens if rule == "sample-path" else _by_odds
    verdict, is_finite = by_rule(
        target, settings, proposal, logits, first_position, rule=rule
    )
    return verdict, is_finite[: proposal.tokens.shape[0] + 1]


def _by_tokens(target, settings, proposal, logits, first_position, *, rule):
    """By the rule that keeps drafts equal to the target's own tokens."""
    del rule
    own, is_finite = own_tokens(
        target,
        logits,
        settings,
        first_position=first_position,
        num_live=proposal.num_drafted + 1,
    )
    num_rows = proposal.tokens.shape[0] + 1
    verdict = acceptance.accept_exact(
        proposal.tokens, own[:num_rows], proposal.num_drafted
    )
    return verdict, is_finite


def _by_odds(target, settings, proposal, logits, first_position, *, rule):
    """By a rule that draws uniforms; its noise is keyed by the round."""
    (gamma_max,) = proposal.tokens.shape
    vocab_size = logits.shape[-1]
    is_finite = finite_rows(logits, target.choose(logits, proposal.num_drafted + 1))
    draft_probs = proposal.probs
    if draft_probs is None:
        draft_probs = jax.nn.one_hot(proposal.tokens, vocab_size, dtype=jnp.float32)
    if settings is None:
        settings = sampling.make_settings(temperature=0.0)
    accept = {
        "rejection": acceptance.accept_rejection,
        "block": acceptance.accept_block,
    }[rule]
    verdict = accept(
        proposal.tokens,
        draft_probs,
        sampling.distribution(logits[: gamma_max + 1], settings),
        proposal.num_drafted,
        uniforms=sampling.uniforms(settings.seed, first_position, gamma=gamma_max),
        noise=sampling.noise(
            settings.seed,
            first_position,
            vocab_size=vocab_size,
            stream=sampling.Stream.OWN,
        ),
    )
    return verdict, is_finite
