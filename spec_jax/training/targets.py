"""The target's outputs for its texts, to train drafters: made as needed, or cached.

They are data of `loop.run`: `data[rows]` is a batch of `tokens`, `mask`, `greedy`,
`final`, `best`, and where asked for `features` and `normalizer`. One program computes
one text at a time, so that a cache holds the bits that would be computed.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pytree
from spec_jax.model import (
    config as config_lib,
    fingerprint,
    params as params_lib,
    sequence,
)
from spec_jax.ops import weights
from spec_jax.training import store as stores


BUCKET = 128
"""Columns of a batch are a multiple of this, or all: few shapes, little padding."""


class Teacher(pytree.Node):
    """The target's part of a drafter's loss, besides a batch; not trained."""

    embed: jax.Array  # [V, D]
    head: jax.Array  # [V, D]
    hot: jax.Array | None  # [Vd] int32, the target's token of each draft token
    scale: jax.Array | None = None  # [taps * D] of the features, see `scale_of`

    @property
    def draft_head(self) -> jax.Array:
        """The rows of `head` that are of draft tokens, `[Vd, D]`."""
        return self.head if self.hot is None else self.head[self.hot]


def final_norm(params: params_lib.Params) -> jax.Array:
    """Returns the weight of a target's final norm, of whichever kind it is."""
    norm: Any = params.final_norm
    return getattr(norm, "weight", norm)


