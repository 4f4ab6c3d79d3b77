"""Logits processors in rounds: the states of slots, of rows, and of drafters' rows.

A slot's state is that after its committed text, the pending token included. Column 0 of
a window has that state, and every other column that of its parent, stepped by the
column's token: each row's state is made along its own path, whatever is beside it.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax import pytree, tree
from spec_jax.engine import protocols, state as state_lib
from spec_jax.processors import processor as processor_lib


class Processing(pytree.Node):
    """The processor of a run, and states: of slots, or of ONE decoded sequence."""

    processor: processor_lib.Processor  # as `Processor.shared` has it
    states: Any  # leaves [B, ..]; of ONE sequence without that axis

    def apply_each(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns the processed logits of the next token of each slot."""
        return _each(functools.partial(process, self.processor), self.states, logits)

    def step_each(
        self, tokens: Int[Array, " B"], asked: Bool[Array, " B"]
    ) -> "Processing":
        """Returns the states after a token more, in the slots that are asked."""

        def one(state, token, asked):
            step = functools.partial(self.processor.step, token=token)
            return jax.lax.cond(asked, step, lambda state: state, state)

        return self.replace(states=_each(one, self.states, tokens, asked))

    def along(
        self,
        logits: Float[Array, "B K V"],
        tokens: Int[Array, "B C"],
        parents: Int[Array, "B C"],
        first: Int[Array, ""],
        *,
        names: Int[Array, " V"] | None,
        vocab_size: int,
    ) -> Float[Array, "B K V"]:
        """Returns the processed logits of the columns of trees from `first` on.

        Args:
          tokens, parents: of all columns; column 0 is the end of the text.
          names: the target's token of each logit; None: the same. The target's other
            tokens are processed as -inf.
          vocab_size: of the target.
        """
        columns = first + jnp.arange(logits.shape[1], dtype=jnp.int32)

        def one(state, logits, tokens, parents):
            def row(given):
                column, logits = given
                own = after(self.processor, state, tokens, parents, column)
                if names is None:
                    return process(self.processor, own, logits)
                wide = jnp.full((vocab_size,), -jnp.inf).at[names].set(logits)
                return process(self.processor, own, wide)[names]

            return jax.lax.map(row, (columns, logits))

        return _each(one, self.states, logits, tokens, parents)


def begin(
    processor: processor_lib.Processor | None,
    prompt: Int[Array, " max_len"] | np.ndarray,
    length: Int[Array, ""] | np.int32,
    *,
    vocab_size: int | None,
) -> Processing | None:
    """Returns the processing of ONE sequence, after its prompt, in arrays of its own;
    None without a processor.

    Raises:
      ValueError: an object that is no `Processor`, or one of another vocabulary.
    """
    if processor is None:
        return None
    check(processor, vocab_size=vocab_size)
    return _begin(processor, prompt, length, vocab_size=cast(int, vocab_size))


def check(processor: processor_lib.Processor, *, vocab_size: int | None) -> None:
    """Raises `ValueError` unless it is a processor for such a vocabulary.

    Args:
      vocab_size: of the target; None: the target has no config, and so no logits.
    """
    processor_lib.check_kind(processor, "the processor")
    if vocab_size is None:
        raise ValueError(
            "a target without a model has no logits to process: leave processors out"
        )
    processor.check(vocab_size)


@functools.partial(jax.jit, static_argnames="vocab_size")
def _begin(processor, prompt, length, *, vocab_size):
    """Computes what `begin` returns."""
    states = processor.init(prompt, length, vocab_size=vocab_size)
    made = Processing(processor=processor.shared(), states=states)
    return jax.tree.map(jnp.array, made)


@functools.partial(jax.jit, static_argnames="num_slots")
def of_slots(one: Processing, num_slots: int) -> Processing:
    """Returns the processing of slots that have the state of ONE sequence."""
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_slots), one.states)
    return jax.tree.map(jnp.array, one.replace(states=states))


def check_fits(all_: Processing | None, one: Processing | None) -> None:
    """Raises `ValueError` unless both request and slots have one, or neither."""
    if (all_ is None) == (one is None):
        return
    has = ["a" if part is not None else "no" for part in (one, all_)]
    raise ValueError(
        f"a request that has {has[0]} processor, and a state of requests that have "
        f"{has[1]} processor: make it by empty(processor=...) of the first request's"
    )


@functools.partial(jax.jit, donate_argnums=0)
def occupy(all_: Processing, one: Processing, slot: Int[Array, ""]) -> Processing:
    """Returns the processing with ONE sequence's state in a slot; donates `all_`."""
    put = lambda leaf, new: leaf.at[slot].set(new)
    return all_.replace(states=jax.tree.map(put, all_.states, one.states))


def process(
    processor: processor_lib.Processor, state: Any, logits: Float[Array, " V"]
) -> Float[Array, " V"]:
    """Returns ONE row's processed logits, float32.

    Barriers keep every program from fusing a part with the code that made the row, or
    moving it out of a loop, and so the bits are the same in all of them.
    """
    state, logits = jax.lax.optimization_barrier((state, logits.astype(jnp.float32)))
    return jax.lax.optimization_barrier(processor.apply(state, logits))


