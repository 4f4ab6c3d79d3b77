"""Sampling: logits -> distribution -> token, with noise keyed by seed and position.

Functions here know arrays only: no models, pages or rounds. The filters apply in the
order of Hugging Face's `generate`: temperature, top-k, top-p, min-p. (vLLM has min-p
first.) Tokens are ordered by `(logit - max logit) / temperature` in float32, highest
first, and equal ones by index, lowest first, as in argmax. In that order

    top-k   keeps the first k tokens, and all that equal the last of them, as Hugging
            Face does;
    top-p   keeps the shortest run of first tokens whose mass, among tokens that top-k
            kept, is at least p: the token that reaches p stays;
    min-p   keeps the tokens at least `min_p` times as likely as the first.

The first token always stays. Temperature 0 is greedy exactly: all mass on the argmax.

A token is drawn by Gumbel argmax: `argmax(log_weights + noise)`. The noise is a
function of the seed, the position that the token will have, and a `Stream`, and of
nothing else. So the bits of a token that a target draws with it depend on its row's
logits, the settings and its position, and not on the round that computes the row.
Rounds that keep a draft where it equals the target's own draw (`acceptance`) write the
stream that plain decoding writes.

Cost, for a row of V entries: drawing is one pass of noise; top-k is 32 passes and
top-p about 50, a bisection on the bits of the logits in place of a sort, which is many
times slower on a CPU. A filter that is off is skipped, by `lax.cond` on the data: it
costs nothing, and one executable serves all settings. Greedy is an argmax. Under
`vmap` over settings both branches run.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray, UInt32

from spec_jax.rules import settings as settings_lib
from spec_jax.typing import typed


SamplingSettings = settings_lib.SamplingSettings
make_settings = settings_lib.make_settings
greedy = settings_lib.greedy


class Stream(enum.IntEnum):
    """Purposes of noise. No two purposes share noise.

    `SAMPLE` is keyed by the token's position alone. The others are keyed by the first
    position of a round, which no two rounds share, and by an offset into it: the number
    that `acceptance.accept_block` keeps depends on drafts and uniforms past the last
    kept one, so the next round must not use them again.
    """

    SAMPLE = 0  # the target's own draws, and drafts that aim at them
    DRAFT = 1  # drafts, for rejection and block verification
    UNIFORM = 2  # which of those drafts stay
    OWN = 3  # the target's own token after them


def _last_true(holds, low: int, high: int, num_steps: int) -> Int[Array, ""]:
    """Finds the largest `t` in `[low, high)` with `holds(t)`, true up to there.

    `holds(low)` is taken as true. `2**num_steps` is at least `high - low`.
    """

    def halve(_, bounds):
        low, high = bounds
        # The middle, without a sum that overflows.
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        is_true = holds(middle)
        return jnp.where(is_true, middle, low), jnp.where(is_true, high, middle)

    bounds = (jnp.int32(low), jnp.int32(high))
    return jax.lax.fori_loop(0, num_steps, halve, bounds)[0]


def _rank(scores: Float32[Array, " V"]) -> Int[Array, " V"]:
    """Maps scores to integers in the same order, both zeros to one."""
    # Floats compare as their bits do, with the bits of negative ones reversed.
    as_int = jax.lax.bitcast_convert_type(scores, jnp.int32)
    as_int = jnp.where(as_int == -(2**31), 0, as_int)
    return jnp.where(as_int < 0, as_int ^ jnp.int32(2**31 - 1), as_int)


def _last_rank(holds) -> Int[Array, ""]:
    """Finds the largest rank with `holds(rank)`, true up to there."""
    return _last_true(holds, -(2**31), 2**31 - 1, num_steps=32)


def _first_tokens(
    scores: Float32[Array, " V"],
    weights: Float32[Array, " V"],
    wanted: Float32[Array, ""],
) -> Bool[Array, " V"]:
    """Finds the shortest run of tokens, highest score first, that weighs `wanted`.

    Equal scores go by index, lowest first. If all tokens weigh less, all are returned.
    A sum of fewer of the same terms in the same order never rounds to more, so the
    condition of both searches changes once.
    """
    (vocab_size,) = scores.shape
    index = jnp.arange(vocab_size, dtype=jnp.int32)
    rank = _rank(scores)

    def weighs_enough(kept):
        return jnp.sum(jnp.where(kept, weights, 0.0)) >= wanted

    boundary = _last_rank(lambda t: weighs_enough(rank >= t))

    def without_last(num_cut):
        """Keeps all above the boundary, and those on it of index below V - num_cut."""
        is_early = index < vocab_size - num_cut
        return (rank > boundary) | ((rank == boundary) & is_early)

    num_cut = _last_true(
        lambda n: weighs_enough(without_last(n)),
        0,
        vocab_size + 1,
        num_steps=(vocab_size + 1).bit_length(),
    )
    return without_last(num_cut)


def _top_k(scores: Float32[Array, " V"], top_k: Int[Array, ""]):
    rank, wanted = _rank(scores), jnp.minimum(top_k, scores.shape[0])
    last = _last_rank(lambda t: jnp.sum(rank >= t, dtype=jnp.int32) >= wanted)
    return jnp.where(rank >= last, scores, -jnp.inf)


def _top_p(scores: Float32[Array, " V"], top_p: Float32[Array, ""]):
    weights = jnp.exp(scores)
    kept = _first_tokens(scores, weights, top_p * jnp.sum(weights))
    return jnp.where(kept, scores, -jnp.inf)


def _filtered(
    logits: Float32[Array, " V"], settings: SamplingSettings
) -> Float32[Array, " V"]:
    # The maximum first: a small temperature would make infinities, and inf - inf.
    scores = (logits - jnp.max(logits)) / settings.temperature
    scores = jax.lax.cond(
        settings.top_k < logits.shape[0],
        lambda x: _top_k(x, settings.top_k),
        lambda x: x,
        scores,
    )
    # 1 must keep every token, even if the sum of all is rounded above their total.
    scores = jax.lax.cond(
        settings.top_p < 1, lambda x: _top_p(x, settings.top_p), lambda x: x, scores
    )
    # The highest score is 0, and stays.
    return jax.lax.cond(
        settings.min_p > 0,
        lambda x: jnp.where(jnp.exp(x) >= settings.min_p, x, -jnp.inf),
        lambda x: x,
        scores,
    )


@typed
def log_weights(
    logits: Float[Array, " V"], settings: SamplingSettings
) -> Float32[Array, " V"]:
    """Returns the log weight of each token of ONE row, after all filters.

    0 for the most likely token, -inf for filtered tokens; not normalised.

    Args:
      logits: finite or -inf, and not all -inf; cast to float32 first.
    """
    logits = logits.astype(jnp.float32)

    def greedy(logits):
        is_best = jnp.arange(logits.shape[0], dtype=jnp.int32) == jnp.argmax(logits)
        return jnp.where(is_best, jnp.float32(0), -jnp.inf)

    return jax.lax.cond(
        settings.temperature == 0, greedy, lambda x: _filtered(x, settings), logits
    )


@typed
def distribution(
    logits: Float[Array, "*rows V"], settings: SamplingSettings
) -> Float32[Array, "*rows V"]:
    """Returns the probabilities that `sample_each` draws from, for each row.

    Row by row, in a loop: a row's bits depend on no other row.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    probs = jax.lax.map(lambda row: jax.nn.softmax(log_weights(row, settings)), rows)
    return probs.reshape(logits.shape)


