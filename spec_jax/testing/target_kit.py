"""The row contract as a check of a target: a row's bits depend on that row alone.

Speculative decoding is exact because verification rows are decoding rows, bit for bit.
`check_target` reads one text in several ways and compares the logits as integers: row
by row; in windows of many; beside other sequences, at other places of the slab; after
drafts that were rolled back; and among rows of NaN.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import compilation
from spec_jax.engine import protocols, rows
from spec_jax.testing import compare


PROMPT = 5
PAGE_SIZE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A way to read the text.

    Attributes:
      clause: how the text is read, for the message of an error.
      place: the text's slot.
      beside: sequences in other slots.
      widths: columns of each slot's windows, in turn; of the text's own first.
      drafts: wrong tokens that are verified, and rolled back, before each window.
      poison: whether others hold NaN, and places that were not written yet.
    """

    clause: str
    place: int = 0
    beside: int = 0
    widths: tuple[int, ...] = (1,)
    drafts: int = 0
    poison: bool = False


def readings(width: int) -> list[Reading]:
    """Returns the ways to read a text with windows of `width` columns at most."""
    uneven = (width, 1, max(1, width - 1))
    return [
        Reading(clause="in windows of many columns", widths=(width,)),
        Reading(clause="in windows of other widths", widths=uneven),
        Reading(clause="after drafts were rolled back", drafts=width - 1),
        Reading(clause="before other slots' rows", beside=2, widths=uneven),
        Reading(
            clause="moved behind other slots' rows", place=2, beside=2, widths=uneven
        ),
        Reading(clause="alone in a slot between others", place=1, beside=2),
        Reading(clause="among rows of NaN", place=1, beside=2, poison=True),
        Reading(
            clause="in windows among rows of NaN",
            place=2,
            beside=2,
            widths=uneven,
            poison=True,
        ),
    ]


def check_target(
    target: Any, params: protocols.Params, *, seed: int = 0, prompt: int = PROMPT
) -> list[str]:
    """Raises `AssertionError` unless the rows of a target are batch-invariant.

    A target that passes decodes losslessly with any drafter, as far as random texts can
    show. For a new one, run it with the dtype, sizes and devices that are meant.

    Examples:
      >>> import spec_jax as sj
      >>> lm = sj.load()
      >>> len(sj.testing.check_target(lm.target, lm.params))
      8

    Args:
      target: a `RowModel`, such as `lm.target`; a `ForwardTarget`; or a dataclass that
        keeps `target.Target`, with the field `num_slots`.
      params: the target's.
      seed: of the texts.
      prompt: tokens of each text before the rows that are compared; where attention is
        split over a long context, more than a part of it has.

    Returns:
      The ways in which the text was read.

    Raises:
      AssertionError: how the text was read, the first position whose row differs from
        that row alone, and by how much.
      ValueError: a target that runs windows of one column alone.
    """
    done = []
    for clause, alone, found in compared(target, params, seed=seed, prompt=prompt):
        _compare(alone, found, clause, prompt)
        done.append(clause)
    return done


