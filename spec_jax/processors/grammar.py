"""Token masks of a grammar: an automaton over tokens, as tables on the device.

    classes  the class of each token: tokens of a class lead to the same states
    next     the state after a token of a class; `FORBIDDEN` where it may not follow

The text after the prompt begins in state 0, or in `first`. Where the text may end, stop
tokens may follow, and after these only more stop tokens. A text that left the grammar,
as a text to be scored may, is no longer masked.

`outlines-core` makes the automaton of a regular expression, or of a JSON schema, on the
host (`pip install 'spec_jax[grammar]'`). The tables here are compressed: they have a
column for each class, a few hundred for a schema, and not one for each token.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.processors import processor


FORBIDDEN = -1
MAX_ENTRIES = 2**26
"""The most entries of `Grammar.next`: 256 MiB."""


class Grammar(processor.Processor):
    """Allows the tokens that an automaton does; made by `regex` and `json_schema`.

    Its state is the automaton's, int32. The requests of a run share the tables, which
    hold the automata of all their grammars.
    """

    next: jax.Array  # [S, C] int32
    classes: jax.Array  # [V] int32
    first: jax.Array | None = None  # [] int32; None: state 0

    def shared(self) -> Self:
        """Returns the tables alone."""
        return self.replace(first=None)

    @classmethod
    def joined(cls, each):
        """Returns the grammars with one table, all automata one below the other.

        Raises:
          ValueError: tables that would be too large together.
        """
        apart = list({id(one.next): one for one in each}.values())
        if len(apart) == 1 or len({one.classes.shape for one in apart}) > 1:
            return list(each)  # `check` says which is of another vocabulary.
        # Tokens share a class of the joined table if they do so in each grammar.
        classes = np.stack([np.asarray(one.classes) for one in apart])
        columns, classes = np.unique(classes, axis=1, return_inverse=True)
        starts = np.cumsum([0, *(len(one.next) for one in apart)])
        _check_size(int(starts[-1]), columns.shape[1], f"{len(apart)} grammars")
        tables, start_of = [], {}
        for one, start, own in zip(apart, starts[:-1], columns, strict=True):
            table = np.asarray(one.next)[:, own]
            tables.append(np.where(table == FORBIDDEN, table, table + start))
            start_of[id(one.next)] = int(start)
        all_ = {
            "next": jnp.asarray(np.concatenate(tables).astype(np.int32)),
            "classes": jnp.asarray(classes.reshape(-1).astype(np.int32)),
        }
        firsts = [start_of[id(one.next)] + int(one.first or 0) for one in each]
        pairs = zip(each, firsts, strict=True)
        return [one.replace(**all_, first=jnp.int32(first)) for one, first in pairs]

    def init(self, prompt, length, *, vocab_size):
        """Returns the first state, whatever the prompt."""
        return jnp.int32(0) if self.first is None else self.first

    def step(self, state, token):
        """Returns the state after a token; `FORBIDDEN` if the token may not follow."""
        column = self.classes.at[token].get(mode="clip")
        after = self.next[jnp.maximum(state, 0), column]
        return jnp.where(state < 0, state, after)

    def apply(self, state, logits):
        """Forbids all tokens that may not follow."""
        row = self.next[jnp.maximum(state, 0)]
        may_follow = (row[self.classes] != FORBIDDEN) | (state < 0)
        return jnp.where(may_follow, logits, -jnp.inf)

    def allows(self, state, token):
        """Returns whether the token may follow; True after the grammar was left."""
        is_token = (token >= 0) & (token < self.classes.shape[0])
        return (is_token & (self.step(state, token) != FORBIDDEN)) | (state < 0)

    def check(self, vocab_size):
        """Raises `ValueError` for tables of another vocabulary."""
        if self.classes.shape[0] != vocab_size:
            raise ValueError(
                f"a grammar over {self.classes.shape[0]} tokens, and the model has "
                f"{vocab_size}: compile it with this model"
            )


def regex(pattern: str, lm: Any) -> Grammar:
    """Returns the grammar of the texts that a regular expression matches as a whole.

    Args:
      pattern: as Rust's `regex` has it, without look-around and back-references.
      lm: a `LanguageModel`, with a tokenizer and a stop token.

    Raises:
      ValueError: a pattern that cannot be compiled, or that no text of tokens matches;
        a model without tokenizer or stop token; tables that would be too large; or
        `outlines-core` is not installed.
    """
    if lm.tokenizer is None:
        raise ValueError("the model has no tokenizer, and a grammar is of texts")
    stop_ids, words = tuple(lm.stop_ids), lm.tokenizer
    vocab_size = lm.target.config.vocab_size
    skipped = {*words.special_ids, *stop_ids}
    pieces = [
        b"" if token in skipped else words.bytes_of(token)
        for token in range(min(vocab_size, words.num_ids))
    ]
    return of_pieces(pattern, pieces, stop_ids=stop_ids, vocab_size=vocab_size)


def json_schema(schema: str | Mapping[str, Any], lm: Any) -> Grammar:
    """Returns the grammar of the JSON texts that a schema describes.

    Args:
      schema: JSON, or what `json.loads` makes of it; `outlines-core` documents which
        parts of it are enforced, and where blanks may stand.
      lm: as `regex` takes it.

    Raises:
      ValueError: as `regex`, or a schema that cannot be compiled.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        import outlines_core.json_schema
    except ImportError:
        raise ValueError(_MISSING) from None
    try:
        pattern = outlines_core.json_schema.build_regex_from_schema(text)
    except Exception as error:  # The bindings raise several classes.
        raise ValueError(f"the JSON schema cannot be used: {_line(error)}") from None
    return regex(pattern, lm)