def teacher_of(
    params: params_lib.Params, hot: jax.Array | None, scale: Any = None
) -> Teacher:
    """Returns the parts of a target that its drafter is trained with."""
    return Teacher(
        embed=weights.matrix(params.embed),
        head=weights.matrix(params.head),
        hot=hot,
        scale=None if scale is None else jnp.asarray(scale),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts, of which the target wrote the ends.

    Attributes:
      tokens: ids `[n, T] int32`.
      mask: which rows of the target count `[n, T] bool`: those after which it wrote a
        token. Row `t` predicts token `t + 1`.
      greedy: which texts it wrote greedily `[n] bool`.
      samples: texts of a prompt, one after the other: where texts are held out, no
        prompt of theirs is trained on.
    """

    tokens: np.ndarray
    mask: np.ndarray
    greedy: np.ndarray
    samples: int = 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Rows of each text up to the last that counts, `[n] int`."""
        is_last = self.mask[:, ::-1].argmax(axis=1)
        return np.where(self.mask.any(axis=1), self.mask.shape[1] - is_last, 0)

    @functools.cached_property
    def columns(self) -> np.ndarray:
        """Columns that show a text's rows and the token after them, `[n] int`: few
        different numbers, and little padding."""
        whole = -(-(self.lengths + 1) // BUCKET) * BUCKET
        return np.minimum(whole, self.tokens.shape[1])

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `tokens`, `mask` and `greedy` of some texts, without the columns that
        none of them needs."""
        size = self.columns[rows].max()
        return {
            "tokens": self.tokens[rows, :size],
            "mask": self.mask[rows, :size],
            "greedy": self.greedy[rows],
        }

    def read(self, row: int) -> np.ndarray:
        """Returns the tokens of a text's rows, up to the last row that counts."""
        return self.tokens[row, : self.lengths[row]]

    def part(self, rows: slice) -> "Texts":
        """Returns some of the texts, such as the held-out ones."""
        names = ("tokens", "mask", "greedy")
        return dataclasses.replace(self, **{x: getattr(self, x)[rows] for x in names})


_CHOICES = np.dtype([("best", "<i4"), ("normalizer", "<f4")])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """Texts, and the target's outputs: computed when they are asked for, or cached.

    Attributes:
      normalizers: batches have `normalizer`, too, the target's log-sum-exp after each
        row: with it a loss needs the logits of draft tokens alone.
      store: the cache, see `cached`, which keeps what is computed; None: nothing is
        kept.
    """

    texts: Texts
    params: params_lib.Params
    config: config_lib.ModelConfig
    taps: tuple[int, ...]
    normalizers: bool = False
    store: stores.Store | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def columns(self) -> np.ndarray:
        """As `Texts.columns`."""
        return self.texts.columns

    def part(self, rows: slice) -> "Outputs":
        """Returns the outputs of some of the texts, as `Texts.part`."""
        return dataclasses.replace(self, texts=self.texts.part(rows))

    def rows_of(self, row: int) -> np.ndarray:
        """Returns features and final hidden states of a text, `[T, (taps + 1) * D]`, up
        to the last row that counts."""

        def make() -> np.ndarray:
            tokens = self.texts.tokens[row, : self.columns[row]]
            made = _one(self.params, tokens[None], self.config, self.taps)
            return np.asarray(made)[: self.texts.lengths[row]]

        return stores.kept(self.store, self.texts.read(row), make)

    @functools.cached_property
    def _choices(self) -> stores.Store | None:
        """Choices after rows of cached texts.

        A product with the whole vocabulary costs as much as a step of a small drafter.
        """
        if self.store is None:
            return None
        folder, described = self.store.folder / "choices", self.store.described
        return stores.Store(folder, described=described, width=1, dtype=_CHOICES)

    def choices_of(
        self, row: int, final: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the target's most likely token after each row of a text, `[T] int32`,
        and the log-sum-exp of its logits, `[T] float32`, or None.

        Texts that it wrote greedily say the token, whatever a cache has kept.

        Args:
          final: the text's final hidden states `[T, D]`.
        """
        if self.texts.greedy[row] and not self.normalizers:
            return self.texts.tokens[row, 1 : len(final) + 1], None

        def make() -> np.ndarray:
            padded = np.pad(final, ((0, -len(final) % BUCKET), (0, 0)))
            made = jax.device_get(_choices(weights.matrix(self.params.head), padded))
            found = np.empty((len(final), 1), _CHOICES)
            found["best"], found["normalizer"] = (x[: len(final), None] for x in made)
            return found

        found = stores.kept(self._choices, self.texts.read(row), make)
        return found["best"][:, 0], found["normalizer"][:, 0]

    def __getitem__(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns a batch, whose texts have zeros past the last row that counts."""
        rows = np.asarray(rows)
        batch = self.texts.batch(rows)
        size, width = batch["tokens"].shape[1], self.config.hidden_size
        dtype = jnp.dtype(self.config.dtype)
        made = np.zeros((len(rows), size, (len(self.taps) + 1) * width), dtype)
        batch["best"] = np.zeros((len(rows), size), np.int32)
        if self.normalizers:
            batch["normalizer"] = np.zeros((len(rows), size), np.float32)
        for place, row in enumerate(rows.tolist()):
            found = self.rows_of(row)
            made[place, : len(found)] = found
            best, normalizer = self.choices_of(row, found[:, -width:])
            batch["best"][place, : len(found)] = best
            if self.normalizers:
                batch["normalizer"][place, : len(found)] = normalizer
        batch["final"] = made[..., -width:]
        return batch | ({"features": made[..., :-width]} if self.taps else {})


@jax.jit
def _choices(head, final):
    head, final = head.astype(jnp.float32), final.astype(jnp.float32)
    logits = sequence.product(final, head)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return best, jax.nn.logsumexp(logits, axis=-1)


@functools.partial(jax.jit, static_argnames=("config", "taps"))
def _one(params, tokens, config, taps):
    """Returns features and final hidden states of a text, `[T, (taps + 1) * D]`."""
    made = sequence.forward(params, config, tokens, taps=taps)
    return jnp.concatenate(
        [made.features[0].reshape(tokens.shape[1], -1), made.hidden[0]], axis=-1
    )


def scale_of(data: Outputs, *, texts: int = 32) -> np.ndarray:
    """Returns factors that bring each feature's root mean square to about one.

    A few features of a model are a thousand times as large as others. A projection
    that is trained on features of one size learns from all of them: its product with
    these factors reads the features as they are. They are powers of two, and so the
    product is exact in any dtype.

    Args:
      data: with features; the rows that count of its first texts decide.

    Returns:
      `[taps * D] float32`.
    """
    batch = data[np.arange(min(texts, len(data)))]
    rows = batch["features"][batch["mask"]].astype(np.float32)
    size = np.sqrt(np.mean(rows * rows, axis=0))
    powers = np.round(np.log2(np.maximum(size, np.finfo(np.float32).tiny)))
    return np.exp2(-np.clip(powers, -16, 16)).astype(np.float32)


def draft_vocabulary(texts: Texts, *, size: int, vocab_size: int) -> np.ndarray | None:
    """Returns the most frequent tokens that the target wrote, ascending, int32.

    None where the draft vocabulary is the whole one.
    """
    if size == vocab_size:
        return None
    written = texts.tokens[:, 1:][texts.mask[:, :-1]]
    counts = np.bincount(written, minlength=vocab_size)
    # The smaller id wins a tie: the same on every machine.
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def cached(outputs: Outputs, folder: pathlib.Path) -> Outputs:
    """Returns the same outputs, which a folder keeps: by memory map, once computed.

    Raises:
      ValueError: `folder` holds another target's, or of other taps.
    """
    config, taps = outputs.config, outputs.taps
    store = stores.Store(
        folder,
        described={
            "target_sha256": fingerprint.of_params(outputs.params),
            "target_config": config_lib.to_dict(config),
            "taps": list(taps),
        },
        width=(len(taps) + 1) * config.hidden_size,
        dtype=jnp.dtype(config.dtype),
    )
    return dataclasses.replace(outputs, store=store)
