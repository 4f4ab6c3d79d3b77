"""Draft models of a batch, which draft for all slots in the same forwards."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax import protocols
from spec_jax.batch import drafter as drafter_lib, rows
from spec_jax.drafters import draft_model, hybrid, suffix
from spec_jax.paging import cache as paged


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelBatch:
    """A draft model for all slots. The memory is one cache, as in `DraftModel`.

    Each forward takes in what slots are behind by, up to `model.slab` rows of each, and
    drafts one token in each slot that is caught up and has not drafted enough. Before
    these, slots that are behind by more are caught up `catch_up_rows` at a time.

    Raises:
      NotImplementedError: a draft model whose drafts are "independent" draws, end by
        confidence, or come from a cache that is dropped every round.
    """

    drafter: draft_model.DraftModel
    num_slots: int

    def __post_init__(self):
        one = self.drafter
        if one.draws == "independent" or one.draft_cache != "persistent":
            raise NotImplementedError(
                f"a batch has no draws={one.draws!r} with "
                f"draft_cache={one.draft_cache!r}: use 'highest' or 'sample-path', and "
                "'persistent'"
            )
        if one.min_confidence:
            raise NotImplementedError(
                f"a batch drafts as far as gamma says: min_confidence="
                f"{one.min_confidence} must be 0"
            )

    @property
    def gamma_max(self) -> int:
        """The most tokens of a proposal."""
        return self.drafter.gamma_max

    @property
    def vocab_size(self) -> int:
        """Entries of the draft's vocabulary."""
        return self.drafter.vocab_size

    @property
    def _rows(self) -> rows.RowBatch:
        return rows.RowBatch(model=self.drafter.model, num_slots=self.num_slots)

    def _weights(self, params: draft_model.DraftParams):
        return params if self.drafter.draws == "highest" else params.weights

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> paged.PagedKV:
        """An empty cache; raises as `RowBatch.new_cache`."""
        if self.drafter.model.cache == "static":
            num_pages = None
        return self._rows.new_cache(
            capacity=capacity, page_size=page_size, num_pages=num_pages
        )

    def prefill(
        self,
        params: draft_model.DraftParams,
        memory: paged.PagedKV,
        prompt: list[int],
        *,
        slot: int,
    ) -> paged.PagedKV:
        """The K/V of the prompt but for its last token. Donates `memory`."""
        return self._rows.prefill(self._weights(params), memory, prompt, slot=slot)

    def propose(
        self,
        params: draft_model.DraftParams,
        memory: paged.PagedKV,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        settings: drafter_lib.Settings,
    ) -> tuple[paged.PagedKV, protocols.Proposal]:
        """Drafts `gamma[b]` tokens; fewer only where the cache has no room."""
        window = self.drafter.model.slab
        width = max(window, self.drafter.catch_up_rows) + self.gamma_max
        text = jnp.pad(tokens, ((0, 0), (0, width)))
        goal = draft_model.goal_of(memory, length, gamma)
        memory = self._catch_up(params, memory, text, length, asked=goal > length)
        is_each = jnp.arange(self.num_slots, dtype=jnp.int32)
        draws = settings if self.drafter.draws == "sample-path" else None

        def is_wanted(known, has_room):
            return (known < goal) & has_room

        def step(carry):
            """One forward of every slot that wants one."""
            kv, text, known, has_room = carry
            starts = kv.length
            wanted = is_wanted(known, has_room)
            num_live = jnp.where(wanted, jnp.minimum(known - starts, window), 0)
            kv, own, _ = self._rows.next_tokens(
                self._weights(params),
                kv,
                tokens=_windows(text, starts, window),
                starts=starts,
                num_live=num_live,
                settings=draws,
            )
            has_room = has_room & ~(wanted & self._rows.is_starved(kv))
            drafts = wanted & has_room & (starts + num_live == known)
            token = own[is_each, jnp.maximum(num_live - 1, 0)]
            at = jnp.where(drafts, known, text.shape[1])
            text = text.at[is_each, at].set(token, mode="drop")
            return kv, text, known + drafts.astype(jnp.int32), has_room

        memory, text, known, _ = jax.lax.while_loop(
            lambda carry: jnp.any(is_wanted(carry[2], carry[3])),
            step,
            (memory, text, length, jnp.ones((self.num_slots,), bool)),
        )
        return memory, protocols.Proposal(
            tokens=_windows(text, length, self.gamma_max), num_drafted=known - length
        )

    def _catch_up(self, params, memory, text, length, *, asked) -> paged.PagedKV:
        """As `DraftModel._catch_up`, for the slots that are asked."""
        rows_ahead, slab = self.drafter.catch_up_rows, self.drafter.model.slab
        if not rows_ahead:
            return memory

        def is_behind(kv, has_room):
            return asked & has_room & (length - kv.length > slab)

        def step(carry):
            """One forward of every slot that is far behind."""
            kv, has_room = carry
            wanted = is_behind(kv, has_room)
            missing = length - 1 - kv.length
            kv, _, _ = self._rows.next_tokens(
                self._weights(params),
                kv,
                tokens=_windows(text, kv.length, rows_ahead),
                starts=kv.length,
                num_live=jnp.where(wanted, jnp.minimum(missing, rows_ahead), 0),
                settings=None,
                chooses=False,
            )
            return kv, has_room & ~(wanted & self._rows.is_starved(kv))

        memory, _ = jax.lax.while_loop(
            lambda carry: jnp.any(is_behind(*carry)),
            step,
            (memory, jnp.ones((self.num_slots,), bool)),
        )
        return memory

    def commit(
        self,
        params: draft_model.DraftParams,
        memory: paged.PagedKV,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> paged.PagedKV:
        """Forgets drafts that were not committed."""
        kept = jnp.minimum(memory.length, length - 1)
        return self._rows.truncate(memory, kept, asked=asked)


def _windows(
    text: Int[Array, "B max_len"], starts: Int[Array, " B"], size: int
) -> Int[Array, "B size"]:
    """`size` tokens of each text, from its start on."""
    cut = lambda row, start: jax.lax.dynamic_slice(row, (start,), (size,))
    return jax.vmap(cut)(text, starts)


@flax.struct.dataclass(kw_only=True)
class _Sure:
    """What suffix statistics propose for each slot, and where they are sure."""

    proposal: protocols.Proposal
    is_sure: jax.Array  # [B] bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridBatch:
    """As `hybrid.Hybrid`: only slots without a sure lookup ask the draft model."""

    suffix: suffix.SuffixDecoding
    draft: DraftModelBatch
    threshold: float

    @property
    def gamma_max(self) -> int:
        """The most tokens of a proposal."""
        return self.draft.gamma_max

    @property
    def vocab_size(self) -> int:
        """Entries of the draft model's vocabulary."""
        return self.draft.vocab_size

    @property
    def num_slots(self) -> int:
        """Texts at once."""
        return self.draft.num_slots

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> paged.PagedKV:
        """The draft model's empty cache."""
        return self.draft.init(
            capacity=capacity, page_size=page_size, num_pages=num_pages
        )

    def prefill(
        self,
        params: hybrid.HybridParams,
        memory: paged.PagedKV,
        prompt: list[int],
        *,
        slot: int,
    ) -> paged.PagedKV:
        """The draft model's prefill. Donates `memory`."""
        return self.draft.prefill(params.draft, memory, prompt, slot=slot)

    def propose(
        self,
        params: hybrid.HybridParams,
        memory: paged.PagedKV,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        settings: drafter_lib.Settings,
    ) -> tuple[paged.PagedKV, protocols.Proposal]:
        """Drafts what one of the two drafts, slot by slot."""

        def look_up(tokens, length, gamma):
            found = self.suffix.look_up(
                params.corpus, tokens=tokens, length=length, gamma=gamma
            )
            is_sure = found.score >= self.threshold
            return _Sure(proposal=found.proposal, is_sure=is_sure)

        found = jax.vmap(look_up)(tokens, length, gamma)
        memory, drafted = self.draft.propose(
            params.draft,
            memory,
            tokens=tokens,
            length=length,
            gamma=jnp.where(found.is_sure, 0, gamma),
            settings=settings,
        )
        is_sure = found.is_sure
        return memory, protocols.Proposal(
            tokens=jnp.where(is_sure[:, None], found.proposal.tokens, drafted.tokens),
            num_drafted=jnp.where(
                is_sure, found.proposal.num_drafted, drafted.num_drafted
            ),
        )

    def commit(
        self,
        params: hybrid.HybridParams,
        memory: paged.PagedKV,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> paged.PagedKV:
        """Forgets the draft model's drafts that were not committed."""
        return self.draft.commit(params.draft, memory, length, asked=asked)
