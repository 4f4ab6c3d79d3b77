"""Trees that a draft model proposes: the rows of a level are one forward."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import pytree
from spec_jax.drafters import draft_slots, tree_search, tree_shapes
from spec_jax.engine import protocols
from spec_jax.model import params as params_lib
from spec_jax.native import children as children_lib, draws as draws_lib
from spec_jax.ops import draw as draw_op
from spec_jax.paging import cache as paged
from spec_jax.rules import sampling as sampling_lib


class Memory(pytree.Node):
    """The draft's cache, and whose rows are stored in it after the text.

    Column 0 is the last token of the text that a tree was drafted after, at place
    `start`; the other columns are the rows that drafted its nodes' children.
    """

    kv: paged.PagedKV
    start: jax.Array  # [B] int32
    tokens: jax.Array  # [B, num_columns] int32
    parents: jax.Array  # [B, num_columns] int32
    is_run: jax.Array  # [B, num_columns] bool: whose K/V are stored; never column 0's


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotDraftTree(draft_slots.SlotDraftModel):
    """A `DraftModel` with a tree, for `num_slots` sequences.

    The rows of a tree are stored after the text. Of those that were committed the K/V
    is moved to their positions when the next tree is drafted, as the target's is: only
    what the draft has not seen is caught up, in one forward. All others are forgotten
    then, or before that where a prompt needs their pages.
    """

    @property
    def _tree(self) -> tree_shapes.AnyTree:
        return cast(tree_shapes.AnyTree, self.drafter.tree)

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> Memory:
        """Allocates an empty cache; raises as `SlotRows.new_cache`."""
        kv = super().init(capacity=capacity, page_size=page_size, num_pages=num_pages)
        shape = self.num_slots, self._tree.num_columns
        return Memory(
            kv=kv,
            start=jnp.zeros(shape[:1], jnp.int32),
            tokens=jnp.zeros(shape, jnp.int32),
            parents=jnp.zeros(shape, jnp.int32),
            is_run=jnp.zeros(shape, bool),
        )

    def prefill(
        self, params: params_lib.Params, memory: Memory, prompt: list[int], *, slot: int
    ) -> Memory:
        """Writes the K/V of the prompt but for its last token. Donates `memory`."""
        if bool(memory.is_run.any()):
            memory = self._forget(memory)
        kv = super().prefill(params, memory.kv, prompt, slot=slot)
        return memory.replace(kv=kv)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def _forget(self, memory: Memory) -> Memory:
        """Forgets all rows that are stored after a text."""
        has_rows = jnp.any(memory.is_run, axis=1)
        kv = self._rows.truncate(memory.kv, memory.start + 1, asked=has_rows)
        return memory.replace(kv=kv, is_run=jnp.zeros_like(memory.is_run))

    def _keep_committed(
        self, memory: Memory, text: Int[Array, "B padded"], length: Int[Array, " B"]
    ) -> paged.PagedKV:
        """Returns the cache with the K/V of rows that were committed, and of no others.

        At most of `[0, length - 1)`: the row of the last token drafts.
        """
        depth_max = self._tree.depth - 1
        start, is_run = memory.start, memory.is_run
        committed = draft_slots.windows(text, start + 1, depth_max)
        most = jnp.maximum(length - 2 - start, 0)
        path, num_kept = jax.vmap(_follow)(
            memory.tokens, memory.parents, is_run, committed, most
        )
        kv = self._rows.keep_path(memory.kv, path, num_kept, start=start)
        new_len = jnp.minimum(start + 1 + num_kept, length - 1)
        return self._rows.truncate(kv, new_len, asked=jnp.any(is_run, axis=1))

    def commit(
        self,
        params: params_lib.Params,
        memory: Memory,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> Memory:
        """Forgets what was not committed; of a tree the next `propose` does that."""
        goes_on = jnp.any(memory.is_run, axis=1) & (length > memory.start + 1)
        held = memory.kv.length
        kept = jnp.where(goes_on, held, jnp.minimum(held, length - 1))
        return memory.replace(
            kv=self._rows.truncate(memory.kv, kept, asked=asked),
            is_run=memory.is_run & (goes_on | ~asked)[:, None],
        )

    def propose(
        self,
        params: params_lib.Params,
        memory: Memory,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        sampling: protocols.Sampling,
    ) -> tuple[Memory, protocols.Proposal]:
        """Drafts trees of `gamma[b]` nodes; less deep where the cache has no room."""
        tree = self._tree
        width = max(self._slab, self.drafter.catch_up_rows, tree.depth)
        text = jnp.pad(tokens, ((0, 0), (0, width)))
        kv = self._keep_committed(memory, text, length)
        kv = kv.replace(out_of_pages=jnp.zeros_like(kv.out_of_pages))
        asked = (gamma > 0) & (length <= kv.slot_capacity)
        kv = self._catch_up(params, kv, text, length, asked=asked)
        kv, logits = self._root(params, kv, text, length, asked)
        asked &= kv.length == length
        memory = memory.replace(
            kv=kv, start=length - 1, is_run=jnp.zeros_like(memory.is_run)
        )
        draw = Draw.of(self.drafter, sampling, length, num_slots=self.num_slots)
        children = functools.partial(
            draw.children, tree=tree, vocab_size=self.vocab_size
        )

        def expand(carry, tokens, parents, first, num_rows):
            """Runs the rows of a level; see `tree_search.Expand`."""
            memory, probs = carry
            window = protocols.Window(
                tokens=tokens,
                start=length - 1,
                num_active=num_rows,
                parents=parents,
                first=first,
                depth_max=tree.depth - 1,
            )
            kv, verified = self._rows.verify(params, memory.kv, window)
            has_run = (num_rows > 0) & ~self._rows.out_of_pages(kv)
            num_rows = jnp.where(has_run, num_rows, 0)
            memory = _remember(memory, kv, window, first, num_rows)
            level = tree_search.level_of(tree, first)
            rows = verified.by_column(verified.logits, fill=0.0)
            probs = draw.put(probs, rows, first)
            found = children(rows, level=level, counts=num_rows)
            return (memory, probs), found, has_run

        first, root = jnp.int32(0), logits[:, None]
        (memory, probs), proposal = tree_search.grow(
            expand,
            children(root, level=first, counts=asked.astype(jnp.int32)),
            (memory, draw.begin(root, tree)),
            tree=tree,
            wanted=jnp.where(asked, gamma, 0),
        )
        return memory, with_probs(proposal, probs, tree)

    def _root(self, params, memory, text, length, asked):
        """Returns the memory of the whole text, and the logits `[B, V]` after it."""
        slab = self._slab
        is_each = jnp.arange(self.num_slots, dtype=jnp.int32)

        def step(carry):
            """Takes in a slab of rows of every slot that is behind."""
            kv, logits, wanted = carry
            num_active = jnp.where(wanted, jnp.minimum(length - kv.length, slab), 0)
            window = protocols.Window(
                tokens=draft_slots.windows(text, kv.length, slab),
                start=kv.length,
                num_active=num_active,
            )
            kv, verified = self._rows.verify(params, kv, window)
            wanted &= kv.length > window.start  # Else there is no room, or no slot.
            last = verified.at[is_each, jnp.maximum(num_active - 1, 0)]
            found = verified.logits.at[last].get(mode="fill", fill_value=0)
            logits = jnp.where((num_active > 0)[:, None], found, logits)
            return kv, logits, wanted & (kv.length < length)

        logits = jnp.zeros((self.num_slots, self.vocab_size), jnp.float32)
        carry = memory, logits, asked & (memory.length < length)
        memory, logits, _ = jax.lax.while_loop(
            lambda carry: jnp.any(carry[2]), step, carry
        )
        return memory, logits


def _remember(memory, kv, window, first, num_rows) -> Memory:
    """The memory with the rows of a level that were run, from column `first` on."""
    columns = jnp.arange(window.tokens.shape[1], dtype=jnp.int32)[None]
    put = lambda all_, new: jax.lax.dynamic_update_slice(
        all_, new, (jnp.int32(0), first)
    )
    return memory.replace(
        kv=kv,
        tokens=put(memory.tokens, window.tokens),
        parents=window.parents,
        is_run=put(memory.is_run, columns < num_rows[:, None]),
    )


def _follow(
    tokens: Int[Array, " C"],
    parents: Int[Array, " C"],
    is_run: Bool[Array, " C"],
    committed: Int[Array, " D"],
    most: Int[Array, ""],
) -> tuple[Int[Array, " D"], Int[Array, ""]]:
    """Returns the columns that hold what was committed after column 0, and how many.

    Any of equal siblings will do: they have the same K/V.
    """

    def step(carry, token):
        column, num_kept = carry
        holds = is_run & (parents == column) & (tokens == token)
        # The path ends where no column holds the token.
        goes_on = (column >= 0) & jnp.any(holds) & (num_kept < most)
        column = jnp.where(goes_on, jnp.argmax(holds), -1).astype(jnp.int32)
        return (column, num_kept + goes_on.astype(jnp.int32)), jnp.maximum(column, 0)

    begin = jnp.int32(0), jnp.int32(0)
    (_, num_kept), path = jax.lax.scan(step, begin, committed)
    return path, num_kept


class Draw(pytree.Node):
    """By which weights the children of a tree's nodes are chosen.

    Attributes:
      sampling: of the target's draws; None: by the logits alone.
      length: of the text of each slot.
      impl: of the drafter, whose kernels add the noise of the target's draws.
      has_probs: whether children are drawn with noise of the round's own, another for
        each node, rather than with that of the target's draw for their position.
    """

    sampling: protocols.Sampling
    length: jax.Array  # [B] int32
    impl: str = pytree.static()
    has_probs: bool = pytree.static()

    @classmethod
    def of(cls, drafter, sampling, length, *, num_slots: int) -> "Draw":
        """Returns how a drafter's `draws` says it, as of `DraftModel`."""
        draws, impl = drafter.draws, drafter.model.impl
        if draws == "independent" and sampling is None:
            sampling = sampling_lib.greedy(num_slots)
        if draws == "greedy":
            sampling = None
        has_probs = draws == "independent"
        return cls(sampling=sampling, length=length, impl=impl, has_probs=has_probs)

    def weights(
        self, logits: Float[Array, "B K V"], *, level: jax.Array, width: int
    ) -> Float[Array, "B K V"]:
        """Returns what the best children of a level's rows have the highest of.

        Args:
          level: of the rows; that of the root is 0.
          width: rows of a level, at most.
        """
        if self.sampling is None:
            return logits
        columns = _columns(level, logits.shape[1], width)
        if draw_op.has_kernels(self.impl):
            return self._by_kernels(logits, level, columns)

        def one(slot):
            """Adds noise to the rows of a slot, one by one."""
            rows, settings, length = slot

            def noisy(row):
                logits, column = row
                if self.has_probs:
                    stream = sampling_lib.Stream.DRAFT
                    return sampling_lib.noisy_weights(
                        logits, settings, length, stream=stream, offset=column
                    )
                return sampling_lib.noisy_weights(logits, settings, length + level)

            return jax.lax.map(noisy, (rows, columns))

        return jax.lax.map(one, (logits, self.sampling, self.length))

    def _by_kernels(self, logits, level, columns):
        """As `weights`, of all rows at once."""
        B, K, V = logits.shape
        rows, each, lengths = self._flat(logits)
        draws = each.temperature != 0
        if self.has_probs:
            noisy = draw_op.log_weights(rows, each, impl=self.impl)
            noisy += draft_slots.own_noise(
                each.seed, lengths, jnp.tile(columns, B), vocab_size=V
            )
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
        vocab_size: int,
        hot: Int[Array, " Vd"] | None = None,
    ) -> tree_search.Children:
        """Returns the best children of a level's rows.

        Args:
          level: of the rows; that of the root is 0.
          counts: rows of each slot that count, the first ones.
          vocab_size: of the target.
          hot: the target's token of each of the drafter's own; None: the same.
        """
        is_native, width = self.impl == "native", tree.width
        if hot is not None and tree.top_k > hot.size:
            logits, hot = draft_slots.widened(hot, vocab_size)(logits), None
        if not is_native:
            if hot is not None and self.sampling is not None:  # By the target's tokens.
                logits, hot = draft_slots.widened(hot, vocab_size)(logits), None
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
            draws=self.native(vocab_size),
        )

    def native(self, vocab_size: int) -> draws_lib.Draws | None:
        """Returns how a native call draws; None: by the logits alone."""
        if self.sampling is None:
            return None
        return draws_lib.Draws(
            settings=self.sampling,
            positions=self.length,
            vocab_size=vocab_size,
            independent=self.has_probs,
        )

    def begin(
        self, root: Float[Array, "B 1 V"], tree: tree_shapes.AnyTree
    ) -> Array | None:
        """Returns the array that `put` fills, with the root's distribution in it; None
        where no distributions are kept."""
        if not self.has_probs:
            return None
        num_slots, _, vocab_size = root.shape
        # One row more, which is no node's: that of leaves.
        shape = num_slots, tree.num_columns + 1, vocab_size
        return self.put(jnp.zeros(shape, jnp.float32), root, jnp.int32(0))

    def put(
        self, probs: Array | None, logits: Float[Array, "B K V"], first: jax.Array
    ) -> Array | None:
        """Returns `probs` with the distributions of rows from column `first` on."""
        if probs is None:
            return None
        if draw_op.has_kernels(self.impl):
            flat, each, _ = self._flat(logits)
            rows = draw_op.distribution(flat, each, impl=self.impl)
            rows = rows.reshape(logits.shape)
        else:
            rows = jax.lax.map(
                lambda slot: sampling_lib.distribution(*slot), (logits, self.sampling)
            )
        zero = jnp.zeros((), first.dtype)
        return jax.lax.dynamic_update_slice(probs, rows, (zero, first, zero))


def with_probs(
    proposal: protocols.Proposal, probs: Array | None, tree: tree_shapes.AnyTree
) -> protocols.Proposal:
    """Returns the proposal with what the children of each column were drawn from."""
    if probs is None:
        return proposal
    columns = cast(tree_shapes.FixedTree, tree).columns
    return proposal.replace(probs=probs[:, columns[:-1]])


def _columns(level: jax.Array, count: int, width: int) -> Int[Array, " K"]:
    """Returns the columns of a level's rows, `width` at most: by their level and their
    places there, however many rows other levels have."""
    first = jnp.maximum(1 + (level - 1) * width, 0)
    return first + jnp.arange(count, dtype=jnp.int32)