@typed
def noise_key(
    seed: UInt32[Array, ""],
    stream: Stream,
    position: Int[Array, ""],
    offset: Int[Array, ""] | int = 0,
) -> PRNGKeyArray:
    """Returns the key of one stream's noise at a position, and offset into a round.

    Threefry is named, as another configured default would make other streams.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    for part in (int(stream), position, offset):
        key = jax.random.fold_in(key, part)
    return key


@typed
def noise(
    seed: UInt32[Array, ""],
    position: Int[Array, ""],
    *,
    vocab_size: int,
    stream: Stream = Stream.SAMPLE,
    offset: Int[Array, ""] | int = 0,
) -> Float32[Array, " vocab_size"]:
    """Draws Gumbel noise. `position` is that of the token to be drawn.

    Its resolution is high: with 24 random bits no value would exceed 17, and thousands
    of unlikely tokens would together be drawn too seldom.
    """
    key = noise_key(seed, stream, position, offset)
    with jax.threefry_partitionable(True):  # The flag of the process makes other bits.
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")


@typed
def uniforms(
    seed: UInt32[Array, ""], position: Int[Array, ""], *, gamma: int
) -> Float32[Array, " gamma"]:
    """Draws a uniform number in `[0, 1)` for each draft of the round from `position`.

    Each has 64 random bits, cut to the 24 significant ones that float32 holds: it is
    less than a float32 probability of at least 2**-32 exactly as often as that says,
    and less than a smaller one to within 2**-56. It is 0 once in 2**56 draws.
    """
    key = noise_key(seed, Stream.UNIFORM, position)
    with jax.threefry_partitionable(True):
        bits = jax.random.bits(key, (gamma, 2), jnp.uint32)
    return _unit_interval(bits)


def _unit_interval(bits: UInt32[Array, "n 2"]) -> Float32[Array, " n"]:
    """Turns rows of bits to binary fractions, cut to float32, never rounded up."""
    high, low = bits[:, 0], bits[:, 1]
    num_zeros = jax.lax.clz(high)
    # The 32 bits behind the zeros; a shift by 32 gives 0.
    shifted = jax.lax.shift_left(high, num_zeros) | jax.lax.shift_right_logical(
        low, jnp.uint32(32) - num_zeros
    )
    leading = (shifted >> 8).astype(jnp.float32)  # 24 bits: exact
    # 2**(-24 - num_zeros), by its exponent.
    exponent = (jnp.uint32(127 - 24) - num_zeros) << 23
    return leading * jax.lax.bitcast_convert_type(exponent, jnp.float32)


@typed
def noisy_weights(
    logits: Float[Array, " V"],
    settings: SamplingSettings,
    position: Int[Array, ""],
    *,
    stream: Stream = Stream.SAMPLE,
    offset: Int[Array, ""] | int = 0,
) -> Float32[Array, " V"]:
    """Returns the scores whose argmax is the token of one `position`, of ONE row: log
    weights plus noise.

    At temperature 0 they are the logits as they are: no filter, no noise.
    """

    def noisy(logits):
        return log_weights(logits, settings) + noise(
            settings.seed,
            position,
            vocab_size=logits.shape[0],
            stream=stream,
            offset=offset,
        )

    # An argmax that is fused with the code that makes the noise is several times slower
    # on a CPU: the `cond` prevents that.
    return jax.lax.cond(
        settings.temperature == 0, lambda x: x, noisy, logits.astype(jnp.float32)
    )


@typed
def sample_each(
    logits: Float[Array, "R V"],
    settings: SamplingSettings,
    *,
    positions: Int[Array, " R"],
    draws: Bool[Array, " R"],
) -> Int[Array, " R"]:
    """Draws a token from each row, int32, by its own settings and position.

    Row by row, in a loop: a token's bits depend on its own row, its position and the
    settings.

    Args:
      settings: with leaves `[R]`.
      draws: which rows draw; the others give 0, and cost nothing.
    """

    def one_row(row):
        """Draws a token if the row is to draw; else returns 0."""
        logits, settings, position, draws = row
        return jax.lax.cond(
            draws,
            lambda: jnp.argmax(noisy_weights(logits, settings, position)).astype(
                jnp.int32
            ),
            lambda: jnp.int32(0),
        )

    return jax.lax.map(one_row, (logits, settings, positions, draws))
