"""The target's outputs for its texts, to train drafters: made as needed, or cached.

Both are data of `loop.run`: `data[rows]` is a batch of `tokens`, `mask`, `greedy`,
`final` and, where there are taps, `features`. One program makes them, for one sequence
at a time, so that a cache holds the bits of what would be made.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pytree
from spec_jax.model import (
    checkpoint_files as files,
    config as config_lib,
    fingerprint,
    params as params_lib,
    sequence,
)
from spec_jax.ops import weights


SHARD = 512  # sequences
_INDEX = "cache.json"


class Teacher(pytree.Node):
    """The target's part of a drafter's loss, besides a batch; not trained."""

    embed: jax.Array  # [V, D]
    head: jax.Array  # [V, D]
    hot: jax.Array | None  # [Vd] int32, the target's token of each draft token


def final_norm(params: params_lib.Params) -> jax.Array:
    """Returns the weight of a target's final norm, of whichever kind it is."""
    norm: Any = params.final_norm
    return getattr(norm, "weight", norm)


def teacher_of(params: params_lib.Params, hot: jax.Array | None) -> Teacher:
    """Returns the parts of a target that its drafter is trained with."""
    return Teacher(
        embed=weights.matrix(params.embed), head=weights.matrix(params.head), hot=hot
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts, of which the target wrote the ends.

    Attributes:
      tokens: ids `[n, T] int32`.
      mask: which rows of the target count `[n, T] bool`: those after which it wrote a
        token. Row `t` is of token `t + 1`.
      greedy: which texts it wrote greedily `[n] bool`; all if None.
      samples: texts of a prompt, one after the other: where texts are held out, no
        prompt of theirs is trained on.
    """

    tokens: np.ndarray
    mask: np.ndarray
    greedy: np.ndarray | None = None
    samples: int = 1

    @property
    def is_greedy(self) -> np.ndarray:
        """Which texts were written greedily, `[n] bool`."""
        return np.ones(len(self), bool) if self.greedy is None else self.greedy

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Online:
    """Texts whose features the target computes when they are asked for."""

    texts: Texts
    params: params_lib.Params
    config: config_lib.ModelConfig
    taps: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        tokens = self.texts.tokens[rows]
        made = [
            jax.tree.map(np.asarray, _one(self.params, x[None], self.config, self.taps))
            for x in tokens
        ]
        features, final = (np.concatenate(part) for part in zip(*made, strict=True))
        batch = {"tokens": tokens, "mask": self.texts.mask[rows], "final": final}
        batch["greedy"] = self.texts.is_greedy[rows]
        return batch | ({"features": features} if self.taps else {})


@functools.partial(jax.jit, static_argnames=("config", "taps"))
def _one(params, tokens, config, taps):
    """Features `[1, T, taps * D]` and final hidden states of one sequence."""
    made = sequence.forward(params, config, tokens, taps=taps)
    width = len(taps) * config.hidden_size
    return made.features.reshape(*tokens.shape, width), made.hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Rows `first ..` of some data, such as those that are held out."""

    data: "Online | Cached"
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return self.data[np.asarray(rows) + self.first]


def share(found: jax.Array, of: jax.Array) -> jax.Array:
    """Returns how many of some places are found, and how many there are, float32."""
    return jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in (found & of, of)])


def tokens_and_rounds(
    agrees: jax.Array, counted: jax.Array, greedy: jax.Array
) -> jax.Array:
    """Counts what greedy decoding of texts would: tokens, and the rounds they take.

    A round from column `i` that keeps `n` drafts is followed by one from column
    `i + n + 1`: unlike in a mean over all columns, a stretch that is easily drafted
    counts as the one round that it takes.

    Args:
      agrees: whether draft `j` of a round from column `i` counts and is the target's
        choice, `[B, P, W]`.
      counted: columns after which the target wrote a token, one stretch of a text
        `[B, P]`.
      greedy: texts that the target wrote greedily `[B]`; others are left out.

    Returns:
      Two numbers, float32.
    """
    counted = counted & greedy[:, None]
    kept = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=-1), axis=-1)

    def step(start, column):
        place, is_counted, kept = column
        begins = is_counted & (start == place)
        return jnp.where(begins, place + kept + 1, start), begins

    first = jnp.argmax(counted, axis=-1).astype(jnp.int32)
    places = jnp.arange(counted.shape[1], dtype=jnp.int32)
    _, begins = jax.lax.scan(step, first, (places, counted.T, kept.T))
    return share(begins.T, counted)[::-1]