def after(
    processor: processor_lib.Processor,
    state: Any,
    tokens: Int[Array, " C"],
    parents: Int[Array, " C"],
    column: Int[Array, ""],
) -> Any:
    """Returns the state after the path to a column, from that of column 0."""

    def above(carry):
        path, depth, at = carry
        return path.at[depth].set(at), depth + 1, parents[at]

    begun = jnp.zeros(tokens.shape, jnp.int32), jnp.int32(0), column
    path, depth, _ = jax.lax.while_loop(lambda carry: carry[2] > 0, above, begun)
    step = lambda i, state: processor.step(state, tokens[path[depth - 1 - i]])
    return jax.lax.fori_loop(0, depth, step, state)


def process_rows(
    processing: Processing, verified: protocols.Verified, window: protocols.Window
) -> protocols.Verified:
    """Returns the rows of a window with processed logits; inactive ones stay."""
    num_slots, width = window.tokens.shape
    parents = window.parents
    if parents is None:
        parents = jnp.broadcast_to(jnp.asarray(tree.chain(width)), (num_slots, width))
    columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (num_slots, width))
    none = jnp.zeros(verified.slots.shape, jnp.int32)
    column_of = none.at[verified.at].set(columns, mode="drop")

    def one(row, logits):
        """Processes a row in its place."""
        slot = verified.slots[row]
        own = after(
            processing.processor,
            jax.tree.map(lambda leaf: leaf[slot], processing.states),
            window.tokens[slot],
            parents[slot],
            column_of[row],
        )
        made = jax.lax.dynamic_index_in_dim(logits, row, keepdims=False)
        made = process(processing.processor, own, made)
        return jax.lax.dynamic_update_index_in_dim(logits, made, row, 0)

    logits = verified.logits.astype(jnp.float32)
    logits = jax.lax.fori_loop(0, verified.num_active, one, logits)
    return verified.replace(logits=logits)


def commit(
    processing: Processing, before: Int[Array, " B"], slots: state_lib.Slots
) -> Processing:
    """Returns the states after the tokens that slots committed since `before`."""

    def one(state, text, before, length):
        step = lambda at, state: processing.processor.step(state, text[at])
        return jax.lax.fori_loop(before, length, step, state)

    states = _each(one, processing.states, slots.tokens, before, slots.length)
    return processing.replace(states=states)


def cut(processing: Processing, proposal: protocols.Proposal) -> protocols.Proposal:
    """Returns the proposal without forbidden drafts and the drafts after them.

    Drafts with probabilities stay as they are: which of them are verified must not
    depend on the tokens drawn.
    """
    if proposal.probs is not None or not processing.processor.forbids():
        return proposal
    processor, states = _that_forbid(processing.processor, processing.states)
    one = _cut_chain if proposal.parents is None else _cut_tree
    return _each(functools.partial(one, processor), states, proposal)


def _that_forbid(processor, states):
    """Returns the parts of a chain that forbid tokens, and their states."""
    if not isinstance(processor, processor_lib.Chain):
        return processor, states
    pairs = zip(processor.parts, states, strict=True)
    parts, states = zip(*(both for both in pairs if both[0].forbids()), strict=True)
    return processor_lib.Chain(parts=parts), states


def _cut_chain(processor, state, proposal):
    """Returns the leading drafts of ONE chain that may follow."""

    def look(at, carry):
        state, count = carry
        token = proposal.tokens[at]
        goes_on = (count == at) & processor.allows(state, token)
        return processor.step(state, token), count + goes_on.astype(jnp.int32)

    begun = state, jnp.int32(0)
    _, count = jax.lax.fori_loop(0, proposal.num_drafted, look, begun)
    return proposal.replace(num_drafted=count)


def _cut_tree(processor, state, proposal):
    """Returns ONE tree of the drafts that may follow, in the same order."""
    tokens = jnp.pad(proposal.tokens, (1, 0))
    parents = jnp.pad(cast(jax.Array, proposal.parents), (1, 0))

    def look(column, stays):
        parent = parents[column]
        before = after(processor, state, tokens, parents, parent)
        may_follow = processor.allows(before, tokens[column])
        return stays.at[column].set(stays[parent] & may_follow)

    stays = jnp.zeros(tokens.shape, bool).at[0].set(True)
    stays = jax.lax.fori_loop(1, proposal.num_drafted + 1, look, stays)
    column_of = jnp.cumsum(stays, dtype=jnp.int32) - 1
    order = jnp.argsort(~stays, stable=True)[1:]
    moved = {"tokens": tokens[order], "parents": column_of[parents[order]]}
    if proposal.survival is not None:
        moved["survival"] = proposal.survival[order - 1]
    return proposal.replace(num_drafted=column_of[-1], **moved)


def _each(one: Callable, *arguments: Any) -> Any:
    """Maps a function of ONE slot over slots, one after the other: a loop inside it
    takes no more turns than the slot needs."""
    (num_slots,) = {leaf.shape[0] for leaf in jax.tree.leaves(arguments)}
    if num_slots == 1:
        return state_lib.map_slots(one, *arguments)
    return jax.lax.map(lambda slot: one(*slot), arguments)
