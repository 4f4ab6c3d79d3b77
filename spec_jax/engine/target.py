"""The protocol of a target: a model that verifies drafts, of all slots at once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import pytree
from spec_jax.engine import protocols
from spec_jax.rules import sampling


class Target(Protocol):
    """A model whose verification rows equal its decoding rows, bit for bit.

    Hashable: it is a static argument. Everything that changes is in the cache, which
    all slots share. A class that inherits has the defaults of the properties.
    """

    @pytree.optional
    def config(self) -> Any:
        """The model's config, with `vocab_size`, which bounds tokens, `num_layers`, ..;
        None: no model."""
        return None

    @pytree.optional
    def draw(self) -> Callable[..., Int[Array, " P"]] | None:
        """Kernels that draw tokens as `sampling.sample_each`; None: that function."""
        return None

    @pytree.optional
    def sums(self) -> Any:
        """The fields of `Sums`, by kernels; None: XLA's."""
        return None

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
        ...

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
        ...

    def truncate(
        self,
        cache: protocols.Cache,
        new_len: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> protocols.Cache:
        """Forgets the K/V from position `new_len` on, in the slots that are asked."""
        ...

    def out_of_pages(self, cache: protocols.Cache) -> Bool[Array, " B"]:
        """Returns for each slot whether its last window found no page."""
        ...


def draw_of(target: Any) -> Callable[..., Int[Array, " P"]]:
    """Returns a target's own `draw`, or `sampling.sample_each`."""
    return target.draw or sampling.sample_each


class Sums(NamedTuple):
    """Sums over a vocabulary, for the rules that compare distributions."""

    distribution: Callable[..., jax.Array]  # as `sampling.distribution`
    row_sums: Callable[[jax.Array], jax.Array]  # `[*rows, V]` to `[*rows]`


def sums_of(target: Any) -> Sums:
    """Returns a target's own `sums`, a pair of such functions; else XLA's."""
    own = target.sums
    return Sums(*own or (sampling.distribution, functools.partial(jnp.sum, axis=-1)))
