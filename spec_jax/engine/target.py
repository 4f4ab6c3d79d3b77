"""The protocol of a target: a model that verifies drafts, of all slots at once."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import pytree
from spec_jax.engine import protocols
from spec_jax.rules import sampling


class Sums(NamedTuple):
    """Sums over a vocabulary, for the rules that compare distributions."""

    # As these functions of XLA: settings and `[*rows, V]` to `[*rows]`.
    distribution: Callable[..., jax.Array] = sampling.distribution
    row_sums: Callable[[jax.Array], jax.Array] = functools.partial(jnp.sum, axis=-1)


class Target(Protocol):
    """A model whose verification rows equal its decoding rows, bit for bit.

    Hashable: it is a static argument. Everything that changes is in the cache, which
    all slots share. A class that inherits has defaults, but for its numbers of slots
    and rows and for `verify`: those of a target of chains with room for every slot.
    """

    @pytree.optional
    def config(self) -> Any:
        """The model's config, with `vocab_size`, which bounds tokens, `num_layers`, ..;
        None: no model."""
        return None

    @pytree.optional
    def draw(self) -> Callable[..., Int[Array, " P"]]:
        """Draws tokens: `sampling.sample_each`, or kernels that do as it does."""
        return sampling.sample_each

    @pytree.optional
    def sums(self) -> Sums:
        """The sums over the vocabulary, by XLA or by kernels."""
        return Sums()

    @pytree.optional
    def taps(self) -> tuple[int, ...] | None:
        """The taps of the features that it has; None: any that a drafter reads."""
        return None

    @pytree.optional
    def num_slots(self) -> int:
        """The sequences that run at once."""
        ...

    @pytree.optional
    def max_rows(self) -> int:
        """The most columns of a window of a chain."""
        ...

    def verify(
        self,
        params: protocols.Params,
        cache: protocols.Cache,
        window: protocols.Window,
        *,
        taps: tuple[int, ...] = (),
    ) -> tuple[protocols.Cache, protocols.Verified]:
        """Runs each slot's active columns, and keeps their K/V.

        A slot that sits out is not touched. Where a slot finds no page nothing of it is
        run, and `out_of_pages` says so; the others go on.

        Args:
          taps: of the features that a drafter asks for, see `Drafter`. Without them
            the argument is left out, and the program holds nothing of features.
        """
        ...

    def choose(
        self, logits: Float[Array, "P V"], num_active: Int[Array, ""]
    ) -> Int[Array, " P"]:
        """Returns the token of highest logit of each active row, int32."""
        del num_active
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def keep_path(
        self,
        cache: protocols.Cache,
        path: Int[Array, "B D"],
        num_kept: Int[Array, " B"],
        *,
        start: Int[Array, " B"],
    ) -> protocols.Cache:
        """Moves the K/V of a tree's columns `path[:num_kept]` to their positions.

        Column `path[i]`, at place `start + path[i]`, comes to `start + i + 1`. Asked
        after a `verify` of trees only, and before `truncate`.
        """
        raise NotImplementedError(f"{type(self).__name__} verifies chains, no trees")

    def truncate(
        self,
        cache: protocols.Cache,
        new_len: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> protocols.Cache:
        """Forgets the K/V from position `new_len` on, in the slots that are asked.

        By default it keeps them: a row sees the keys up to its own position alone, and
        those after it are overwritten before they are seen.
        """
        del new_len, asked
        return cache

    def out_of_pages(self, cache: protocols.Cache) -> Bool[Array, " B"]:
        """Returns for each slot whether its last window found no page."""
        del cache
        return jnp.zeros((self.num_slots,), bool)


def passed_on(name: str, *, of: str) -> Any:
    """Returns a property of a target that is that of its field `of`, or a method."""
    found = operator.attrgetter(f"{of}.{name}")
    return property(found, doc=getattr(vars(Target).get(name), "__doc__", None))
