"""Logits processors: they change a row's logits, by the row's own prefix.

    init    returns the state after a prompt, with all that a request has of its own
    step    returns the state after one token more
    apply   returns a row's processed logits, by the state after its token

A state is a function of the tokens up to a row and of nothing else: neither of other
rows nor of rounds. A row of a tree has the state of its own path, and so the target
chooses there what decoding would choose. Functions here know arrays only: no slots,
pages or rounds.

Greedy decoding processes logits, too; where tokens are drawn, logits are processed
before temperature and filters. `Chain` applies its parts one after the other.
"""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from spec_jax import pytree


State = Any
"""A pytree of arrays, whose shapes and dtypes `step` keeps."""


class Processor(pytree.Node):
    """Processes the logits of one sequence, by functions of a state: pure and jittable.

    Fields are arrays, or `static`. The requests of a run have processors of one
    structure, and `step` and `apply` are called on what they share (`shared`); so what
    a request has of its own, `init` puts into the state.
    """

    def shared(self) -> Self:
        """Returns what all requests of a run share: equal for each of them."""
        return self

    @classmethod
    def joined(cls, each: Sequence[Any]) -> list[Any]:
        """Returns processors of this class for the requests of one run, in order:
        unchanged, or changed so that what they share is equal."""
        return list(each)

    def init(
        self, prompt: Int[Array, " max_len"], length: Int[Array, ""], *, vocab_size: int
    ) -> State:
        """Returns the state after `prompt[:length]`; later entries are not read."""
        raise NotImplementedError(f"{type(self).__name__} has no `init`")

    def step(self, state: State, token: Int[Array, ""]) -> State:
        """Returns the state after one token more."""
        raise NotImplementedError(f"{type(self).__name__} has no `step`")

    def apply(self, state: State, logits: Float32[Array, " V"]) -> jax.Array:
        """Returns the logits of the next token, float32; -inf forbids a token."""
        raise NotImplementedError(f"{type(self).__name__} has no `apply`")

    def forbids(self) -> bool:
        """Returns whether `allows` may be False: whether the class defines its own."""
        return type(self).allows is not Processor.allows

    def allows(self, state: State, token: Int[Array, ""]) -> Bool[Array, ""]:
        """Returns whether `apply` leaves a token; drafts end before the first False.

        True is never wrong: it can only let a draft be proposed in vain.
        """
        return jnp.bool_(True)

    def check(self, vocab_size: int) -> None:
        """Raises `ValueError`, on the host, if the processor does not fit it."""


class Chain(Processor):
    """Applies several processors, in order; made by `chain`."""

    parts: tuple[Processor, ...]

    def shared(self) -> Self:
        """Returns the chain of what requests share of each part."""
        return self.replace(parts=tuple(part.shared() for part in self.parts))

    @classmethod
    def joined(cls, each):
        """Returns the chains, with the processors of each part joined."""
        columns = zip(*(one.parts for one in each), strict=False)
        return [cls(parts=parts) for parts in zip(*map(join, columns), strict=True)]

    def init(self, prompt, length, *, vocab_size):
        """Returns the states of all parts."""
        return tuple(
            part.init(prompt, length, vocab_size=vocab_size) for part in self.parts
        )

    def step(self, state, token):
        """Returns the states after one token more."""
        pairs = zip(self.parts, state, strict=True)
        return tuple(part.step(own, token) for part, own in pairs)

    def apply(self, state, logits):
        """Returns the logits after all parts."""
        for part, own in zip(self.parts, state, strict=True):
            logits = part.apply(own, logits)
        return logits

    def forbids(self) -> bool:
        """Returns whether a part may forbid tokens."""
        return any(part.forbids() for part in self.parts)

    def allows(self, state, token):
        """Returns whether all parts allow the token."""
        allowed = jnp.bool_(True)
        for part, own in zip(self.parts, state, strict=True):
            allowed &= part.allows(own, token)
        return allowed

    def check(self, vocab_size):
        """Raises as the parts do."""
        for part in self.parts:
            part.check(vocab_size)


def chain(*parts: Processor) -> Processor:
    """Returns the processor that applies `parts` in order; a single one as it is.

    Raises:
      ValueError: no part, or one that is no processor.
    """
    if not parts:
        raise ValueError("a chain of no processors: give it at least one")
    for number, part in enumerate(parts):
        check_kind(part, f"part {number} of the chain")
    return parts[0] if len(parts) == 1 else Chain(parts=parts)


def join(each: Sequence[Processor]) -> list[Processor]:
    """Returns the processors of the requests of one run, see `Processor.joined`;
    unchanged if their kinds differ, which `check_same` refuses."""
    kinds = {(type(one), len(getattr(one, "parts", ()))) for one in each}
    return type(each[0]).joined(each) if len(kinds) == 1 else list(each)


def check_kind(processor: Any, what: str) -> None:
    """Raises `ValueError` unless it is a `Processor`."""
    if not isinstance(processor, Processor):
        raise ValueError(
            f"{what} is of type {type(processor).__name__}: give a Processor of "
            "sj.processors, or a class that inherits from it"
        )


def check_same(first: Processor, other: Processor) -> None:
    """Raises `ValueError` unless two requests' processors fit one run."""
    shapes = lambda tree: [(x.shape, jnp.asarray(x).dtype) for x in tree]
    leaves = [jax.tree.leaves(one) for one in (first, other)]
    structures: list[Any] = [jax.tree.structure(one) for one in (first, other)]
    if structures[0] != structures[1] or shapes(leaves[0]) != shapes(leaves[1]):
        raise ValueError(
            "the processors of two requests differ in kind or in shapes, such as the "
            "number of tokens of a bias: give requests of one run processors that "
            "differ in values alone, or generate them one by one"
        )
    pairs = zip(*(jax.tree.leaves(x.shared()) for x in (first, other)), strict=True)
    if not all(a is b or np.array_equal(a, b) for a, b in pairs):
        raise ValueError(
            "the processors of two requests have different tables, and those of a run "
            "are shared: give their class a `joined`, as grammars have it, or generate "
            "them one by one"
        )