def draft_vocabulary(texts: Texts, *, size: int, vocab_size: int) -> np.ndarray | None:
    """Returns the most frequent tokens that the target wrote, ascending, int32.

    None where the draft vocabulary is the whole one.

    Raises:
      ValueError: more tokens than there are.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size}, of a vocabulary of {vocab_size}: it must "
            f"be from 1 to {vocab_size}"
        )
    if size == vocab_size:
        return None
    written = texts.tokens[:, 1:][texts.mask[:, :-1]]
    counts = np.bincount(written, minlength=vocab_size)
    # The smaller id wins a tie: the same on every machine.
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def num_shards(online: Online) -> int:
    """Returns how many files `write` makes."""
    return -(-len(online) // SHARD)


def write(
    folder: pathlib.Path,
    online: Online,
    *,
    after_shard: Callable[[], None] = lambda: None,
) -> None:
    """Caches all that `online` gives; a killed run goes on after its last whole shard.

    Args:
      after_shard: called after each of `num_shards`.

    Raises:
      ValueError: `folder` holds another target's, or of other texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index, described = folder / _INDEX, _describe(online)
    if index.exists():
        _check(index, described)
    else:
        whole = index.with_name(index.name + ".partial")
        whole.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        whole.replace(index)  # Which is never half a file.
    for number, start in enumerate(range(0, len(online), SHARD)):
        path = folder / _shard(number)
        if path.exists():
            after_shard()
            continue
        batch = online[np.arange(start, min(start + SHARD, len(online)))]
        pending = [
            files.Pending(
                name=name,
                dtype=array.dtype,
                shape=array.shape,
                fetch=functools.partial(np.asarray, array),
            )
            for name, array in batch.items()
        ]
        partial = path.with_name(path.name + ".partial")
        files.write(partial, pending, metadata={"taps": str(list(online.taps))})
        partial.replace(path)  # Which is never half a file.
        after_shard()


class Cached:
    """The batches of an `Online` from files that `write` made, by memory map."""

    def __init__(self, folder: pathlib.Path, online: Online):
        """Opens a cache.

        Raises:
          ValueError: none is there, or another target's, or of other texts.
        """
        if not (folder / _INDEX).exists():
            raise ValueError(f"{folder}: holds no cache; run the stage cache first")
        _check(folder / _INDEX, _describe(online))
        self._length = len(online)
        self._shards = [
            _open(folder / _shard(number)) for number in range(-(-len(online) // SHARD))
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        places = [divmod(int(row), SHARD) for row in np.asarray(rows)]
        return {
            name: np.stack([self._shards[shard][name][at] for shard, at in places])
            for name in self._shards[0]
        }


def _shard(number: int) -> str:
    return f"targets-{number:05}.safetensors"


def _open(path: pathlib.Path) -> dict[str, np.ndarray]:
    entries = files.read_header(path, dtypes=files.DTYPES | files.WHOLE_DTYPES)
    return {
        name: np.memmap(
            path, dtype=entry.dtype, mode="r", offset=entry.offset, shape=entry.shape
        )
        for name, entry in entries.items()
    }


def _describe(online: Online) -> dict:
    """Returns a description that decides every bit of a cache."""
    digest = hashlib.sha256(np.ascontiguousarray(online.texts.tokens).tobytes())
    for part in (online.texts.mask, online.texts.is_greedy):
        digest.update(np.ascontiguousarray(part).tobytes())
    return {
        "target_sha256": fingerprint.of_params(online.params),
        "target_config": config_lib.to_dict(online.config),
        "texts_sha256": digest.hexdigest(),
        "taps": list(online.taps),
        "sequences": len(online),
    }


def _check(index: pathlib.Path, described: dict) -> None:
    held = json.loads(index.read_text(encoding="utf-8"))
    differing = [key for key, value in described.items() if held.get(key) != value]
    if differing:
        raise ValueError(
            f"{index}: of another {', '.join(differing)}; delete the folder, or name "
            "another"
        )
