"""Evidence of a run: everything that must be equal, compared as integers and hashed.

Functions here read arrays on the host; they do not run anything.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax import testing
from spec_jax.debug import recorder
from spec_jax.engine import baseline, state as states
from spec_jax.paging import cache as paged, index


WHATS = ("tokens", "log_probs", "logits", "kv")
"""The compared parts: generated tokens; the log-probability of each, or of the most
probable one where it was drawn; a hash of all logits that it was chosen by; committed
keys and values of all layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Results of one recorded run: a text of `n` tokens, `T` of them generated.

    Attributes:
      num_prompt: tokens before the first generated one.
      tokens: `[T]` int32, generated.
      log_probs: `[T]` uint32, the bits of the log-probability of the token of highest
        logit: the generated one, unless that was drawn.
      logits: `[T, 2]` uint32, `recorder.hash_bits` of the logits that decided it.
      row: `[T]` int32, their row's number in its window.
      constant: `[T]` bool, whether all these logits were equal; equality of two runs
        then shows nothing.
      kv: per layer keys and values of `[0, n-1)` in order, unsigned integers
        `[2, n-1, K, H]`.
      nonfinite: tokens that were chosen from logits that are not finite. Different
        logits of that kind give the same tokens, so that equality means nothing there.
    """

    num_prompt: int
    tokens: np.ndarray
    log_probs: np.ndarray
    logits: np.ndarray
    row: np.ndarray
    constant: np.ndarray
    kv: Sequence[np.ndarray]
    nonfinite: int = 0

    def hashes(self) -> dict[str, str]:
        """Hashes each of `WHATS` (SHA-256, little-endian)."""
        parts = {what: [getattr(self, what)] for what in WHATS} | {"kv": self.kv}
        return {what: _sha256(arrays) for what, arrays in parts.items()}


def _sha256(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
        digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def of_decode(state: baseline.DecodeState, *, num_prompt: int) -> Evidence:
    """Returns the evidence of finished autoregressive decoding with a recorder."""
    one = jax.tree.map(lambda leaf: leaf[None], state.replace(cache=None))
    return _of_slot(one, state.cache, num_prompt=num_prompt, slot=0)


def of_slot(state: states.State, *, num_prompt: int, slot: int) -> Evidence:
    """Returns the evidence of a finished slot that has had no other request since."""
    return _of_slot(state.slots, state.cache, num_prompt=num_prompt, slot=slot)


def _of_slot(
    slots: Any, recording: recorder.Recording, *, num_prompt: int, slot: int
) -> Evidence:
    """Reads one slot of a run with a recorder."""
    length = int(slots.length[slot])
    decided = slice(num_prompt - 1, length - 1)
    of = lambda leaf: np.array(leaf[slot])
    return Evidence(
        num_prompt=num_prompt,
        tokens=of(slots.tokens)[num_prompt:length],
        log_probs=testing.bits(of(recording.log_prob))[decided],
        logits=of(recording.logits_hash)[decided],
        row=of(recording.row)[decided],
        constant=of(recording.constant)[decided],
        kv=committed_kv(recording.cache, length - 1, slot=slot),
        nonfinite=int(slots.num_nonfinite[slot]),
    )


def committed_kv(kv: paged.PagedKV, length: int, *, slot: int = 0) -> list[np.ndarray]:
    """Reads K/V of `[0, length)` through the page table, as in `Evidence.kv`.

    Reads on the host: a gather on the device would be compiled for every length.
    """
    num_pages = index.pages_for(length, kv.page_size)
    pages = np.asarray(kv.page_table)[slot, :num_pages]

    def read(pool) -> np.ndarray:
        pool = testing.bits(pool)
        return pool[pages].reshape(-1, *pool.shape[2:])[:length]

    return [np.stack([read(k), read(v)]) for k, v in zip(kv.k, kv.v, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The place where one of `WHATS` first differs, and the number of differences.

    Attributes:
      position: of the first differing token, decision on a token, key or value.
      row: the row of its window that decided the token; None for keys and values, and
        for a token that only the run without rounds has.
      layer: None except for keys and values.
      part: "k" or "v" of that layer.
      count, total: elements that differ, and elements that were compared.
    """

    what: str
    position: int
    count: int
    total: int
    row: int | None = None
    layer: int | None = None
    part: str | None = None

    def to_row(self) -> dict[str, Any]:
        """Returns the JSON form."""
        return dataclasses.asdict(self)


def describe(difference: Mapping[str, Any]) -> str:
    """Describes a `Difference.to_row` in words."""
    where = f"position {difference['position']}"
    if difference["layer"] is not None:
        where += f", layer {difference['layer']}, {difference['part']}"
    if difference["row"] is not None:
        where += f", row {difference['row']} of its window"
    return (
        f"{difference['what']} from {where}: "
        f"{difference['count']} of {difference['total']}"
    )


def compare(plain: Evidence, spec: Evidence) -> list[Difference]:
    """Finds where two runs of one prompt differ, at most once for each of `WHATS`.

    After the first token that differs the texts are different ones: decisions after it,
    and keys and values from it on, are not compared. A token that only one run has
    counts as a difference; its decision, keys and values are not compared.
    """
    shared = min(len(plain.tokens), len(spec.tokens))
    unequal = np.ones(max(len(plain.tokens), len(spec.tokens)), bool)
    unequal[:shared] = plain.tokens[:shared] != spec.tokens[:shared]
    first = int(np.argmax(unequal)) if unequal.any() else shared
    decided = min(first + 1, shared)
    differs = {"tokens": unequal}
    for what in ("log_probs", "logits"):
        pairs = getattr(plain, what)[:decided] != getattr(spec, what)[:decided]
        differs[what] = pairs.reshape(decided, -1).any(axis=-1)
    found = []
    for what, each in differs.items():
        if each.any():
            at = int(np.argmax(each))
            found.append(
                Difference(
                    what=what,
                    position=plain.num_prompt + at,
                    count=int(each.sum()),
                    total=len(each),
                    row=int(spec.row[at]) if at < len(spec.row) else None,
                )
            )
    return found + _compare_kv(plain, spec, length=plain.num_prompt - 1 + decided)


def _compare_kv(plain: Evidence, spec: Evidence, *, length: int) -> list[Difference]:
    """Finds the first difference of K/V at `[0, length)`: by position, then layer."""
    differs = [
        ours[:, :length] != theirs[:, :length]
        for ours, theirs in zip(spec.kv, plain.kv, strict=True)
    ]
    count = sum(int(layer.sum()) for layer in differs)
    if not count:
        return []
    # [layer, k or v, position]
    where = np.argwhere(np.stack([layer.any(axis=(-2, -1)) for layer in differs]))
    layer, part, position = min(where.tolist(), key=lambda at: (at[2], at[0], at[1]))
    return [
        Difference(
            what="kv",
            position=position,
            count=count,
            total=sum(layer.size for layer in differs),
            layer=layer,
            part="kv"[part],
        )
    ]