def compared(
    target: Any, params: protocols.Params, *, seed: int = 0, prompt: int = PROMPT
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields each way to read, the logits `[T, V]` of rows alone, and of that way.

    Raises:
      AssertionError, ValueError: as `check_target`, but for what differs.
    """
    width = min(rows.of(target, 1).max_rows, 8)
    if width < 2:
        raise ValueError(f"max_rows={width}: a window has the pending token and drafts")
    size = target.config.vocab_size
    texts = np.random.default_rng(seed).integers(0, size, (3, prompt + 3 * width))
    alone = read(target, params, texts, Reading(clause="alone"), width)
    if not np.isfinite(alone).all():
        raise AssertionError("rows alone have logits that are not finite")
    for reading in readings(width):
        yield reading.clause, alone, read(target, params, texts, reading, width)


def _compare(alone: np.ndarray, found: np.ndarray, clause: str, prompt: int) -> None:
    """Raises `AssertionError` where a row has other bits."""
    differ = compare.bits(alone) != compare.bits(found)
    if not differ.any():
        return
    row = int(np.flatnonzero(differ.any(axis=1))[0])
    gap = np.abs(alone[row].astype(np.float64) - found[row])
    raise AssertionError(
        f"rows are not batch-invariant: read {clause}, the row of position "
        f"{prompt - 1 + row} has {differ[row].sum()} of {differ.shape[1]} logits with "
        f"other bits than alone, by at most {gap.max():.3g}. Let sums run in one order "
        "whatever is in the slab, and set what is masked to 0: NaN times 0 is NaN"
    )


def read(
    target: Any,
    params: protocols.Params,
    texts: np.ndarray,
    reading: Reading,
    width: int,
) -> np.ndarray:
    """Returns the logits `[T, V]` of the first text's rows after its prompt.

    Args:
      texts: `[3, L]`; the text, and the texts of others, each with `3 * width` tokens
        after its prompt.
      width: columns of the widest window.
    """
    prompt = texts.shape[1] - 3 * width
    others = [slot for slot in range(reading.beside + 1) if slot != reading.place]
    slots = rows.of(target, 1 + reading.beside)
    text_of = dict(zip([reading.place, *others], texts.tolist(), strict=False))
    cache = slots.new_cache(capacity=texts.shape[1] + width, page_size=PAGE_SIZE)
    for slot in [*others, reading.place]:
        if reading.poison and slot == reading.place:
            cache = jax.tree.map(_nan, cache)
        cache = slots.prefill(params, cache, text_of[slot][:prompt], slot=slot)
    at = dict.fromkeys(text_of, prompt - 1)
    found: list[np.ndarray] = []
    for turn in range(texts.shape[1]):
        if reading.drafts:
            wrong = [(token + 1) % target.config.vocab_size for token in texts[0]]
            count = min(reading.drafts + 1, texts.shape[1] - at[reading.place])
            window = _window({0: wrong}, at, {0: count}, width)
            cache, _ = _verify(slots, params, cache, window, at[reading.place])
        counts = {
            slot: min(
                reading.widths[(turn + n) % len(reading.widths)],
                *(width, texts.shape[1] - at[slot]),
            )
            for n, slot in enumerate([reading.place, *others])
        }
        single = set(counts.values()) <= {0, 1} and not reading.beside
        window = _window(text_of, at, counts, 1 if single else width)
        cache, logits = _verify(slots, params, cache, window)
        found.append(np.asarray(logits)[reading.place, : counts[reading.place]])
        at = {slot: at[slot] + counts[slot] for slot in at}
        if at[reading.place] == texts.shape[1]:
            break
    return np.concatenate(found)


def _nan(leaf: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jnp.full_like(leaf, jnp.nan) if is_float else leaf


def _window(
    text_of: dict[int, Sequence[int]],
    at: dict[int, int],
    counts: dict[int, int],
    width: int,
) -> protocols.Window:
    """Returns the next columns of each slot's text."""
    tokens = np.zeros((len(at), width), np.int32)
    for slot, count in counts.items():
        tokens[slot, :count] = text_of[slot][at[slot] : at[slot] + count]
    array = lambda values: jnp.asarray([values[slot] for slot in sorted(at)], jnp.int32)
    return protocols.Window(
        tokens=jnp.asarray(tokens), start=array(at), num_active=array(counts)
    )


@functools.partial(compilation.jit, static_argnums=0, donate_argnums=2)
def _verify(slots, params, cache, window, keep=None):
    """Returns the cache, cut to `keep` positions if told, and logits `[B, R, V]`."""
    cache, verified = slots.verify(params, cache, window)
    if keep is not None:
        asked = window.num_active > 0
        lengths = jnp.full(asked.shape, keep, jnp.int32)
        cache = slots.truncate(cache, lengths, asked=asked)
    return cache, verified.by_column(verified.logits, fill=0)
