"""Acceptance: which drafted tokens stay.

Functions here take ONE sequence and know arrays only: no batches, pages or models.
Random numbers are arguments, so the functions are pure. Three rules:

    coupled       `accept_exact` on the target's own draws (`sampling.sample_each`; at
                  temperature 0 the argmax). The committed tokens are those of plain
                  decoding with the same seed, bit for bit, for any drafter. Drafts
                  that are drawn with the same noise are kept more often.
    rejection     `accept_rejection`: the target's distribution, in another stream.
    block         `accept_block`: the same, and on average more drafts are kept.

Trees are in `tree_acceptance`.

The last two take the probabilities that each draft was drawn from, in float32, after
the same filters as the target's: a drafter that draws from others biases the output.
A greedy draft was drawn from a one-hot row.

No rule keeps a draft outside the vocabulary: the target gives it probability 0. A
drafter may put probability on such tokens, by rows that sum to less than one; the
output has the target's distribution all the same. The last two rules keep no draft
whose own probability is 0, negative or NaN, as no draw gives such a draft.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from spec_jax import pytree
from spec_jax.typing import typed


PAD = 0
"""Fills token arrays past their end. It is a real token: lengths decide, not PAD."""


class Outcome(pytree.Node):
    """The target's decision about one proposal, a chain or a tree of depth `D`.

    A chain of `gamma` drafts has `D = gamma`.

    Attributes:
      num_accepted: how many drafts stay, in `0 .. num_drafted`.
      tokens: the tokens to commit are `tokens[: num_accepted + 1]`: the accepted
        drafts and one token of the target's own. The rest is `PAD`.
      path: for a tree, the columns of the accepted drafts are `path[: num_accepted]`,
        increasing. None for a chain, whose column `i + 1` is draft `i`.
      reached: for a tree, whether the accepted path has a node of depth `i` after which
        more drafts were wanted and at least one was there. None for a chain.
    """

    num_accepted: jax.Array  # [] int32
    tokens: jax.Array  # [D + 1] int32
    path: jax.Array | None = None  # [D] int32
    reached: jax.Array | None = None  # [D] bool


@typed
def accept_exact(
    draft_tokens: Int[Array, " gamma"],
    target_tokens: Int[Array, " gamma+1"],
    num_drafted: Int[Array, ""],
) -> Outcome:
    """Keeps the leading run of drafts that equal the target's own choice.

    The committed tokens are what the target alone would have chosen, one after
    the other: `target_tokens[i]` is its choice after the prefix and the first `i`
    drafts, and it is used only where those drafts were its own choices too.

    Args:
      num_drafted: how many of `draft_tokens` are real, in `0 .. gamma`.
    """
    (gamma,) = draft_tokens.shape
    is_real = jnp.arange(gamma, dtype=jnp.int32) < num_drafted
    agrees = is_real & (draft_tokens == target_tokens[:-1])
    num_accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32)), dtype=jnp.int32)
    kept = jnp.arange(gamma + 1, dtype=jnp.int32) <= num_accepted
    # An accepted draft equals the target's token, so one array serves for both.
    return Outcome(
        num_accepted=num_accepted, tokens=jnp.where(kept, target_tokens, PAD)
    )


RowSums = Callable[[jax.Array], jax.Array]
"""Sums `[*rows, V]` to `[*rows]`, in an order of its own; None leaves that to XLA."""


class AcceptanceProbabilities(pytree.Node):
    """A rule's probabilities for one chain or tree, before any uniform is drawn.

    Rows past the number drafted are not used.
    """

    # [gamma] float32: uniform `i` succeeds where it is less. The rules differ in which
    # drafts a success keeps: see the functions that return these probabilities.
    keep: jax.Array
    own: jax.Array  # [gamma + 1, V] float32, weights of the own token after column `i`


@typed
def rejection_probabilities(
    draft_tokens: Int[Array, " gamma"],
    draft_probs: Float32[Array, "gamma V"],
    target_probs: Float32[Array, "gamma+1 V"],
    num_drafted: Int[Array, ""],
) -> AcceptanceProbabilities:
    """Returns `min(1, target / draft)` of each draft, and the residuals.

    `accept_rejection` decides by them.
    """
    draft_probs = _without_padding(draft_probs, num_drafted)
    keep = ratio(
        _of_drafts(target_probs, draft_tokens), _of_drafts(draft_probs, draft_tokens)
    )
    return AcceptanceProbabilities(keep=keep, own=residual(target_probs, draft_probs))


@typed
def block_probabilities(
    draft_tokens: Int[Array, " gamma"],
    draft_probs: Float32[Array, "gamma V"],
    target_probs: Float32[Array, "gamma+1 V"],
    num_drafted: Int[Array, ""],
    *,
    row_sums: RowSums | None = None,
) -> AcceptanceProbabilities:
    """Returns the chances to keep the first `i + 1` drafts, given no more are kept.

    `accept_block` decides by them.
    """
    draft_probs = _without_padding(draft_probs, num_drafted)

    def extend(joint, step):
        at_target, at_draft = step
        joint = ratio(joint * at_target, at_draft)
        return joint, joint

    start = jnp.ones((), jnp.float32)
    steps = (
        _of_drafts(target_probs, draft_tokens),
        _of_drafts(draft_probs, draft_tokens),
    )
    _, joint = jax.lax.scan(extend, start, steps)
    joint = jnp.concatenate([start[None], joint])
    own = residual(joint[:, None] * target_probs, draft_probs)
    # After the last draft nothing was drafted and nothing is subtracted: the sum is
    # `joint`, and so is `keep`, which is the algorithm's other case.
    lacking = row_sums(own) if row_sums else jnp.sum(own, axis=-1)
    keep = ratio(lacking, lacking + (1 - joint))
    return AcceptanceProbabilities(keep=keep[1:], own=own)


@typed
def accept_rejection(
    draft_tokens: Int[Array, " gamma"],
    draft_probs: Float32[Array, "gamma V"],
    target_probs: Float32[Array, "gamma+1 V"],
    num_drafted: Int[Array, ""],
    *,
    uniforms: Float32[Array, " gamma"],
    noise: Float32[Array, " V"],
) -> Outcome:
    """Keeps drafts one by one so that the output has the target's distribution.

    Algorithm 1 of Leviathan et al. (2023), https://arxiv.org/abs/2211.17192. The
    paper's `p` is `target_probs`, its `q` is `draft_probs`. Draft `i` stays where those
    before it do and `uniforms[i] < target / draft`; after the first that does not, the
    own token is drawn from `norm(max(0, target - draft))`, or after all drafts from the
    target.

    Args:
      draft_tokens: token `i` was drawn from `draft_probs[i]`.
      draft_probs: rows sum to one, or to less by what tokens outside the vocabulary
        have.
      target_probs: after the committed prefix and after each draft; rows sum to one.
      num_drafted: how many of `draft_tokens` are real, in `0 .. gamma`. Later drafts
        and their rows may hold anything.
      uniforms: uniform in `[0, 1)`, shared with nothing else.
      noise: Gumbel noise for the own token, shared with nothing else, in particular
        not with the drafts.
    """
    probabilities = rejection_probabilities(
        draft_tokens, draft_probs, target_probs, num_drafted
    )
    stays = (uniforms < probabilities.keep) & (
        jnp.arange(uniforms.shape[0], dtype=jnp.int32) < num_drafted
    )
    num_accepted = jnp.sum(jnp.cumprod(stays.astype(jnp.int32)), dtype=jnp.int32)
    return _outcome(num_accepted, draft_tokens, target_probs, probabilities, noise)


@typed
def accept_block(
    draft_tokens: Int[Array, " gamma"],
    draft_probs: Float32[Array, "gamma V"],
    target_probs: Float32[Array, "gamma+1 V"],
    num_drafted: Int[Array, ""],
    *,
    uniforms: Float32[Array, " gamma"],
    noise: Float32[Array, " V"],
    row_sums: RowSums | None = None,
) -> Outcome:
    """Keeps a prefix of the draft, verified as a block, in the target's distribution.

    Block verification, algorithm 2 of Sun et al. (2024),
    https://arxiv.org/abs/2403.10444. The paper's `M_b` is `target_probs`, its `M_s` is
    `draft_probs`, its `p_i` is `joint`, its `h_i` is `keep` of the probabilities, its
    `eta_i` are the `uniforms`. The longest prefix whose uniform succeeds stays, also
    where one before it failed; the target's token is drawn from
    `norm(max(0, joint * target - draft))`. On average it keeps at least as many drafts
    as any rule that has the target's distribution for every prefix,
    `accept_rejection` among them.

    The kept drafts depend on all drafts and uniforms of the round, even on those past
    the last kept one: the next round must use noise of its own.

    Args: as in `accept_rejection`, and `row_sums`.
    """
    probabilities = block_probabilities(
        draft_tokens, draft_probs, target_probs, num_drafted, row_sums=row_sums
    )
    lengths = jnp.arange(1, uniforms.shape[0] + 1, dtype=jnp.int32)
    stays = (uniforms < probabilities.keep) & (lengths <= num_drafted)
    num_accepted = jnp.max(jnp.where(stays, lengths, 0), initial=0)
    return _outcome(num_accepted, draft_tokens, target_probs, probabilities, noise)


def _without_padding(draft_probs: jax.Array, num_drafted: jax.Array) -> jax.Array:
    """Returns `draft_probs` and one more row; rows that were not drafted are zero.

    Where there is no draft there is nothing to subtract. `[gamma + 1, V]`.
    """
    padded = jnp.pad(draft_probs, ((0, 1), (0, 0)))
    is_real = jnp.arange(padded.shape[0], dtype=jnp.int32) < num_drafted
    return jnp.where(is_real[:, None], padded, 0.0)


def _of_drafts(probs: jax.Array, draft_tokens: jax.Array) -> jax.Array:
    """Returns each draft's probability in its row; 0 outside the vocabulary."""
    return probs.at[
        jnp.arange(draft_tokens.shape[0], dtype=jnp.int32), draft_tokens
    ].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns `min(1, part / whole)`; 0 where either is 0, negative or NaN."""
    is_ratio = (part > 0) & (whole > 0)
    return jnp.where(is_ratio, part / jnp.maximum(part, whole), 0.0)


def residual(target: jax.Array, draft: jax.Array) -> jax.Array:
    """Returns `target` less `draft`, at least 0; `target` where `draft` is not > 0."""
    return jnp.where(draft > 0, jnp.maximum(target - draft, 0.0), target)


def or_else(weights: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the weights; the row where all of them are 0.

    A draft that equals the target to rounding may be rejected, once in millions, with
    nothing left to draw from. The target's row is then the residual, to rounding.
    """
    return jnp.where(jnp.any(weights > 0), weights, row)


def _outcome(
    num_accepted: jax.Array,
    draft_tokens: jax.Array,
    target_probs: jax.Array,
    probabilities: AcceptanceProbabilities,
    noise: jax.Array,
) -> Outcome:
    """Returns the accepted drafts and an own token, Gumbel argmax of its weights."""
    weights = or_else(probabilities.own[num_accepted], target_probs[num_accepted])
    own = jnp.argmax(jnp.log(weights) + noise).astype(draft_tokens.dtype)
    offsets = jnp.arange(draft_tokens.shape[0] + 1, dtype=jnp.int32)
    tokens = jnp.where(offsets < num_accepted, jnp.append(draft_tokens, PAD), PAD)
    tokens = jnp.where(offsets == num_accepted, own, tokens)
    return Outcome(num_accepted=num_accepted, tokens=tokens)