_MISSING = (
    "grammars are compiled by outlines-core, which is not installed: "
    "pip install 'spec_jax[grammar]'"
)


def of_pieces(
    pattern: str, pieces: Sequence[bytes], *, stop_ids: Sequence[int], vocab_size: int
) -> Grammar:
    """Returns the grammar of a regular expression over a vocabulary; raises as `regex`.

    Args:
      pieces: the bytes of each token; empty if it is never part of a text.
    """
    if not stop_ids:
        raise ValueError(
            "the model has no stop token, and a text of a grammar ends with one"
        )
    try:
        import outlines_core
    except ImportError:
        raise ValueError(_MISSING) from None
    by_bytes: dict[str | bytes, list[int]] = {}
    for token, piece in enumerate(pieces):
        if piece:
            by_bytes.setdefault(piece, []).append(token)
    try:
        made = outlines_core.Index(
            pattern, outlines_core.Vocabulary(stop_ids[0], by_bytes)
        )
    except Exception as error:  # The bindings raise several classes.
        raise ValueError(
            f"the pattern {pattern[:60]!r} cannot be compiled: {_line(error)}"
        ) from None
    return of_transitions(
        made.get_transitions(),
        first=made.get_initial_state(),
        final=set(made.get_final_states()),
        stop_ids=list(stop_ids),
        vocab_size=vocab_size,
    )


def of_transitions(
    transitions: Mapping[int, Mapping[int, int]],
    *,
    first: int,
    final: set[int],
    stop_ids: Sequence[int],
    vocab_size: int,
) -> Grammar:
    """Returns the tables of an automaton, given as states by token by state.

    Raises:
      ValueError: tables that would be too large.
    """
    states = [first, *sorted({*transitions, *final} - {first})]
    number_of = {state: number for number, state in enumerate(states)}
    end = len(states)  # The state after a stop token.

    def row_of(state: int | None) -> np.ndarray:
        """Returns the state after each token."""
        row = np.full((vocab_size,), FORBIDDEN, np.int32)
        found = {} if state is None else transitions.get(state, {})
        tokens = np.fromiter(found.keys(), np.int64, len(found))
        row[tokens] = [number_of[after] for after in found.values()]
        row[list(stop_ids)] = end if state is None or state in final else FORBIDDEN
        return row

    # The classes by the states so far; each further state makes them finer.
    classes = np.zeros((vocab_size,), np.int64)
    for state in (*states, None):
        finer = classes * (end + 2) + row_of(state) + 1
        _, members, classes = np.unique(finer, return_index=True, return_inverse=True)
        _check_size(end + 1, len(members), "a grammar")
    table = np.stack([row_of(state)[members] for state in (*states, None)])
    return Grammar(
        next=jnp.asarray(table), classes=jnp.asarray(classes.astype(np.int32))
    )


def _check_size(num_states: int, num_classes: int, what: str) -> None:
    """Raises `ValueError` for a table that would be too large."""
    if num_states * num_classes > MAX_ENTRIES:
        raise ValueError(
            f"{what} of {num_states} states and {num_classes} classes of tokens or "
            f"more: the table has more than {MAX_ENTRIES} entries; take simpler ones, "
            "such as with shorter bounds of lengths, or fewer at once"
        )


def _line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
