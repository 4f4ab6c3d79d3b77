"""The loss of EAGLE-3: drafting is trained as it is done, several steps deep.

"Training-time test" of Li et al. 2025, https://arxiv.org/abs/2503.01840: step 0 reads
the target's features, each later step what the step before it made of them. A step is
trained towards the target's distribution on the draft vocabulary, by cross-entropy, and
counts `decay` times as much as the one before.
"""

import jax
import jax.numpy as jnp

from spec_jax.model import (
    eagle3,
    eagle3_params,
    head_params,
    params as params_lib,
    sequence,
)
from spec_jax.ops import weights
from spec_jax.training import heads, targets as targets_lib


STEPS, DECAY = 7, 0.8


def init(
    key: jax.Array,
    config: eagle3_params.Eagle3Config,
    params: params_lib.Params,
    hot: jax.Array | None,
) -> eagle3_params.Eagle3Params:
    """Returns what is trained: float32 weights, without what is the target's.

    The output projection begins as the target's rows of the draft vocabulary, and the
    norm before it as the target's; in a head of another width as what a narrower one
    can hold of them, and so its own embedding. The norm is divided so that logits of
    random hidden states have a spread of one: drafts begin without an opinion, in the
    place of a wrong one that takes a hundred steps to lose. Consumes `key`.
    """
    embed, head = weights.matrix(params.embed), weights.matrix(params.head)
    if config.has_own_embed:
        embed, head = (_resized(x, config.hidden_size) for x in (embed, head))
    made = head_params.init(key, config, embed=embed, hot=hot)
    rows = (head if hot is None else head[hot]).astype(jnp.float32)
    own = config.has_own_embed
    norm = made.final_norm if own else targets_lib.final_norm(params)
    norm = norm.astype(jnp.float32)
    spread = jnp.sqrt(jnp.mean(jnp.sum((rows * norm) ** 2, axis=-1)))
    return heads.trained(config, made.replace(lm_head=rows, final_norm=norm / spread))


def _resized(x: jax.Array, width: int) -> jax.Array:
    """Returns `[V, width]`, a narrower `x [V, D]` along its leading directions.

    A wider one is `x`, and zeros.
    """
    wide = x.astype(jnp.float32)
    if width > x.shape[1]:
        return jnp.pad(wide, ((0, 0), (0, width - x.shape[1])))
    _, _, directions = jnp.linalg.svd(wide, full_matrices=False)
    return wide @ directions[:width].T


def loss(
    config: eagle3_params.Eagle3Config,
    params: eagle3_params.Eagle3Params,
    batch: dict[str, jax.Array],
    teacher: targets_lib.Teacher,
    *,
    steps: int = STEPS,
    decay: float = DECAY,
) -> jax.Array:
    """Returns `sum_j decay^j loss_j`, each step's the mean over all columns, nats.

    Positions whose most likely token the draft vocabulary lacks count 0, and so do
    positions outside `batch["mask"]`: the mean of a batch's parts is the batch's.
    Batches of shorter texts have fewer columns, and a token of theirs counts more.
    """
    counted = batch["mask"][:, 1:]
    if teacher.hot is not None:
        is_kept = jnp.zeros(len(teacher.head), bool).at[teacher.hot].set(True)
        counted = counted & is_kept[batch["best"][:, 1:]]
    logits = sequence.product(batch["final"][:, 1:], teacher.draft_head)
    targets = jax.nn.softmax(logits, axis=-1)
    total = jnp.float32(0)
    for j, made in enumerate(_unroll(config, params, batch, teacher, steps)):
        products = jnp.sum(_shift(targets, j) * made.logits, axis=-1)
        nats = jax.nn.logsumexp(made.logits, axis=-1) - products
        total += decay**j * jnp.mean(jnp.where(_shift(counted, j), nats, 0.0))
    return total


def measure(
    config: eagle3_params.Eagle3Config,
    params: eagle3_params.Eagle3Params,
    batch: dict[str, jax.Array],
    teacher: targets_lib.Teacher,
    *,
    steps: int = STEPS,
) -> dict[str, jax.Array]:
    """Counts how often each step's draft is the target's most likely token, see
    `heads.agreements`."""
    made = _unroll(config, params, batch, teacher, steps)
    drafts = jnp.stack([jnp.argmax(step.logits, axis=-1) for step in made], axis=-1)
    best, counted = (
        jnp.stack([_shift(x, j) for j in range(steps)], axis=-1)
        for x in (batch["best"][:, 1:], batch["mask"][:, 1:])
    )
    return heads.agreements(drafts, best, counted, batch, teacher)


def _unroll(config, params, batch, teacher, steps):
    """Returns the steps' outputs; column `i` of step `j` is pair `i + j`."""
    whole = heads.computing(config, params, teacher)
    pairs = batch["tokens"][:, 1:]
    made: list[eagle3.StepOutputs] = []
    for j in range(steps):
        read = made[-1].hidden if made else batch["features"][:, :-1]
        made.append(
            eagle3.forward_sequence(
                whole, config, _shift(pairs, j), read, earlier=tuple(made)
            )
        )
    return made


def _shift(x: jax.Array, steps: int) -> jax.Array:
    """Moves columns left, and fills the last ones with zeros, or false."""
    widths = [(0, 0), (0, steps)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x[:, steps:], widths)
