"""The weights by which drafts are chosen: logits, or these with the noise of a draw.

A `Draw` serves the trees of all drafters that have logits, and their chains; coupled
draws of the chains of draft models are the target's own. `grow` runs `tree_search` by a
`Draw`.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import pytree
from spec_jax.drafters import tree_search, tree_shapes
from spec_jax.engine import processing as processing_lib, protocols
from spec_jax.native import children as children_lib, draws as draws_lib
from spec_jax.ops import draw as draw_op
from spec_jax.rules import sampling as sampling_lib


def widened(
    hot: Int[Array, " Vd"] | None, vocab_size: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that widens logits `[.., Vd]` of draft tokens to `[.., V]`.

    Tokens that are never drafted get -inf. The result is in the target's vocabulary, as
    the noise is keyed by the target's tokens.

    Args:
      hot: the target's token of each draft token; None: the same.
    """
    if hot is None:
        return lambda logits: logits
    (size,) = hot.shape
    draft_of = jnp.full((vocab_size,), size, jnp.int32)
    draft_of = draft_of.at[hot].set(jnp.arange(size, dtype=jnp.int32))
    return lambda logits: logits.at[..., draft_of].get(mode="fill", fill_value=-jnp.inf)


class Draw(pytree.Node):
    """The weights by which the children of a tree's nodes are chosen.

    Attributes:
      sampling: of the target's draws; None: by the logits alone.
      length: of the text of each slot.
      impl: of the drafter, whose kernels add the noise of the target's draws.
      has_probs: whether children are drawn with noise of the round's own, another for
        each node, rather than with that of the target's draw for their position.
      processing: of the target's logits, and so of a drafter's; None: no processor.
      hot: the target's token of each of the drafter's own; None: the same.
      vocab_size: of the target.
    """

    sampling: protocols.Sampling
    length: jax.Array  # [B] int32
    processing: processing_lib.Processing | None = None
    hot: jax.Array | None = None  # [Vd] int32
    vocab_size: int = pytree.static()
    impl: str = pytree.static()
    has_probs: bool = pytree.static()

    @classmethod
    def of(
        cls,
        drafter: Any,
        sampling: protocols.Sampling,
        length: Int[Array, " B"],
        processing: processing_lib.Processing | None = None,
        *,
        hot: Int[Array, " Vd"] | None = None,
    ) -> "Draw":
        """Returns the `Draw` for a drafter's `draws`; see `DraftModel`."""
        has_probs = drafter.draws == "independent"
        if has_probs and sampling is None:
            sampling = sampling_lib.greedy(length.shape[0])
        return cls(
            sampling=None if drafter.draws == "greedy" else sampling,
            length=length,
            processing=processing,
            hot=hot,
            vocab_size=drafter.vocab_size,
            impl=drafter.model.impl,
            has_probs=has_probs,
        )

    def weights(
        self,
        logits: Float[Array, "B K V"],
        *,
        level: jax.Array | int = 0,
        width: int = 1,
        columns: Array | None = None,
    ) -> Float[Array, "B K V"]:
        """Returns the weights of a level's rows: the best children have the highest.

        Args:
          level: of the rows; that of the root is 0.
          width: rows of a level, at most.
          columns: the offsets `[K]` or `[B, K]` of the rows' independent noise; None:
            their columns.
        """
        if self.sampling is None:
            return logits
        if columns is None:
            columns = _columns(level, logits.shape[1], width)
        columns = jnp.broadcast_to(columns, logits.shape[:2])
        if draw_op.has_kernels(self.impl):
            return self._by_kernels(logits, level, columns)

        def one(slot):
            """Adds noise to the rows of a slot, one by one."""
            rows, columns, settings, length = slot

            def noisy(row):
                logits, column = row
                if self.has_probs:
                    stream = sampling_lib.Stream.DRAFT
                    return sampling_lib.noisy_weights(
                        logits, settings, length, stream=stream, offset=column
                    )
                return sampling_lib.noisy_weights(logits, settings, length + level)

            return jax.lax.map(noisy, (rows, columns))

        return jax.lax.map(one, (logits, columns, self.sampling, self.length))

    def _by_kernels(self, logits, level, columns):
        """Computes `weights` of all rows at once."""
        rows, each, lengths = self._flat(logits)
        draws = each.temperature != 0
        if self.has_probs:
            noise = functools.partial(
                sampling_lib.noise,
                vocab_size=rows.shape[1],
                stream=sampling_lib.Stream.DRAFT,
            )
            noisy = draw_op.log_weights(rows, each, impl=self.impl)
            noisy += jax.vmap(noise)(each.seed, lengths, offset=columns.reshape(-1))
        else:
            noisy = draw_op.noisy_weights(
                rows, each, positions=lengths + level, draws=draws, impl=self.impl
            )
        return jnp.where(draws[:, None], noisy, rows.astype(jnp.float32)).reshape(
            logits.shape
        )

    def _flat(self, logits):
        """Returns rows `[B * K, V]`, and the settings and the length of each."""
        B, K, V = logits.shape
        each = jax.tree.map(
            lambda leaf: jnp.repeat(leaf, K), (self.sampling, self.length)
        )
        return logits.reshape(B * K, V), *each

    def children(
        self,
        logits: Float[Array, "B K Vd"],
        *,
        level: jax.Array,
        counts: Int[Array, " B"],
        tree: tree_shapes.AnyTree,
    ) -> tree_search.Children:
        """Returns the best children of a level's rows.

        Args:
          level: of the rows; that of the root is 0.
          counts: rows of each slot that count, the first ones.
        """
        is_native, width, hot = self.impl == "native", tree.width, self.hot
        # By the target's tokens: XLA's noise is.
        is_wide = not is_native and self.sampling is not None
        is_wide |= tree.replaces or (hot is not None and tree.top_k > hot.size)
        if is_wide:
            logits, hot = widened(hot, self.vocab_size)(logits), None
        if tree.replaces:
            return self._with_replacement(logits, level, tree)
        if not is_native:
            weights = self.weights(logits, level=level, width=width)
            log_softmax = jax.nn.log_softmax
            if draw_op.has_kernels(self.impl):
                log_softmax = functools.partial(draw_op.log_softmax, impl=self.impl)
            return tree_search.children(weights, tree, hot, log_softmax=log_softmax)
        count = logits.shape[1]
        numbers = jnp.broadcast_to(level, (count,))
        if self.has_probs:
            numbers = _columns(level, count, width)
        return children_lib.children(
            logits,
            counts,
            numbers,
            most=tree.top_k,
            tau=tree.tau,
            names=hot,
            draws=self.native(),
        )

    def _with_replacement(self, logits, level, tree) -> tree_search.Children:
        """Draws each child of a row as if it were the row's only one."""
        num_slots, count, _ = logits.shape
        ranks = jnp.arange(tree.top_k, dtype=jnp.int32)
        numbers = _columns(level, count, tree.width)[:, None] * tree.top_k + ranks[None]
        weights = self.weights(
            jnp.repeat(logits, tree.top_k, axis=1),
            level=level,
            width=tree.width,
            columns=numbers.reshape(-1),
        )
        tokens = jnp.argmax(weights, axis=-1).astype(jnp.int32)
        # A fixed tree reads no score.
        shape = num_slots, count, tree.top_k
        return jnp.zeros(shape, jnp.float32), tokens.reshape(shape)

    def native(self) -> draws_lib.Draws | None:
        """Returns how a native call draws; None: by the logits alone."""
        if self.sampling is None:
            return None
        return draws_lib.Draws(
            settings=self.sampling,
            positions=self.length,
            vocab_size=self.vocab_size,
            independent=self.has_probs,
        )

    def given(
        self, log_weights: Float[Array, "B W Vd"] | None, counts: Int[Array, " B"]
    ) -> Float[Array, "B W V"] | None:
        """Returns the distributions that a native call drew `counts[b]` drafts from, as
        `sampling.distribution` gives them; None without log weights."""
        if log_weights is None:
            return None
        rows = widened(self.hot, self.vocab_size)(log_weights)
        # Row by row: the bits of one depend on no other.
        flat = jax.lax.map(jax.nn.softmax, rows.reshape(-1, self.vocab_size))
        columns = jnp.arange(rows.shape[1], dtype=jnp.int32)
        is_drafted = columns[None] < counts[:, None]
        return jnp.where(is_drafted[..., None], flat.reshape(rows.shape), 0.0)

    def no_probs(self, num_rows: int) -> Float[Array, "B {num_rows} V"] | None:
        """Returns zeros, which `put` fills; None where no distributions are kept."""
        if not self.has_probs:
            return None
        shape = self.length.shape[0], num_rows, self.vocab_size
        return jnp.zeros(shape, jnp.float32)

    def distributions(self, logits: Float[Array, "B K V"]) -> Float[Array, "B K V"]:
        """Returns the distributions that rows are drawn from."""
        if draw_op.has_kernels(self.impl):
            flat, each, _ = self._flat(logits)
            rows = draw_op.distribution(flat, each, impl=self.impl)
            return rows.reshape(logits.shape)
        return jax.lax.map(
            lambda slot: sampling_lib.distribution(*slot), (logits, self.sampling)
        )

    def put(
        self, probs: Array | None, logits: Float[Array, "B K V"], first: jax.Array
    ) -> Array | None:
        """Returns `probs` with the distributions of rows from column `first` on."""
        if probs is None:
            return None
        rows, zero = self.distributions(logits), jnp.zeros((), first.dtype)
        return jax.lax.dynamic_update_slice(probs, rows, (zero, first, zero))


Run = Callable[
    [Any, jax.Array, jax.Array, jax.Array, jax.Array],
    tuple[Any, jax.Array, jax.Array],
]
"""`run(memory, tokens [B, K], parents [B, num_columns], first, num_rows [B])` runs the
rows of a level, as `tree_search.Expand` has it. Returns the memory, the logits of each
row `[B, K, Vd]`, and which slots were run."""


def grow(
    draw: Draw,
    run: Run,
    root: Float[Array, "B Vd"],
    memory: Any,
    *,
    tree: tree_shapes.AnyTree,
    wanted: Int[Array, " B"],
) -> tuple[Any, protocols.Proposal]:
    """Returns the memory, and the tree of at most `wanted` nodes after each text.

    Args:
      root: logits after the pending token.
      wanted: nodes; 0: the slot sits out.
    """
    widen = widened(draw.hot, draw.vocab_size)
    logits, text, along = root[:, None], None, None
    if draw.processing is not None:
        along = functools.partial(
            draw.processing.along, names=draw.hot, vocab_size=draw.vocab_size
        )
        text = jnp.zeros((root.shape[0], tree.num_columns), jnp.int32)
        logits = along(logits, text, text, jnp.int32(0))
    children = functools.partial(draw.children, tree=tree)

    def expand(carry, tokens, parents, first, num_rows):
        """Runs the rows of a level, and finds their children."""
        memory, probs, text = carry
        level = tree_search.level_of(tree, first)
        memory, rows, has_run = run(memory, tokens, parents, first, num_rows)
        if along is not None:
            text = jax.lax.dynamic_update_slice(text, tokens, (jnp.int32(0), first))
            rows = along(rows, text, parents, first)
        probs = draw.put(probs, widen(rows), first)
        found = children(rows, level=level, counts=num_rows)
        return (memory, probs, text), found, has_run

    # One extra row of zeros, which leaves have as their distribution.
    probs = draw.no_probs(tree.num_columns + 1)
    probs = draw.put(probs, widen(logits), jnp.int32(0))
    (memory, probs, _), proposal = tree_search.grow(
        expand,
        children(logits, level=jnp.int32(0), counts=jnp.minimum(wanted, 1)),
        (memory, probs, text),
        tree=tree,
        wanted=wanted,
    )
    if probs is not None:
        columns = cast(tree_shapes.FixedTree, tree).columns
        proposal = proposal.replace(probs=probs[:, columns[:-1]])
    return memory, proposal


def _columns(level: jax.Array | int, count: int, width: int) -> Int[Array, " K"]:
    """Returns numbers of a level's rows, `width` at most, for their noise: they depend
    on level and place, and not on how many rows other levels have."""
    first = jnp.maximum(1 + (level - 1) * width, 0)
    return first + jnp.arange(count, dtype=jnp.int32)
